"""A driver for spark-submit: drops the numbers that it has seen, and writes the others into a topic, exactly once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, run_stream
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.flink import Semantic, kafka_delivery
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.stream.start_from import StartFrom

STREAM = "numbers"
# A file has the second half of the one before.
ROWS, NEW_ROWS = 40, 20


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        folder: Its folder, with the input.
        servers: The broker.
        topic: The topic.
        die_at: Which process dies at which call of the Kafka client on an executor; see `mortal_workers`.
        state_partitions: Rewrite the state to this number of partitions before the query starts.
        bounded: Whether it ends with its input.
    """

    folder: str
    servers: str
    topic: str
    die_at: str = ""
    state_partitions: int | None = None
    bounded: bool = True

    @property
    def catalog(self) -> str:
        return f"sqlite:///{self.folder}/catalog.db"

    @property
    def snapshots(self) -> str:
        return f"file://{self.folder}/snapshots"

    @property
    def live_root(self) -> str:
        return f"file://{self.folder}/live"


def write_input(folder: Path, first: int, beyond: int) -> None:
    """Write files of numbers."""
    folder.mkdir(exist_ok=True)
    for file in range(first, beyond):
        numbers = range(file * NEW_ROWS, file * NEW_ROWS + ROWS)
        (folder / f".{file:03}").write_text("".join(f"{number}\n" for number in numbers))
        (folder / f".{file:03}").rename(folder / f"{file:03}.txt")


def once(files: int) -> dict[str, int]:
    """What an uninterrupted run writes: each number once."""
    return {str(number): 1 for number in range(NEW_ROWS * (files - 1) + ROWS)}


def described(spark: SparkSession, run: Run) -> DataStreamWriter:
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(f"{run.folder}/input")
    numbers = lines.dropDuplicates(["value"]).selectExpr("value as key", "value")
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id=run.topic, writers=2)
    writer = numbers.writeStream.format("kafka").options(**delivery.writer_options)
    writer = writer.option("kafka.bootstrap.servers", run.servers).option("topic", run.topic)
    return writer.trigger(availableNow=True) if run.bounded else writer


def main(run: Run) -> None:
    """Copy what there is."""
    builder = SparkSession.builder.config("spark.executorEnv.MORTAL_GROUP", str(os.getpid()))
    builder = builder.config("spark.executorEnv.DIE_AT", run.die_at)
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    run_stream(
        STREAM,
        lambda spark: described(spark, run),
        catalog=run.catalog,
        # Nothing is small enough to be stored in the metadata.
        storage=FileSystemCheckpointStorage(run.snapshots, 0),
        live_root=run.live_root,
        checkpointing=CheckpointConfig(interval=100, min_pause=0),
        restart_strategy=RestartStrategies.no_restart(),
        spark=spark,
        start_from=StartFrom(state_partitions=run.state_partitions),
        executor_copy_bytes=0,
    )


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
