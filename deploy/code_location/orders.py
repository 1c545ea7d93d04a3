"""A stream as a driver of its own, started by systemd, by the Spark operator, or by hand."""

import os

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from code_location import definitions
from code_location.definitions import orders_by_shop, spark_settings
from dagster_ckpt import CheckpointConfig, run_stream


def orders(spark: SparkSession) -> DataStreamWriter:
    """Counts the orders of each shop to the console."""
    return orders_by_shop(definitions.orders(spark)).writeStream.outputMode("update").format("console")


def main() -> None:
    """Run until somebody stops it."""
    builder = SparkSession.builder.appName("orders")
    for name, value in spark_settings().items():
        # On a cluster, spark-submit has chosen the master.
        if name != "spark.master" or "SPARK_MASTER" in os.environ:
            builder = builder.config(name, value)
    run_stream(
        "orders",
        orders,
        catalog=os.environ["CATALOG_URL"],
        storage=os.environ["CHECKPOINT_STORAGE"],
        live_root=os.environ["LIVE_DIRECTORY"],
        checkpointing=CheckpointConfig(interval=60_000),
        spark=builder.getOrCreate(),
    )


if __name__ == "__main__":
    main()
