"""State that is built from a real Delta or Iceberg table: the counts afterwards, or the refusal, as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.errors import CkptError
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.table_sources_program import TABLES
from tests.sinks.delta_program import DELTA
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS
from tests.support.small_stream import SmallStream

AT_ONCE = 10


class Delta:
    """A Delta table."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.path = spark, f"{root}/table"

    def add(self, numbers: DataFrame) -> None:
        numbers.write.format("delta").mode("append").save(self.path)

    def compact(self) -> None:
        self.spark.sql(f"OPTIMIZE delta.`{self.path}`")

    def forget(self) -> None:
        """Delete what only earlier versions need."""
        self.compact()
        self.spark.sql(f"VACUUM delta.`{self.path}` RETAIN 0 HOURS")

    def delete(self, where: str) -> None:
        self.spark.sql(f"DELETE FROM delta.`{self.path}` WHERE {where}")

    def read(self, spark: SparkSession, options: dict[str, Any]) -> DataFrame:
        return spark.readStream.format("delta").options(**options).load(self.path)


class Iceberg:
    """A table of Iceberg."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.name = spark, root.name.replace(" ", "_")
        spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
        spark.sql(f"CREATE TABLE lake.db.{self.name} (n BIGINT) USING iceberg")

    def add(self, numbers: DataFrame) -> None:
        numbers.writeTo(f"lake.db.{self.name}").append()

    def compact(self) -> None:
        self._call("rewrite_data_files", "options => map('rewrite-all', 'true')")

    def forget(self) -> None:
        self._call("expire_snapshots", "older_than => TIMESTAMP '2200-01-01', retain_last => 1")

    def _call(self, procedure: str, arguments: str) -> None:
        self.spark.sql(f"CALL lake.system.{procedure}(table => 'db.{self.name}', {arguments})").collect()

    def read(self, spark: SparkSession, options: dict[str, Any]) -> DataFrame:
        return spark.readStream.format("iceberg").options(**options).load(f"lake.db.{self.name}")


class Life:
    """A stream without state that reads a table, and then counts its rows."""

    def __init__(self, spark: SparkSession, root: Path, table: Callable[[SparkSession, Path], Delta | Iceberg]) -> None:
        root.mkdir(parents=True)
        self.spark, self.table = spark, table(spark, root)
        self.stream = SmallStream(spark, root)
        self.counts: dict[int, int] = {}
        self.options: dict[str, Any] = {}
        self.added = 0

    def add(self, commits: int = 1) -> None:
        for _ in range(commits):
            self.table.add(self.spark.range(self.added, self.added + AT_ONCE, 1, 1).toDF("n"))
            self.added += AT_ONCE

    def pass_on(self) -> None:
        self.stream.run(lambda spark: self.table.read(spark, self.options).writeStream.format("noop"))

    def count(self, **options: Any) -> str | None:
        def keep(batch: DataFrame, _number: int) -> None:
            self.counts.update({row.k: row.n for row in batch.collect()})

        def writer(spark: SparkSession) -> Any:
            rows = self.table.read(spark, self.options).selectExpr("n % 3 AS k")
            counted = rows.groupBy("k").count().toDF("k", "n")
            return counted.writeStream.outputMode("update").foreachBatch(keep)

        try:
            if "refused" in options:
                return str(self.stream.refused(writer, start_from=StartFrom(bootstrap_state=True)))
            self.stream.run(writer, **options)
        except CkptError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def bootstrap(self, start_from: str = "latest") -> str | None:
        return self.count(start_from=StartFrom(start_from, bootstrap_state=True))


def counted(life: Life) -> str | None:
    life.add(2)
    life.pass_on()
    life.add()
    life.table.compact()
    refused = life.bootstrap()
    life.add()
    return refused or life.count()


def within_a_version(life: Life) -> str | None:
    """The position is behind the first of three files of the table as it was at the start."""
    life.options = {"maxFilesPerTrigger": 1, "streaming-max-files-per-micro-batch": 1}
    life.add(3)
    life.pass_on()
    return life.bootstrap("batch-0")


def rows_were_deleted(life: Life) -> str | None:
    life.options = {"skipChangeCommits": "true", "startingVersion": "0"}
    life.add(2)
    assert isinstance(life.table, Delta)
    life.table.delete("n < 5")
    life.add()
    life.pass_on()
    life.add()
    return life.bootstrap()


def which_rows_is_unknown(life: Life) -> str | None:
    life.options = {"skipChangeCommits": "true"}
    life.add()
    life.pass_on()
    return life.count(refused=True)


def forgotten(life: Life) -> str | None:
    """What comes next is still there."""
    life.add(2)
    life.pass_on()
    life.table.forget()
    return life.count(refused=True)


def began_empty(life: Life) -> str | None:
    """Spark records that it begins with the first snapshot, and not with which."""
    life.pass_on()
    life.add(2)
    life.pass_on()
    life.add()
    refused = life.bootstrap()
    life.add()
    return refused or life.count()


def began_empty_and_forgotten(life: Life) -> str | None:
    life.pass_on()
    return forgotten(life)


OF_ANY = {"counted": counted, "within a version": within_a_version, "forgotten": forgotten}
SCENARIOS = {
    "delta": {**OF_ANY, "rows were deleted": rows_were_deleted, "which rows is unknown": which_rows_is_unknown},
    "iceberg": {**OF_ANY, "began empty": began_empty, "began empty and forgotten": began_empty_and_forgotten},
}


def main(folder: Path, jars: str, table: str) -> None:
    """Play the scenarios of a table format."""
    of_format = {**DELTA, "spark.databricks.delta.retentionDurationCheck.enabled": "false"}
    if table == "iceberg":
        of_format = {**TABLES, "spark.sql.catalog.lake.warehouse": f"{folder}/lake"}
    spark = SparkSession.builder.master("local[2]").config(map={**SETTINGS, **of_format, "spark.jars": jars})
    session = spark.getOrCreate()
    for scenario, play in SCENARIOS[table].items():
        life = Life(session, folder / scenario, Delta if table == "delta" else Iceberg)
        refused = play(life)
        tell({"scenario": scenario, "refused": refused, "counts": life.counts})
    session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
