"""A program that counts the sales in a topic by shop, and writes down each new count."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.flink.environment import StreamExecutionEnvironment

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


def main(folder: Path, servers: str, first: int, beyond: int, *, bounded: bool) -> None:
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
    env.add_writer(STREAM, writer.trigger(availableNow=True) if bounded else writer)
    env.execute("kafka")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), bounded=sys.argv[5] != "unbounded")
