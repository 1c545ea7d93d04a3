"""`KeepRules`: restic's rules of `forget`, with the reason for each kept snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies.retention import NewestPer, Period, RetainedSnapshot, RetentionContext, Rule
from dagster_ckpt.values.durations import checked_timezone, rounded_duration
from dagster_ckpt.values.validation import Milliseconds, WholeNumber

_PERIODS = {
    "hourly": Period.HOUR,
    "daily": Period.DAY,
    "weekly": Period.WEEK,
    "monthly": Period.MONTH,
    "yearly": Period.YEAR,
}


@dataclass(frozen=True, kw_only=True, repr=False)
class KeepRules(Rule):
    """Keep what at least one of restic's rules keeps.

    A periodic rule keeps the newest snapshot of each of the last periods that have one and, as in restic, also the
    oldest snapshot if it may keep more than there are.

    Attributes:
        last: The newest snapshots; -1: all.
        hourly: The newest snapshot of each of so many hours; -1: of each hour. The same for `daily` to `yearly`.
        weekly: Weeks begin on Monday.
        within_ms: All that are less than so much older than the newest one, ms or a timedelta.
        within_hourly_ms: Of those, the newest one of each hour. The same for `within_daily_ms` to `within_yearly_ms`.
        labels: Those with one of these labels, or with one that matches, such as "release-*".
        timezone: In which a day begins.

    Example:
        >>> KeepRules(last=3, daily=7, labels=["release-*"])
        KeepRules(last=3, daily=7, labels=('release-*',))
    """

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within_ms: int | timedelta = 0
    within_hourly_ms: int | timedelta = 0
    within_daily_ms: int | timedelta = 0
    within_weekly_ms: int | timedelta = 0
    within_monthly_ms: int | timedelta = 0
    within_yearly_ms: int | timedelta = 0
    labels: Sequence[str] = ()
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        for name in ("last", *_PERIODS):
            WholeNumber(name, minimum=-1).checked(getattr(self, name))
        for name in ("within_ms", *(f"within_{period}_ms" for period in _PERIODS)):
            object.__setattr__(self, name, Milliseconds(name, minimum=0).checked(getattr(self, name)))
        if isinstance(self.labels, str) or not all(isinstance(each, str) for each in self.labels):
            raise OptionError(f"labels is {self.labels!r}, but must be a list of labels, such as ['release-*'].")
        object.__setattr__(self, "labels", tuple(self.labels))
        checked_timezone("timezone", self.timezone)
        if not any(self._is_given(each) for each in fields(self) if each.name != "timezone"):
            raise OptionError("KeepRules has no rule, and would keep nothing. Give one, such as daily=7.")

    def __repr__(self) -> str:
        given = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if self._is_given(each))
        return f"KeepRules({', '.join(given)})"

    def _is_given(self, option: Field[Any]) -> bool:
        return bool(getattr(self, option.name) != option.default)

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        reasons = self.reasons(snapshots, context)
        return [snapshot for snapshot in snapshots if snapshot.snapshot_id in reasons]

    def reasons(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> dict[str, tuple[str, ...]]:
        del context
        found: dict[str, list[str]] = {}
        for rule in self._rules(snapshots):
            for snapshot, reason in rule:
                found.setdefault(snapshot.snapshot_id, []).append(reason)
        return {snapshot_id: tuple(reasons) for snapshot_id, reasons in found.items()}

    def _rules(self, snapshots: Sequence[RetainedSnapshot]) -> Iterator[Iterator[tuple[RetainedSnapshot, str]]]:
        newest_first = snapshots[::-1]
        yield _of_each(newest_first, self.last, lambda snapshot: snapshot.snapshot_id, "last", snapshots[:1])
        for name, period in _PERIODS.items():
            begin = NewestPer(period, 1, self.timezone).begin
            yield _of_each(newest_first, getattr(self, name), begin, name, snapshots[:1])
            recent, reason = self._within(newest_first, f"within_{name}_ms")
            yield _of_each(recent, -1, begin, f"{name} {reason}", snapshots[:1])
        recent, reason = self._within(newest_first, "within_ms")
        yield ((each, reason) for each in recent)
        yield (
            (each, f"label {each.label}")
            for each in newest_first
            if each.label is not None and any(fnmatchcase(each.label, pattern) for pattern in self.labels)
        )

    def _within(self, newest_first: Sequence[RetainedSnapshot], option: str) -> tuple[list[RetainedSnapshot], str]:
        within_ms: int = getattr(self, option)
        recent = [each for each in newest_first if each.taken_at_ms > newest_first[0].taken_at_ms - within_ms]
        return recent, f"within {rounded_duration(within_ms)}"


def _of_each(
    newest_first: Sequence[RetainedSnapshot],
    count: int,
    period_of: Callable[[RetainedSnapshot], object],
    reason: str,
    oldest: Sequence[RetainedSnapshot],
) -> Iterator[tuple[RetainedSnapshot, str]]:
    """Newest snapshot of each of `count` periods (-1: all), plus the oldest one if more may be kept."""
    last, left = None, count
    for snapshot in newest_first:
        period = period_of(snapshot)
        if left != 0 and (period != last or snapshot in oldest):
            yield snapshot, reason if period != last else f"oldest {reason}"
            last, left = period, left - 1
