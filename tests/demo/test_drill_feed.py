"""The feed of the drill: its last days come when its end is waited for, and not before."""

import time
from pathlib import Path

from dagster_ckpt.demo.drill import HELD_BACK_DAYS, Feed

AS_FAST_AS_IT_CAN = 1e6
DEADLINE_S = 120.0


def test_the_last_days_are_held_back_until_the_end_is_waited_for(tmp_path: Path) -> None:
    feed = Feed(tmp_path, AS_FAST_AS_IT_CAN)
    days = feed.plan.days
    deadline = time.monotonic() + DEADLINE_S
    with feed.arriving():
        while feed.share * days < days - HELD_BACK_DAYS and time.monotonic() < deadline:
            time.sleep(0.05)
        held_back = set(feed.plan.flight_files) - {path.name for path in (tmp_path / "flights").iterdir()}
        assert held_back == set(feed.plan.flight_files[-HELD_BACK_DAYS:])
        feed.await_end()
    assert feed.share == 1
    assert {path.name for path in (tmp_path / "flights").iterdir()} == set(feed.plan.flight_files)


def test_a_feed_whose_end_nobody_waits_for_ends_with_its_context(tmp_path: Path) -> None:
    feed = Feed(tmp_path, AS_FAST_AS_IT_CAN)
    with feed.arriving():
        pass
    assert feed.share < 1
