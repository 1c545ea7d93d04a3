"""Activity of a running query, in enough detail to tell whether it works, waits or hangs.

Spark reports only what a query does, not since when: `StreamingQueryStatus` has a message and
whether a trigger is active, and `SparkStatusTracker` has the progress of its jobs. A listener is
not used, because it would need a Python thread that the JVM calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_ckpt.config.redaction import without_secrets
from dagster_ckpt.spark.versions import Feature, installed_release

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTING = "Initializing"
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class TaskCounts:
    """Task counts of the active Spark jobs of a query.

    Attributes:
        jobs: Number of active jobs.
        running: Running tasks.
        done: Finished tasks of their stages.
        total: All tasks of their stages.
    """

    jobs: int
    running: int
    done: int
    total: int


@dataclass(frozen=True)
class QueryActivity:
    """Activity of a query.

    Attributes:
        doing: Spark's status message, such as `Initializing sources` or `Processing new data`.
        in_trigger: Whether a trigger is active: it looks for new data or runs a batch.
        trigger: Identifies the trigger; None if it is not visible (over Spark Connect).
    """

    doing: str
    in_trigger: bool
    trigger: int | None = None

    @property
    def is_starting(self) -> bool:
        """Whether its first trigger has not started yet."""
        return self.doing.startswith(STARTING)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its next trigger, so that nothing is active that could hang."""
        return not (self.is_starting or self.in_trigger)


def activity_of(query: StreamingQuery) -> QueryActivity:
    """The current activity of a query."""
    status = query.status
    # Of a query that failed, the message is that of the exception, and heartbeats are kept in the
    # catalog.
    return QueryActivity(without_secrets(str(status["message"])), bool(status["isTriggerActive"]), _trigger_of(query))


def tasks_of(query: StreamingQuery) -> TaskCounts | None:
    """Task counts of the Spark jobs of a query, or None if they are not visible (over Spark Connect).

    Jobs that a `foreachBatch` function starts in other threads are not counted, because they are
    not in the query's job group.
    """
    return _seen(query, lambda execution: _tasks(execution, str(query.runId)))


def stack_of(query: StreamingQuery) -> list[str]:
    """The stack of the thread that runs a query, innermost frame first; empty if it is not visible."""
    return _seen(query, lambda it: [str(frame) for frame in it.queryExecutionThread().getStackTrace()]) or []


def _tasks(execution: Any, group: str) -> TaskCounts:
    tracker = execution.sparkSession().sparkContext().statusTracker()
    active = _numbers(tracker.getActiveJobIds())
    # The group contains every job of the query that the status store still has, up to a thousand.
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
    return _seen(query, lambda it: int(_started_at(it)))


def _started_at(execution: Any) -> Any:
    if installed_release().has(Feature.TRIGGER_CONTEXT):
        return execution.getLatestExecutionContext().currentTriggerStartTimestamp()
    # A private variable of a Scala trait is public in Java, under this name.
    reporter = "org$apache$spark$sql$execution$streaming$ProgressReporter$"
    return getattr(execution, f"{reporter}$currentTriggerStartTimestamp")()


def _seen(query: StreamingQuery, look: Callable[[Any], Seen]) -> Seen | None:
    """The result of an inspection of a query's `StreamExecution`, or None if it fails: it must never end the query."""
    # Imported here, because reading live directories does not require Spark.
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

    # One JVM call for all of them.
    jvm: Any = SparkContext._jvm
    return set(json.loads(str(jvm.java.util.Arrays.toString(array))))
