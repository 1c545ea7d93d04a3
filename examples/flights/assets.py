"""The flights example as Dagster assets: two streams and one batch asset that reads what they write."""

from pathlib import Path

import dagster as dg
from pydantic import Field
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup
from examples.flights import streams
from examples.flights.workspace import Workspace

GROUP = "flights"
CHECKPOINTING = CheckpointConfig(
    interval=5_000,
    min_pause=1_000,
    num_retained=3,
    tolerable_failures=3,
    cleanup=ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION,
)
RESTART = RestartStrategies.exponential_delay_restart(
    initial_backoff=1_000, max_backoff=60_000, backoff_multiplier=2.0, reset_backoff_threshold=600_000
)
LOGGING = Path(__file__).with_name("log4j2.properties")
SPARK = {
    "spark.app.name": "flights",
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # List a batch of many small files with two tasks instead of one task per file.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    # The processes run for minutes on two cores: compile time matters more than peak speed.
    "spark.driver.extraJavaOptions": (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={LOGGING.as_uri()}"
    ),
}


class FlightsResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where the feed of flights arrives and where the assets write."""

    landing: str = Field(description="Folder into which the replayer lays files of flights, weather and planes.")
    output: str = Field(description="Folder below which each asset has its Parquet table.")

    def table(self, asset: str) -> str:
        """Folder of one asset's table."""
        return f"{self.output}/{asset}"


@streaming_asset(checkpointing=CHECKPOINTING, restart_strategy=RESTART, group_name=GROUP)
def departure_delays(
    context: dg.AssetExecutionContext, pyspark: SparkSessionResource, flights: FlightsResource
) -> DataStreamWriter:
    """Departure delays per airport and carrier in event-time windows: a windowed aggregation with state."""
    return streams.departure_delays(pyspark.spark_session, flights.landing, flights.table("departure_delays"))


@streaming_asset(checkpointing=CHECKPOINTING, restart_strategy=RESTART, group_name=GROUP)
def flights_with_weather(
    context: dg.AssetExecutionContext, pyspark: SparkSessionResource, flights: FlightsResource
) -> DataStreamWriter:
    """Each flight with the weather of its hour: a stream-stream join of two feeds."""
    return streams.flights_with_weather(pyspark.spark_session, flights.landing, flights.table("flights_with_weather"))


@dg.asset(
    deps=[departure_delays.asset, flights_with_weather.asset],
    group_name=GROUP,
    kinds={"spark"},
    pool="airport_day_summary",
)
def airport_day_summary(
    context: dg.AssetExecutionContext, pyspark: SparkSessionResource, flights: FlightsResource
) -> dg.MaterializeResult[None]:
    """One row per airport and day from both streams: an ordinary batch asset downstream of streaming ones."""
    rows = streams.airport_day_summary(
        pyspark.spark_session,
        delays_path=flights.table("departure_delays"),
        weather_path=flights.table("flights_with_weather"),
        planes_path=f"{flights.landing}/planes",
        output=flights.table("airport_day_summary"),
    )
    return dg.MaterializeResult(metadata={"dagster/row_count": rows})


airport_day_summary_job = dg.define_asset_job(
    "airport_day_summary_job",
    selection=dg.AssetSelection.assets(airport_day_summary),
    description="Read what the streams have written and summarise it.",
    executor_def=dg.in_process_executor,
)


def flight_definitions(workspace: Workspace) -> dg.Definitions:
    """The code location of the flights example."""
    return dg.Definitions.merge(
        stream_definitions(
            departure_delays,
            flights_with_weather,
            downstream=airport_day_summary_job,
            downstream_interval_seconds=90,
            # A demo lasts minutes: show every checkpoint on the page.
            report_interval_seconds=0,
            savepoint_schedules={departure_delays.stream_id: "0 3 * * *"},
        ),
        dg.Definitions(
            assets=[airport_day_summary],
            executor=dg.in_process_executor,
            resources={
                "pyspark": SparkSessionResource(spark_config=SPARK),
                "checkpoint_storage": CheckpointStorageResource(path=workspace.checkpoints.as_uri()),
                "state_backend": StateBackendResource(live_directory=str(workspace.live)),
                "checkpoint_catalog": CheckpointCatalogResource(url=workspace.catalog_url),
                "flights": FlightsResource(landing=str(workspace.landing), output=str(workspace.output)),
            },
        ),
    )
