"""Progress of a running query: the report of each batch, and whether the query works, waits or hangs.

Spark reports only what a query does, not since when: `StreamingQueryStatus` has a message and
whether a trigger is active, and `SparkStatusTracker` has the progress of its jobs. A listener is
not used, because it would need a Python thread that the JVM calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_ckpt.spark.query.output import NamedOutput, qualified
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class SourceProgress:
    """Progress of one source in a batch.

    Attributes:
        source: Spark's name for it, such as `KafkaV2[Subscribe[orders]]`.
        behind: Number of records between the read offset and the source's newest; None if the
            source does not report both.
        read_up_to: Kafka's offsets up to which the batch has read, as their JSON; None for other
            sources.
        lags: Records waiting in each partition of Kafka topics, by names such as `orders-3`.
    """

    source: str
    behind: int | None
    read_up_to: str | None
    lags: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(report: Mapping[str, Any]) -> SourceProgress:
        """Parse the JSON form of a source's report."""
        read, newest = _offset(report.get("endOffset")), _offset(report.get("latestOffset"))
        return SourceProgress(
            source=str(report.get("description")),
            behind=_records_between(read, newest),
            read_up_to=json.dumps(read) if _is_kafka(read) else None,
            lags=_lags(read, newest),
        )


@dataclass(frozen=True)
class QueryProgress:
    """One report of a streaming query (`StreamingQueryProgress`), sent after the batch's commit.

    Attributes:
        batch_id: The batch.
        run_id: Id of the query's run; a restart has another one.
        timestamp: Start of the trigger, ISO-8601 in UTC.
        input_rows: Rows read.
        state_rows: Rows in all state stores after the batch.
        watermark: Event-time watermark, ISO-8601, or None if the query has none.
        sinks: Spark's names of the sinks.
        duration_ms: Duration of the batch.
        ran: False if Spark only reports that there was nothing to do.
        sources: The sources, with their lag if they report it.
        rows_per_second: Rows that the batch processed per second, or None.
    """

    batch_id: int
    run_id: str
    timestamp: str
    input_rows: int
    state_rows: int
    watermark: str | None
    sinks: tuple[str, ...]
    duration_ms: int
    ran: bool
    sources: tuple[SourceProgress, ...] = ()
    rows_per_second: float | None = None

    @staticmethod
    def of(report: Mapping[str, Any], output: NamedOutput | None = None) -> QueryProgress:
        """Parse the JSON form of a report.

        Args:
            report: The report.
            output: Where the query writes: Spark's name for the sink may not say it. None if unknown.
        """
        durations = report.get("durationMs") or {}
        sink = (report.get("sink") or {}).get("description")
        return QueryProgress(
            batch_id=int(report["batchId"]),
            run_id=str(report["runId"]),
            timestamp=str(report["timestamp"]),
            input_rows=max(0, int(report.get("numInputRows") or 0)),
            state_rows=sum(int(operator["numRowsTotal"]) for operator in report.get("stateOperators") or []),
            watermark=(report.get("eventTime") or {}).get("watermark"),
            sinks=(qualified(str(sink), output),) if sink else (),
            duration_ms=int(report.get("batchDuration") or 0),
            ran="addBatch" in durations,
            sources=tuple(SourceProgress.of(source) for source in report.get("sources") or []),
            rows_per_second=_speed(report.get("processedRowsPerSecond")),
        )


def _offset(offset: Any) -> Any:
    """An offset as a value: Spark writes JSON offsets as JSON, others as text, unknown ones as null."""
    try:
        return json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None


def _is_kafka(offset: Any) -> bool:
    return (
        isinstance(offset, dict)
        and bool(offset)
        and all(
            isinstance(partitions, dict) and all(type(each) is int for each in partitions.values())
            for partitions in offset.values()
        )
    )


def _records_between(read: Any, newest: Any) -> int | None:
    return sum(_lags(read, newest).values()) if _is_kafka(read) and _is_kafka(newest) else None


def _lags(read: Any, newest: Any) -> dict[str, int]:
    if not (_is_kafka(read) and _is_kafka(newest)):
        return {}
    return {
        f"{topic}-{partition}": max(0, offset - read.get(topic, {}).get(partition, 0))
        for topic, partitions in newest.items()
        for partition, offset in partitions.items()
    }


def _speed(value: Any) -> float | None:
    # For an idle query, Spark writes NaN or omits the value.
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


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
