"""A program whose query answers each record within milliseconds: Spark's real-time mode, from a topic to a topic."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, RestartStrategies, run_stream
from tests.support.small_spark import SETTINGS

STREAM = "clicks"
# The shortest that Spark allows. Offsets and commits are written at its end.
BATCH = "5 seconds"


def topics_of(keeps: str) -> tuple[str, str]:
    """What it reads, and what it writes."""
    return f"clicks-{keeps}", f"counts-{keeps}"


def in_real_time(writer: DataStreamWriter) -> DataStreamWriter:
    """PySpark 4.1 has no name for the trigger; its JVM has."""
    try:
        return writer.trigger(realTime=BATCH)
    except TypeError:
        trigger = writer._spark._jvm.org.apache.spark.sql.streaming.Trigger
        writer._jwrite = writer._jwrite.trigger(trigger.RealTime(BATCH))
        return writer


def main(folder: Path, servers: str, keeps: str) -> None:
    """Run it, with "state" or "nothing", until the process is killed."""
    clicked, counted_in = topics_of(keeps)

    def query(spark: SparkSession) -> DataStreamWriter:
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
        clicks = reader.option("subscribe", clicked).option("startingOffsets", "earliest").load().select("value")
        counted = clicks.groupBy("value").count().selectExpr("value AS key", "CAST(count AS string) AS value")
        rows = counted if keeps == "state" else clicks.selectExpr("value AS key", "value")
        writer = rows.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", counted_in)
        return in_real_time(writer.outputMode("update"))

    # Every task of a batch runs during all of it, so each needs a slot.
    spark = SparkSession.builder.master("local[6]").config(map=SETTINGS).getOrCreate()
    run_stream(
        STREAM,
        query,
        catalog=f"sqlite:///{folder}/catalog.db",
        storage=f"file://{folder}/snapshots",
        live_root=f"{folder}/live",
        spark=spark,
        restart_strategy=RestartStrategies.no_restart(),
        checkpointing=CheckpointConfig(interval=2_000, cleanup="RETAIN_ON_CANCELLATION"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
