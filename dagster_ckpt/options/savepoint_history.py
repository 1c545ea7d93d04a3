"""Which savepoints of a schedule are still kept: pure rules over values.

The rules are those of the history of the Flink Kubernetes Operator (`SnapshotObserver`): a greatest number, a greatest
age, savepoints that a person took are no part of it, and the newest one always stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.options.allowed_values import Milliseconds, WholeNumber
from dagster_ckpt.options.durations import iso_duration

MAX_COUNT = WholeNumber("max_count", minimum=1)
MAX_AGE = Milliseconds("max_age", minimum=1)


@dataclass(frozen=True)
class SavepointHistory:
    """How many savepoints of one schedule are kept, and how long.

    The operator's default age of one day is not one here: a daily schedule would keep a single savepoint.

    Attributes:
        max_count: How many (`kubernetes.operator.savepoint.history.max.count`, 10); None for any number.
        max_age_ms: How old they get (`kubernetes.operator.savepoint.history.max.age`); None for any age.

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
        image_id: Its id.
        taken_at_ms: When it was completed.
        held_because: Why it stays whatever its age, or None.
    """

    image_id: str
    taken_at_ms: int
    held_because: str | None = None


@dataclass(frozen=True)
class Leaving:
    """A savepoint that the history has no room for.

    Attributes:
        image_id: Its id.
        reason: Why it goes.
    """

    image_id: str
    reason: str


def leaving_history(
    savepoints: Sequence[ScheduledSavepoint], history: SavepointHistory, *, now_ms: int
) -> list[Leaving]:
    """The savepoints of one schedule that its history has no room for, oldest first.

    Args:
        savepoints: The completed savepoints of the schedule, oldest first.
        history: The limits.
        now_ms: The time now, ms since the epoch.

    Example:
        >>> taken = [ScheduledSavepoint("a", 1), ScheduledSavepoint("b", 2), ScheduledSavepoint("c", 3)]
        >>> leaving_history(taken, SavepointHistory(max_count=2), now_ms=4)
        [Leaving(image_id='a', reason='more than 2 of its schedule')]
    """
    leaving = []
    # The newest is passed over: it is kept whatever its age.
    for newer, savepoint in enumerate(reversed(savepoints[:-1]), start=1):
        if savepoint.held_because is not None:
            continue
        if history.max_count is not None and newer >= history.max_count:
            leaving.append(Leaving(savepoint.image_id, f"more than {history.max_count} of its schedule"))
        elif history.max_age_ms is not None and now_ms - savepoint.taken_at_ms > history.max_age_ms:
            leaving.append(Leaving(savepoint.image_id, f"older than {iso_duration(history.max_age_ms)}"))
    return leaving[::-1]
