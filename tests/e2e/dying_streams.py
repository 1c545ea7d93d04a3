"""What the `dagster dev` of these tests loads: small streams with a real query each, alike but for their options."""

from __future__ import annotations

from pathlib import Path
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
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup
from examples.flights.workspace import Workspace
from tests.support.thorough import either

LOGGING = Path(__file__).resolve().parents[2] / "examples/flights/log4j2.properties"
SPARK = {
    "spark.master": "local[1]",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.extraJavaOptions": (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={LOGGING.as_uri()}"
    ),
}


_workspace = Workspace.from_environment()


def ticking(name: str, cleanup: ExternalizedCheckpointCleanup) -> StreamingAsset:
    """A stream that counts seconds."""

    @streaming_asset(
        name=name,
        checkpointing=CheckpointConfig(interval=1_000, min_pause=200, num_retained=2, cleanup=cleanup),
        restart_strategy=RestartStrategies.fixed_delay_restart(20, 0),
    )
    def ticks(context: Any, pyspark: SparkSessionResource) -> Any:
        seconds = pyspark.spark_session.readStream.format("rate").option("rowsPerSecond", 1).load()
        return seconds.writeStream.format("noop").trigger(processingTime="500 milliseconds")

    return ticks


def in_processes_of_their_own(stream: StreamingAsset) -> Any:
    """The stream's job with Dagster's default executor, which the asset's page uses: a process for the step."""
    return dg.define_asset_job(
        f"{stream.name}_multiprocess", selection=[stream.key], executor_def=dg.multiprocess_executor
    )


@streaming_asset(
    checkpointing=CheckpointConfig(
        interval=1_000,
        min_pause=200,
        num_retained=2,
        cleanup=ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION,
    ),
    restart_strategy=RestartStrategies.fixed_delay_restart(20, 0),
    standby=either(quick=False, thorough=True),
)
def often_killed(context: Any, pyspark: SparkSessionResource) -> Any:
    """A stream that writes the numbers from 0 on."""
    numbers = pyspark.spark_session.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    written = numbers.select("value").writeStream.format("json").option("path", str(_workspace.output))
    return written.trigger(processingTime="500 milliseconds")


STREAMS = [
    often_killed,
    ticking("in_own_process", ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION),
    ticking("leaves_nothing", ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION),
    ticking("retried", ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION),
]
defs = dg.Definitions.merge(
    stream_definitions(*STREAMS),
    dg.Definitions(
        jobs=[in_processes_of_their_own(stream) for stream in STREAMS],
        resources={
            "pyspark": SparkSessionResource(spark_config=SPARK),
            "checkpoint_storage": CheckpointStorageResource(path=_workspace.checkpoints.as_uri()),
            "state_backend": StateBackendResource(live_directory=str(_workspace.live)),
            "checkpoint_catalog": CheckpointCatalogResource(url=_workspace.catalog_url),
        },
    ),
)
