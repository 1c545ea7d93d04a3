"""The queries of the example in plain PySpark, without checkpoints or Dagster.

Their results do not depend on how the feed is split into batches: files arrive in event-time order,
so no row is late, and every figure is a count, a sum of integers, or a maximum.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pendulum
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from examples.flights.flights import FLIGHTS_SCHEMA, PLANES_SCHEMA, WEATHER_SCHEMA
from examples.flights.replayer import FeedPlan

WATERMARK_DELAY = "1 hour"
WATERMARK_DELAY_MS = 3_600_000
WINDOW = "6 hours"

DELAYS_SCHEMA = (
    "window_start timestamp, window_end timestamp, origin string, carrier string, flights long, departed long, "
    "delay_minutes long, worst_delay long, mean_delay double"
)
WITH_WEATHER_SCHEMA = (
    "at timestamp, origin string, dest string, carrier string, flight long, tailnum string, dep_delay long, "
    "temp double, wind_speed double, precip double, visib double"
)


def departure_delays(
    spark: SparkSession, landing: str, output: str, *, files_per_batch: int | None = None
) -> DataStreamWriter:
    """Departure delays per airport and carrier in windows of six hours, each written once it is complete.

    Args:
        spark: The session that will run the query.
        landing: The landing directory.
        output: Folder of the table.
        files_per_batch: Maximum number of files per batch; None for no limit.
    """
    flights = _feed(spark, landing, "flights", FLIGHTS_SCHEMA, files_per_batch).withWatermark("at", WATERMARK_DELAY)
    delays = flights.groupBy(F.window("at", WINDOW), "origin", "carrier").agg(
        F.count("*").alias("flights"),
        F.count("dep_delay").alias("departed"),
        F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("delay_minutes"),
        F.max("dep_delay").alias("worst_delay"),
    )
    return _to_parquet(
        delays.select(
            F.col("window.start").alias("window_start"),
            F.col("window.end").alias("window_end"),
            *("origin", "carrier", "flights", "departed", "delay_minutes", "worst_delay"),
            F.try_divide("delay_minutes", "departed").alias("mean_delay"),
        ),
        output,
    )


def flights_with_weather(
    spark: SparkSession, landing: str, output: str, *, files_per_batch: int | None = None
) -> DataStreamWriter:
    """Each flight with the weather of its airport and hour; without it, once none can arrive any more.

    Args:
        spark: The session that will run the query.
        landing: The landing directory.
        output: Folder of the table.
        files_per_batch: Maximum number of files of each feed per batch; None for no limit.
    """
    flights = _feed(spark, landing, "flights", FLIGHTS_SCHEMA, files_per_batch)
    weather = _feed(spark, landing, "weather", WEATHER_SCHEMA, files_per_batch)
    flights = flights.withWatermark("time_hour", WATERMARK_DELAY).alias("f")
    weather = weather.withWatermark("time_hour", WATERMARK_DELAY).alias("w")
    same_hour = (F.col("f.origin") == F.col("w.origin")) & (F.col("f.time_hour") == F.col("w.time_hour"))
    joined = flights.join(weather, same_hour, "left_outer")
    return _to_parquet(
        joined.select(
            *(f"f.{name}" for name in ("at", "origin", "dest", "carrier", "flight", "tailnum", "dep_delay")),
            *(f"w.{name}" for name in ("temp", "wind_speed", "precip", "visib")),
        ),
        output,
    )


def airport_day_summary(
    spark: SparkSession, *, delays_path: str, weather_path: str, planes_path: str, output: str
) -> int:
    """Write one row per airport and day from the streams' output; returns the number of rows.

    A stream that has not written yet counts as empty.
    """
    delays = (
        _table(spark, delays_path, DELAYS_SCHEMA)
        .groupBy("origin", F.to_date("window_start").alias("day"))
        .agg(
            F.sum("flights").alias("flights"),
            F.sum("delay_minutes").alias("delay_minutes"),
            F.max("worst_delay").alias("worst_delay"),
        )
    )
    planes = _table(spark, planes_path, PLANES_SCHEMA).select("tailnum", "seats")
    weather = (
        _table(spark, weather_path, WITH_WEATHER_SCHEMA)
        .join(planes, "tailnum", "left")
        .groupBy("origin", F.to_date("at").alias("day"))
        .agg(
            F.count(F.when(F.col("precip") > 0, 1)).alias("flights_in_rain"),
            F.count(F.when(F.col("temp").isNull(), 1)).alias("flights_without_weather"),
            F.max("wind_speed").alias("strongest_wind"),
            F.sum("seats").alias("seats"),
        )
    )
    summary = delays.join(weather, ["origin", "day"], "full_outer").orderBy("origin", "day").coalesce(1)
    # Written to a temporary folder: if the run is killed while writing, the table is unchanged.
    unfinished = f"{output}.unfinished"
    summary.write.mode("overwrite").parquet(unfinished)
    rows = spark.read.parquet(unfinished).count()
    shutil.rmtree(output, ignore_errors=True)
    Path(unfinished).rename(output)
    return rows


def final_watermarks(plan: FeedPlan) -> dict[str, str]:
    """The watermark of each stream after the whole feed, as shown in its progress.

    The keys are the names of the streams' functions; the value is `eventTime.watermark` of
    `StreamingQueryProgress`. Spark does not keep the watermarks of a join's two inputs, only the
    lower one: a join restarted after the last file of one feed does not advance, because that input
    never shows another event time.
    """
    return {
        "departure_delays": _shown(plan.last_departure_ms - WATERMARK_DELAY_MS),
        # The slower of two inputs counts.
        "flights_with_weather": _shown(min(plan.last_flight_hour_ms, plan.last_weather_hour_ms) - WATERMARK_DELAY_MS),
    }


def _feed(spark: SparkSession, landing: str, feed: str, schema: str, files_per_batch: int | None) -> DataFrame:
    # Spark requires the folder to exist; the replayer may not have created it yet.
    Path(landing, feed).mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema(schema)
    if files_per_batch is not None:
        reader = reader.option("maxFilesPerTrigger", files_per_batch)
    return reader.parquet(f"{landing}/{feed}")


def _to_parquet(frame: DataFrame, output: str) -> DataStreamWriter:
    writer: DataStreamWriter = frame.writeStream.format("parquet").option("path", output).outputMode("append")
    return writer


def _table(spark: SparkSession, path: str, schema: str) -> DataFrame:
    if not Path(path).is_dir():
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(path)


def _shown(moment_ms: int) -> str:
    return pendulum.from_timestamp(moment_ms / 1000).format("YYYY-MM-DDTHH:mm:ss.SSS[Z]")
