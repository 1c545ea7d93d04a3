"""A stream whose live directory Spark wrote: a RocksDB-backed aggregation after batch 4, from the golden snapshots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from dagster_ckpt.catalog.records import (
    CompletedSnapshot,
    ExecutionStatus,
    Holder,
    SnapshotRecord,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Filler, materialize
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import boot_id
from dagster_ckpt.stream.snapshotting import SnapshotOrder, sharing_base, take_snapshot
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer, keeping
from tests.support.places import path_of
from tests.support.streams import storage_at, stream_at

STREAM = "golden"
GOLDEN = Path(__file__).parents[1] / "golden/format-2"


@dataclass
class GoldenStream:
    """The stream, and short words for what happens to it.

    Attributes:
        root: Folder of everything that it has.
        num_retained: Checkpoints that it keeps.
    """

    root: Path
    num_retained: int = 3
    stream: StreamHandle = field(init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.stream = stream_at(
            self.root, STREAM, storage=storage_at(self.root, inline_bytes=256), num_retained=self.num_retained
        )

    def make(self) -> GoldenStream:
        """Let it have run up to batch 4."""
        golden = open_store(FileSystemCheckpointStorage(f"file://{GOLDEN}"), STREAM)

        def fill(filler: Filler) -> None:
            golden.extract(f"file://{GOLDEN}/golden/chk-2", lambda entry, chunks: filler(entry.path, chunks))

        self.stream.register()
        target = self.stream.live_directory(1, 0)
        materialize(target, fill)
        writer = self._writer
        writer.streams.switch_live_directory(target.url)
        self._begin("first", target.url)
        return self

    def run_again(self, status: ExecutionStatus) -> None:
        """Let it have run once more in its live directory, to this end."""
        self._begin("second", self.live_url)
        self._writer.executions.end("second", status, "because", settled=True)

    def begin_again(self, progress: dict[str, Any]) -> None:
        """Let it run once more, and report this."""
        self._begin("second", self.live_url)
        self._writer.executions.heartbeat("second", progress)
        self.stream.catalog.leases.acquire(STREAM, Holder("second", "run", "elsewhere", 1, 1, "boot"), 600_000)

    def _begin(self, execution_id: str, live_directory: str) -> None:
        holder = Holder(execution_id, "run", "host", 1, 1, boot_id())
        executions = self._writer.executions
        executions.start(execution_id, run_id="run", cause=StartCause.MANUAL, holder=holder)
        executions.running(execution_id, live_directory=live_directory, recovery={}, application=None)

    @property
    def _writer(self) -> Any:
        return as_writer(self.stream.catalog, STREAM)

    def end(self, status: ExecutionStatus = ExecutionStatus.SUSPENDED) -> None:
        """Record the end of its execution."""
        self._writer.executions.end("first", status, "because", settled=True)

    @property
    def live(self) -> Path:
        """Its live directory now."""
        return path_of(self.live_url)

    @property
    def live_url(self) -> str:
        """The same as the stream knows it."""
        return self.stream.catalog.streams.get(STREAM).live_directory or ""

    @property
    def status(self) -> LiveStatus:
        """What its live directory is good for."""
        return inspect_live_directory(LiveDirectory(self.live_url)).status

    def commit(self, batch: int) -> None:
        """Write what a batch writes that changes no row."""
        live = self.live
        for partition in (0, 1):
            changes = live / f"state/0/{partition}/{batch}.changelog"
            (live / f"state/0/{partition}/{batch + 1}.changelog").write_bytes(changes.read_bytes())
        planned = (live / f"offsets/{batch - 1}").read_bytes()
        old, new = (f'"logOffset":{number}'.encode() for number in (batch - 1, batch))
        (live / f"offsets/{batch}").write_bytes(planned.replace(old, new))
        entry = (live / "sources/0/4").read_bytes()
        (live / f"sources/0/{batch}").write_bytes(entry.replace(b'"batchId":4', f'"batchId":{batch}'.encode()))
        (live / f"commits/{batch}").write_bytes((live / f"commits/{batch - 1}").read_bytes())

    def snapshot(self, kind: SnapshotKind = SnapshotKind.CHECKPOINT, label: str | None = None) -> SnapshotRecord:
        """Take a checkpoint or a savepoint."""
        stream, snapshots = self.stream, self._writer.snapshots
        record = stream.catalog.streams.get(STREAM)
        base = sharing_base(stream)
        order = SnapshotOrder(kind, record.next_number, base=base.location if base is not None else None)
        snapshots.start(
            snapshot_id=order.snapshot_id,
            execution_id="first",
            kind=kind,
            number=order.number,
            trigger=SnapshotTrigger.MANUAL,
            timeline=record.timeline,
            label=label,
        )
        taken = take_snapshot(stream, LiveDirectory(self.live_url), order, now_ms=1)
        facts = CompletedSnapshot(
            location=taken.stored.location,
            batch_id=taken.batch_id,
            query_id=taken.query_id,
            full_bytes=taken.stored.full_bytes,
            incremental_bytes=taken.stored.incremental_bytes,
            file_count=taken.stored.file_count,
            properties=dict(taken.properties),
        )
        completed: SnapshotRecord = snapshots.complete(order.snapshot_id, facts)
        return completed

    def start(self, text: str = "latest", **how: Any) -> tuple[RecoveryPlan, PreparedStart]:
        """Prepare a start as an execution does."""
        plan = planned_start(self.stream, StartFrom(text, **how))
        with keeping(self.stream.catalog, STREAM) as lease:
            return plan, prepare(self.stream, plan, lease)

    def subsume(self) -> None:
        """Delete the checkpoints that are too many, as after a new one."""
        with keeping(self.stream.catalog, STREAM) as lease:
            discard(self.stream, subsume(self.stream), reason="subsumed", lease=lease)

    def entries(self, snapshot: SnapshotRecord) -> dict[str, FileEntry]:
        """The files of a snapshot, by their paths."""
        return {entry.path: entry for entry in self.stream.store.manifest(snapshot.location or "").files}

    def unlike(self, snapshot: SnapshotRecord) -> list[str]:
        """Files of the live directory that have not the content that a snapshot has of them."""
        return [
            path
            for path, entry in self.entries(snapshot).items()
            if blake3((self.live / path).read_bytes()).hexdigest() != entry.digest
        ]

    def close(self) -> None:
        """Let go of the catalog."""
        self.stream.catalog.close()


def alter(paths: Iterable[Path], change: Callable[[bytes], bytes]) -> list[Path]:
    """Change files as a disk does: neither inode nor time says so; returns them."""
    changed = []
    for path in paths:
        found, data = path.stat(), path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(0)
            stream.write(change(data))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        changed.append(path)
    return changed


def with_a_flipped_bit(data: bytes) -> bytes:
    """What bit rot makes of it."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def as_zeros(data: bytes) -> bytes:
    """What a loss of power makes of it: its length is on the disk, its blocks are not."""
    return bytes(len(data))
