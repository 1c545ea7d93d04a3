"""What the soak's `dagster dev` loads: the streams of the flights example, restarted as often as they are killed."""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster_pyspark import PySparkResource

from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from examples.flights import streams
from examples.flights.assets import CHECKPOINTING, SPARK, FlightsResource
from examples.flights.workspace import Workspace

RESTART = RestartStrategies.fixed_delay_restart(1_000_000, 500)
workspace = Workspace.from_environment()


@streaming_asset(checkpointing=CHECKPOINTING, restart_strategy=RESTART)
def departure_delays(context: Any, pyspark: PySparkResource, flights: FlightsResource) -> Any:
    """A windowed aggregation."""
    return streams.departure_delays(pyspark.spark_session, flights.landing, flights.table("departure_delays"))


@streaming_asset(checkpointing=CHECKPOINTING, restart_strategy=RESTART)
def flights_with_weather(context: Any, pyspark: PySparkResource, flights: FlightsResource) -> Any:
    """A join of two streams."""
    return streams.flights_with_weather(pyspark.spark_session, flights.landing, flights.table("flights_with_weather"))


defs = dg.Definitions.merge(
    stream_definitions(departure_delays, flights_with_weather),
    dg.Definitions(
        resources={
            "pyspark": PySparkResource(spark_config={**SPARK, "spark.master": "local[1]"}),
            "checkpoint_storage": CheckpointStorageResource(path=workspace.checkpoints.as_uri()),
            "state_backend": StateBackendResource(live_directory=str(workspace.live)),
            "checkpoint_catalog": CheckpointCatalogResource(url=workspace.catalog_url),
            "flights": FlightsResource(landing=str(workspace.landing), output=str(workspace.output)),
        },
    ),
)
