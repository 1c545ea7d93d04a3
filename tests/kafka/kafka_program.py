"""A program that counts the sales in a topic by shop, and writes down each new count."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.errors import InputGoneError
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

STREAM = "sales"
TOPIC = "sales"
SHOPS = 3
BATCH = 10


def produce(spark: SparkSession, servers: str, first: int, beyond: int) -> None:
    """Write sales with the numbers from `first` to before `beyond`."""
    sales = spark.range(first, beyond).selectExpr(f"cast(id % {SHOPS} as string) key", "cast(id as string) value")
    sales.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", TOPIC).save()


def produce_when_asked(spark: SparkSession, servers: str, asked: Path) -> None:
    """Write more sales once a file says which."""
    while not asked.exists():
        time.sleep(0.05)
    first, beyond = json.loads(asked.read_text())
    produce(spark, servers, first, beyond)


def debug(env: StreamExecutionEnvironment, writer: DataStreamWriter) -> None:
    """Print what the newest batch read and gave, or why it cannot be replayed."""
    with env.client() as client:
        batch = LiveDirectory(client.catalog.streams.get(STREAM).live_directory or "").positions().commit or 0
        try:
            with client.debug_batch(STREAM, batch, lambda _spark: writer, spark=env.spark) as found:
                print(f"read {found.input.count()} records, gave {found.output.count()} counts, {found.notes}")
        except InputGoneError as error:
            print(error)


def main(folder: Path, servers: str, first: int, beyond: int, kind: str) -> None:
    """Write sales, and count all there are; unbounded, until the process is killed."""
    env = StreamExecutionEnvironment.get_execution_environment(folder=folder / "ckpt")
    env.set_parallelism(2).set_default_local_parallelism(2)
    env.spark.sparkContext.setLogLevel("ERROR")
    produce(env.spark, servers, first, beyond)
    threading.Thread(target=produce_when_asked, args=(env.spark, servers, folder / "more"), daemon=True).start()

    def note(batch: DataFrame, batch_id: int) -> None:
        counts = {row["key"]: row["count"] for row in batch.collect()}
        with (folder / "counts.jsonl").open("a") as ledger:
            print(json.dumps({"batch": batch_id, "counts": counts}), file=ledger)

    stream = env.spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    stream = stream.option("subscribe", TOPIC).option("startingOffsets", "earliest")
    sales = stream.option("maxOffsetsPerTrigger", BATCH).load().selectExpr("cast(key as string) key")
    writer = sales.groupBy("key").count().writeStream.foreachBatch(note).outputMode("update")
    if kind == "debugged":
        debug(env, writer)
        return
    env.add_writer(STREAM, writer if kind == "unbounded" else writer.trigger(availableNow=True))
    env.execute("kafka")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
