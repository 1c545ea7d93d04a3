"""The uninterrupted run: the same feed through plain PySpark, without Dagster and without this package."""

from __future__ import annotations

from pyspark.sql import SparkSession

from examples.flights import streams


def run_reference(spark: SparkSession, landing: str, root: str) -> None:
    """Process a whole feed at once; tables go below `root`, named like the assets.

    Args:
        spark: A session.
        landing: The landing directory with the whole feed.
        root: An empty folder.
    """
    for stream in (streams.departure_delays, streams.flights_with_weather):
        writer = stream(spark, landing, f"{root}/{stream.__name__}")
        query = (
            writer.option("checkpointLocation", f"{root}/checkpoints/{stream.__name__}")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    streams.airport_day_summary(
        spark,
        delays_path=f"{root}/departure_delays",
        weather_path=f"{root}/flights_with_weather",
        planes_path=f"{landing}/planes",
        output=f"{root}/airport_day_summary",
    )
