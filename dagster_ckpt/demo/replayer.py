"""The feed: flights and weather arrive as files, in the order of event time, at a set pace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import track

from dagster_ckpt.demo.flights import FlightData, load_flights

if TYPE_CHECKING:
    import pandas as pd

# Spark takes files in the order of their modification time, in ms: two files must not share one.
MTIME_STEP_NS = 2_000_000


@dataclass(frozen=True)
class FeedPlan:
    """What the whole feed holds.

    Attributes:
        days: Number of days; each is one file of flights and one of weather.
        flight_rows: Rows in the files of flights.
        weather_rows: Rows in the files of weather.
        last_departure_ms: Latest scheduled departure, ms since the epoch.
        last_flight_hour_ms: Its hour.
        last_weather_hour_ms: Latest hour of weather.
    """

    days: int
    flight_rows: int
    weather_rows: int
    last_departure_ms: int
    last_flight_hour_ms: int
    last_weather_hour_ms: int


class Replayer:
    """Lays the feed into a landing directory. Files that are there already are passed over.

    Args:
        landing: `flights/`, `weather/` and `planes/` are below it.
        data: The tables; None loads all flights of 2013.
        days: Only so many days from the start.
    """

    def __init__(self, landing: Path, *, data: FlightData | None = None, days: int | None = None) -> None:
        self.landing = landing
        self._data = data or load_flights()
        self._flights = _by_day(self._data.flights, "at")
        self._weather = _by_day(self._data.weather, "time_hour")
        self._days = sorted({*self._flights, *self._weather})[:days]
        self._last_mtime_ns = 0

    @property
    def plan(self) -> FeedPlan:
        """What the whole feed holds."""
        flights = [self._flights[day] for day in self._days if day in self._flights]
        weather = [self._weather[day] for day in self._days if day in self._weather]
        return FeedPlan(
            days=len(self._days),
            flight_rows=sum(len(table) for table in flights),
            weather_rows=sum(len(table) for table in weather),
            last_departure_ms=max(_ms(table["at"].max()) for table in flights),
            last_flight_hour_ms=max(_ms(table["time_hour"].max()) for table in flights),
            last_weather_hour_ms=max(_ms(table["time_hour"].max()) for table in weather),
        )

    def replay(self, pace: float, *, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Lay one day after the other; yields each day when its files are visible.

        Args:
            pace: Days per second; 0 is all at once.
            stopped: Asked before each day; True ends the replay.
        """
        self._write(self.landing / "planes" / "planes.parquet", self._data.planes)
        due = time.monotonic()
        for day in self._days:
            if stopped():
                return
            # Weather first: it is known before the flights of the day have left.
            for feed, tables in (("weather", self._weather), ("flights", self._flights)):
                path = self.landing / feed / f"{day}.parquet"
                if day in tables and not path.exists():
                    self._write(path, tables[day])
            yield day
            if pace > 0:
                due += 1 / pace
                time.sleep(max(0.0, due - time.monotonic()))

    def _write(self, path: Path, table: pd.DataFrame) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Spark passes over names that begin with a dot; the rename makes the whole file visible at once.
        unfinished = path.with_name(f".{path.name}.tmp")
        # Spark reads microseconds; pandas may keep nanoseconds.
        table.to_parquet(unfinished, index=False, coerce_timestamps="us")
        self._last_mtime_ns = max(time.time_ns(), self._last_mtime_ns + MTIME_STEP_NS)
        os.utime(unfinished, ns=(self._last_mtime_ns, self._last_mtime_ns))
        unfinished.replace(path)


def _by_day(table: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    return {str(day): rows for day, rows in table.groupby(table[column].dt.strftime("%Y-%m-%d"))}


def _ms(moment: pd.Timestamp) -> int:
    return int(moment.timestamp() * 1000)


@click.command()
@click.option("--landing", type=click.Path(path_type=Path), required=True, help="Folder to lay the feed into.")
@click.option("--pace", default=2.0, show_default=True, help="Days of 2013 per second; 0 is all at once.")
@click.option("--days", type=int, default=None, help="Only so many days from the start. Default: the whole year.")
def main(landing: Path, pace: float, days: int | None) -> None:
    """Replay the flights of 2013 as files, in event-time order."""
    replayer = Replayer(landing, days=days)
    for _ in track(replayer.replay(pace), total=replayer.plan.days, description="days of 2013"):
        pass


if __name__ == "__main__":
    main()
