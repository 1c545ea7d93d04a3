"""Three streams that count sales by shop, in a process that stops dead at a chosen moment and waits to be killed.

| stream | mode | what comes out |
|---|---|---|
| `exact-files` | EXACTLY_ONCE, aligned | windows that are over, by the file sink |
| `exact-calls` | EXACTLY_ONCE, unaligned | the new count of each shop, by `foreachBatch` |
| `least-calls` | AT_LEAST_ONCE | the new count of each shop, by `foreachBatch` |
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import CompletedSnapshot, LeaseRecord, SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.snapshots import SnapshotRecords
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.flink.program import StreamToRun, run_program
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.modes import CheckpointingMode

EXACT_FILES, EXACT_CALLS, LEAST_CALLS = "exact-files", "exact-calls", "least-calls"
STREAMS = {
    EXACT_FILES: {"mode": CheckpointingMode.EXACTLY_ONCE},
    # The sink below knows a batch by its number; the file sink's rows are rolled back instead.
    EXACT_CALLS: {"mode": CheckpointingMode.EXACTLY_ONCE, "unaligned": True, "force_unaligned": True},
    LEAST_CALLS: {"mode": CheckpointingMode.AT_LEAST_ONCE},
}
INTERVAL_MS = 700
SHOPS, ROWS = 3, 9
FIRST_FILES = 2


class KillPoint(StrEnum):
    """Where the process is when it is killed.

    SNAPSHOTTED: A snapshot has been taken of all there is.
    PLANNED: A batch is planned and its tasks run.
    WRITTEN: The rows of that batch have come out, and it is not committed.
    UNREGISTERED: It is committed and in a snapshot, which the catalog does not know yet.
    """

    SNAPSHOTTED = "snapshotted"
    PLANNED = "planned"
    WRITTEN = "written"
    UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class Shops:
    """The folder of one trial: input, live directories, snapshots, output."""

    folder: Path

    @property
    def gate(self) -> Path:
        """While this file is there, a batch with a marked row stays in its task."""
        return self.folder / "gate"

    @property
    def ready(self) -> Path:
        """Made when the process is where it is to be killed."""
        return self.folder / "ready"

    def held(self, stream: str) -> Path:
        """Made when a batch of a stream is held by the gate."""
        return self.folder / f"held-{stream}"

    def unregistered(self, stream: str) -> Path:
        """Made when a snapshot of a stream is stored and not in the catalog."""
        return self.folder / f"unregistered-{stream}"

    def feed(self, first: int, files: int, *, marked: bool = False) -> None:
        """Lay files: each has three sales of each of three shops, an hour after those of the file before."""
        landing = self.folder / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(first, first + files):
            rows = [
                {"at": f"2024-01-01T{number:02}:{20 + n}:00Z", "shop": n % SHOPS, "held": marked} for n in range(ROWS)
            ]
            unfinished = landing / f".{number}"
            unfinished.write_text("\n".join(map(json.dumps, rows)))
            # Spark takes files in the order of their times.
            os.utime(unfinished, ns=((1_700_000_000 + number) * 10**9,) * 2)
            unfinished.replace(landing / f"{number:04}.json")

    def stream(self, catalog: Catalog, name: str) -> StreamHandle:
        storage = FileSystemCheckpointStorage(f"file://{self.folder}/snapshots", 64)
        return StreamHandle(
            stream_id=name,
            name=name,
            asset_key=name,
            catalog=catalog,
            store=open_store(storage, name),
            options=CheckpointConfig(**{"interval": INTERVAL_MS, **STREAMS[name]}).options,
            restart=RestartStrategies.no_restart(),
            live_root=str(self.folder / "live"),
        )

    def catalog(self) -> Catalog:
        return Catalog(f"sqlite:///{self.folder / 'catalog.db'}")

    def writer(self, spark: SparkSession, name: str, *, files_a_batch: int) -> DataStreamWriter:
        stream = spark.readStream.schema("at timestamp, shop long, held boolean")
        sales = stream.option("maxFilesPerTrigger", files_a_batch).json(str(self.folder / "landing"))
        sales = sales.where(self._passed(name)("held"))
        if name == EXACT_FILES:
            windows = sales.withWatermark("at", "10 minutes").groupBy(F.window("at", "1 hour"), "shop").count()
            hours = windows.select(F.hour("window.start").alias("hour"), "shop", "count")
            return hours.writeStream.format("parquet").option("path", str(self.folder / name)).outputMode("append")
        return sales.groupBy("shop").count().writeStream.foreachBatch(self._note(name)).outputMode("update")

    def came_out(self, name: str) -> list[dict[str, Any]]:
        """What `foreachBatch` was given, oldest first: `batch` and, by shop, the `counts` that changed."""
        path = self.folder / f"{name}.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def _passed(self, name: str) -> Callable[..., Any]:
        gate, held = str(self.gate), str(self.held(name))

        # Everything it needs is inside: Spark's Python workers do not have this module.
        @F.udf("boolean", useArrow=False)
        def passed(is_held: bool) -> bool:
            import os
            import time

            while is_held and os.path.exists(gate):  # noqa: PTH110 - pickled, with its imports
                open(held, "a").close()  # noqa: PTH123 - the same
                time.sleep(0.02)
            return True

        return passed

    def _note(self, name: str) -> Callable[[DataFrame, int], None]:
        def note(batch: DataFrame, batch_id: int) -> None:
            counts = {str(row["shop"]): row["count"] for row in batch.collect()}
            with (self.folder / f"{name}.jsonl").open("a") as ledger:
                print(json.dumps({"batch": batch_id, "counts": counts}), file=ledger)

        return note


def run(
    shops: Shops,
    catalog: Catalog,
    spark: SparkSession,
    describe: Callable[[str], DataStreamWriter],
    started: Callable[[str, SupervisedQuery], None] = lambda _name, _query: None,
) -> None:
    """Run the three streams until they end."""

    def stream(name: str) -> StreamToRun:
        def start(live: LiveDirectory) -> SupervisedQuery:
            query = start_query(describe(name), name, live)
            started(name, query)
            return query

        return StreamToRun(shops.stream(catalog, name), start, lambda: describe(name))

    run_program("shops", [stream(name) for name in STREAMS], spark=spark)


@dataclass
class Victim:
    """The process that will be killed, as it drives itself to the chosen moment."""

    shops: Shops
    catalog: Catalog
    point: KillPoint
    queries: dict[str, SupervisedQuery] = field(default_factory=dict)
    held_batch: dict[str, int] = field(default_factory=dict)

    def drive(self) -> None:
        """Go to the kill point, say so, and stay there; in a thread beside the streams."""
        self._await(self._is_snapshotted)
        if self.point is not KillPoint.SNAPSHOTTED:
            self.shops.gate.touch()
            self.shops.feed(FIRST_FILES, 1, marked=True)
            self._await(lambda name: self.shops.held(name).exists())
            self.held_batch = {name: (self._live(name).positions().commit or 0) + 1 for name in STREAMS}
            # A snapshot carries the plan of the batch that is held.
            self._await(lambda name: name != EXACT_CALLS or self._is_carried())
        if self.point is KillPoint.WRITTEN:
            for query in self.queries.values():
                # Spark needs it to commit, and this thread never gives it back.
                execution: Any = query._query._jsq.streamingQuery()
                execution.awaitProgressLock().lock()
            self.shops.gate.unlink()
            self._await(self._is_written)
            assert all(self._live(name).positions().commit == self.held_batch[name] - 1 for name in STREAMS)
        if self.point is KillPoint.UNREGISTERED:
            self._hold_before_the_catalog()
            self.shops.gate.unlink()
            self._await(lambda name: self.shops.unregistered(name).exists())
        self.shops.ready.touch()
        threading.Event().wait()

    def _await(self, holds: Callable[[str], bool]) -> None:
        while not all(map(holds, STREAMS)):
            time.sleep(0.02)

    def _live(self, name: str) -> LiveDirectory:
        return LiveDirectory(self.catalog.streams.get(name).live_directory or "")

    def _newest(self, name: str) -> SnapshotRecord | None:
        return next(iter(self.catalog.snapshots.of_stream(name, status=SnapshotStatus.COMPLETED)), None)

    def _is_snapshotted(self, name: str) -> bool:
        newest = self._newest(name)
        if newest is None:
            return False
        live = self._live(name)
        read = len([file for file in live.folder.list("sources/0") if file.isdigit()])
        positions = live.positions()
        return read == FIRST_FILES and newest.batch_id == positions.commit == positions.offset

    def _is_carried(self) -> bool:
        newest = self._newest(EXACT_CALLS)
        return newest is not None and newest.properties["in_flight_batch"] == self.held_batch[EXACT_CALLS]

    def _is_written(self, name: str) -> bool:
        if name == EXACT_FILES:
            return (self.shops.folder / name / "_spark_metadata" / str(self.held_batch[name])).exists()
        return self.held_batch[name] in [line["batch"] for line in self.shops.came_out(name)]

    def _hold_before_the_catalog(self) -> None:
        complete = SnapshotRecords.complete

        def hold(
            store: SnapshotRecords, lease: LeaseRecord, snapshot_id: str, facts: CompletedSnapshot, **more: int | None
        ) -> SnapshotRecord:
            if (facts.batch_id or 0) >= self.held_batch[lease.stream_id]:
                self.shops.unregistered(lease.stream_id).touch()
                threading.Event().wait()
            return complete(store, lease, snapshot_id, facts, **more)

        SnapshotRecords.complete = hold  # type: ignore[method-assign]


def main(folder: str, point: str) -> None:
    # Every held batch keeps a thread that does nothing.
    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    shops = Shops(Path(folder))
    catalog = shops.catalog()
    victim = Victim(shops, catalog, KillPoint(point))
    threading.Thread(target=victim.drive, daemon=True).start()
    run(shops, catalog, spark, lambda name: shops.writer(spark, name, files_a_batch=1), victim.queries.__setitem__)


if __name__ == "__main__":
    main(*sys.argv[1:])
