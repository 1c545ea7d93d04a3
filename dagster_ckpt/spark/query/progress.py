"""Progress of a running query: the report of each batch, and whether the query works, waits or hangs.

No listener is used: the JVM would need a Python thread to call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster_ckpt.spark.query.description import seen_in
from dagster_ckpt.spark.query.output import NamedOutput, qualified
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class SourceProgress:
    """Progress of one source in a batch.

    Attributes:
        behind: Records between the read offset and the newest; None if not reported.
        read_up_to: Kafka's end offsets of the batch as JSON.
        lags: Records waiting by partition, such as `orders-3`.
    """

    source: str
    behind: int | None
    read_up_to: str | None
    lags: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(report: Mapping[str, Any]) -> SourceProgress:
        read, newest = _offset(report.get("endOffset")), _offset(report.get("latestOffset"))
        lags = _lags(read, newest) if _is_kafka(read) and _is_kafka(newest) else None
        return SourceProgress(
            source=str(report.get("description")),
            behind=sum(lags.values()) if lags is not None else None,
            read_up_to=json.dumps(read) if _is_kafka(read) else None,
            lags=lags or {},
        )


@dataclass(frozen=True)
class QueryProgress:
    """One report of a streaming query (`StreamingQueryProgress`), sent after the batch's commit.

    Attributes:
        timestamp: Start of the trigger, ISO-8601 in UTC; so is the watermark.
        state_rows: In all state stores after the batch; `state_memory` are bytes.
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
    state_memory: int = 0

    @staticmethod
    def of(report: Mapping[str, Any], output: NamedOutput | None = None) -> QueryProgress:
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
            state_memory=sum(int(each.get("memoryUsedBytes") or 0) for each in report.get("stateOperators") or []),
        )


def _offset(offset: Any) -> Any:
    """Spark writes JSON as JSON, other offsets as text, unknown ones as null."""
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


def _lags(read: Any, newest: Any) -> dict[str, int]:
    return {
        f"{topic}-{partition}": max(0, offset - read.get(topic, {}).get(partition, 0))
        for topic, partitions in newest.items()
        for partition, offset in partitions.items()
    }


def _speed(value: Any) -> float | None:
    # An idle query has NaN or none.
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


STARTING = "Initializing"


@dataclass(frozen=True)
class TaskCounts:
    jobs: int
    running: int
    done: int
    total: int


@dataclass(frozen=True)
class QueryActivity:
    """What a query does now; Spark does not report since when.

    Attributes:
        doing: Spark's status message, such as `Initializing sources`.
        in_trigger: It looks for new data or runs a batch.
        trigger: Identifies the trigger; None over Spark Connect.
    """

    doing: str
    in_trigger: bool
    trigger: int | None = None

    @property
    def is_starting(self) -> bool:
        return self.doing.startswith(STARTING)

    @property
    def is_idle(self) -> bool:
        """It waits for its next trigger, so nothing could hang."""
        return not (self.is_starting or self.in_trigger)


def activity_of(query: StreamingQuery) -> QueryActivity:
    status = query.status
    # May be a failed query's exception, and the catalog keeps heartbeats.
    return QueryActivity(
        without_secrets(str(status["message"])), bool(status["isTriggerActive"]), seen_in(query, _started_at)
    )


def tasks_of(query: StreamingQuery) -> TaskCounts | None:
    """None over Spark Connect.

    Jobs that a `foreachBatch` function starts in other threads are not in the query's job group.
    """
    return seen_in(query, lambda execution: _tasks(execution, str(query.runId)))


def stack_of(query: StreamingQuery) -> list[str]:
    return seen_in(query, lambda it: [str(frame) for frame in it.queryExecutionThread().getStackTrace()]) or []


def _tasks(execution: Any, group: str) -> TaskCounts:
    tracker = execution.sparkSession().sparkContext().statusTracker()
    active = _numbers(tracker.getActiveJobIds())
    # Also contains up to a thousand finished jobs.
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


def _started_at(execution: Any) -> int:
    if installed_release().has(Feature.TRIGGER_CONTEXT):
        return int(execution.getLatestExecutionContext().currentTriggerStartTimestamp())
    # Java's name of the trait's private variable.
    reporter = "org$apache$spark$sql$execution$streaming$ProgressReporter$"
    return int(getattr(execution, f"{reporter}$currentTriggerStartTimestamp")())


def _numbers(array: Any) -> set[int]:
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    return set(json.loads(str(jvm.java.util.Arrays.toString(array))))
