"""Streams into a real Delta table: each step of a scenario, with what the table holds afterwards, as JSON lines."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, run_stream
from dagster_ckpt.errors import CkptError, SinkRollbackError
from dagster_ckpt.sinks.delta import DeltaTable
from tests.support.small_spark import SETTINGS, lay_file

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}


class Shops:
    """Each file names a new shop and the one before: the table gets each shop once, if the state is whole."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.fed = spark, folder, 0
        (folder / "landing").mkdir(parents=True)
        self.table = f"{folder}/table"
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, files: int) -> None:
        for number in range(self.fed, self.fed + files):
            lay_file(self.folder / "landing", number, [{"shop": number}, {"shop": max(0, number - 1)}])
        self.fed += files

    def run(self, start_from: str = "latest", *, files_per_batch: int = 1) -> None:
        def query(spark: SparkSession) -> DataStreamWriter:
            rows = spark.readStream.schema("shop long").option("maxFilesPerTrigger", files_per_batch)
            shops = rows.json(f"{self.folder}/landing").dropDuplicates(["shop"])
            return shops.writeStream.format("delta").option("path", self.table).trigger(availableNow=True)

        run_stream(
            "shops",
            query,
            **self.places,
            spark=self.spark,
            start_from=start_from,
            discard_state=start_from == "empty",
        )

    def savepoint(self, label: str) -> None:
        with Client(**self.places) as client:
            client.trigger_savepoint("shops", label=label)

    def lose_the_directory(self) -> None:
        for live in (self.folder / "live/shops").glob("live-*"):
            shutil.rmtree(live)

    def lose_the_last_commit(self, *, state_too: bool) -> None:
        """As if the query had been killed after the table had the batch, and before its commit."""
        (live,) = (self.folder / "live/shops").glob("live-*")
        newest = max(int(path.name) for path in (live / "commits").iterdir() if path.name.isdecimal())
        for path in (live / "commits" / str(newest), live / "commits" / f".{newest}.crc"):
            path.unlink(missing_ok=True)
        if state_too:
            for path in [*(live / "state").rglob(f"{newest + 1}.delta"), *(live / "state").rglob(f"{newest + 1}.zip")]:
                path.unlink()

    def told(self) -> dict[str, Any]:
        rows = self.spark.read.format("delta").load(self.table).collect()
        history = self.spark.sql(f"DESCRIBE HISTORY delta.`{self.table}`").collect()
        return {
            "rows": sorted(row.shop for row in rows),
            "operations": [row.operation for row in sorted(history, key=lambda row: row.version)],
        }


def lost_directory(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.feed(3)
    shops.run()
    shops.lose_the_directory()
    # Cut otherwise than the first time: a batch number now stands for other rows.
    shops.run(files_per_batch=3)


def back_and_forth(shops: Shops) -> None:
    shops.feed(4)
    shops.run()
    shops.savepoint("four")
    shops.run("batch-1", files_per_batch=2)
    shops.run("four")
    shops.feed(1)
    shops.run()


def from_nothing(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.run("empty", files_per_batch=2)


def killed_after_the_restore(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    rolls_back = DeltaTable.roll_back

    def dies(*args: Any) -> None:
        rolls_back(*args)
        raise RuntimeError("killed")

    DeltaTable.roll_back = dies  # type: ignore[method-assign,assignment]
    try:
        shops.run("batch-0", files_per_batch=2)
    except SinkRollbackError:
        pass
    finally:
        DeltaTable.roll_back = rolls_back  # type: ignore[method-assign]
    shops.run(files_per_batch=2)


def in_flight(shops: Shops, *, state_too: bool) -> None:
    shops.feed(3)
    shops.run()
    shops.lose_the_last_commit(state_too=state_too)
    shops.feed(1)
    shops.run(files_per_batch=2)


def others_wrote(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.createDataFrame([(100,)], "shop long").write.format("delta").mode("append").save(shops.table)
    shops.run("batch-0")


def optimized(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"OPTIMIZE delta.`{shops.table}`")
    shops.run("batch-0", files_per_batch=2)


SCENARIOS: dict[str, Callable[[Shops], None]] = {
    "lost directory": lost_directory,
    "back and forth": back_and_forth,
    "from nothing": from_nothing,
    "killed after the restore": killed_after_the_restore,
    "in flight, its state is there": lambda shops: in_flight(shops, state_too=False),
    "in flight, its state is missing": lambda shops: in_flight(shops, state_too=True),
    "others wrote": others_wrote,
    "optimized": optimized,
}


def main(folder: Path, jars: str, only: Sequence[str] = ()) -> None:
    """Play the scenarios with these names, by default all."""
    spark = SparkSession.builder.master("local[2]").config(map={**SETTINGS, **DELTA, "spark.jars": jars}).getOrCreate()
    for name, play in SCENARIOS.items():
        if only and name not in only:
            continue
        shops = Shops(spark, folder / name.replace(" ", "-").replace(",", ""))
        refused = None
        try:
            play(shops)
        except CkptError as error:
            refused = f"{type(error).__name__}: {error}"
        print("TOLD", json.dumps({"scenario": name, "refused": refused, **shops.told()}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
