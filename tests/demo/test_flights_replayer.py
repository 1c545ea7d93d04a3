import os
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from dagster_ckpt.errors import OptionError
from examples.flights import replayer as replayer_module
from examples.flights.flights import DataSetMissingError, FlightData
from examples.flights.replayer import Replayer, main


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_mtime(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns // 1_000_000)]


def test_the_files_hold_the_feed_in_the_order_of_event_time(january: FlightData, landing: Path) -> None:
    list(Replayer(landing, data=january, days=3, hours_per_file=6).replay(0))
    tables = [pd.read_parquet(landing / "flights" / name) for name in by_mtime(landing / "flights")]
    expected = january.flights[january.flights["at"] < "2013-01-04"]
    laid = pd.concat(tables, ignore_index=True).convert_dtypes()
    pd.testing.assert_frame_equal(laid, expected.reset_index(drop=True).convert_dtypes())


def test_the_plan_tells_what_completes_each_feed(january: FlightData, landing: Path) -> None:
    plan = Replayer(landing, data=january, days=2).plan
    flights = january.flights[january.flights["at"] < "2013-01-03"]
    assert plan.days == 2
    assert plan.flight_files == plan.weather_files == ("2013-01-01.parquet", "2013-01-02.parquet")
    assert plan.flight_rows == len(flights)
    assert plan.last_departure_ms == flights["at"].max().timestamp() * 1000
    assert plan.last_weather_hour_ms == pd.Timestamp("2013-01-02T23:00Z").timestamp() * 1000


def test_the_plan_of_the_year() -> None:
    plan = Replayer(Path("nowhere")).plan
    assert plan.days == 366
    assert (plan.flight_rows, len(plan.flight_files)) == (336_776, 366)
    assert (plan.weather_rows, len(plan.weather_files)) == (26_115, 364)


def test_files_laid_after_a_restart_come_after_those_before(january: FlightData, landing: Path) -> None:
    list(Replayer(landing, data=january, days=4).replay(0, stopped=lambda: len(list(landing.glob("flights/*"))) == 2))
    # The clock of the machine has been set back by an hour since.
    for path in landing.glob("*/2013-*"):
        later_ns = path.stat().st_mtime_ns + 3_600_000_000_000
        os.utime(path, ns=(later_ns, later_ns))
    list(Replayer(landing, data=january, days=4).replay(0))
    assert len(names(landing / "flights")) == 4
    assert by_mtime(landing / "flights") == names(landing / "flights")


def test_a_file_half_written_by_a_killed_replayer_is_not_of_the_feed(january: FlightData, landing: Path) -> None:
    (landing / "flights").mkdir(parents=True)
    (landing / "flights" / ".2013-01-01.parquet.tmp").write_bytes(b"half")
    list(Replayer(landing, data=january, days=1).replay(0))
    assert names(landing / "flights") == ["2013-01-01.parquet"]


# Nothing waits before the first file; the weather of the first day begins with its second quarter.
@pytest.mark.parametrize(("hours_per_file", "seconds"), [(24, 7 / 2), (6, 30 / 8)])
def test_the_pace_is_in_days_a_second(january: FlightData, landing: Path, hours_per_file: int, seconds: float) -> None:
    time = Time()
    replayer = Replayer(
        landing, data=january, days=8, hours_per_file=hours_per_file, clock=time.clock, sleep=time.sleep
    )
    list(replayer.replay(2))
    assert time.now == pytest.approx(seconds)


def test_days_that_are_there_take_no_time(january: FlightData, landing: Path) -> None:
    time = Time()
    list(Replayer(landing, data=january, days=6).replay(0))
    list(Replayer(landing, data=january, days=8, clock=time.clock, sleep=time.sleep).replay(2))
    assert time.now == pytest.approx(0.5)


def test_a_landing_with_another_feed_is_refused_untouched(january: FlightData, landing: Path) -> None:
    list(Replayer(landing, data=january, days=1).replay(0))
    with pytest.raises(OptionError, match=r"2013-01-01\.parquet is not a file of this feed"):
        list(Replayer(landing, data=january, days=1, hours_per_file=6).replay(0))
    assert names(landing / "flights") == ["2013-01-01.parquet"]


@pytest.mark.parametrize(
    ("options", "found"), [({"days": 0}, "days is 0"), ({"hours_per_file": 5}, "hours_per_file is 5")]
)
def test_wrong_options_are_refused(january: FlightData, landing: Path, options: dict[str, int], found: str) -> None:
    with pytest.raises(OptionError, match=found):
        Replayer(landing, data=january, **options)


def test_a_negative_pace_is_refused(january: FlightData, landing: Path) -> None:
    with pytest.raises(OptionError, match="pace is -1"):
        list(Replayer(landing, data=january).replay(-1))


def test_the_command_lays_the_feed(landing: Path) -> None:
    result = CliRunner().invoke(main, ["--landing", str(landing), "--pace", "0", "--days", "2"])
    assert result.exit_code == 0, result.output
    assert names(landing / "flights") == ["2013-01-01.parquet", "2013-01-02.parquet"]


def test_the_command_tells_what_is_missing(landing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> FlightData:
        raise DataSetMissingError("not installed")

    monkeypatch.setattr(replayer_module, "load_flights", missing)
    result = CliRunner().invoke(main, ["--landing", str(landing)])
    assert (result.exit_code, result.output) == (1, "Error: not installed\n")
