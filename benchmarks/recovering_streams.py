"""What the `dagster dev` of section `recovery` loads: a stream as it is, and with what changes its recovery."""

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
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.policies.restart import RestartStrategies
from examples.flights.workspace import Workspace

KEYS = 1_000
SPARK = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
# As many cores, one for each.
EXECUTORS = 2
ON_CLUSTER = {"spark.master": f"local-cluster[{EXECUTORS},1,1024]", "spark.executor.memory": "1g"}
PLAIN, WITH_STANDBY, WITH_ARCHIVE, ON_EXECUTORS = "plain", "with_standby", "with_archive", "on_executors"
# Below the root of the workspace.
ARCHIVE = "classes.jsa"
_archived = StreamTranslator("with", {"pyspark": "archived_pyspark"})
_executed = StreamTranslator("on", {"pyspark": "executed_pyspark"})


def _options(*, standby: bool = False) -> dict[str, Any]:
    return {
        "checkpointing": CheckpointConfig(interval=5_000),
        "restart_strategy": RestartStrategies.fixed_delay_restart(1_000_000, 0),
        "standby": standby,
    }


def counted(pyspark: SparkSessionResource) -> Any:
    """The query."""
    rows = pyspark.spark_session.readStream.format("rate").option("rowsPerSecond", 1_000).load()
    found = rows.selectExpr(f"value % {KEYS} AS key").groupBy("key").count()
    return found.writeStream.format("noop").outputMode("update").trigger(processingTime="500 milliseconds")


def counting(name: str, *, standby: bool) -> StreamingAsset:
    """A stream with state in RocksDB and a batch each half second."""

    @streaming_asset(name=name, **_options(standby=standby))
    def counts(context: Any, pyspark: SparkSessionResource) -> Any:  # noqa: ARG001
        return counted(pyspark)

    return counts


@streaming_asset(name="archive", stream_id=WITH_ARCHIVE, translator=_archived, **_options())
def archive(context: Any, archived_pyspark: SparkSessionResource) -> Any:  # noqa: ARG001
    """The same, and Java reads its classes from an archive."""
    return counted(archived_pyspark)


@streaming_asset(name="executors", stream_id=ON_EXECUTORS, translator=_executed, **_options())
def executors(context: Any, executed_pyspark: SparkSessionResource) -> Any:  # noqa: ARG001
    """The same, on executors."""
    return counted(executed_pyspark)


_workspace = Workspace.from_environment()

defs = dg.Definitions.merge(
    stream_definitions(counting(PLAIN, standby=False), counting(WITH_STANDBY, standby=True)),
    stream_definitions(archive),
    stream_definitions(executors),
    dg.Definitions(
        resources={
            "pyspark": SparkSessionResource(spark_config=SPARK),
            "archived_pyspark": SparkSessionResource(spark_config=SPARK, class_archive=str(_workspace.root / ARCHIVE)),
            "executed_pyspark": SparkSessionResource(spark_config=SPARK | ON_CLUSTER),
            "checkpoint_storage": CheckpointStorageResource(path=_workspace.checkpoints.as_uri()),
            "state_backend": StateBackendResource(live_directory=str(_workspace.live)),
            "checkpoint_catalog": CheckpointCatalogResource(url=_workspace.catalog_url),
        },
    ),
)
