"""A stream whose driver is launched outside of Dagster, in the release that an environment variable names."""

from __future__ import annotations

import os
import sys

import dagster as dg

from dagster_ckpt import (
    CheckpointCatalogResource,
    CheckpointConfig,
    CheckpointStorageResource,
    DriverLaunch,
    RestartStrategies,
    StateBackendResource,
    external_streaming_asset,
    run_stream,
    stream_definitions,
)
from examples.flights.workspace import Workspace

CHECKPOINTING = CheckpointConfig(interval=500, cleanup="RETAIN_ON_CANCELLATION")
RESTART = RestartStrategies.fixed_delay_restart(3, 0)
RELEASE = "PRICES_RELEASE"


def run(workspace: Workspace, release: str) -> None:
    """As the program of a user."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from tests.support.small_spark import SETTINGS

    root = workspace.root
    run_stream(
        "prices",
        lambda spark: (
            spark.readStream.schema("a long")
            .option("maxFilesPerTrigger", 1)
            .json(str(root / "in"))
            .withColumn("release", F.lit(release))
            .writeStream.format("parquet")
            .option("path", str(root / "out"))
        ),
        catalog=workspace.catalog_url,
        storage=f"file://{root}/snapshots",
        live_root=str(workspace.live),
        checkpointing=CHECKPOINTING,
        restart_strategy=RESTART,
        code_version=release,
        spark=SparkSession.builder.master("local[1]").config(map=SETTINGS).getOrCreate(),
    )


def definitions(workspace: Workspace, release: str) -> dg.Definitions:
    root = workspace.root
    stream = external_streaming_asset(
        "prices",
        launch=DriverLaunch(
            [sys.executable, __file__],
            log_directory=str(root / "logs"),
            environment={RELEASE: release},
        ),
        checkpointing=CHECKPOINTING,
        restart_strategy=RESTART,
    )
    return dg.Definitions.merge(
        stream_definitions(stream),
        dg.Definitions(
            resources={
                "pyspark": dg.ResourceDefinition.none_resource(),
                "checkpoint_storage": CheckpointStorageResource(path=f"file://{root}/snapshots"),
                "state_backend": StateBackendResource(live_directory=str(workspace.live), kind="HASHMAP"),
                "checkpoint_catalog": CheckpointCatalogResource(url=workspace.catalog_url),
            }
        ),
    )


if __name__ == "__main__":
    run(Workspace.from_environment(), os.environ[RELEASE])
else:
    defs = definitions(Workspace.from_environment(), os.environ[RELEASE])
