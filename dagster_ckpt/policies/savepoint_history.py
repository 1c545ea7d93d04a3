"""Retention of scheduled savepoints, and blackout windows in which no savepoint is taken. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pendulum
from pendulum.tz.exceptions import InvalidTimezone

from dagster_ckpt.config.durations import iso_duration
from dagster_ckpt.config.validation import Milliseconds, WholeNumber
from dagster_ckpt.errors import OptionError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class Blackout:
    """A window of the day, on all or some days of the week.

    Attributes:
        begin: Local start time, such as "22:00", inclusive.
        end: Local end time, exclusive. A time at or before `begin` is on the next day.
        timezone: Name of the time zone of both. The window follows its daylight saving time.
        days: Days on which the window begins, "mon" to "sun"; empty means every day.

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
        """End of the window that contains a moment, or None if none does; ms since the epoch."""
        moment = pendulum.from_timestamp(at_ms / 1000, tz=self.timezone)
        today = moment.start_of("day")
        # A window that began yesterday may extend into today.
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
    """Latest end of the windows that contain a moment, or None if none does."""
    return max((end for blackout in blackouts if (end := blackout.ends_at_ms(at_ms)) is not None), default=None)


def _at(day: pendulum.DateTime, time: str) -> pendulum.DateTime:
    hour, minute = time.split(":")
    return day.at(int(hour), int(minute))


MAX_COUNT = WholeNumber("max_count", minimum=1)
MAX_AGE = Milliseconds("max_age", minimum=1)


@dataclass(frozen=True)
class SavepointHistory:
    """How many savepoints of one schedule are kept, and for how long.

    The Flink operator's default age of one day is not used here, because a daily schedule would
    keep a single savepoint.

    Attributes:
        max_count: Maximum number (`kubernetes.operator.savepoint.history.max.count`, 10); None
            means unlimited.
        max_age_ms: Maximum age (`kubernetes.operator.savepoint.history.max.age`); None means
            unlimited.

    Raises:
        OptionError: A limit is below 1.

    Example:
        >>> SavepointHistory(max_count=24, max_age_ms=7 * 86_400_000)
        SavepointHistory(max_count=24, max_age_ms=604800000)
    """

    max_count: int | None = 10
    max_age_ms: int | None = None

    def __post_init__(self) -> None:
        if self.max_count is not None:
            MAX_COUNT.checked(self.max_count)
        if self.max_age_ms is not None:
            MAX_AGE.checked(self.max_age_ms)


@dataclass(frozen=True)
class ScheduledSavepoint:
    """A completed savepoint that a schedule took.

    Attributes:
        snapshot_id: Id of the savepoint.
        taken_at_ms: When it was completed.
        held_because: Why it is kept regardless of its age, or None.
    """

    snapshot_id: str
    taken_at_ms: int
    held_because: str | None = None


@dataclass(frozen=True)
class Leaving:
    """A savepoint that exceeds the limits of its history.

    Attributes:
        snapshot_id: Id of the savepoint.
        reason: Why it is removed.
    """

    snapshot_id: str
    reason: str


def leaving_history(
    savepoints: Sequence[ScheduledSavepoint], history: SavepointHistory, *, now_ms: int
) -> list[Leaving]:
    """Return the savepoints of one schedule that exceed the limits of its history, oldest first.

    Args:
        savepoints: The completed savepoints of the schedule, oldest first.
        history: The limits.
        now_ms: The current time, ms since the epoch.

    Example:
        >>> taken = [ScheduledSavepoint("a", 1), ScheduledSavepoint("b", 2), ScheduledSavepoint("c", 3)]
        >>> leaving_history(taken, SavepointHistory(max_count=2), now_ms=4)
        [Leaving(snapshot_id='a', reason='more than 2 of its schedule')]
    """
    leaving = []
    # The newest savepoint is skipped: it is kept regardless of its age.
    for newer, savepoint in enumerate(reversed(savepoints[:-1]), start=1):
        if savepoint.held_because is not None:
            continue
        if history.max_count is not None and newer >= history.max_count:
            leaving.append(Leaving(savepoint.snapshot_id, f"more than {history.max_count} of its schedule"))
        elif history.max_age_ms is not None and now_ms - savepoint.taken_at_ms > history.max_age_ms:
            leaving.append(Leaving(savepoint.snapshot_id, f"older than {iso_duration(history.max_age_ms)}"))
    return leaving[::-1]
