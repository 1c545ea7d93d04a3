"""The feed: flights and weather arrive as files, in event-time order, at a set pace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import track

from dagster_ckpt.errors import CkptError, OptionError
from examples.flights.flights import FlightData, load_flights

if TYPE_CHECKING:
    import pandas as pd

# Spark reads files in order of modification time, in ms: no two files may share one.
MTIME_STEP_NS = 2_000_000
HOURS_PER_DAY = 24


@dataclass(frozen=True)
class FeedPlan:
    """The contents of the whole feed, known before the first file is written.

    Attributes:
        days: Number of days, in UTC. The year in New York spans 366 of them.
        flight_files: Names of the flight files, in order; the last one completes the feed.
        weather_files: Names of the weather files. Weather ends one day before the flights do.
        flight_rows: Rows in the flight files.
        weather_rows: Rows in the weather files.
        last_departure_ms: Latest scheduled departure, in ms since the epoch.
        last_flight_hour_ms: Its hour.
        last_weather_hour_ms: Latest hour of weather.
    """

    days: int
    flight_files: tuple[str, ...]
    weather_files: tuple[str, ...]
    flight_rows: int
    weather_rows: int
    last_departure_ms: int
    last_flight_hour_ms: int
    last_weather_hour_ms: int


class Replayer:
    """Writes the feeds into a landing directory. Existing files are skipped, so it can be restarted.

    Args:
        landing: Contains `flights/`, `weather/` and `planes/`.
        data: The tables; None loads all flights of 2013.
        days: Number of days from the start; None for all.
        hours_per_file: Event time in one file of a feed; a divisor of 24.
        clock: Monotonic time in seconds.
        sleep: Sleeps for a number of seconds.

    Raises:
        OptionError: `days` or `hours_per_file` is out of range.
    """

    def __init__(
        self,
        landing: Path,
        *,
        data: FlightData | None = None,
        days: int | None = None,
        hours_per_file: int = HOURS_PER_DAY,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if days is not None and days < 1:
            raise OptionError(f"days is {days}, but must be 1 or more, or None for the whole year.")
        if hours_per_file < 1 or HOURS_PER_DAY % hours_per_file:
            raise OptionError(f"hours_per_file is {hours_per_file}, but must divide 24: 1, 2, 3, 4, 6, 8, 12 or 24.")
        self.landing = landing
        self._data = data or load_flights()
        self._parts_per_day = HOURS_PER_DAY // hours_per_file
        by_feed = {
            # Weather first: it is known before the flights of the day have left.
            "weather": _by_file(self._data.weather, "time_hour", hours_per_file),
            "flights": _by_file(self._data.flights, "at", hours_per_file),
        }
        self._days = sorted({_day(name) for tables in by_feed.values() for name in tables})[:days]
        self._feeds = {
            feed: {name: table for name, table in tables.items() if _day(name) in self._days}
            for feed, tables in by_feed.items()
        }
        self._clock = clock
        self._sleep = sleep
        self._last_mtime_ns = 0

    @property
    def plan(self) -> FeedPlan:
        """The contents of the whole feed, whether or not it has been written."""
        flights, weather = self._feeds["flights"], self._feeds["weather"]
        return FeedPlan(
            days=len(self._days),
            flight_files=tuple(flights),
            weather_files=tuple(weather),
            flight_rows=sum(len(table) for table in flights.values()),
            weather_rows=sum(len(table) for table in weather.values()),
            last_departure_ms=_last_ms(flights, "at"),
            last_flight_hour_ms=_last_ms(flights, "time_hour"),
            last_weather_hour_ms=_last_ms(weather, "time_hour"),
        )

    def replay(self, pace: float, *, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Write one day after the other; yields each day once its files are visible.

        Args:
            pace: Days per second; 0 is all at once. Days that already exist take no time.
            stopped: Called before a file is written; True ends the replay.

        Raises:
            OptionError: The pace is negative, or the landing directory contains files of another feed.
        """
        if pace < 0:
            raise OptionError(f"pace is {pace:g}, but must be 0 (all at once) or a number of days per second.")
        self._take_up()
        planes = self.landing / "planes" / "planes.parquet"
        if not planes.exists():
            self._write(planes, self._data.planes)
        due = self._clock()
        for day in self._days:
            for turn in self._turns(day):
                missing = [(feed, name) for feed, name in turn if not (self.landing / feed / name).exists()]
                if pace > 0 and missing:
                    self._sleep(max(0.0, due - self._clock()))
                    due += 1 / (pace * self._parts_per_day)
                if stopped():
                    return
                for feed, name in missing:
                    self._write(self.landing / feed / name, self._feeds[feed][name])
            yield day

    def _turns(self, day: str) -> list[list[tuple[str, str]]]:
        """The files of a day as (feed, name), those of the same hours together."""
        names = sorted({name for tables in self._feeds.values() for name in tables if _day(name) == day})
        return [[(feed, name) for feed, tables in self._feeds.items() if name in tables] for name in names]

    def _take_up(self) -> None:
        for feed, tables in self._feeds.items():
            for path in (self.landing / feed).glob("[!.]*"):
                if path.name not in tables:
                    raise OptionError(
                        f"{path} is not a file of this feed: another one was laid there, with other days or hours in "
                        "a file. Lay this one into an empty folder, or with the options of the other."
                    )
                self._last_mtime_ns = max(self._last_mtime_ns, path.stat().st_mtime_ns)

    def _write(self, path: Path, table: pd.DataFrame) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Spark ignores names that begin with a dot; the rename makes the whole file visible at
        # once.
        unfinished = path.with_name(f".{path.name}.tmp")
        # Spark reads microseconds; pandas may have nanoseconds.
        table.to_parquet(unfinished, index=False, coerce_timestamps="us")
        self._last_mtime_ns = max(time.time_ns(), self._last_mtime_ns + MTIME_STEP_NS)
        os.utime(unfinished, ns=(self._last_mtime_ns, self._last_mtime_ns))
        unfinished.replace(path)


def _by_file(table: pd.DataFrame, column: str, hours_per_file: int) -> dict[str, pd.DataFrame]:
    """File names in order, with the rows of each."""
    begins = table[column].dt.floor(f"{hours_per_file}h")
    pattern = "%Y-%m-%d.parquet" if hours_per_file == HOURS_PER_DAY else "%Y-%m-%dT%H.parquet"
    return {begin.strftime(pattern): rows for begin, rows in table.groupby(begins)}


def _day(name: str) -> str:
    return name[: len("2013-01-01")]


def _last_ms(tables: dict[str, pd.DataFrame], column: str) -> int:
    last: pd.Timestamp = max(table[column].max() for table in tables.values())
    return int(last.timestamp() * 1000)


@click.command()
@click.option("--landing", type=click.Path(path_type=Path), required=True, help="Folder to lay the feeds into.")
@click.option("--pace", default=2.0, show_default=True, help="Days of 2013 per second; 0 is all at once.")
@click.option("--days", type=int, default=None, help="Only so many days from the start. Default: the whole year.")
@click.option(
    "--hours-per-file", default=HOURS_PER_DAY, show_default=True, help="Event time in one file; a divisor of 24."
)
def main(landing: Path, pace: float, days: int | None, hours_per_file: int) -> None:
    """Replay the flights of 2013 as files, in event-time order."""
    try:
        replayer = Replayer(landing, days=days, hours_per_file=hours_per_file)
        for _ in track(replayer.replay(pace), total=replayer.plan.days, description="days of 2013"):
            pass
    except CkptError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
