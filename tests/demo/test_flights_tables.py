"""The tables of the example are those that pandas computes, however the feed is cut into batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from examples.flights.compare import compare_tables
from examples.flights.flights import FlightData
from examples.flights.reference import run_reference
from examples.flights.replayer import FeedPlan, Replayer
from examples.flights.streams import departure_delays, final_watermarks, flights_with_weather

pytestmark = pytest.mark.spark

DAYS = 10
Stream = Callable[..., DataStreamWriter]
BOTH_STREAMS = pytest.mark.parametrize("stream", [departure_delays, flights_with_weather], ids=lambda s: s.__name__)


@dataclass(frozen=True)
class Example:
    """A whole feed, and the tables of a run that takes all of it in one batch."""

    feed: Path
    plan: FeedPlan
    reference: Path


@pytest.fixture(scope="module")
def example(spark: SparkSession, january: FlightData, tmp_path_factory: pytest.TempPathFactory) -> Example:
    feed, reference = tmp_path_factory.mktemp("feed"), tmp_path_factory.mktemp("reference")
    replayer = Replayer(feed, data=january, days=DAYS)
    list(replayer.replay(0))
    run_reference(spark, str(feed), str(reference))
    return Example(feed, replayer.plan, reference)


def start(writer: DataStreamWriter, checkpoint: Path) -> StreamingQuery:
    return writer.option("checkpointLocation", str(checkpoint)).start()


def arrive(feed: Path, landing: Path, name: str, *files: str) -> None:
    (landing / name).mkdir(parents=True, exist_ok=True)
    for file in files:
        # As the replayer does: the query runs meanwhile, and must not see half a file.
        unfinished = landing / name / f".{file}"
        shutil.copy2(feed / name / file, unfinished)
        unfinished.replace(landing / name / file)


def watermark(query: StreamingQuery) -> str:
    return str(query.recentProgress[-1]["eventTime"]["watermark"])


def assert_same(spark: SparkSession, output: Path, reference: Path, stream: Stream) -> None:
    comparison = compare_tables(spark, str(output), str(reference / stream.__name__))
    assert comparison.equal, comparison


def test_delays_are_what_pandas_computes(spark: SparkSession, january: FlightData, example: Example) -> None:
    final = pd.Timestamp(final_watermarks(example.plan)["departure_delays"])
    flights = january.flights[january.flights["at"] < "2013-01-11"]
    flights = flights.assign(window_start=flights["at"].dt.floor("6h"))
    over = flights[flights["window_start"] + pd.Timedelta("6h") <= final]
    expected = {
        (start, origin, carrier): (len(rows), rows["dep_delay"].count(), rows["dep_delay"].sum())
        for (start, origin, carrier), rows in over.groupby(["window_start", "origin", "carrier"])
    }
    table = spark.read.parquet(str(example.reference / "departure_delays"))
    # As text in UTC: a collected timestamp would be in the zone of this machine.
    rows = table.selectExpr("string(window_start) AS begin", "*").collect()
    found = {
        (pd.Timestamp(row.begin, tz="UTC"), row.origin, row.carrier): (row.flights, row.departed, row.delay_minutes)
        for row in rows
    }
    assert found == expected
    assert len(rows) == len(found)
    assert all(row.mean_delay == (row.delay_minutes / row.departed if row.departed else None) for row in rows)


def test_every_flight_has_the_weather_of_its_hour(spark: SparkSession, january: FlightData, example: Example) -> None:
    final = pd.Timestamp(final_watermarks(example.plan)["flights_with_weather"])
    flights = january.flights[january.flights["at"] < "2013-01-11"]
    weather = january.weather[january.weather["time_hour"] < "2013-01-11"]
    joined = flights.merge(weather, on=["origin", "time_hour"], how="left", indicator=True)
    written = joined[(joined["_merge"] == "both") | (joined["time_hour"] <= final)]
    rows = (
        spark.read.parquet(str(example.reference / "flights_with_weather"))
        .selectExpr("string(at) AS moment", "*")
        .collect()
    )
    found = sorted((pd.Timestamp(row.moment, tz="UTC"), row.origin, row.carrier, row.flight, row.visib) for row in rows)
    wanted = written[["at", "origin", "carrier", "flight", "visib"]].astype(object)
    assert found == sorted(tuple(row) for row in wanted.where(wanted.notna(), None).itertuples(index=False))


def test_the_summary_adds_up_what_the_streams_wrote(spark: SparkSession, example: Example) -> None:
    summary = spark.read.parquet(str(example.reference / "airport_day_summary"))
    delays = spark.read.parquet(str(example.reference / "departure_delays"))
    assert summary.count() == summary.select("origin", "day").distinct().count() == 3 * DAYS
    totals = ("sum(flights)", "sum(delay_minutes)", "max(worst_delay)")
    assert summary.selectExpr(*totals).first() == delays.selectExpr(*totals).first()
    assert len(list((example.reference / "airport_day_summary").glob("*.parquet"))) == 1


@pytest.mark.thorough
def test_a_batch_takes_no_more_files_than_it_may(spark: SparkSession, example: Example, tmp_path: Path) -> None:
    output = tmp_path / "output"
    query = start(departure_delays(spark, str(example.feed), str(output), files_per_batch=4), tmp_path / "live")
    try:
        query.processAllAvailable()
        assert sum(progress["numInputRows"] > 0 for progress in query.recentProgress) == 3
    finally:
        query.stop()
    assert_same(spark, output, example.reference, departure_delays)


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", ["flights", "weather"])
def test_a_feed_that_runs_ahead_changes_nothing(
    spark: SparkSession, example: Example, tmp_path: Path, ahead: str
) -> None:
    landing, output = tmp_path / "landing", tmp_path / "output"
    behind = "weather" if ahead == "flights" else "flights"
    files = example.plan.flight_files
    query = start(flights_with_weather(spark, str(landing), str(output)), tmp_path / "live")
    try:
        for name, arrived in ((ahead, files[:7]), (behind, files[:3]), (ahead, files[7:]), (behind, files[3:])):
            arrive(example.feed, landing, name, *arrived)
            query.processAllAvailable()
        assert watermark(query) == final_watermarks(example.plan)["flights_with_weather"]
    finally:
        query.stop()
    assert_same(spark, output, example.reference, flights_with_weather)


@pytest.mark.thorough(but="departure_delays")
@BOTH_STREAMS
def test_a_restart_in_the_middle_of_the_feed_changes_nothing(
    spark: SparkSession, example: Example, tmp_path: Path, stream: Stream
) -> None:
    landing, output = tmp_path / "landing", tmp_path / "output"
    for files in (example.plan.flight_files[:6], example.plan.flight_files[6:]):
        for name in ("weather", "flights"):
            arrive(example.feed, landing, name, *files)
        query = start(stream(spark, str(landing), str(output)), tmp_path / "live")
        try:
            query.processAllAvailable()
            reached = watermark(query)
        finally:
            query.stop()
    assert reached == final_watermarks(example.plan)[stream.__name__]
    assert_same(spark, output, example.reference, stream)


@pytest.mark.thorough
def test_a_join_restarted_after_the_last_file_of_one_feed_stays_short_of_the_final_watermark(
    spark: SparkSession, example: Example, tmp_path: Path
) -> None:
    landing, output = tmp_path / "landing", tmp_path / "output"
    for name, files in (("weather", example.plan.weather_files), ("flights", example.plan.flight_files[:6])):
        arrive(example.feed, landing, name, *files)
    reached = []
    for files in ((), example.plan.flight_files[6:]):
        arrive(example.feed, landing, "flights", *files)
        query = start(flights_with_weather(spark, str(landing), str(output)), tmp_path / "live")
        try:
            query.processAllAvailable()
            reached.append(watermark(query))
        finally:
            query.stop()
    assert reached[1] == reached[0] < final_watermarks(example.plan)["flights_with_weather"]
