from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from examples.flights.flights import FlightData, load_flights
from tests.support.small_spark import small_spark


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
    settings = {
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        **EmbeddedRocksDBStateBackend(True).spark_settings(),
    }
    with small_spark(settings) as session:
        yield session


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    return tmp_path / "landing"
