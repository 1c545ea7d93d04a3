"""A stopped query with a past: live directory and file sink as Spark leaves them, all files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from retention_shelf import JOB, Shelf

from dagster_ckpt.lifecycle.fencing import fence_predecessor
from dagster_ckpt.lifecycle.operations import preview_start
from dagster_ckpt.lifecycle.prepare import PreparedStart, prepare
from dagster_ckpt.lifecycle.recovery import RecoveryKind
from dagster_ckpt.lifecycle.start_from import StartFrom
from dagster_ckpt.lifecycle.writer_lease import AcquiredLease
from dagster_ckpt.spark import LiveDirectory, LiveStatus, inspect_live_directory
from tests.as_writer import as_writer, keeping

LAST = 8


class History:
    """A stateless query that has committed nine batches to a file sink, all files written by hand."""

    def __init__(self, root: Path, *, catalog_url: str | None = None) -> None:
        self._open(Shelf.at(root, catalog_url=catalog_url))
        for batch in range(LAST + 1):
            self.commit(batch)
        self.sinks(f"FileSink[file:{self.sink}]", "ForeachBatchSink")

    @staticmethod
    def reopened(root: Path) -> History:
        """The same as another process finds it."""
        history = History.__new__(History)
        history._open(Shelf.reopened(root))
        return history

    def _open(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.sink = shelf.root / "out put"

    def commit(self, batch: int, live: Path | None = None) -> None:
        """Write what a batch writes, by default in the first live directory."""
        live = live or self.shelf.live
        offsets = {
            "batchWatermarkMs": 0,
            "batchTimestampMs": 1_000 * batch,
            "conf": {"spark.sql.shuffle.partitions": "1"},
        }
        entries = [{"path": f"file:///in/{b}.json", "timestamp": 1, "batchId": b} for b in range(batch + 1)]
        self._entry(live / "sources/0", batch, entries)
        folder = quote(str(self.sink))
        parts = [{"path": f"file://{folder}/part-{b}", "action": "add"} for b in range(batch + 1)]
        self._entry(self.sink / "_spark_metadata", batch, parts)
        self._write(self.sink / f"part-{batch}", "rows")
        planned = "\n".join(["v1", json.dumps(offsets), json.dumps({"logOffset": batch})])
        self._write(live / f"offsets/{batch}", planned)
        self._write(live / f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')

    def sinks(self, *sinks: str) -> None:
        """What the query reports to write to."""
        as_writer(self.shelf.job.catalog, JOB).executions.heartbeat("first", {"batch_id": LAST, "sinks": list(sinks)})

    def start(self, text: str = "latest", **how: bool) -> tuple[RecoveryKind, PreparedStart]:
        plan = preview_start(self.shelf.job, StartFrom.parse(text, **how))
        with keeping(self.shelf.job.catalog, JOB) as lease:
            fence_predecessor(self.shelf.job, AcquiredLease(lease.record))
            return plan.kind, prepare(self.shelf.job, plan, lease)

    @property
    def live(self) -> LiveDirectory:
        return LiveDirectory(self.shelf.job.catalog.jobs.get(JOB).live_directory or "")

    @property
    def batch(self) -> int | None:
        state = inspect_live_directory(self.live)
        assert state.status is LiveStatus.GOOD, state.reason
        return state.batch_id

    @property
    def query_id(self) -> str:
        return str(json.loads(self.live.folder.read("metadata"))["id"])

    @property
    def sink_batch(self) -> int:
        names = [path.name for path in (self.sink / "_spark_metadata").iterdir()]
        return max(int(name.removesuffix(".compact")) for name in names)

    def close(self) -> None:
        self.shelf.job.catalog.close()

    def _entry(self, log: Path, number: int, lines: list[dict[str, Any]]) -> None:
        compact = (number + 1) % 4 == 0
        self._write(
            log / (f"{number}.compact" if compact else str(number)),
            "\n".join(["v1", *map(json.dumps, lines if compact else lines[-1:])]),
        )

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
