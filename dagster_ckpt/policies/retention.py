"""Retention: which snapshots a stream keeps while it runs, at its end, and in the history of a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from itertools import accumulate, islice
from typing import Any, Protocol, runtime_checkable

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies import Combinable, Combination
from dagster_ckpt.values.durations import checked_timezone, local_time, rounded_duration
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from dagster_ckpt.values.validation import LONG_MAX, Milliseconds, WholeNumber, policy_name, type_error

_LOG = logging.getLogger(__name__)


class RetainedKind(Enum):
    """Kind of a snapshot in the retained queue.

    Attributes:
        CHECKPOINT: Owned by the stream, which deletes it: a checkpoint, or a claimed savepoint.
        SAVEPOINT: Requested by a user. It may leave the queue, but its data is not deleted.
        STOP_WITH_SAVEPOINT: A savepoint after which the stream takes no further snapshot.
    """

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"


@dataclass(frozen=True)
class RetainedSnapshot:
    """A completed snapshot, for policies.

    Attributes:
        taken_at_ms: When it was completed, by the catalog's clock, since the epoch.
        number: The n of `chk-<n>`.
        full_bytes: Bytes that a restore reads.
        new_bytes: Bytes that it shares with no older snapshot.
        is_verified: False also if it was never verified.
        objects: Bytes of the data objects that it needs, by name; only for `MaxBytes`, and empty if unknown.
    """

    snapshot_id: str
    kind: RetainedKind = RetainedKind.CHECKPOINT
    taken_at_ms: int = 0
    number: int = 0
    batch_id: int | None = None
    full_bytes: int = 0
    new_bytes: int = 0
    is_verified: bool = False
    label: str | None = None
    objects: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class RetentionContext:
    """What a policy may need besides the snapshots.

    Attributes:
        now_ms: By the catalog's clock, as the snapshots.
        ended_as: None while the stream runs.
    """

    now_ms: int
    ended_as: TerminalState | None = None


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which snapshots to keep. Any object with this method is a policy.

    Example:
        >>> class NewestVerified:
        ...     def keep(self, snapshots, context):
        ...         verified = [snapshot for snapshot in snapshots if snapshot.is_verified]
        ...         return verified[-1:]
        >>> policy = Latest(3) | NewestVerified()
    """

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        """Return the snapshots to keep of those that exist, oldest state first, never by a clock."""


def checked_retention(policy: object) -> RetentionPolicy:
    if not isinstance(policy, RetentionPolicy) or isinstance(policy, type):
        allowed = (
            "a policy such as Latest(3) | NewestPer('day', 7), or an object of your own with a method keep(snapshots, "
            "context)"
        )
        raise type_error("retention", policy, allowed)
    return policy


class Rule(Combinable[RetentionPolicy]):
    """A policy of this package."""


COUNT = WholeNumber("count", minimum=1)
MAX_COUNT = WholeNumber("max_count", minimum=1)
AGE = Milliseconds("max_age", minimum=1)
DISTANCE = Milliseconds("distance", minimum=1)
LIMIT = WholeNumber("limit", minimum=1, maximum=LONG_MAX, unit="of bytes")


@dataclass(frozen=True)
class Latest(Rule):
    """Keep the newest snapshots, from 1: Flink's `num-retained`."""

    count: int = 1

    def __post_init__(self) -> None:
        COUNT.checked(self.count)

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        del context
        return snapshots[-self.count :]


@dataclass(frozen=True)
class YoungerThan(Rule):
    """Keep snapshots up to an age, ms or a timedelta.

    Combine it with `Latest`, or an idle stream keeps only its newest one.
    """

    max_age_ms: int | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_age_ms", AGE.checked(self.max_age_ms))

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        since_ms = context.now_ms - AGE.checked(self.max_age_ms)
        return [snapshot for snapshot in snapshots if snapshot.taken_at_ms >= since_ms]


