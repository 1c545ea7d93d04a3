"""An archive of the classes that a query of section `recovery` loads: `python -m benchmarks.class_archive <path>`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

KEYS = 1_000
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
SPARK: dict[str, Any] = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


def counted(spark: SparkSession) -> DataStreamWriter:
    """A query with state, and a batch each half second."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", 1_000).load()
    found = rows.selectExpr(f"value % {KEYS} AS key").groupBy("key").count()
    return found.writeStream.format("noop").outputMode("update").trigger(processingTime="500 milliseconds")


def write_archive(path: Path) -> None:
    """In a process of its own: Java writes it when it ends."""
    subprocess.run([sys.executable, "-m", __spec__.name, str(path)], check=True, capture_output=True)


def uses_archive(path: Path) -> dict[str, Any]:
    """Settings of a session whose Java reads the classes from there."""
    return SPARK | {JAVA_OPTIONS: f"-XX:SharedArchiveFile={path} -Xlog:cds=off -Xlog:cds+dynamic=off"}


def _main(path: str) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    settings = SPARK | {
        JAVA_OPTIONS: f"-XX:ArchiveClassesAtExit={path}",
        "spark.sql.streaming.stateStore.providerClass": provider,
    }
    spark = SparkSession.builder.config(map=settings).getOrCreate()
    query = counted(spark).option("checkpointLocation", f"{path}.checkpoint").start()
    while (done := query.lastProgress) is None or done["batchId"] < 2:
        query.awaitTermination(1)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1])
