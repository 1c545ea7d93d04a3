"""Streams that read each other's topics, rewound to a savepoint set: see `table_graph_program`.

No stage after the first drops what it has seen, so that what is read twice is there twice. The last one writes a table.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.flink import Semantic, kafka_delivery
from tests.kafka.kafka_rows import new_topic
from tests.spark.table_graph_program import CHAIN, DIAMOND, Graph, Pipeline, play
from tests.support.small_spark import SETTINGS

BROKER = "TEST_KAFKA_SERVERS"
LAST = "totals"


class TopicPipeline(Pipeline):
    scenarios: ClassVar[tuple[str, ...]] = ("chain", "diamond", "twice", "lags", "diamond lags")
    only_as_a_new_query: ClassVar[bool] = True

    def __init__(self, spark: SparkSession, root: Path, graph: Graph = CHAIN) -> None:
        super().__init__(spark, root, graph)
        self.servers = os.environ[BROKER]
        self.topics = {stream: new_topic(self.servers) for stream in graph if stream != LAST}

    def query(self, spark: SparkSession, stream: str) -> DataStreamWriter:
        upstream = self.graph[stream]
        if not upstream:
            return super().query(spark, stream)
        # One source that reads two topics.
        return self.into(stream, self.table(spark, *upstream)).trigger(availableNow=True)

    def table(self, spark: SparkSession, *streams: str) -> DataFrame:
        topics = spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.servers)
        topics = topics.option("subscribe", ",".join(self.topics[each] for each in streams))
        topics = topics.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 4)
        return (
            topics.option("kafka.isolation.level", "read_committed")
            .load()
            .selectExpr("cast(cast(value as string) as long) a")
        )

    def into(self, stream: str, rows: DataFrame) -> DataStreamWriter:
        if stream == LAST:
            return rows.writeStream.format("parquet").option("path", str(self.root / stream))
        delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id=f"{stream}-{self.root.name}", writers=2)
        records = rows.selectExpr("cast(a as string) key", "cast(a as string) value").writeStream.format("kafka")
        records = records.options(**delivery.writer_options).option("kafka.bootstrap.servers", self.servers)
        return records.option("topic", self.topics[stream])

    def rows(self) -> dict[str, list[int]]:
        """Each row once for each way to the last stage."""
        ways = 2 if self.graph is DIAMOND else 1
        found = Counter(row.a for row in self.spark.read.parquet(str(self.root / LAST)).collect())
        return {LAST: sorted(value for value, count in found.items() for _ in range(count // ways + count % ways))}


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2]").config(map={**SETTINGS, "spark.jars": sys.argv[2]}).getOrCreate()
    play(session, Path(sys.argv[1]), TopicPipeline, sys.argv[3:])
