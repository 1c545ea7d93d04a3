"""Lets a JVM load and compile what the start of a query needs, before there is a query to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.spark.query.session import is_classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONGEST_S = 60


def warm_up(spark: SparkSession) -> None:
    """Run one batch of a small query with state, in a session and a temporary directory of its own."""
    if not is_classic_session(spark):
        return
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    provider = "spark.sql.streaming.stateStore.providerClass"
    session.conf.set(provider, str(spark.conf.get(provider)))
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", "1").load()
    counted = rows.groupBy("value").count()
    writer = counted.writeStream.queryName("dagster_ckpt_warm_up").format("noop").outputMode("update")
    query = writer.trigger(once=True).start()
    try:
        query.awaitTermination(_LONGEST_S)
    finally:
        query.stop()