@dataclass(frozen=True)
class Every(Rule):
    """Keep snapshots that are at least a time apart, ms or a timedelta, beginning with the oldest one.

    Nothing leaves by age. To thin out a limited past, combine it:
    `Every(timedelta(hours=6)) & YoungerThan(timedelta(days=7))`.
    """

    distance_ms: int | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "distance_ms", DISTANCE.checked(self.distance_ms))

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        del context
        distance_ms = DISTANCE.checked(self.distance_ms)
        kept: list[RetainedSnapshot] = []
        for snapshot in snapshots:
            if not kept or snapshot.taken_at_ms - kept[-1].taken_at_ms >= distance_ms:
                kept.append(snapshot)
        return kept


class Period(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"


@dataclass(frozen=True)
class NewestPer(Rule):
    """Keep the newest snapshot of each of the last periods, like `keep-daily` of restic.

    Periods without a snapshot do not count.

    Attributes:
        period: "hour", "day", "week", "month" or "year", which begin in `timezone`.
        count: Number of periods, from 1.

    Example:
        >>> NewestPer("day", 7, timezone="Europe/Berlin")
        NewestPer(period=<Period.DAY: 'day'>, count=7, timezone='Europe/Berlin')
    """

    period: Period | str
    count: int
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if self.period not in tuple(Period):
            raise OptionError(f"period is {self.period!r}, but must be one of {', '.join(Period)}.")
        object.__setattr__(self, "period", Period(self.period))
        COUNT.checked(self.count)
        checked_timezone("timezone", self.timezone)

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        del context
        newest = {self.begin(snapshot): snapshot for snapshot in snapshots}
        return [newest[begin] for begin in sorted(newest)[-self.count :]]

    def begin(self, snapshot: RetainedSnapshot) -> float:
        """The begin of a snapshot's period, in seconds since the epoch: an hour that comes twice is two periods."""
        taken = local_time(snapshot.taken_at_ms, self.timezone)
        return taken.start_of(Period(self.period).value).timestamp()


@dataclass(frozen=True)
class MaxBytes(Rule):
    """Keep the newest snapshots that together take at most `limit` bytes, and the newest one in any case.

    Objects that snapshots share count once.

    Attributes:
        of: Only what this policy keeps, such as one that thins out the past; None: all.

    Example:
        >>> MaxBytes(500 * 10**9, of=NewestPer("day", 30))
        MaxBytes(limit=500000000000, of=NewestPer(period=<Period.DAY: 'day'>, count=30, timezone='UTC'))
    """

    limit: int
    of: RetentionPolicy | None = None

    def __post_init__(self) -> None:
        LIMIT.checked(self.limit)
        if self.of is not None:
            checked_retention(self.of)

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        chosen = set(snapshots if self.of is None else self.of.keep(snapshots, context))
        candidates = [snapshot for snapshot in snapshots if snapshot in chosen]
        kept: list[RetainedSnapshot] = []
        growing = accumulate(_growing(candidates, snapshots), max)
        for snapshot, together in zip(reversed(candidates), growing, strict=True):
            if kept and together > self.limit:
                break
            kept.insert(0, snapshot)
        return kept


def bytes_of(kept: Sequence[RetainedSnapshot], snapshots: Sequence[RetainedSnapshot]) -> int:
    """Bytes that some of the snapshots, oldest first, take in storage; what they share counts once.

    If the objects of one are unknown, this is an upper bound by what was new in each of `snapshots`.
    """
    return max(_growing(kept, snapshots), default=0)


def _growing(kept: Sequence[RetainedSnapshot], snapshots: Sequence[RetainedSnapshot]) -> Iterator[int]:
    """Bytes of the newest one, of the two newest ones, and so on."""
    if all(snapshot.objects for snapshot in kept):
        used: dict[str, int] = {}
        total = 0
        for snapshot in reversed(kept):
            for name, length in snapshot.objects.items():
                total += max(0, length - used.get(name, 0))
                used[name] = max(length, used.get(name, 0))
            yield total
        return
    wanted, since, later = {snapshot.snapshot_id for snapshot in kept}, 0, 0
    newest: RetainedSnapshot | None = None
    for snapshot in reversed(snapshots):
        if snapshot.snapshot_id in wanted:
            # The newer one adds at most what was new since, and at most all that it has.
            later += min(since, newest.full_bytes) if newest is not None else 0
            yield later + snapshot.full_bytes
            newest, since = snapshot, 0
        since += snapshot.new_bytes


def needs_objects(policy: object) -> bool:
    inner = [*getattr(policy, "policies", ()), getattr(policy, "of", None)]
    return isinstance(policy, MaxBytes) or any(needs_objects(each) for each in inner if each is not None)


class AnyOf(Combination[RetentionPolicy], Rule):
    """Keep what at least one policy keeps: `first | second`."""

    sign = "|"
    checked = checked_retention

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        answers = [set(policy.keep(snapshots, context)) for policy in self.policies]
        return [snapshot for snapshot in snapshots if any(snapshot in answer for answer in answers)]


class AllOf(Combination[RetentionPolicy], Rule):
    """Keep what every policy keeps: `first & second`."""

    sign = "&"
    checked = checked_retention

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        answers = [set(policy.keep(snapshots, context)) for policy in self.policies]
        return [snapshot for snapshot in snapshots if all(snapshot in answer for answer in answers)]


Rule.any_of, Rule.all_of = AnyOf, AllOf


@dataclass(frozen=True)
class SavepointHistory(Rule):
    """How many savepoints of one schedule are kept, and for how long; None: no limit.

    Named as in the Flink operator (`kubernetes.operator.savepoint.history.max.count`, `.age`), without its default age
    of one day: a daily schedule would keep one savepoint.

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
            AGE.checked(self.max_age_ms)

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        limits: list[RetentionPolicy] = []
        if self.max_count is not None:
            limits.append(Latest(self.max_count))
        if self.max_age_ms is not None:
            limits.append(YoungerThan(self.max_age_ms))
        return AllOf(*limits).keep(snapshots, context) if limits else snapshots


def reasons_to_keep(
    policy: RetentionPolicy, snapshots: Sequence[RetainedSnapshot], context: RetentionContext
) -> dict[str, tuple[str, ...]]:
    """Why a policy keeps each snapshot, by id: its own `reasons`, else its name."""
    if isinstance(policy, AnyOf | AllOf):
        kept = {snapshot.snapshot_id for snapshot in policy.keep(snapshots, context)}
        answers = [reasons_to_keep(each, snapshots, context) for each in policy.policies]
        return {name: tuple(why for answer in answers for why in answer.get(name, ())) for name in kept}
    kept = {snapshot.snapshot_id for snapshot in policy.keep(snapshots, context)}
    if isinstance(policy, MaxBytes) and policy.of is not None:
        told = reasons_to_keep(policy.of, snapshots, context)
    else:
        tells = getattr(policy, "reasons", None)
        told = tells(snapshots, context) if tells is not None else {}
    return {name: tuple(told.get(name, (policy_name(policy),))) for name in kept}


_KEPT_AT: dict[ExternalizedCheckpointCleanup, frozenset[TerminalState]] = {
    ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS: frozenset(),
    ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION: frozenset({TerminalState.FAILED}),
    ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION: frozenset(
        {TerminalState.CANCELED, TerminalState.FAILED, TerminalState.SUSPENDED}
    ),
}


@dataclass(frozen=True)
class KeepAtEnd(Rule):
    """Keep all or none when a stream ends (Flink's `CheckpointProperties`), and all while it runs.

    A stream that stopped with a savepoint is FINISHED: its checkpoints are deleted under every option.
    """

    cleanup: ExternalizedCheckpointCleanup

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        is_kept = context.ended_as is None or context.ended_as in _KEPT_AT[self.cleanup]
        return snapshots if is_kept else ()


def deletes_live_directory(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Spark's own checkpoint directory is deleted after a cancellation under DELETE_ON_CANCELLATION only."""
    return state is TerminalState.CANCELED and cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


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
        hourly: The newest snapshot of each of this many hours; -1: of each hour. The same for `daily` to `yearly`.
        weekly: Weeks begin on Monday.
        within_ms: All that are less than this much older than the newest one, ms or a timedelta.
        within_hourly_ms: Of those, the newest one of each hour. The same for `within_daily_ms` to `within_yearly_ms`.
        labels: Those with one of these labels, or with one that matches, such as "release-*".

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
    last, left = None, count
    for snapshot in newest_first:
        period = period_of(snapshot)
        if left != 0 and (period != last or snapshot in oldest):
            yield snapshot, reason if period != last else f"oldest {reason}"
            last, left = period, left - 1


class KeptBecause(Enum):
    """Why a snapshot stays; PROVEN: it is the newest one whose state was loaded."""

    POLICY = "POLICY"
    NEWEST = "NEWEST"
    PROVEN = "PROVEN"
    IN_USE = "IN_USE"
    POLICY_FAILED = "POLICY_FAILED"


@dataclass(frozen=True)
class RetentionDecision:
    """`kept` has reasons by snapshot id, `dropped` is oldest first; `problem`: why the policy's answer was not used."""

    kept: Mapping[str, KeptBecause]
    dropped: tuple[RetainedSnapshot, ...] = ()
    problem: str | None = field(default=None, compare=False)


def needed_for_recovery(snapshots: Sequence[RetainedSnapshot]) -> dict[str, KeptBecause]:
    """What no policy may drop: of snapshots oldest first, the newest one and the newest checkpoint.

    A user may delete a savepoint, and later incremental checkpoints may refer to the newest checkpoint. As in Flink, a
    stream that stopped with a savepoint needs none.
    """
    if not snapshots:
        return {}
    newest, checkpoint = snapshots[-1], _newest_checkpoint(snapshots)
    needed = {newest.snapshot_id: KeptBecause.NEWEST}
    if checkpoint is not None and newest.kind is not RetainedKind.STOP_WITH_SAVEPOINT:
        needed[checkpoint.snapshot_id] = KeptBecause.NEWEST
    return needed


def needed_of_history(
    savepoints: Sequence[RetainedSnapshot], held: Collection[str], *, broken: Collection[str] = ()
) -> dict[str, KeptBecause]:
    """What no history may drop: the newest savepoint, the newest one not known to be `broken`, and those `held`."""
    intact = [snapshot for snapshot in savepoints if snapshot.snapshot_id not in broken]
    newest = {snapshot.snapshot_id: KeptBecause.NEWEST for snapshot in (*savepoints[-1:], *intact[-1:])}
    return newest | dict.fromkeys(held, KeptBecause.IN_USE)


def decide_retention(
    policy: RetentionPolicy,
    snapshots: Sequence[RetainedSnapshot],
    context: RetentionContext,
    *,
    needed: Mapping[str, KeptBecause],
) -> RetentionDecision:
    """Ask a policy which snapshots, oldest first, stay; `needed` ones stay regardless.

    A policy that raises, or answers with other snapshots, drops nothing; this is logged.
    """
    try:
        # An answer that never ends is refused as well.
        answers = list(islice(policy.keep(tuple(snapshots), context), len(snapshots) + 1))
        answer = frozenset(answers)
        unknown = answer - frozenset(snapshots)
        problem = f"it returned {next(iter(unknown))!r}, which is not one of the snapshots" if unknown else None
        if len(answers) > len(snapshots):
            problem = problem or f"it returned more than the {len(snapshots)} existing snapshots"
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        answer, problem = frozenset(), f"{type(error).__name__}: {error}"
    if problem is not None:
        _LOG.warning("Retention policy %s failed, so nothing is deleted: %s", policy_name(policy), problem)
        return RetentionDecision({each.snapshot_id: KeptBecause.POLICY_FAILED for each in snapshots}, (), problem)
    kept = {each.snapshot_id: KeptBecause.POLICY for each in snapshots if each in answer}
    kept |= {each.snapshot_id: needed[each.snapshot_id] for each in snapshots if each.snapshot_id in needed}
    return RetentionDecision(kept, tuple(each for each in snapshots if each.snapshot_id not in kept))


def snapshot_to_recover_from(
    snapshots: Sequence[RetainedSnapshot], *, prefer_checkpoint: bool
) -> RetainedSnapshot | None:
    if not snapshots:
        return None
    if not prefer_checkpoint:
        return snapshots[-1]
    return _newest_checkpoint(snapshots) or snapshots[-1]


def _newest_checkpoint(snapshots: Sequence[RetainedSnapshot]) -> RetainedSnapshot | None:
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.kind is RetainedKind.CHECKPOINT), None)
