"""Streams that read real Iceberg tables, which expire or are created again: what happened, as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, run_stream
from dagster_ckpt.errors import CkptError
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS

TABLES = {
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
    "spark.sql.catalog.lake.cache-enabled": "false",
}


class Copies:
    """A stream that copies the rows of a table."""

    def __init__(self, spark: SparkSession, folder: Path, name: str) -> None:
        self.spark, self.folder, self.table = spark, folder / name, f"lake.db.{name}"
        self.folder.mkdir(parents=True)
        self.places = {
            "catalog": f"sqlite:///{self.folder}/catalog.db",
            "storage": f"file://{self.folder}/snapshots",
            "live_root": f"{self.folder}/live",
        }
        self.create()

    def create(self) -> None:
        self.spark.sql(f"CREATE TABLE {self.table} (n INT) USING iceberg")

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.spark.sql(f"INSERT INTO {self.table} VALUES ({number})")

    def run(self, start_from: str = "latest") -> str | None:
        def query(spark: SparkSession) -> DataStreamWriter:
            rows = spark.readStream.format("iceberg").load(self.table)
            return rows.writeStream.format("json").option("path", f"{self.folder}/out").trigger(availableNow=True)

        try:
            run_stream("copies", query, **self.places, spark=self.spark, start_from=start_from)
        except CkptError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def expire(self) -> None:
        self.spark.sql(
            f"CALL lake.system.expire_snapshots(table => '{self.table.removeprefix('lake.')}', "
            "older_than => TIMESTAMP '2200-01-01', retain_last => 1)"
        )

    def savepoint(self) -> None:
        with Client(**self.places) as client:
            client.trigger_savepoint("copies", label="sp")

    @property
    def rows(self) -> list[int]:
        return sorted(row["n"] for row in self.spark.read.schema("n int").json(f"{self.folder}/out").collect())


def created_again(copies: Copies) -> str | None:
    copies.add(1, 2)
    copies.run()
    copies.spark.sql(f"DROP TABLE {copies.table} PURGE")
    copies.create()
    copies.add(3, 4, 5)
    return copies.run()


def expired(copies: Copies) -> str | None:
    copies.add(1, 2)
    copies.run()
    copies.savepoint()
    copies.add(3, 4)
    copies.run()
    copies.expire()
    return copies.run("sp")


def expired_after_an_empty_batch(copies: Copies) -> str | None:
    # Of an empty table, Iceberg notes that the stream begins before the first snapshot.
    copies.run()
    copies.add(1, 2)
    copies.expire()
    return copies.run()


def kept(copies: Copies) -> str | None:
    copies.add(1, 2)
    copies.run()
    copies.savepoint()
    copies.add(3)
    copies.run()
    return copies.run("sp")


SCENARIOS: dict[str, Callable[[Copies], str | None]] = {
    "created again": created_again,
    "expired": expired,
    "expired after an empty batch": expired_after_an_empty_batch,
    "kept": kept,
}


def main(folder: Path, jars: str) -> None:
    settings = {**SETTINGS, **TABLES, "spark.sql.catalog.lake.warehouse": f"{folder}/lake", "spark.jars": jars}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    for scenario, play in SCENARIOS.items():
        copies = Copies(spark, folder, scenario.replace(" ", "_"))
        refused = play(copies)
        tell({"scenario": scenario, "refused": refused, "rows": copies.rows})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
