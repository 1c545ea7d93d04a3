"""Streams into Delta tables by MERGE, by name, and with features that change the log; each result as a JSON line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import delta_transaction, to_table
from dagster_ckpt.errors import CkptError, StreamFailedError
from tests.sinks.delta_program import DELTA, DeltaShops
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS


class Described(DeltaShops):
    """Shops that are written in another way."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.transform: Callable[[DataFrame], DataFrame] = lambda rows: rows.dropDuplicates(["shop"])
        self.write: Callable[[DataFrame], DataStreamWriter] = lambda shops: shops.writeStream.format("delta").option(
            "path", self.table
        )

        # The table that is read; None for files.
        self.source: str | None = None

    def writer(self, spark: SparkSession, files_per_batch: int) -> DataStreamWriter:
        reader = spark.readStream.option("maxFilesPerTrigger", files_per_batch)
        rows = (
            reader.schema("shop long").json(f"{self.folder}/landing")
            if self.source is None
            else reader.format("delta").load(self.source)
            if "/" in self.source
            else reader.table(self.source)
        )
        return self.write(self.transform(rows)).trigger(availableNow=True)

    def insert(self, *shops: int) -> None:
        for shop in shops:
            self.spark.sql(f"INSERT INTO {self.of_source} VALUES ({shop})")

    @property
    def of_source(self) -> str:
        return f"delta.`{self.source}`" if "/" in str(self.source) else str(self.source)

    @property
    def source_folder(self) -> Path:
        (row,) = self.spark.sql(f"DESCRIBE DETAIL {self.of_source}").collect()
        return Path(row.location.removeprefix("file:"))

    def create(self, columns: str = "shop long", properties: str = "") -> None:
        self.spark.sql(f"CREATE TABLE delta.`{self.table}` ({columns}) USING delta {properties}")

    def goes_back(self) -> None:
        self.feed(3)
        self.run()
        self.savepoint("three")
        self.feed(2)
        self.run()
        self.lose_the_directory()
        self.run(files_per_batch=2)


def merged(shops: Described) -> None:
    def upsert(batch: DataFrame, batch_id: int) -> None:
        batch.createOrReplaceTempView("batch")
        with delta_transaction(batch, batch_id):
            batch.sparkSession.sql(
                f"MERGE INTO delta.`{shops.table}` AS old USING batch AS new ON false WHEN NOT MATCHED THEN INSERT *"
            )

    shops.create()
    shops.write = lambda rows: rows.writeStream.foreachBatch(upsert).option("path", f"delta:{shops.table}")
    shops.goes_back()


def merged_in_flight(shops: Described) -> None:
    def upsert(batch: DataFrame, batch_id: int) -> None:
        with delta_transaction(batch, batch_id):
            batch.write.format("delta").mode("append").save(shops.table)

    shops.write = lambda rows: rows.writeStream.foreachBatch(upsert).option("path", f"delta:{shops.table}")
    shops.feed(3)
    shops.run()
    shops.lose_the_last_commit(state_too=True)
    shops.feed(1)
    shops.run()


