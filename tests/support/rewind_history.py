"""A stopped query with a past: live directory and file sink as Spark leaves them, all files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.lease import AcquiredLease
from dagster_ckpt.stream.ownership import fence_predecessor
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer, keeping
from tests.support.places import SCHEME, is_local, path_of, place
from tests.support.retention_shelf import STREAM, Shelf

LAST = 8
SINK = "out put"


class History:
    """A stateless query that has committed nine batches to a file sink, all files written by hand."""

    def __init__(self, root: Path, *, catalog_url: str | None = None) -> None:
        self._open(Shelf.at(root, catalog_url=catalog_url))
        for batch in range(LAST + 1):
            self.commit(batch)
        self.sinks(self.file_sink, "ForeachBatchSink")

    @staticmethod
    def reopened(root: Path) -> History:
        """The same as another process finds it."""
        history = History.__new__(History)
        history._open(Shelf.reopened(root))
        return history

    def _open(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.sink = shelf.root / SINK

    def commit(self, batch: int, live: Path | None = None, sink: Path | None = None) -> None:
        """Write what a batch writes, by default in the first live directory and its own sink."""
        live, sink = live or self.shelf.live, sink or self.sink
        folder = f"{SCHEME.get()}://{quote(str(sink))}"
        parts = [{"path": f"{folder}/part-{b}", "action": "add"} for b in range(batch + 1)]
        files = {f"{live}/{name}": text for name, text in _of_batch(batch).items()}
        files |= {f"{sink}/_spark_metadata/{_name(batch)}": _entry(batch, parts), f"{sink}/part-{batch}": "rows"}
        for path, text in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)

    def sinks(self, *sinks: str) -> None:
        """What the query reports to write to."""
        as_writer(self.shelf.stream.catalog, STREAM).executions.heartbeat(
            "first", {"batch_id": LAST, "sinks": list(sinks)}
        )

    def start(self, text: str = "latest", **how: Any) -> tuple[RecoveryKind, PreparedStart]:
        plan = planned_start(self.shelf.stream, StartFrom(text, **how))
        with keeping(self.shelf.stream.catalog, STREAM) as lease:
            fence_predecessor(self.shelf.stream, AcquiredLease(lease.record))
            return plan.kind, prepare(self.shelf.stream, plan, lease)

    @property
    def file_sink(self) -> str:
        """Its sink as Spark describes it."""
        return f"FileSink[file:{self.sink}]" if is_local() else f"FileSink[{place(self.sink)}]"

    @property
    def live(self) -> LiveDirectory:
        return LiveDirectory(self.shelf.stream.catalog.streams.get(STREAM).live_directory or "")

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

    def unlike_uninterrupted(self) -> list[str]:
        """What its live directory and its sink have that an uninterrupted run up to their batches has not."""
        live = path_of(self.live.url)
        found = [
            f"{live.name}/{name} has another content"
            for batch in range(1, LAST + 1)
            for name, text in _of_batch(batch).items()
            if (live / name).is_file() and (live / name).read_text() != text
        ]
        lines: list[str] = []
        for batch in range(self.sink_batch, -1, -1):
            path = self.sink / "_spark_metadata" / _name(batch)
            lines += path.read_text().splitlines()[1:]
            if path.suffix:
                break
        rows = sorted(json.loads(line)["path"].rsplit("-", 1)[1] for line in lines)
        if rows != sorted(str(batch) for batch in range(self.sink_batch + 1)):
            found.append(f"at batch {self.sink_batch} the sink's log has the rows of batches {rows}")
        gone = [row for row in rows if (self.sink / f"part-{row}").read_text() != "rows"]
        return [*found, *(f"part-{row} is not what the batch wrote" for row in gone)]

    def close(self) -> None:
        self.shelf.stream.catalog.close()


def _of_batch(batch: int) -> dict[str, str]:
    """What a batch writes into the live directory; its commit comes last."""
    offsets = {"batchWatermarkMs": 0, "batchTimestampMs": 1_000 * batch, "conf": {"spark.sql.shuffle.partitions": "1"}}
    entries = [{"path": f"file:///in/{b}.json", "timestamp": 1, "batchId": b} for b in range(batch + 1)]
    return {
        f"sources/0/{_name(batch)}": _entry(batch, entries),
        f"offsets/{batch}": "\n".join(["v1", json.dumps(offsets), json.dumps({"logOffset": batch})]),
        f"commits/{batch}": 'v1\n{"nextBatchWatermarkMs":0}',
    }


def _name(batch: int) -> str:
    return f"{batch}.compact" if (batch + 1) % 4 == 0 else str(batch)


def _entry(batch: int, lines: list[dict[str, Any]]) -> str:
    return "\n".join(["v1", *map(json.dumps, lines if _name(batch).endswith(".compact") else lines[-1:])])
