"""Counts clicks by page in real-time mode, from a topic into a topic: `python real_time_program.py FOLDER SERVERS`."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import run_stream
from dagster_ckpt.config.rocksdb import ROCKSDB
from dagster_ckpt.config.state_backend import PROVIDER_CLASS

STREAM = "clicks"


def main(folder: Path, servers: str) -> None:
    """Run until the process is killed."""

    def counts(spark: SparkSession) -> DataStreamWriter:
        source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
        clicks = source.option("subscribe", "clicks").option("startingOffsets", "earliest").load()
        counted = clicks.selectExpr("cast(key as string) key").groupBy("key").count()
        sink = counted.selectExpr("key", "cast(count as string) value").writeStream.format("kafka")
        sink = sink.option("kafka.bootstrap.servers", servers).option("topic", "counts")
        return sink.outputMode("update").trigger(realTime="5 seconds")

    session = SparkSession.builder.master("local[4]").config("spark.sql.shuffle.partitions", "1")
    session = session.config("spark.sql.streaming.stateStore.checkpointFormatVersion", "2")
    run_stream(
        STREAM,
        counts,
        catalog=f"sqlite:///{folder}/catalog.db",
        storage=f"{folder}/snapshots",
        live_root=f"{folder}/live",
        spark=session.config(PROVIDER_CLASS, ROCKSDB).getOrCreate(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
