"""Since when a running query stands still: neither a batch, nor a step of one, nor a rest between two. Pure.

A query that has nothing to do looks for new data all the time, or waits for its next trigger: both are signs of life.
A batch that takes long is one too, as long as its tasks come to their ends. What is left is a query that is alive for
everybody, keeps its lease and has snapshots taken of the same batch for ever, and makes no progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dagster_ckpt.spark.query.activity import QueryActivity, TaskCounts

# Most triggers are over by then; only of one that is not are the tasks looked at.
LOOK_AT_TASKS_AFTER_MS = 10_000


@dataclass(frozen=True)
class QueryInactivity:
    """What a query is doing, and for how long it has done nothing else.

    Attributes:
        doing: In Spark's words.
        is_idle: It waits for its next trigger, and may do so for ever.
        stalled_for_ms: Nothing has moved for so long.
        tasks: Its Spark jobs under way; None where nobody looked, or can.
    """

    doing: str
    is_idle: bool
    stalled_for_ms: int
    tasks: TaskCounts | None = None

    def is_over(self, limit_ms: int) -> bool:
        """Whether it stands still for longer than a limit, and no task of it runs that may only take long."""
        works = self.tasks is not None and self.tasks.running > 0
        return self.stalled_for_ms > limit_ms and not (self.is_idle or works)

    def as_record(self) -> dict[str, Any]:
        """As the catalog keeps it among the figures of an execution."""
        return asdict(self)

    @staticmethod
    def of_record(record: object) -> QueryInactivity | None:
        """What the catalog has of it; None where the process that wrote it did not know it yet."""
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
    """Watches one query for signs of life.

    Args:
        now_ms: When it was started, on the clock that `note` is given.
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
            tasks: Looks at the tasks of its Spark jobs; called only where nothing else has moved for a while.
            now_ms: The time now, on a clock that never goes back.
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
