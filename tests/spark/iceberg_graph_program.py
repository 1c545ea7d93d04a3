"""Streams that read each other's Iceberg tables, rewound to a savepoint set: see `table_graph_program`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.spark.table_graph_program import CHAIN, Graph, Pipeline, play
from tests.support.small_spark import SETTINGS


class IcebergPipeline(Pipeline):
    scenarios: ClassVar[tuple[str, ...]] = ("chain", "diamond", "twice", "lags", "diamond lags", "follows")

    def __init__(self, spark: SparkSession, root: Path, graph: Graph = CHAIN) -> None:
        super().__init__(spark, root, graph)
        spark.sql("CREATE NAMESPACE IF NOT EXISTS books.db")
        for stream in graph:
            spark.sql(f"CREATE TABLE {self._name(stream)} (a long) USING iceberg")

    def table(self, spark: SparkSession, stream: str) -> DataFrame:
        reader = spark.readStream.format("iceberg").option("streaming-max-files-per-micro-batch", 1)
        return reader.load(self._name(stream))

    def into(self, stream: str, rows: DataFrame) -> DataStreamWriter:
        return rows.writeStream.format("iceberg").option("path", self._name(stream))

    def rows_in(self, stream: str) -> DataFrame:
        return self.spark.read.format("iceberg").load(self._name(stream))

    def _name(self, stream: str) -> str:
        return f"books.db.{self.root.name}_{stream}"


def main(folder: Path, jars: str, only: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    catalog = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "jdbc",
        ".uri": f"jdbc:sqlite:{folder}/books.db",
        ".warehouse": f"{folder}/books",
        ".jdbc.schema-version": "V1",
    }
    settings = {**SETTINGS, "spark.jars": jars}
    settings |= {f"spark.sql.catalog.books{name}": value for name, value in catalog.items()}
    settings["spark.sql.extensions"] = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    play(session, folder, IcebergPipeline, only)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
