"""What the code location of `deploy/` loads: a topic counted into another topic and kept as Parquet, each exactly once.

Every place comes from the environment, so that the same image runs in compose, on Kubernetes and on one machine.
"""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import (
    CheckpointCatalogResource,
    CheckpointSettings,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
    stream_definitions,
    streaming_asset,
)
from dagster_ckpt.flink import Semantic, kafka_delivery

SERVERS = os.environ.get("KAFKA_SERVERS", "kafka:9092")
ORDERS_TABLE = os.environ.get("ORDERS_TABLE", "/var/lib/streams/orders")
CHECKPOINTING = CheckpointSettings(interval=int(os.environ.get("CHECKPOINT_INTERVAL_MS", "60000")))


def orders(spark: SparkSession) -> DataFrame:
    """The orders: a topic with the shop as key."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", SERVERS)
    return source.option("subscribe", "orders").option("startingOffsets", "earliest").load()


def orders_by_shop(orders: DataFrame) -> DataFrame:
    """The newest count of each shop, as a record of its key."""
    counts = orders.selectExpr("cast(key as string) key").groupBy("key").count()
    return counts.selectExpr("key", "cast(count as string) value")


@streaming_asset(checkpointing=CHECKPOINTING)
def shop_counts(context: dg.AssetExecutionContext, pyspark: SparkSessionResource) -> DataStreamWriter:
    """Counts the orders of each shop; consumers that read committed records see each count once."""
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id="deploy")
    return (
        orders_by_shop(orders(pyspark.spark_session))
        .writeStream.outputMode("update")
        .format("kafka")
        .options(**delivery.writer_options)
        .option("kafka.bootstrap.servers", SERVERS)
        .option("topic", "shop-counts")
        .trigger(processingTime="5 seconds")
    )


@streaming_asset(checkpointing=CHECKPOINTING)
def orders_table(context: dg.AssetExecutionContext, pyspark: SparkSessionResource) -> DataStreamWriter:
    """Keeps every order as Parquet."""
    rows = orders(pyspark.spark_session).selectExpr("cast(key as string) shop", "cast(value as string) sold")
    writer = rows.writeStream.format("parquet").option("path", ORDERS_TABLE)
    return writer.trigger(processingTime="5 seconds")


def spark_settings() -> dict[str, str]:
    """Settings of the Spark session: the cluster, the jars of the image, and the object store."""
    jars = sorted(map(str, Path(os.environ.get("SPARK_JARS_FOLDER", "/nonexistent")).glob("*.jar")))
    settings = {
        "spark.master": os.environ.get("SPARK_MASTER", "local[2]"),
        "spark.hadoop.fs.s3a.path.style.access": "true",
    }
    if jars:
        settings["spark.jars"] = ",".join(jars)
    if "AWS_ENDPOINT_URL" in os.environ:
        settings["spark.hadoop.fs.s3a.endpoint"] = os.environ["AWS_ENDPOINT_URL"]
        settings["spark.hadoop.fs.s3a.endpoint.region"] = os.environ.get("AWS_REGION", "us-east-1")
    return settings


defs = dg.Definitions.merge(
    stream_definitions(shop_counts, orders_table),
    dg.Definitions(
        resources={
            "pyspark": SparkSessionResource(
                spark_config=spark_settings(), class_archive=os.environ.get("SPARK_CLASS_ARCHIVE")
            ),
            "checkpoint_catalog": CheckpointCatalogResource(url=dg.EnvVar("CATALOG_URL")),
            "checkpoint_storage": CheckpointStorageResource(path=dg.EnvVar("CHECKPOINT_STORAGE")),
            "state_backend": StateBackendResource(live_directory=dg.EnvVar("LIVE_DIRECTORY")),
        }
    ),
)
