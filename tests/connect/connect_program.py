"""A stream of a Spark Connect client, which prints JSON: `connect_program.py FOLDER REMOTE TRIGGER START_FROM OPTIONS`.

The input is in FOLDER/in, one file for each hour. TRIGGER is `all` (process all input, then end) or `on` (run on);
OPTIONS are those of the start, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, StartFrom, run_stream

STREAM = "sales"


def hourly(sales: DataFrame) -> DataFrame:
    """What the stream computes."""
    counted = sales.withWatermark("at", "10 minutes").groupBy(F.window("at", "30 minutes"), "shop").count()
    return counted.select(F.col("window.start").cast("string").alias("start"), "shop", "count")


def main(folder: Path, remote: str, trigger: str, start_from: str, options: str) -> None:
    """Run the stream, and print what it began with and what is in its output."""
    spark = SparkSession.builder.remote(remote).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    places = {
        "catalog": f"sqlite:///{folder}/catalog.db",
        "storage": str(folder / "snapshots"),
        "live_root": str(folder / "live"),
    }

    def describe(session: SparkSession) -> DataStreamWriter:
        sales = session.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1)
        writer = (
            hourly(sales.json(str(folder / "in"))).writeStream.format("parquet").option("path", str(folder / "out"))
        )
        return (
            writer.trigger(availableNow=True) if trigger == "all" else writer.trigger(processingTime="200 milliseconds")
        )

    run_stream(
        STREAM,
        describe,
        spark=spark,
        start_from=StartFrom(start_from, **json.loads(options)),
        checkpointing=CheckpointConfig(interval=500),
        **places,
    )
    with Client(**places) as client:
        recovery = client.describe_stream(STREAM).executions[0].recovery or {}
    rows = sorted(map(tuple, spark.read.parquet(str(folder / "out")).collect()))
    print(json.dumps({"recovery": recovery["kind"], "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
