"""A program that copies numbered lines into a topic, exactly once, and is killed on the way.

A line of input is a row. `mortal_workers/sitecustomize.py` kills a Python worker, or the whole program, at one call of
the Kafka client.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.client.client import Client
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.flink import Semantic, kafka_delivery
from dagster_ckpt.flink.program import Deployment, StreamToRun, run_program
from dagster_ckpt.policies.restart import NoRestartStrategyConfiguration
from dagster_ckpt.runtime.start import start_stream_query
from dagster_ckpt.stream.start_from import StartFrom

STREAM = "copy"
ROWS = 40


@dataclass
class Run:
    """One run of the program.

    Attributes:
        folder: Its folder, with the input.
        servers: The broker.
        topic: The topic.
        writers: Number of writers.
        start_from: Where to start.
        new_query_id: Whether the topic may get rows again.
        source: A topic to read in place of the input's files.
        source_offsets: Where to continue there.
        jars: Spark's connector for Kafka.
        distinct: Whether a line that was there before is dropped, for which the query keeps state.
        stream: Its id.
        output: A folder to write Parquet to, in place of the topic.
    """

    folder: str
    servers: str
    topic: str
    writers: int = 3
    start_from: str = "latest"
    new_query_id: bool = False
    source: str = ""
    source_offsets: str = ""
    jars: str = ""
    distinct: bool = False
    stream: str = STREAM
    output: str = ""

    @property
    def catalog(self) -> str:
        return f"sqlite:///{self.folder}/catalog.db"

    @property
    def snapshots(self) -> str:
        return f"file://{self.folder}/snapshots"

    @property
    def live_root(self) -> str:
        return f"file://{self.folder}/live"

    def client(self) -> Client:
        return Client(self.catalog, storage=self.snapshots, live_root=self.live_root)


def write_input(folder: Path, first: int, beyond: int) -> None:
    """Write files of ROWS numbered lines."""
    folder.mkdir(exist_ok=True)
    for file in range(first, beyond):
        lines = (f"{number}\n" for number in range(file * ROWS, (file + 1) * ROWS))
        (folder / f".{file:03}").write_text("".join(lines))
        (folder / f".{file:03}").rename(folder / f"{file:03}.txt")


def described(spark: SparkSession, run: Run) -> DataStreamWriter:
    if run.source:
        topic = spark.readStream.format("kafka").option("kafka.bootstrap.servers", run.servers)
        topic = topic.option("subscribe", run.source).option("startingOffsets", "earliest")
        topic = topic.option("kafka.isolation.level", "read_committed")
        # A record that is no number ends the query.
        lines = (
            topic.load()
            .selectExpr("cast(value as string) value")
            .selectExpr("if(value rlike '[0-9]+', value, raise_error('poison')) value")
        )
    else:
        lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(f"{run.folder}/input")
    lines = lines.dropDuplicates(["value"]) if run.distinct else lines
    if run.output:
        return lines.writeStream.format("parquet").option("path", run.output).trigger(availableNow=True)
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id=run.topic, writers=run.writers)
    writer = lines.selectExpr("value as key", "value").writeStream.format("kafka").options(**delivery.writer_options)
    writer = writer.option("kafka.bootstrap.servers", run.servers).option("topic", run.topic)
    return writer.trigger(availableNow=True)


def main(run: Run) -> None:
    """Copy all there is, and end."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    spark = (builder.config("spark.jars", run.jars) if run.jars else builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    deployment = Deployment(run.live_root, run.catalog, FileSystemCheckpointStorage(run.snapshots))
    with closing(deployment.open_catalog()) as catalog:
        stream = deployment.stream(
            run.stream,
            catalog=catalog,
            query_name=run.stream,
            options=CheckpointConfig().options,
            restart=NoRestartStrategyConfiguration(),
            backend=None,
            savepoint_url=None,
            code_version=None,
        )
        to_run = StreamToRun(
            stream,
            lambda live: start_stream_query(stream, described(spark, run), live),
            lambda: described(spark, run),
            start_from=StartFrom(run.start_from, new_query_id=run.new_query_id, source_offsets=run.source_offsets),
        )
        run_program(run.stream, [to_run], spark=spark, run_id="run", signals=())


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
