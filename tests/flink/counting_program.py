"""A program that counts sales by window and shop, on an environment that the test configures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotStatus
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry, parse_offset_entry
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.small_spark import lay_file

DEADLINE_S = 90.0
SCHEMA = "at timestamp, shop long"


@dataclass
class Program:
    """One program: its input, its folder, and environments that run it."""

    spark: SparkSession
    folder: Path
    files: int = 0

    def feed(self, files: int) -> None:
        """Lay files of ten rows; no row is late."""
        landing = self.folder / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number % 24:02}:{n:02}:00Z", "shop": n % 3} for n in range(10)]
            lay_file(landing, number, rows)
        self.files += files

    def environment(self) -> StreamExecutionEnvironment:
        """A new environment, as another run of the program has it."""
        return StreamExecutionEnvironment.get_execution_environment(spark=self.spark, folder=self.folder / "ckpt")

    def sales(self) -> DataFrame:
        stream = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return stream.json(str(self.folder / "landing"))

    def counts(self, sales: DataFrame) -> DataFrame:
        counted = sales.groupBy(F.window("at", "30 minutes"), "shop").count()
        return counted.select("window.start", "shop", "count")

    def writer(self, env: StreamExecutionEnvironment, *, output: str = "output") -> DataStreamWriter:
        """The counts, unbounded and with no trigger, to files."""
        sales = env.assign_timestamps_and_watermarks(self.sales(), "at", "10 minutes")
        return self.counts(sales).writeStream.format("parquet").option("path", str(self.folder / output))

    def rows(self, output: str = "output") -> list[tuple[object, ...]]:
        return sorted(map(tuple, self.spark.read.parquet(str(self.folder / output)).collect()))

    def expected(self) -> list[tuple[object, ...]]:
        """What an uninterrupted batch query counts, without the window that the watermark has not closed."""
        batch = self.counts(self.spark.read.schema(SCHEMA).json(str(self.folder / "landing")))
        rows = sorted(map(tuple, batch.collect()))
        newest = max(row[0] for row in rows)
        return [row for row in rows if row[0] != newest]

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(f"sqlite:///{self.folder / 'ckpt' / 'catalog.db'}")

    def executions(self, stream_id: str = "counts") -> list[ExecutionRecord]:
        """Executions of a stream, oldest first."""
        found = self.catalog.executions.of_stream(stream_id)
        return sorted(found, key=lambda each: each.started_at_ms)

    def checkpoints(self, stream_id: str = "counts") -> int:
        if not (self.folder / "ckpt" / "catalog.db").exists():
            return 0
        return len(
            self.catalog.snapshots.of_stream(stream_id, kind=SnapshotKind.CHECKPOINT, status=SnapshotStatus.COMPLETED)
        )

    def offsets(self, stream_id: str = "counts") -> OffsetEntry:
        """The newest entry of the offset log."""
        live = LiveDirectory(self.catalog.streams.get(stream_id).live_directory or "")
        path = f"offsets/{live.positions().offset}"
        return parse_offset_entry(live.folder.read(path), path)


def execute_until(env: StreamExecutionEnvironment, condition: Callable[[], bool], job_name: str | None = None) -> None:
    """Execute in the main thread, and interrupt it as Ctrl-C does once a condition holds."""
    trouble: list[str] = []
    has_ended = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + DEADLINE_S
        try:
            while not condition() and not has_ended.wait(0.05):
                if time.monotonic() > deadline:
                    trouble.append("the condition did not come to hold")
                    break
        except Exception as error:  # noqa: BLE001 - told to the main thread
            trouble.append(f"{type(error).__name__}: {error}")
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            env.execute(job_name)
    finally:
        has_ended.set()
        watcher.join()
    assert trouble == []
