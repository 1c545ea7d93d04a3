"""A stream whose live directories and output are in one store and its snapshots in one too, and what becomes of it.

`python live_in_a_store_program.py FOLDER LIVE SNAPSHOTS OPTIONS`: URLs, and the options of the second as JSON; the last
line of output is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt import CheckpointConfig, RestartStrategies, run_stream
from dagster_ckpt.catalog.records import EventType
from dagster_ckpt.client.derived_savepoint import edit_state
from dagster_ckpt.client.examination import examine_live_directory
from dagster_ckpt.client.outputs import clean_sinks
from dagster_ckpt.client.state_browsing import StreamState, StreamStateDiff
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.config.rocksdb import ROCKSDB
from dagster_ckpt.flink.program import Deployment
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.editing import StateEdit
from dagster_ckpt.state.rewriting import shape_in
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.small_spark import lay_file, small_spark
from tests.support.thorough import either

SCHEMA = "at timestamp, shop long"
CHECKPOINTING = CheckpointConfig(interval=500)


@dataclass
class Sales:
    """The stream and its places.

    Attributes:
        spark: A session that reaches the bucket.
        folder: Input and catalog, on this machine.
        place: URL of live directories and output.
        snapshots: Where snapshots go.
        name: Id of the stream.
        files: How many files there are.
    """

    spark: SparkSession
    folder: Path
    place: str
    snapshots: FileSystemCheckpointStorage
    name: str = "sales"
    files: int = 0

    @property
    def output(self) -> str:
        """Where the rows go."""
        return f"{self.place}/output/{self.name}"

    def feed(self, files: int) -> None:
        """Lay files, an hour each."""
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number:02}:{minute:02}:00Z", "shop": minute % 3} for minute in range(9)]
            lay_file(self.folder, number, rows)
        self.files += files

    def run(
        self, start_from: str = "latest", *, no_safety_savepoint: bool = False, state_partitions: int | None = None
    ) -> str:
        """Run the stream until it has taken all files; returns what it began with."""
        run_stream(
            self.name,
            self.describe,
            catalog=self.catalog_url,
            storage=self.snapshots,
            live_root=self.live_root,
            checkpointing=CHECKPOINTING,
            spark=self.spark,
            start_from=StartFrom(
                start_from, no_safety_savepoint=no_safety_savepoint, state_partitions=state_partitions
            ),
        )
        execution = self.stream.catalog.executions.latest(self.name)
        assert execution is not None
        return str((execution.recovery or {})["kind"])

    def describe(self, spark: SparkSession) -> DataStreamWriter:
        """Sales by shop and half hour, one file a batch."""
        sales = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.folder))
        counts = self.counts(sales.withWatermark("at", "10 minutes"))
        return counts.writeStream.format("parquet").option("path", self.output).trigger(availableNow=True)

    def counts(self, sales: DataFrame) -> DataFrame:
        """Sales by shop and half hour."""
        counted = sales.groupBy(F.window("at", "30 minutes"), "shop").count()
        return counted.select("window.start", "shop", "count")

    def rows(self) -> list[tuple[object, ...]]:
        """What came out."""
        return sorted(map(tuple, self.spark.read.parquet(self.output).collect()))

    def uninterrupted(self) -> list[tuple[object, ...]]:
        """What an uninterrupted query over the same files has written: all but the window that is still open."""
        rows = sorted(map(tuple, self.counts(self.spark.read.schema(SCHEMA).json(str(self.folder))).collect()))
        return [row for row in rows if row[0] != rows[-1][0]]

    @property
    def catalog_url(self) -> str:
        """The catalog."""
        return f"sqlite:///{self.folder}.db"

    @property
    def live_root(self) -> str:
        """Where live directories go."""
        return f"{self.place}/live"

    @property
    def stream(self) -> StreamHandle:
        """The stream as operators see it."""
        deployment = Deployment(self.live_root, self.catalog_url, self.snapshots)
        return deployment.stream(
            self.name,
            catalog=deployment.open_catalog(),
            query_name=self.name,
            options=CHECKPOINTING.options,
            restart=RestartStrategies.no_restart(),
            backend=None,
            savepoint_url=None,
        )


def steps(sales: Sales) -> Iterator[dict[str, object]]:
    """One step after the other, and what came of each."""
    sales.feed(3)
    yield ran(sales, "first run", sales.run())
    savepoint = verbs.trigger_savepoint(sales.stream, origin="test")
    sales.feed(either(quick=1, thorough=2))
    yield ran(sales, "goes on", sales.run())
    yield ran(sales, "back to the savepoint", sales.run(str(savepoint.location)))
    told = sales.stream.catalog.events.after(0)
    if either(quick=False, thorough=True):
        yield from more_steps(sales, str(savepoint.location))
    yield {
        "step": "end",
        "checkpoints": sum(event.type is EventType.CHECKPOINT_COMPLETED for event in told),
        "failures": [event.payload["reason"] for event in told if event.type is EventType.CHECKPOINT_FAILED],
        "can_resume": examine_live_directory(sales.stream).diagnosis.can_resume,
    }


def more_steps(sales: Sales, savepoint: str) -> Iterator[dict[str, object]]:
    """What `make test` leaves out."""
    # A savepoint of where it stood would name the files that are then removed.
    yield ran(sales, "back to batch 4", sales.run("batch-4", no_safety_savepoint=True))
    cleaned = clean_sinks(sales.stream, dry_run=False, grace_ms=0)
    yield ran(sales, "orphans removed", "REMOVED" if cleaned.removable else str(cleaned.orphans))
    copy = replace(sales, name="copy-of-sales")
    fork(sales.stream, copy.stream, StartFrom("latest"), origin="test", outputs={sales.output: copy.output})
    copy.feed(1)
    yield ran(copy, "goes on as a fork", copy.run())
    yield looked_into(sales, savepoint)
    if installed_release().has(Feature.STATE_REWRITER):
        yield rewritten(sales)


def looked_into(sales: Sales, savepoint: str) -> dict[str, object]:
    """What the state is, at two points, and what copies are left: also that of a process that was killed."""
    killed = LiveDirectory(f"{sales.live_root}/{SCRATCH_FOLDER}/{sales.name}/1-dead")
    killed.folder.write("metadata", [b"{}"])
    with StreamState(sales.stream, "live", spark=sales.spark) as state:
        [total] = [row[0] for row in state.rows().selectExpr("sum(value.count)").collect()]
        keys = [frame.key_fields for frame in map(state.frame, state.states)]
    with StreamStateDiff(sales.stream, savepoint, "live", spark=sales.spark) as diff:
        counts = [{change.value: number for change, number in state.counts.items()} for state in diff.states]
    left = LiveDirectory(f"{sales.live_root}/{SCRATCH_FOLDER}").folder.find()
    return {"step": "state", "total": total, "keys": keys, "diff": counts, "left": [path for path, _ in left]}


def rewritten(sales: Sales) -> dict[str, object]:
    """The state without a shop, as a savepoint of its own; then the stream, with its state in other partitions."""
    edited = edit_state(
        sales.stream,
        [StateEdit(forget="shop = 1")],
        snapshot=str(verbs.trigger_savepoint(sales.stream, origin="test").location),
        reason="test",
        origin="test",
        spark=sales.spark,
    )
    with StreamState(sales.stream, edited.savepoint.snapshot_id, spark=sales.spark) as state:
        shops = sorted(row[0] for row in state.rows().select("key.shop").distinct().collect())
    began_with = sales.run(state_partitions=5)
    sales.feed(1)
    sales.run()
    shape = shape_in(LiveDirectory(sales.stream.catalog.streams.get(sales.name).live_directory or ""))
    left = LiveDirectory(f"{sales.live_root}/{SCRATCH_FOLDER}").folder.find()
    partitions = shape.partitions if shape is not None else None
    found = {"forgotten": edited.rows, "shops": shops, "partitions": partitions, "left": [path for path, _ in left]}
    return {**ran(sales, "rewritten", began_with), **found}


def ran(sales: Sales, what: str, began_with: str) -> dict[str, object]:
    """How a stream stands after a step."""
    record = sales.stream.catalog.streams.get(sales.name)
    return {
        "step": what,
        "began_with": began_with,
        "live": record.live_directory,
        "is_as_uninterrupted": sales.rows() == sales.uninterrupted(),
        "rows": len(sales.rows()),
    }


def main(folder: Path, place: str, snapshots: FileSystemCheckpointStorage) -> None:
    """Do all steps and print what came of them."""
    landing = folder / "landing"
    landing.mkdir()
    settings = {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    with small_spark(settings) as spark:
        print(json.dumps(list(steps(Sales(spark, landing, place, snapshots)))))


if __name__ == "__main__":
    _, root, live_url, snapshots_url, storage_options = sys.argv
    options = json.loads(storage_options)
    main(Path(root), live_url, FileSystemCheckpointStorage(snapshots_url, storage_options=options))
