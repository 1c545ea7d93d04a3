"""What a running query is doing at one moment: enough to tell one that works or waits from one that hangs.

Spark itself says only what it does, not since when: `StreamingQueryStatus` has its words and whether a trigger is under
way, `SparkStatusTracker` how far its jobs are. Nothing comes from a listener: that would need a thread of Python's that
the JVM calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTING = "Initializing"


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
    def at_rest(self) -> bool:
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
    execution = _execution_of(query)
    if execution is None:
        return None
    tracker = execution.sparkSession().sparkContext().statusTracker()
    active = _numbers(tracker.getActiveJobIds())
    # The group has every job of the query that the status store still knows: a thousand.
    own = active and active & _numbers(tracker.getJobIdsForGroup(str(query.runId)))
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
    execution = _execution_of(query)
    return None if execution is None else int(execution.getLatestExecutionContext().currentTriggerStartTimestamp())


def _execution_of(query: StreamingQuery) -> Any:
    jvm_query: Any = getattr(query, "_jsq", None)
    return None if jvm_query is None else jvm_query.streamingQuery()


def _numbers(array: Any) -> set[int]:
    from pyspark import SparkContext  # noqa: PLC0415 - whoever only reads live directories needs no Spark

    # One call into the JVM for all of them.
    jvm: Any = SparkContext._jvm
    return set(json.loads(jvm.java.util.Arrays.toString(array)))
