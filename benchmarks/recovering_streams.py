"""What the `dagster dev` of section `recovery` loads: two streams that count by key, one with a spare process."""

from __future__ import annotations

from typing import Any

import dagster as dg

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from examples.flights.workspace import Workspace

PLAIN, WITH_STANDBY = "plain", "with_standby"
KEYS = 1_000
SPARK = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


def counting(name: str, *, standby: bool) -> StreamingAsset:
    """A stream with state in RocksDB and a batch each half second."""

    @streaming_asset(
        name=name,
        checkpointing=CheckpointConfig(interval=5_000),
        restart_strategy=RestartStrategies.fixed_delay_restart(1_000_000, 0),
        standby=standby,
    )
    def counts(context: Any, pyspark: SparkSessionResource) -> Any:  # noqa: ARG001
        rows = pyspark.spark_session.readStream.format("rate").option("rowsPerSecond", 1_000).load()
        counted = rows.selectExpr(f"value % {KEYS} AS key").groupBy("key").count()
        return counted.writeStream.format("noop").outputMode("update").trigger(processingTime="500 milliseconds")

    return counts


_workspace = Workspace.from_environment()

defs = dg.Definitions.merge(
    stream_definitions(counting(PLAIN, standby=False), counting(WITH_STANDBY, standby=True)),
    dg.Definitions(
        resources={
            "pyspark": SparkSessionResource(spark_config=SPARK),
            "checkpoint_storage": CheckpointStorageResource(path=_workspace.checkpoints.as_uri()),
            "state_backend": StateBackendResource(live_directory=str(_workspace.live)),
            "checkpoint_catalog": CheckpointCatalogResource(url=_workspace.catalog_url),
        },
    ),
)
