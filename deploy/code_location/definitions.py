"""What the code location of `deploy/` loads: one stream from Kafka to Kafka, exactly once, with its places.

Every place comes from the environment, so that the same image runs in compose, on Kubernetes and on one machine.
"""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame
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


def orders_by_shop(orders: DataFrame) -> DataFrame:
    """The newest count of each shop, as a record of its key."""
    counts = orders.selectExpr("cast(key as string) key").groupBy("key").count()
    return counts.selectExpr("key", "cast(count as string) value")


@streaming_asset(checkpointing=CheckpointSettings(interval=60_000))
def shop_counts(context: dg.AssetExecutionContext, pyspark: SparkSessionResource) -> DataStreamWriter:
    """Counts the orders of each shop; consumers that read committed records see each count once."""
    orders = (
        pyspark.spark_session.readStream.format("kafka")
        .option("kafka.bootstrap.servers", SERVERS)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
    )
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id="deploy")
    return (
        orders_by_shop(orders)
        .writeStream.outputMode("update")
        .format("kafka")
        .options(**delivery.writer_options)
        .option("kafka.bootstrap.servers", SERVERS)
        .option("topic", "shop-counts")
        .trigger(processingTime="5 seconds")
    )


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
    return settings


defs = dg.Definitions.merge(
    stream_definitions(shop_counts),
    dg.Definitions(
        resources={
            "pyspark": SparkSessionResource(spark_config=spark_settings()),
            "checkpoint_catalog": CheckpointCatalogResource(url=dg.EnvVar("CATALOG_URL")),
            "checkpoint_storage": CheckpointStorageResource(path=dg.EnvVar("CHECKPOINT_STORAGE")),
            "state_backend": StateBackendResource(live_directory=dg.EnvVar("LIVE_DIRECTORY")),
        }
    ),
)
