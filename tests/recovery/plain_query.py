"""Plain PySpark, as people run it before they know this package, which this program cannot import.

Run as a script; `QUERIES` is a JSON list of folders, each with a `landing` folder, and the `checkpoint` and `output` of
its query. It ends when all its queries have failed, or when the file `STOP` appears and all input is read. It prints
the error of each query, or null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter


def writer(spark: SparkSession, landing: str, output: str) -> DataStreamWriter:
    """Visits in windows of half an hour."""
    visits = (
        spark.readStream.schema("at timestamp, shop long")
        .option("maxFilesPerTrigger", 1)
        .json(landing)
        .withWatermark("at", "10 minutes")
        .groupBy(F.window("at", "30 minutes"), "shop")
        .count()
    )
    return visits.select("window.start", "shop", "count").writeStream.format("parquet").option("path", output)


def start(spark: SparkSession, folder: dict[str, str]) -> StreamingQuery:
    query = writer(spark, folder["landing"], folder["output"])
    return query.option("checkpointLocation", folder["checkpoint"]).start()


def error_of(query: StreamingQuery) -> str | None:
    error = query.exception()
    return None if error is None else str(error)


def main() -> None:
    # Importing it, also by accident, is an error.
    sys.modules["dagster_ckpt"] = None  # type: ignore[assignment]
    settings = json.loads(os.environ["SETTINGS"])
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    queries = [start(spark, folder) for folder in json.loads(os.environ["QUERIES"])]
    stop = Path(os.environ["STOP"])
    while any(query.isActive for query in queries) and not stop.exists():
        time.sleep(0.1)
    for query in queries:
        if query.isActive:
            query.processAllAvailable()
            query.stop()
    sys.stdout.write(json.dumps([error_of(query) for query in queries]) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
