"""Queries into a Kafka topic, by Spark's own sink and by the transactional one, in turn.

`python -m benchmarks.kafka_sinks FOLDER ROUNDS`; the result is one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.sinks.kafka.writer import StreamOwner, with_transactions
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.values.modes import Semantic, kafka_delivery
from tests.kafka.kafka_broker import running_broker

ROWS_OF_A_BATCH = 10_000
PARTITIONS = 2
WARM_UP_BATCHES, BATCHES = 6, 20
BYTES_OF_A_VALUE = 100


@dataclass(frozen=True)
class Sink:
    """One way to write.

    Attributes:
        name: Its name on the page.
        semantic: The guarantee.
        writers: Transactions of a batch.
    """

    name: str
    semantic: Semantic
    writers: int = 1


SINKS = (
    Sink("Spark's sink, at least once", Semantic.AT_LEAST_ONCE),
    Sink("exactly once, 1 writer", Semantic.EXACTLY_ONCE, 1),
    Sink("exactly once, 2 writers", Semantic.EXACTLY_ONCE, 2),
)


@dataclass(frozen=True)
class Window:
    """Some batches of a query.

    Attributes:
        sink: Name of the sink.
        rows: Rows written.
        trigger_s: Seconds from the start of each trigger to its end.
    """

    sink: str
    rows: int
    trigger_s: float


def main(folder: Path, rounds: int) -> None:
    """Measure every sink in each round."""
    with running_broker(folder) as broker, _session(broker.jars) as spark:
        windows = [
            _window(spark, folder / f"{number}-{place}", broker.servers, sink)
            for number in range(rounds)
            for place, sink in enumerate(SINKS)
        ]
    print(json.dumps([asdict(window) for window in windows]))


@contextmanager
def _session(jars: tuple[Path, ...]) -> Iterator[SparkSession]:
    # The executors' Python needs pyarrow and confluent-kafka, as this one has them.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{PARTITIONS}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.jars", ",".join(map(str, jars))).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    yield spark
    spark.stop()


def _window(spark: SparkSession, folder: Path, servers: str, sink: Sink) -> Window:
    live = LiveDirectory(f"file://{folder}/live")
    writer = with_transactions(_described(spark, servers, sink), StreamOwner("bench", uuid.uuid4().hex), live)
    query = start_query(writer, f"bench{uuid.uuid4().hex}", live)
    reports: dict[int, tuple[int, int]] = {}
    while len(reports) < WARM_UP_BATCHES + BATCHES:
        query.wait(0.25)
        failure = query.exception()
        if failure is not None:
            raise RuntimeError(failure)
        reports |= {each.batch_id: (each.input_rows, each.duration_ms) for each in query.recent_progress()}
    query.stop()
    measured = [reports[batch] for batch in sorted(reports)][WARM_UP_BATCHES : WARM_UP_BATCHES + BATCHES]
    return Window(sink.name, sum(rows for rows, _ in measured), sum(took for _, took in measured) / 1000)


def _described(spark: SparkSession, servers: str, sink: Sink) -> DataStreamWriter:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_OF_A_BATCH)
    rows = numbers.option("numPartitions", PARTITIONS).load()
    rows = rows.selectExpr("cast(value as string) key", f"rpad(cast(value as string), {BYTES_OF_A_VALUE}, 'x') value")
    delivery = kafka_delivery(sink.semantic, writers=sink.writers)
    writer = rows.writeStream.format("kafka").options(**delivery.writer_options)
    return writer.option("kafka.bootstrap.servers", servers).option("topic", f"bench-{uuid.uuid4().hex}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
