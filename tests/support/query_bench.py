"""A stream with a real query that counts orders, what happens to it, and the person beside it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotRecord, SnapshotStatus
from dagster_ckpt.errors import CkptError
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import Outcome, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import read_commit_entry, read_offset_entry
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.log_lines import collecting
from tests.support.small_spark import lay_file
from tests.support.streams import stream_at

DEADLINE_S = 180


@dataclass
class Bench:
    """A stream with a feed that the test lays, file by file."""

    spark: SparkSession
    root: Path
    stream: StreamHandle
    files: int = 0
    reports: list[str] = field(default_factory=list)

    def feed(self, files: int) -> None:
        """Lay files; each is one batch, and no row is late."""
        landing = self.root / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            day, hour = f"2024-01-{1 + number // 24:02}", f"{number % 24:02}"
            rows = [{"at": f"{day}T{hour}:{n:02}:00Z", "shop": n % 3} for n in range(10)]
            lay_file(landing, number, rows)
        self.files += files

    def start_query(self, live: LiveDirectory, *, output: str = "output") -> SupervisedQuery:
        stream = self.spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1)
        counts = (
            stream.json(str(self.root / "landing"))
            .withWatermark("at", "10 minutes")
            .groupBy(F.window("at", "30 minutes"), "shop")
            .count()
        )
        writer = counts.select("window.start", "shop", "count").writeStream.format("parquet").outputMode("append")
        return start_query(writer.option("path", str(self.root / output)), "orders", live)

    def run(self, until: Callable[[], bool], **request: Any) -> Outcome:
        """Run the stream in this thread until a condition holds, as if its process was then told to stop."""
        deadline = time.monotonic() + DEADLINE_S

        def interrupted() -> bool:
            if time.monotonic() > deadline:
                pytest.fail(f"the condition did not come to hold; reports: {self.reports}")
            # What holds of the run before is nothing to stop a start for.
            latest = self.stream.catalog.executions.latest("orders")
            return latest is not None and latest.status is ExecutionStatus.RUNNING and until()

        asked = RunRequest(run_id="run", start_query=self.start_query, interrupted=interrupted, **request)
        with collecting(self.reports):
            return execute_stream(self.stream, asked)

    def feeding(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        """A condition that lays another file each time all are committed and it does not hold.

        A stream without new input has no new position, of which another checkpoint would be written.
        """

        def holds() -> bool:
            if condition():
                return True
            if self.committed() >= self.files - 1:
                self.feed(1)
            return False

        return holds

    def run_to_the_end(self, **request: Any) -> Outcome:
        """Run until every file is in a committed batch and the output is what it will be."""
        # A directory that the test has damaged is replaced by one that has not read everything.
        with suppress(CkptError, ValueError):
            if self.has_read_all() and not self.watermark_stands():
                # The run before ended just ahead of its last batch, the one without data. A query that is started
                # again moves its watermark on only with new input.
                self.feed(1)
        return self.run(self.is_at_the_end, **request)

    def is_at_the_end(self) -> bool:
        """Whether every file is committed, and the batch without data after the last one."""
        return self.has_read_all() and self.watermark_stands() and self.idle()

    def has_read_all(self) -> bool:
        record = next(iter(self.stream.catalog.streams.all()), None)
        if record is None or record.live_directory is None:
            return False
        live = LiveDirectory(record.live_directory)
        # Each file is a batch with an entry.
        read = max((int(name.removesuffix(".compact")) for name in live.folder.list("sources/0")), default=-1) + 1
        return read >= self.files and live.positions().offset == live.positions().commit

    def watermark_stands(self) -> bool:
        """Whether the newest batch was planned with the watermark that follows from it."""
        folder, newest = self.live().folder, self.committed()
        return newest >= 0 and (
            read_offset_entry(folder, newest).watermark_ms == read_commit_entry(folder, newest).next_watermark_ms
        )

    def live(self) -> LiveDirectory:
        return LiveDirectory(self.stream.catalog.streams.get("orders").live_directory or "")

    def committed(self) -> int:
        record = next(iter(self.stream.catalog.streams.all()), None)
        if record is None or record.live_directory is None:
            return -1
        commit = LiveDirectory(record.live_directory).positions().commit
        return -1 if commit is None else commit

    def idle(self) -> bool:
        record = self.stream.catalog.streams.get("orders")
        positions = LiveDirectory(record.live_directory or "").positions()
        latest = self.stream.catalog.executions.latest("orders")
        read = sum(1 for path in (self.root / "landing").iterdir() if not path.name.startswith("."))
        sources = LiveDirectory(record.live_directory or "").folder.list("sources/0")
        seen = max((int(name.removesuffix(".compact")) for name in sources), default=-1)
        return (
            positions.offset == positions.commit
            and seen >= read - 1
            and bool(latest and latest.progress and latest.progress.get("idle"))
        )

    def snapshots(self, kind: str | None = None) -> list[SnapshotRecord]:
        return self.stream.catalog.snapshots.of_stream(
            "orders", kind=SnapshotKind(kind) if kind is not None else None, status=SnapshotStatus.COMPLETED
        )

    def rows(self, output: str = "output") -> Counter[tuple[Any, ...]]:
        return Counter(tuple(row) for row in self.spark.read.parquet(str(self.root / output)).collect())

    def uninterrupted(self) -> Counter[tuple[Any, ...]]:
        """What a query that nothing ever happened to writes."""
        live = LiveDirectory(str(self.root / "uninterrupted-live"))
        query = self.start_query(live, output="uninterrupted")
        try:
            query._query.processAllAvailable()
        finally:
            query.stop()
        return self.rows("uninterrupted")

    def assert_exact(self) -> None:
        rows = self.rows()
        assert rows
        assert rows == self.uninterrupted()


def make_stream(root: Path, **options: Any) -> StreamHandle:
    return stream_at(root, **{"interval": 200, "num_retained": 2, **options})


class Person:
    """An operator in a thread of its own, while the query runs in the main one."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


def when(condition: Callable[[], bool], work: Callable[[], Any]) -> Callable[[], Any]:
    def wait_and_work() -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition did not come to hold")
            time.sleep(0.05)
        return work()

    return wait_and_work
