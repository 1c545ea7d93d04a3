"""Triggers: when the next periodic checkpoint is due, and windows in which nothing is taken."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Protocol, runtime_checkable
from zoneinfo import ZoneInfo

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies import Combinable, Combination
from dagster_ckpt.values.durations import checked_timezone, local_time
from dagster_ckpt.values.validation import Milliseconds, WholeNumber, policy_name, type_error

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriggerProgress:
    """Progress of the running query. Times are of a monotonic clock, except `wall_ms`.

    Attributes:
        wall_ms: Now, since the epoch.
        share: Random, from 0 up to 1, so that streams that start together take checkpoints at different times.
        last_due_ms: When the last periodic checkpoint was due; None before the first one.
        last_completed_ms: When a snapshot, periodic or not, was last completed.
        batches: Committed since the last periodic trigger, or the start; `rows` are their input rows.
    """

    now_ms: int
    wall_ms: int
    started_ms: int
    share: float = 0.0
    last_due_ms: int | None = None
    last_triggered_ms: int | None = None
    last_completed_ms: int | None = None
    batches: int = 0
    rows: int = 0


@runtime_checkable
class TriggerPolicy(Protocol):
    """Decides when the next periodic checkpoint is due. Any object with this method is a policy.

    Example:
        >>> class WhenIdleFor:
        ...     def due_at_ms(self, progress):
        ...         return None if progress.batches == 0 else progress.now_ms
        >>> policy = Interval(60_000) & WhenIdleFor()
    """

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        """Return when a checkpoint is due, on the clock of `progress.now_ms`; now or earlier if it is due.

        None: ask again after further progress.
        """


def checked_trigger(policy: object) -> TriggerPolicy:
    if not isinstance(policy, TriggerPolicy) or isinstance(policy, type):
        allowed = (
            "a policy such as Interval(60_000) | EveryBatches(100), or an object of your own with a method "
            "due_at_ms(progress)"
        )
        raise type_error("trigger", policy, allowed)
    return policy


class _Rule(Combinable[TriggerPolicy]):
    """A policy of this package."""


INTERVAL = Milliseconds("checkpoint interval", minimum=10)
FIRST_AFTER = Milliseconds("first_after", minimum=0)
PAUSE = Milliseconds("min pause between checkpoints", minimum=0)
BATCHES = WholeNumber("batches", minimum=1)
ROWS = WholeNumber("rows", minimum=1)


@dataclass(frozen=True)
class Interval(_Rule):
    """Trigger at a fixed rate, like Flink's coordinator.

    Missed times are skipped: catching up would take the same snapshot again.

    Attributes:
        interval_ms: Ms or a timedelta, from 10 ms.
        first_after_ms: The first one is due at a random time between this and the interval.
    """

    interval_ms: int | timedelta
    first_after_ms: int | timedelta = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval_ms", INTERVAL.checked(self.interval_ms))
        object.__setattr__(self, "first_after_ms", FIRST_AFTER.checked(self.first_after_ms))
        if FIRST_AFTER.checked(self.first_after_ms) > INTERVAL.checked(self.interval_ms):
            raise OptionError(
                f"first_after is {self.first_after_ms} ms, but must be at most the interval, {self.interval_ms} ms."
            )

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        period_ms, first_ms = INTERVAL.checked(self.interval_ms), FIRST_AFTER.checked(self.first_after_ms)
        if progress.last_due_ms is None or progress.last_triggered_ms is None:
            return progress.started_ms + first_ms + int(progress.share * (period_ms - first_ms + 1))
        missed = (progress.last_triggered_ms - progress.last_due_ms) // period_ms
        return progress.last_due_ms + (missed + 1) * period_ms


@dataclass(frozen=True)
class MinPause(_Rule):
    """Trigger no sooner than a pause, ms or a timedelta, after the last completed snapshot. Combine it with `&`."""

    pause_ms: int | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "pause_ms", PAUSE.checked(self.pause_ms))

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        """Return when it is due; at once if no snapshot was completed yet."""
        if progress.last_completed_ms is None:
            return progress.started_ms
        return progress.last_completed_ms + PAUSE.checked(self.pause_ms)


@dataclass(frozen=True)
class EveryBatches(_Rule):
    """Trigger after a number of committed batches, from 1."""

    batches: int

    def __post_init__(self) -> None:
        BATCHES.checked(self.batches)

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        return progress.now_ms if progress.batches >= self.batches else None


@dataclass(frozen=True)
class EveryRows(_Rule):
    """Trigger after a number of input rows, from 1. Spark reports rows, not bytes."""

    rows: int

    def __post_init__(self) -> None:
        ROWS.checked(self.rows)

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        return progress.now_ms if progress.rows >= self.rows else None


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class Blackout:
    """A window of the day, on all or some days of the week.

    Attributes:
        begin: Local time, such as "22:00", inclusive.
        end: Exclusive; at or before `begin`: on the next day.
        timezone: Of both, with daylight saving time.
        days: On which the window begins, "mon" to "sun"; empty: every day.

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
            if not isinstance(value, str) or not _TIME.fullmatch(value):
                raise OptionError(f"{name} of a blackout is {value!r}, but must be a time from 00:00 to 23:59.")
        object.__setattr__(self, "days", tuple(self.days))
        unknown = [day for day in self.days if day not in DAYS]
        if unknown:
            raise OptionError(f"days of a blackout are {unknown!r}, but must be of {', '.join(DAYS)}.")
        checked_timezone("timezone of a blackout", self.timezone)

    def ends_at_ms(self, at_ms: int) -> int | None:
        """End of the window that contains a moment, both since the epoch."""
        today = local_time(at_ms, self.timezone).date()
        # A window that began yesterday may extend into today.
        for day in (today - timedelta(days=1), today):
            if self.days and DAYS[day.weekday()] not in self.days:
                continue
            # The texts are compared: when clocks go forward, one of the times may not exist.
            last_day = day + timedelta(days=1) if self.end <= self.begin else day
            zone = ZoneInfo(self.timezone)
            begin_ms = _at_ms(day, self.begin, zone, is_first=True)
            end_ms = _at_ms(last_day, self.end, zone, is_first=False)
            if begin_ms <= at_ms < end_ms:
                return end_ms
        return None


