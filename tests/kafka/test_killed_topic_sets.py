"""Running queries with topics between them, and the client that takes their sets and restarts from them, all killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import pytest
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.flink import Semantic, kafka_delivery
from tests.kafka.kafka_broker import Kafka
from tests.kafka.kafka_rows import new_topic
from tests.spark.test_killed_sets_with_spark import STREAMS, Graph, Stage, live_and_kill, main

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.thorough(sample="tests/client/test_killed_savepoint_sets.py"),
    pytest.mark.timeout(2400),
]
LAST = "totals"
SERVERS, TOPICS = "TEST_KAFKA_SERVERS", "TEST_KAFKA_TOPICS"


class TopicGraph(Graph):
    program: ClassVar[str] = "tests.kafka.test_killed_topic_sets"


class TopicStage(Stage):
    outputs: ClassVar[Collection[str]] = (LAST,)

    def query(self, stream: str) -> DataStreamWriter:
        servers, topics = os.environ[SERVERS], dict(zip(STREAMS, os.environ[TOPICS].split(","), strict=False))
        if stream == "orders":
            rows = self.spark.readStream.schema("a long").option("maxFilesPerTrigger", 1).json(str(self.root / "in"))
            # The files overlap. Later stages drop nothing: what they read twice is there twice.
            rows = rows.dropDuplicates(["a"])
        else:
            records = self.spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
            records = records.option("subscribe", topics[STREAMS[stream]]).option("startingOffsets", "earliest")
            records = records.option("kafka.isolation.level", "read_committed").option("maxOffsetsPerTrigger", 4)
            rows = records.load().selectExpr("cast(cast(value as string) as long) a")
        if stream == LAST:
            written = rows.writeStream.format("parquet").option("path", self.place(stream))
        else:
            delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id=f"{stream}-killed", writers=2)
            written = rows.selectExpr("cast(a as string) key", "cast(a as string) value").writeStream.format("kafka")
            written = written.options(**delivery.writer_options).option("kafka.bootstrap.servers", servers)
            written = written.option("topic", topics[stream])
        return written.trigger(processingTime="300 milliseconds")


def test_no_kill_leaves_streams_that_do_not_belong_together(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jars").mkdir()
    for jar in kafka.jars:
        (tmp_path / "jars" / jar.name).symlink_to(jar)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv(SERVERS, kafka.servers)
    monkeypatch.setenv(TOPICS, f"{new_topic(kafka.servers)},{new_topic(kafka.servers)}")
    live_and_kill(TopicGraph(tmp_path, "parquet"), TopicStage.outputs)


if __name__ == "__main__":
    main(TopicStage)
