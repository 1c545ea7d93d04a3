"""A stream into a real topic, exactly once, is handed over while files come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_broker import Kafka
from kafka_rows import committed_rows, new_topic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.flink import Semantic, kafka_delivery
from tests.support.handed_over import HandOver, each_row_once, hand_over_while_files_come
from tests.support.small_spark import small_spark

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.mark.thorough(sample="tests/client/test_hand_over_with_spark.py")
def test_a_topic_has_each_row_once_of_old_code_up_to_the_hand_over_and_of_new_code_after_it(
    kafka: Kafka, spark: SparkSession, tmp_path: Path
) -> None:
    topic = new_topic(kafka.servers)
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id=topic, writers=2)

    def write(rows: DataFrame, _output: str) -> DataStreamWriter:
        values = rows.selectExpr("CAST(a AS STRING) AS key", "concat_ws(' ', a, code) AS value")
        into = values.writeStream.format("kafka").options(**delivery.writer_options)
        return into.option("kafka.bootstrap.servers", kafka.servers).option("topic", topic)

    of = HandOver(spark, tmp_path, write)
    hand_over_while_files_come(of)

    read = committed_rows(kafka.servers, topic)
    rows = Counter({(int(value.split()[0]), int(value.split()[1])): count for value, count in read.items()})
    assert each_row_once(of, rows) >= 2
    with of.small.client() as client:
        row = client.catalog.desired_states.find("small")
    assert row is not None
    assert row.preflight is not None
    assert "its output is not compared" in row.preflight.reason
    assert "the same state" in row.preflight.reason
