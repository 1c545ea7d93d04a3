"""Durations, times, sizes and messages as text for people, PyFlink's `Duration`, clocks and time zones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dagster_ckpt.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    import pendulum


_MS_PER_SECOND = 1_000
_MS_PER_MINUTE = 60 * _MS_PER_SECOND
_DAYS_FROM = 2
_MS_PER_HOUR = 60 * _MS_PER_MINUTE


class Duration(timedelta):
    """PyFlink's `pyflink.common.Duration`: a timedelta with that class's constructors."""

    @classmethod
    def of_days(cls, days: int) -> Duration:
        return cls._of(days=days)

    @classmethod
    def of_hours(cls, hours: int) -> Duration:
        return cls._of(hours=hours)

    @classmethod
    def of_minutes(cls, minutes: int) -> Duration:
        return cls._of(minutes=minutes)

    @classmethod
    def of_seconds(cls, seconds: int) -> Duration:
        return cls._of(seconds=seconds)

    @classmethod
    def of_millis(cls, millis: int) -> Duration:
        return cls._of(milliseconds=millis)

    @classmethod
    def of_nanos(cls, nanos: int) -> Duration:
        """Return a duration of whole microseconds; the rest is dropped."""
        return cls._of(microseconds=nanos // 1_000)

    @classmethod
    def _of(cls, **amount: int) -> Duration:
        try:
            return cls(**amount)
        except OverflowError as error:
            raise OptionError(f"duration is {amount}, but must be at most {cls.max.days} days.") from error
        except TypeError as error:
            raise OptionTypeError(f"duration is {amount}, but must be a whole number.") from error


def iso_duration(duration_ms: int) -> str:
    """Format milliseconds like Java's `Duration.toString`, which Flink's descriptions use.

    Example:
        >>> iso_duration(61_500), iso_duration(0), iso_duration(-1)
        ('PT1M1.5S', 'PT0S', 'PT-0.001S')
    """
    sign = "-" if duration_ms < 0 else ""
    hours, below_hour = divmod(abs(duration_ms), _MS_PER_HOUR)
    minutes, below_minute = divmod(below_hour, _MS_PER_MINUTE)
    seconds, millis = divmod(below_minute, _MS_PER_SECOND)
    text = f"{sign}{hours}H" if hours else ""
    text += f"{sign}{minutes}M" if minutes else ""
    if seconds or millis or not text:
        fraction = f".{millis:03d}".rstrip("0") if millis else ""
        text += f"{sign}{seconds}{fraction}S"
    return f"PT{text}"


def utc_time(at_ms: int) -> str:
    """Format a time since the epoch; one outside of the years 1 to 9999 is a number of milliseconds."""
    try:
        return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def rounded_duration(duration_ms: int) -> str:
    """Format milliseconds in their two largest units.

    Example:
        >>> [rounded_duration(ms) for ms in (82, 1_500, 10_000, 61_500, 1_200_000, 7_260_000, 270_000_000)]
        ['82 ms', '1.5 s', '10 s', '1 min 1 s', '20 min', '2 h 1 min', '3 d 3 h']
    """
    if duration_ms < _MS_PER_SECOND:
        return f"{duration_ms} ms"
    if duration_ms < _MS_PER_MINUTE:
        return f"{duration_ms / _MS_PER_SECOND:.1f}".removesuffix(".0") + " s"
    minutes, seconds = divmod(duration_ms // _MS_PER_SECOND, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days >= _DAYS_FROM:
        units = (days, "d"), (hours_of_day, "h")
    elif hours:
        units = (hours, "h"), (minutes, "min")
    else:
        units = (minutes, "min"), (seconds, "s")
    return " ".join(f"{number} {unit}" for number, unit in units if number)


def checked_timezone(option: str, timezone: str) -> str:
    allowed = "must be a name such as UTC or Europe/Berlin"
    if not isinstance(timezone, str):
        raise OptionTypeError(f"{option} is {timezone!r}, but {allowed}.")
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise OptionError(f"{option} is {timezone!r}, but {allowed}.") from error
    return timezone


def local_time(at_ms: int, timezone: str) -> pendulum.DateTime:
    # Slow to import; only policies that follow a calendar need it.
    import pendulum  # noqa: PLC0415

    return pendulum.from_timestamp(at_ms / 1000, tz=timezone)


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: int | None) -> str:
    if count is None:
        return "unknown size"
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


Clock = Callable[[], int]


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


_LONGEST = 160


def headline(message: str) -> str:
    """The first line of a message, cut after a clause or a word if it is long."""
    whole = message.strip()
    first = whole.split("\n", 1)[0].rstrip()
    if len(first) > _LONGEST:
        start = first[:_LONGEST]
        ends = [found.end() for found in re.finditer(r"[.;:](?=\s)", start)]
        first = start[: ends[-1]] if ends and ends[-1] > _LONGEST // 3 else start.rsplit(" ", 1)[0]
    return first if first == whole else f"{first} …"
