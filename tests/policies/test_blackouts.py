"""Windows of the day, in their own time zone, on their own days."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pendulum
import pytest
import yaml

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.retention import KeepRules, NewestPer
from dagster_ckpt.policies.trigger import Blackout, blackout_ends_at_ms

CASES = yaml.safe_load((Path(__file__).parent / "blackouts.yaml").read_text(encoding="utf-8"))


def ms(local: str, zone: str) -> int:
    return round(pendulum.from_format(local, "YYYY-MM-DDTHH:mm", tz=zone).timestamp() * 1000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_a_moment_lies_in_a_blackout_or_not(case: dict[str, Any]) -> None:
    window = {**case["window"], "days": tuple(case["window"].get("days", ()))}
    blackout = Blackout(**window)

    until = blackout.ends_at_ms(ms(case["at"], blackout.timezone))

    assert until == (None if case["until"] is None else ms(case["until"], blackout.timezone))


def test_where_windows_overlap_the_last_end_counts() -> None:
    blackouts = [Blackout("10:00", "12:00"), Blackout("11:00", "13:00"), Blackout("20:00", "21:00")]
    assert blackout_ends_at_ms(blackouts, ms("2026-03-10T11:30", "UTC")) == ms("2026-03-10T13:00", "UTC")
    assert blackout_ends_at_ms(blackouts, ms("2026-03-10T14:00", "UTC")) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"begin": "24:00", "end": "01:00"}, "^begin of a blackout is '24:00', but must be a time from 00:00 to 23:59"),
        ({"begin": "22", "end": "01:00"}, "^begin of a blackout is '22', but must be a time from 00:00 to 23:59"),
        ({"begin": "22:00", "end": "1"}, "^end of a blackout is '1', but must be a time from 00:00 to 23:59"),
        ({"begin": "22:00", "end": "01:00", "days": ("monday",)}, "must be of mon, tue"),
        ({"begin": "22:00", "end": "01:00", "timezone": "Mars/Olympus"}, "must be a name such as"),
    ],
)
def test_a_window_that_does_not_exist_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Blackout(**wrong)


@pytest.mark.parametrize("timezone", ["utc", "europe/berlin", "Europe", "", "../UTC", 3, None, ["UTC"]])
def test_a_time_zone_that_no_moment_could_be_converted_to_is_refused(timezone: Any) -> None:
    for make in (partial(Blackout, "22:00", "06:00"), partial(NewestPer, "day", 1), partial(KeepRules, daily=1)):
        with pytest.raises((OptionError, OptionTypeError), match="must be a name such as UTC or Europe/Berlin"):
            make(timezone=timezone)


def test_days_that_are_written_as_a_list_are_kept_as_a_tuple() -> None:
    assert Blackout("22:00", "06:00", days=["fri", "sat"]) == Blackout("22:00", "06:00", days=("fri", "sat"))  # type: ignore[arg-type]
