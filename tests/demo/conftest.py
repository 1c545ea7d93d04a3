from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.demo.flights import FlightData, load_flights
from dagster_ckpt.options import EmbeddedRocksDBStateBackend


@pytest.fixture(scope="session")
def january() -> FlightData:
    """The first days of the year, so that no test cuts the whole of it into files."""
    year = load_flights()
    return FlightData(
        flights=year.flights[year.flights["at"] < "2013-01-13"],
        weather=year.weather[year.weather["time_hour"] < "2013-01-13"],
        planes=year.planes,
    )


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    builder = SparkSession.builder.master("local[2]").appName("flights tests")
    settings = {
        # As the example itself: in so short a life, quick to compile counts more than fast in the end.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        **EmbeddedRocksDBStateBackend(True).spark_settings(),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    return tmp_path / "landing"