def blackout_ends_at_ms(blackouts: Iterable[Blackout], at_ms: int) -> int | None:
    return max((end for blackout in blackouts if (end := blackout.ends_at_ms(at_ms)) is not None), default=None)


def _at_ms(day: date, time: str, zone: ZoneInfo, *, is_first: bool) -> int:
    """A local time in ms since the epoch: of one that comes twice, the first or last.

    One that is left out is moved past the gap.
    """
    hour, minute = map(int, time.split(":"))
    moment = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
    exists = moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == moment.replace(tzinfo=None)
    return round(moment.replace(fold=0 if is_first or not exists else 1).timestamp() * 1000)


@dataclass(frozen=True, init=False)
class OutsideBlackouts(_Rule):
    """Trigger at no time during a blackout. Combine it with `&`.

    A checkpoint that falls into a window is taken at its end, requested ones at any time.
    """

    blackouts: tuple[Blackout, ...]

    def __init__(self, *blackouts: Blackout) -> None:
        if not blackouts or not all(isinstance(each, Blackout) for each in blackouts):
            raise OptionTypeError(f"blackouts is {blackouts!r}, but must be one Blackout('22:00', '06:00') or more.")
        object.__setattr__(self, "blackouts", blackouts)

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        over_ms = blackout_ends_at_ms(self.blackouts, progress.wall_ms)
        return progress.started_ms if over_ms is None else progress.now_ms + over_ms - progress.wall_ms

    def __repr__(self) -> str:
        return f"OutsideBlackouts({', '.join(map(repr, self.blackouts))})"


class AnyOf(Combination[TriggerPolicy], _Rule):
    """Trigger as soon as one policy says so: `first | second`."""

    sign = "|"
    checked = checked_trigger

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        times = [policy.due_at_ms(progress) for policy in self.policies]
        return min((time for time in times if time is not None), default=None)


class AllOf(Combination[TriggerPolicy], _Rule):
    """Trigger once every policy says so: `first & second`."""

    sign = "&"
    checked = checked_trigger

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        times = [policy.due_at_ms(progress) for policy in self.policies]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None


_Rule.any_of, _Rule.all_of = AnyOf, AllOf


def known_interval_ms(policy: TriggerPolicy) -> int | None:
    """The longest time between checkpoints while a query makes progress, for health and freshness.

    None: no limit, as for own policies, rows, batches and blackouts.
    """
    match policy:
        case Interval(interval_ms=time) | MinPause(pause_ms=time):
            return PAUSE.checked(time)
        case AnyOf(policies=members):
            known = [each for each in map(known_interval_ms, members) if each is not None]
            return min(known, default=None)
        case AllOf(policies=members):
            known = [each for each in map(known_interval_ms, members) if each is not None]
            return max(known) if len(known) == len(members) else None
        case _:
            return None


# An unneeded checkpoint costs less than a missing one.
FALLBACK_TRIGGER = Interval(60_000)


class GuardedTrigger:
    """A trigger policy, or `FALLBACK_TRIGGER` while that raises or returns no time."""

    def __init__(self, policy: TriggerPolicy) -> None:
        self._policy = policy
        self._logged: str | None = None

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        try:
            answer: object = self._policy.due_at_ms(progress)
            problem = f"it returned {answer!r}, which is neither a time in ms nor None"
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            answer, problem = "", f"{type(error).__name__}: {error}"
        if answer is None or (isinstance(answer, int) and not isinstance(answer, bool)):
            self._logged = None
            return answer
        if problem != self._logged:
            self._logged = problem
            _LOG.warning(
                "Trigger policy %s failed, so %s applies: %s", policy_name(self._policy), FALLBACK_TRIGGER, problem
            )
        return FALLBACK_TRIGGER.due_at_ms(progress)
