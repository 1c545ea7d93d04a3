"""What a running query is doing at one moment: enough to tell one that works or waits from one that hangs.

Spark itself says only what it does, not since when: `StreamingQueryStatus` has its words and whether a trigger is under
way, `SparkStatusTracker` how far its jobs are. Nothing comes from a listener: that would need a thread of Python's that
the JVM calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTING = "Initializing"
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class TaskCounts:
    """The tasks of the Spark jobs of a query that are under way.

    Attributes:
        jobs: Jobs under way.
        running: Tasks that run.
        done: Tasks of their stages that are over.
        total: Tasks of their stages.
    """

    jobs: int
    running: int
    done: int
    total: int


@dataclass(frozen=True)
class QueryActivity:
    """What a query is doing.

    Attributes:
        doing: Spark's words for it, such as `Initializing sources` or `Processing new data`.
        in_trigger: Whether a trigger is under way: it looks for new data, or runs a batch.
        trigger: Tells one trigger from the next; None where that cannot be seen (over Spark Connect).
    """

    doing: str
    in_trigger: bool
    trigger: int | None = None

    @property
    def is_starting(self) -> bool:
        """It has not come to its first trigger yet."""
        return self.doing.startswith(STARTING)

    @property
    def is_idle(self) -> bool:
        """It waits for its next trigger: nothing is under way that could hang."""
        return not (self.is_starting or self.in_trigger)


def activity_of(query: StreamingQuery) -> QueryActivity:
    """What a query is doing now."""
    status = query.status
    return QueryActivity(str(status["message"]), bool(status["isTriggerActive"]), _trigger_of(query))


def tasks_of(query: StreamingQuery) -> TaskCounts | None:
    """How far the Spark jobs of a query are, or None where that cannot be seen (over Spark Connect).

    Jobs that a `foreachBatch` function starts in threads of its own are not counted: they are not in the query's group.
    """
    return _seen(query, lambda execution: _tasks(execution, str(query.runId)))


def stack_of(query: StreamingQuery) -> list[str]:
    """Where the thread that runs a query is now, innermost first; empty where that cannot be seen."""
    return _seen(query, lambda it: [str(frame) for frame in it.queryExecutionThread().getStackTrace()]) or []


def _tasks(execution: Any, group: str) -> TaskCounts:
    tracker = execution.sparkSession().sparkContext().statusTracker()
    active = _numbers(tracker.getActiveJobIds())
    # The group has every job of the query that the status store still knows: a thousand.
    own = active and active & _numbers(tracker.getJobIdsForGroup(group))
    stages: set[int] = set()
    for job_id in own:
        job = tracker.getJobInfo(job_id)
        if job.isDefined():
            stages |= _numbers(job.get().stageIds())
    running = done = total = 0
    for stage_id in stages:
        stage = tracker.getStageInfo(stage_id)
        if stage.isDefined():
            running += int(stage.get().numActiveTasks())
            done += int(stage.get().numCompletedTasks())
            total += int(stage.get().numTasks())
    return TaskCounts(len(own), running, done, total)


def _trigger_of(query: StreamingQuery) -> int | None:
    return _seen(query, lambda it: int(it.getLatestExecutionContext().currentTriggerStartTimestamp()))


def _seen(query: StreamingQuery, look: Callable[[Any], Seen]) -> Seen | None:
    """What is seen of a query's `StreamExecution`, or None: what is looked at here must never end a query."""
    # Imported here: whoever only reads live directories needs no Spark.
    from py4j.protocol import Py4JError  # noqa: PLC0415

    jvm_query: Any = getattr(query, "_jsq", None)
    if jvm_query is None:
        return None
    try:
        return look(jvm_query.streamingQuery())
    except Py4JError:
        return None


def _numbers(array: Any) -> set[int]:
    from pyspark import SparkContext  # noqa: PLC0415 - see _seen

    # One call into the JVM for all of them.
    jvm: Any = SparkContext._jvm
    return set(json.loads(str(jvm.java.util.Arrays.toString(array))))
