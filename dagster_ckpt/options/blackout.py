"""Times of the day in which a schedule keeps still."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pendulum
from pendulum.tz.exceptions import InvalidTimezone

from dagster_ckpt.errors import OptionError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class Blackout:
    """A time of the day, on some days of the week or on all.

    Attributes:
        begin: Local time of its begin, such as "22:00"; belongs to it.
        end: Local time of its end, which does not belong to it. At or before `begin`: on the next day.
        timezone: Name of the time zone of both. Where its clocks are changed, the window follows them.
        days: Days on which it begins, of "mon" to "sun"; empty for every day.

    Raises:
        OptionError: A time, day or time zone does not exist.

    Example:
        >>> Blackout("22:00", "06:00", timezone="Europe/Berlin", days=("fri", "sat"))
        Blackout(begin='22:00', end='06:00', timezone='Europe/Berlin', days=('fri', 'sat'))
    """

    begin: str
    end: str
    timezone: str = "UTC"
    days: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("begin", self.begin), ("end", self.end)):
            if not _TIME.fullmatch(value):
                raise OptionError(f"{name} of a blackout is {value!r}, but must be a time from 00:00 to 23:59.")
        unknown = [day for day in self.days if day not in DAYS]
        if unknown:
            raise OptionError(f"days of a blackout are {unknown!r}, but must be of {', '.join(DAYS)}.")
        try:
            pendulum.timezone(self.timezone)
        except (InvalidTimezone, ValueError) as error:
            raise OptionError(
                f"timezone of a blackout is {self.timezone!r}, but must be a name such as Europe/Berlin."
            ) from error

    def ends_at_ms(self, at_ms: int) -> int | None:
        """When the window that a moment lies in ends, or None where it lies in none; ms since the epoch."""
        moment = pendulum.from_timestamp(at_ms / 1000, tz=self.timezone)
        today = moment.start_of("day")
        # One that began yesterday may reach into today.
        for day in (today.subtract(days=1), today):
            if self.days and DAYS[day.weekday()] not in self.days:
                continue
            begin, end = _at(day, self.begin), _at(day, self.end)
            if end <= begin:
                end = _at(day.add(days=1), self.end)
            if begin <= moment < end:
                return round(end.timestamp() * 1000)
        return None


def blackout_ends_at_ms(blackouts: Iterable[Blackout], at_ms: int) -> int | None:
    """When the last of the windows that a moment lies in ends, or None where it lies in none."""
    return max((end for blackout in blackouts if (end := blackout.ends_at_ms(at_ms)) is not None), default=None)


def _at(day: pendulum.DateTime, time: str) -> pendulum.DateTime:
    hour, minute = time.split(":")
    return day.at(int(hour), int(minute))
