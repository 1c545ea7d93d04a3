"""The program of a driver, as a user writes one: it counts sales by shop and never ends by itself."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, RestartStrategies, run_stream

CHECKPOINTING = CheckpointConfig(interval=500, cleanup="RETAIN_ON_CANCELLATION")
RESTART = RestartStrategies.fixed_delay_restart(3, 0)
STREAM_ID = "sales"


def counts(spark: SparkSession, folder: Path) -> DataStreamWriter:
    """The windows that are over, to files."""
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    sales = spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1).json(f"{folder}/landing")
    windows = sales.withWatermark("at", "10 minutes").groupBy("shop", "at").count()
    return windows.writeStream.format("parquet").option("path", f"{folder}/output")


def main(folder: Path) -> None:
    """Run the stream below a folder."""
    end = run_stream(
        STREAM_ID,
        lambda spark: counts(spark, folder),
        catalog=f"sqlite:///{folder}/catalog.db",
        storage=f"file://{folder}/checkpoints",
        live_root=f"{folder}/live",
        checkpointing=CHECKPOINTING,
        restart_strategy=RESTART,
    )
    print(f"ended: {end.end.value}")


if __name__ == "__main__":
    main(Path(os.environ["SALES_FOLDER"]))
