"""The feed of the drill: its last days come when they are asked for, and not before."""

import time
from pathlib import Path

import pytest

from examples.flights.drill import STOPS_BEFORE_THE_END, Feed

AS_FAST_AS_IT_CAN = 1e6
DEADLINE_S = 120.0


@pytest.mark.thorough
def test_the_last_days_come_as_they_are_asked_for(tmp_path: Path) -> None:
    feed = Feed(tmp_path, AS_FAST_AS_IT_CAN)
    days, files = feed.plan.days, feed.plan.flight_files
    deadline = time.monotonic() + DEADLINE_S

    def held_back_at(stop: int) -> set[str]:
        while feed.share * days < days - stop and time.monotonic() < deadline:
            time.sleep(0.05)
        return set(files) - {path.name for path in (tmp_path / "flights").iterdir()}

    with feed.arriving():
        for stop in STOPS_BEFORE_THE_END[:-1]:
            assert held_back_at(stop) == set(files[-stop:])
            feed.resume()
        assert held_back_at(STOPS_BEFORE_THE_END[-1]) == set(files[-STOPS_BEFORE_THE_END[-1] :])
        feed.await_end()
    assert feed.share == 1
    assert held_back_at(0) == set()


def test_a_feed_whose_end_nobody_waits_for_ends_with_its_context(tmp_path: Path) -> None:
    feed = Feed(tmp_path, AS_FAST_AS_IT_CAN)
    with feed.arriving():
        pass
    assert feed.share < 1