def upserts(shops: Described) -> None:
    """Each batch updates the rows of earlier ones: how often each shop was named, by the state of the query."""

    def upsert(batch: DataFrame, batch_id: int) -> None:
        batch.createOrReplaceTempView("batch")
        with delta_transaction(batch, batch_id):
            batch.sparkSession.sql(
                f"MERGE INTO delta.`{shops.table}` AS old USING batch AS new ON old.shop = new.shop "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )

    shops.create("shop long, n long", "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    shops.transform = lambda rows: rows.groupBy("shop").count().withColumnRenamed("count", "n")
    shops.write = lambda rows: (
        rows.writeStream.outputMode("update").foreachBatch(upsert).option("path", f"delta:{shops.table}")
    )


def upserted(shops: Described) -> None:
    upserts(shops)
    shops.goes_back()


def upserted_in_flight(shops: Described) -> None:
    upserts(shops)
    shops.feed(3)
    shops.run()
    shops.lose_the_last_commit(state_too=True)
    shops.feed(1)
    shops.run()


def writes_twice(shops: Described, *, named: bool = True, dies_in: int | None = None) -> None:
    """Each batch appends even shops, then odd ones; once, the query dies between the two."""
    deaths: list[int] = []

    def append(batch: DataFrame, batch_id: int) -> None:
        with delta_transaction(batch, batch_id):
            batch.filter("shop % 2 = 0").write.format("delta").mode("append").save(shops.table)
        if batch_id == dies_in and not deaths:
            deaths.append(batch_id)
            raise RuntimeError("killed")
        with delta_transaction(batch, batch_id, "odd" if named else ""):
            batch.filter("shop % 2 = 1").write.format("delta").mode("append").save(shops.table)

    shops.write = lambda rows: rows.writeStream.foreachBatch(append).option("path", f"delta:{shops.table}")


def written_twice(shops: Described) -> None:
    writes_twice(shops)
    shops.goes_back()


def killed_between_two_writes(shops: Described, *, loses: Callable[[Described], None]) -> None:
    """In batch 3, which has an odd shop."""
    writes_twice(shops, dies_in=3)
    shops.feed(2)
    shops.run()
    shops.savepoint("two")
    shops.feed(2)
    with suppress(StreamFailedError):
        shops.run()
    loses(shops)
    shops.feed(1)
    shops.run()


def written_twice_without_a_name(shops: Described) -> None:
    writes_twice(shops, named=False)
    shops.feed(1)
    shops.run()


def written_twice_in_one_transaction(shops: Described) -> None:
    def append(batch: DataFrame, batch_id: int) -> None:
        with delta_transaction(batch, batch_id):
            for rest in range(2):
                batch.filter(f"shop % 2 = {rest}").write.format("delta").mode("append").save(shops.table)

    shops.write = lambda rows: rows.writeStream.foreachBatch(append).option("path", f"delta:{shops.table}")
    shops.feed(1)
    shops.run()


def to_a_named_table(shops: Described) -> None:
    shops.spark.sql(f"CREATE TABLE shops_by_name (shop long) USING delta LOCATION '{shops.table}'")
    shops.write = lambda rows: to_table(rows.writeStream.format("delta"), "shops_by_name")
    shops.goes_back()


def to_a_table_that_the_start_creates(shops: Described) -> None:
    shops.table = f"{Path(shops.folder).parent / 'warehouse'}/shops_created"
    shops.write = lambda rows: to_table(rows.writeStream.format("delta"), "shops_created")
    shops.goes_back()


def mapped_columns(shops: Described) -> None:
    shops.create(
        properties="TBLPROPERTIES ('delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true', "
        "'delta.checkpointInterval' = '2')"
    )
    shops.goes_back()


def left_to_a_person(shops: Described) -> None:
    shops.feed(3)
    shops.run()
    try:
        shops.run("batch-0", roll_back_tables=False)
    except CkptError as error:
        refused = str(error)
    shops.spark.sql("RESTORE" + refused.partition("Run: RESTORE")[2].partition(". Then")[0])
    shops.run("batch-0", files_per_batch=2, roll_back_tables=False)


def reads(shops: Described, source: str) -> None:
    """A savepoint after three versions of the table, and two versions later."""
    shops.source = source
    shops.spark.sql(f"CREATE TABLE {shops.of_source} (shop long) USING delta")
    shops.insert(0, 1, 2)
    shops.run()
    shops.savepoint("three")
    shops.insert(3, 4)
    shops.run()


def from_a_table(shops: Described) -> None:
    reads(shops, f"{shops.folder}/source")
    shops.lose_the_directory()
    shops.insert(5)
    shops.run()


def from_a_named_table(shops: Described) -> None:
    reads(shops, "shops_to_read")
    shops.run("three", files_per_batch=2)
    shops.insert(5)
    shops.run()


def whose_log_was_cut(shops: Described) -> None:
    """As by log retention, which deletes commits before a checkpoint."""
    reads(shops, f"{shops.folder}/source")
    shops.spark.sql(f"ALTER TABLE {shops.of_source} SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    shops.insert(5, 6)
    shops.run()
    checkpoint = max(shops.source_folder.glob("_delta_log/*.checkpoint*.parquet"))
    for commit in sorted(shops.source_folder.glob("_delta_log/*.json")):
        if commit.name[:20] < checkpoint.name[:20]:
            commit.unlink()
    shops.run("three")


def vacuumed(shops: Described) -> None:
    reads(shops, "shops_to_vacuum")
    shops.spark.sql("OPTIMIZE shops_to_vacuum")
    shops.spark.sql("SET spark.databricks.delta.retentionDurationCheck.enabled = false")
    shops.spark.sql("VACUUM shops_to_vacuum RETAIN 0 HOURS")
    shops.run()
    shops.run("three")


def recreated(shops: Described) -> None:
    reads(shops, "shops_recreated")
    shops.spark.sql("CREATE OR REPLACE TABLE shops_recreated (shop long) USING delta")
    shops.insert(7)
    shops.run("three")


SCENARIOS: dict[str, Callable[[Described], None]] = {
    "merged": merged,
    "merged, and killed before the commit": merged_in_flight,
    "upserted": upserted,
    "upserted, and killed before the commit": upserted_in_flight,
    "written twice": written_twice,
    "killed between two writes": lambda shops: killed_between_two_writes(shops, loses=lambda _: None),
    "killed between two writes, and lost its directory": lambda shops: killed_between_two_writes(
        shops, loses=DeltaShops.lose_the_directory
    ),
    "written twice without a name": written_twice_without_a_name,
    "written twice in one transaction": written_twice_in_one_transaction,
    "to a named table": to_a_named_table,
    "to a table that the start creates": to_a_table_that_the_start_creates,
    "mapped columns, deletion vectors, log checkpoints": mapped_columns,
    "left to a person": left_to_a_person,
    "from a table": from_a_table,
    "from a named table": from_a_named_table,
    "from a table whose log was cut": whose_log_was_cut,
    "from a vacuumed table": vacuumed,
    "from a re-created table": recreated,
}


def main(folder: Path, jars: str, only: Sequence[str] = ()) -> None:
    """Play the scenarios with these names, by default all."""
    settings = {**SETTINGS, **DELTA, "spark.jars": jars, "spark.sql.warehouse.dir": f"{folder}/warehouse"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    for name, play in SCENARIOS.items():
        if only and name not in only:
            continue
        shops = Described(spark, folder / name.replace(" ", "-").replace(",", ""))
        told: dict[str, Any] = {"refused": None}
        try:
            play(shops)
        except Exception as error:  # noqa: BLE001 - the other scenarios are played as well
            told["refused"] = f"{type(error).__name__}: {error}"
        rows = spark.read.format("delta").load(shops.table)
        if "n" in rows.columns:
            told["counts"] = sorted([row.shop, row.n] for row in rows.collect())
        tell({"scenario": name, **told, **shops.told()})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
