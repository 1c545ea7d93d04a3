"""Stopped streams that read each other's output: live directories and file sinks as Spark leaves them, by hand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import Emptied
from dagster_ckpt.catalog.records import (
    BATCH_INPUTS,
    SOURCE_IDENTITIES,
    BatchInput,
    SnapshotRecord,
    StartCause,
    StateOrigin,
)
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.edges import READS, Read, reads_as_record
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshotting import savepoint_of_stopped_stream
from tests.support.as_writer import as_writer
from tests.support.places import path_of
from tests.support.retention_shelf import HOLDER
from tests.support.streams import stream_at

COMPACTED_EVERY = 4


class Stage:
    """A stateless stream that copies each file that it reads; the first stage finds a new file for each batch."""

    def __init__(self, root: Path, name: str, *upstream: Stage, catalog: Catalog | None = None) -> None:
        self.root, self.name, self.upstream = root, name, upstream
        self.stream: StreamHandle = stream_at(
            root, name, catalog=catalog or (upstream[0].stream.catalog if upstream else None)
        )
        self.sink = root / "out" / name
        self.stream.register()
        self.kind = "file"
        self.batch_inputs: list[BatchInput] = []
        self.sinks = [f"FileSink[file:{self.sink}]"]
        self.catalog = self.stream.catalog
        directory = self.stream.live_directory(1, 0).url
        writer = as_writer(self.catalog, name).streams
        writer.switch_live_directory(directory, origin=StateOrigin.empty(None), pending_restore=Emptied())
        writer.restore_finished()
        self.execute(directory)

    @property
    def live(self) -> Path:
        """As the catalog has it: a restore makes another one."""
        return path_of(self.catalog.streams.get(self.name).live_directory or "")

    @property
    def folders(self) -> list[Path]:
        return [each.sink for each in self.upstream] or [self.root / "in"]

    def read_as(self, kind: str) -> None:
        """As if its sources were of this kind."""
        self.kind = kind
        self.execute(self.catalog.streams.get(self.name).live_directory or "")

    def sources(self) -> list[dict[str, object]]:
        return [
            {"kind": self.kind, "identity": {"path": f"file:{folder}", "format": "parquet"}, "options": {}}
            for folder in self.folders
        ]

    def execute(
        self,
        directory: str,
        reads: Sequence[Read] | None = None,
        sources: Sequence[dict[str, object]] | None = None,
    ) -> None:
        """As an execution reports it, which had read this of its upstream when it started."""
        execution = f"{self.name}-{uuid.uuid4()}"
        writer = as_writer(self.catalog, self.name).executions
        writer.start(execution, run_id=f"run-{execution}", cause=StartCause.MANUAL, holder=HOLDER)
        recovery: dict[str, object] = {
            SOURCE_IDENTITIES: self.sources() if sources is None else sources,
            BATCH_INPUTS: self.batch_inputs,
        }
        recovery |= {READS: reads_as_record(reads)} if reads is not None else {}
        writer.running(execution, live_directory=directory, recovery=recovery)
        writer.heartbeat(execution, {"sinks": self.sinks})

    def commit(self) -> int:
        """A batch, with every file that is there."""
        newest = LiveDirectory(str(self.live)).positions().commit if self.live.is_dir() else None
        batch = 0 if newest is None else newest + 1
        self.write("metadata", json.dumps({"id": f"query-{self.name}"}))
        if not self.upstream:
            new = self.root / "in" / f"{batch}.json"
            if not new.exists():
                place(new, "rows")
        parts = [self._read(str(number), folder, batch) for number, folder in enumerate(self.folders)]
        meta = {"batchWatermarkMs": 0, "batchTimestampMs": 1_000 * batch, "conf": {"spark.sql.shuffle.partitions": "1"}}
        self.write(
            f"offsets/{batch}", "\n".join(["v1", json.dumps(meta), *[json.dumps({"logOffset": batch})] * len(parts)])
        )
        self._sink(batch)
        self.write(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        return batch

    def write(self, path: str, text: str) -> None:
        place(self.live / path, text)

    def _read(self, source: str, folder: Path, batch: int) -> list[str]:
        known = self.has_read(source)
        there = listed(folder) if self.upstream else [f"file://{folder}/{batch}.json"]
        new = [each for each in there if each not in known]
        times = {path: Path(path.removeprefix("file://")).stat().st_mtime_ns // 10**6 for path in new}
        lines = [{"path": path, "timestamp": times[path], "batchId": batch} for path in new]
        self.write(f"sources/{source}/{batch}", "\n".join(["v1", *map(json.dumps, lines)]))
        return new

    def has_read(self, source: str = "0") -> set[str]:
        entries = (self.live / "sources" / source).glob("[0-9]*")
        return {json.loads(line)["path"] for entry in entries for line in entry.read_text().splitlines()[1:]}

    def _sink(self, batch: int) -> None:
        log = self.sink / "_spark_metadata"
        log.mkdir(parents=True, exist_ok=True)
        new = self.sink / f"part-{batch:05}-{uuid.uuid4()}.parquet"
        new.write_text("rows")
        compacts = (batch + 1) % COMPACTED_EVERY == 0
        before = [Path(each.removeprefix("file://")) for each in listed(self.sink)] if compacts else []
        lines = [{"path": f"file://{each}", "size": 4, "action": "add", **modified(each)} for each in [*before, new]]
        place(log / (f"{batch}.compact" if compacts else str(batch)), "\n".join(["v1", *map(json.dumps, lines)]))

    def savepoint(self, label: str | None = None) -> SnapshotRecord:
        return savepoint_of_stopped_stream(self.stream, label=label)


def modified(file: Path) -> dict[str, int]:
    return {"modificationTime": file.stat().st_mtime_ns // 10**6} if file.exists() else {}


def place(path: Path, text: str) -> None:
    """Atomically, as Spark writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4()}.tmp"
    temporary.write_text(text)
    temporary.rename(path)


def listed(sink: Path) -> list[str]:
    """The files that the log of a sink lists, oldest first."""
    entries = {int(path.name.removesuffix(".compact")): path for path in (sink / "_spark_metadata").glob("[0-9]*")}
    base = max((number for number, path in entries.items() if path.suffix), default=0)
    lines = [line for number in sorted(entries) if number >= base for line in entries[number].read_text().splitlines()]
    return [json.loads(line)["path"] for line in lines if line.startswith("{")]
