"""The outputs must not depend on how the feed is cut into batches: else the drill's comparison means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from examples.flights import streams
from examples.flights.assets import SPARK
from examples.flights.compare import compare_tables
from examples.flights.reference import run_reference
from examples.flights.replayer import Replayer
from tests.support.small_spark import start_jvm

pytestmark = [pytest.mark.spark, pytest.mark.thorough(sample="tests/demo/test_flights_tables.py")]
STREAMS = ("departure_delays", "flights_with_weather")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    start_jvm()
    builder = SparkSession.builder
    for name, value in SPARK.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def replayer(tmp_path_factory: pytest.TempPathFactory) -> Replayer:
    replayer = Replayer(tmp_path_factory.mktemp("landing"), days=8)
    for _ in replayer.replay(pace=0):
        pass
    return replayer


@pytest.fixture(scope="module")
def reference(spark: SparkSession, replayer: Replayer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    run_reference(spark, str(replayer.landing), str(root))
    return root


@pytest.mark.parametrize("stream", STREAMS)
def test_one_file_a_batch_gives_the_same_rows_and_the_expected_watermark(
    stream: str, spark: SparkSession, replayer: Replayer, reference: Path, tmp_path: Path
) -> None:
    # The feed arrives file by file into a folder of its own, so that each batch sees one day.
    landing, output = tmp_path / "landing", tmp_path / "output"
    writer = getattr(streams, stream)(spark, str(landing), str(output))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        for _ in Replayer(landing, days=8).replay(pace=0):
            query.processAllAvailable()
        query.processAllAvailable()
        watermark = query.lastProgress["eventTime"]["watermark"]
        assert query.lastProgress["batchId"] >= 7
    finally:
        query.stop()
    assert compare_tables(spark, str(output), str(reference / stream)).equal
    assert watermark == streams.final_watermarks(replayer.plan)[stream]


def test_windows_count_every_flight_whose_window_is_over(
    spark: SparkSession, replayer: Replayer, reference: Path
) -> None:
    delays = spark.read.parquet(str(reference / "departure_delays"))
    counted = delays.groupBy().sum("flights").first()
    assert counted is not None
    end = delays.select(F.max("window_end")).first()
    assert end is not None
    flights = spark.read.parquet(f"{replayer.landing}/flights")
    assert counted[0] == flights.where(flights["at"] < end[0]).count() > 0


def test_each_flight_is_joined_once(spark: SparkSession, replayer: Replayer, reference: Path) -> None:
    joined = spark.read.parquet(str(reference / "flights_with_weather"))
    assert joined.count() == joined.select("at", "origin", "carrier", "flight").distinct().count()
    assert joined.where("temp IS NOT NULL").count() > 0


def test_the_comparison_sees_a_missing_a_changed_and_a_repeated_row(spark: SparkSession, tmp_path: Path) -> None:
    def table(name: str, rows: list[tuple[int, str]]) -> str:
        path = str(tmp_path / name)
        spark.createDataFrame(rows, "a int, b string").write.parquet(path)
        return path

    left = table("left", [(1, "x"), (2, "y"), (2, "y")])
    assert compare_tables(spark, left, table("same", [(2, "y"), (1, "x"), (2, "y")])).equal
    repeated = compare_tables(spark, left, table("once", [(1, "x"), (2, "y")]))
    assert (repeated.only_left, repeated.only_right, repeated.equal) == (1, 0, False)
    changed = compare_tables(spark, left, table("changed", [(1, "z"), (2, "y"), (2, "y")]))
    assert (changed.only_left, changed.only_right) == (1, 1)
    empty = table("empty", [])
    assert not compare_tables(spark, empty, empty).equal


def test_the_summary_counts_a_stream_that_has_not_written_as_empty(
    spark: SparkSession, replayer: Replayer, reference: Path, tmp_path: Path
) -> None:
    rows = streams.airport_day_summary(
        spark,
        delays_path=str(reference / "departure_delays"),
        weather_path=str(tmp_path / "not-yet"),
        planes_path=f"{replayer.landing}/planes",
        output=str(tmp_path / "summary"),
    )
    assert rows > 0
