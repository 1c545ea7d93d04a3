"""Detects that a running query has stalled, and since when. Pure functions of values.

A query without new data polls its sources or waits for its next trigger. Both count as activity, and so does a long
batch whose tasks finish one after the other. A stalled query does none of this. It looks alive from outside: it keeps
its lease, and checkpoints of the same batch keep completing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dagster_ckpt.spark.query.progress import QueryActivity, TaskCounts

# Most triggers have finished by then, so tasks are counted only for a slow one.
LOOK_AT_TASKS_AFTER_MS = 10_000


@dataclass(frozen=True)
class QueryInactivity:
    """What a query is doing, and for how long nothing has changed.

    Attributes:
        doing: The status message of Spark.
        is_idle: Whether it waits for its next trigger, for any length of time.
        stalled_for_ms: Time since the last sign of activity.
        tasks: Task counts of its active Spark jobs; None if they were not, or cannot be, counted.
    """

    doing: str
    is_idle: bool
    stalled_for_ms: int
    tasks: TaskCounts | None = None

    def is_over(self, limit_ms: int) -> bool:
        """Whether the query has stalled for longer than a limit. A running task means slow, not stalled."""
        works = self.tasks is not None and self.tasks.running > 0
        return self.stalled_for_ms > limit_ms and not (self.is_idle or works)

    def as_record(self) -> dict[str, Any]:
        """The form that the catalog stores in the progress of an execution."""
        return asdict(self)

    @staticmethod
    def of_record(record: object) -> QueryInactivity | None:
        """Read it from the catalog; None if a version that did not record it wrote the progress."""
        if not isinstance(record, Mapping):
            return None
        try:
            tasks = record.get("tasks")
            return QueryInactivity(
                doing=str(record["doing"]),
                is_idle=bool(record["is_idle"]),
                stalled_for_ms=int(record["stalled_for_ms"]),
                tasks=None if tasks is None else TaskCounts(**tasks),
            )
        except (KeyError, TypeError, ValueError):
            return None


class StallDetector:
    """Tracks the activity of one query.

    Args:
        now_ms: When the query was started, on the clock that `note` uses.
    """

    def __init__(self, now_ms: int) -> None:
        self._moved_at_ms = now_ms
        self._batch: int | None = None
        self._activity: QueryActivity | None = None
        self._tasks: TaskCounts | None = None

    def note(
        self,
        activity: QueryActivity,
        *,
        batch: int | None,
        tasks: Callable[[], TaskCounts | None],
        now_ms: int,
    ) -> QueryInactivity:
        """Note what the query is doing now.

        Args:
            activity: What it is doing.
            batch: The newest batch that it has reported.
            tasks: Counts the tasks of its Spark jobs. Called only if nothing else has changed for a while.
            now_ms: The current time of a monotonic clock.
        """
        if activity.is_idle or activity != self._activity or batch != self._batch:
            self._moved(now_ms)
        self._activity, self._batch = activity, batch
        counts = tasks() if now_ms - self._moved_at_ms >= LOOK_AT_TASKS_AFTER_MS else None
        if counts is not None:
            if self._tasks is not None and counts != self._tasks:
                self._moved(now_ms)
            self._tasks = counts
        return QueryInactivity(activity.doing, activity.is_idle, now_ms - self._moved_at_ms, counts)

    def _moved(self, now_ms: int) -> None:
        self._moved_at_ms = now_ms
        self._tasks = None
