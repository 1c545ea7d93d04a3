"""Start, observe and stop a streaming query.

One thread makes all calls to the JVM, and each is short: "No interrupt inside the JVM bridge" in docs/internals.md. No
listener is used, because the JVM would need a Python thread to call.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dagster_ckpt.errors import QueryStopError
from dagster_ckpt.spark.checkpoint_dir.inspect import refuse_unknown_state
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode, mode_of_execution
from dagster_ckpt.spark.query.description import execution_of, is_described_query, seen_in, session_of
from dagster_ckpt.spark.query.output import (
    Columns,
    NamedOutput,
    columns_of_query,
    named_output,
    output_of_started,
    qualified,
    table_of,
)
from dagster_ckpt.spark.query.plan import PlanDescription, plan_of_query
from dagster_ckpt.spark.query.session import active_in_thread
from dagster_ckpt.spark.versions import Feature, installed_release, refuse_names_without_offsets, release_of
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


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
    """Spark writes JSON as JSON, other offsets as text, and unknown ones as null."""
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
        return not (self.is_starting or self.in_trigger)


def activity_of(query: StreamingQuery) -> QueryActivity:
    status = query.status
    # The message may be an exception, and the catalog stores it.
    return QueryActivity(
        without_secrets(str(status["message"])), bool(status["isTriggerActive"]), seen_in(query, _started_at)
    )


def _tasks(execution: Any, group: str) -> TaskCounts:
    tracker = execution.sparkSession().sparkContext().statusTracker()
    active = _numbers(tracker.getActiveJobIds())
    # The group also has up to a thousand finished jobs.
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


def _stack(execution: Any) -> list[str]:
    return [str(frame) for frame in execution.queryExecutionThread().getStackTrace()]


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


_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class QueryFacts:
    mode: ExecutionMode | None = None
    plan: PlanDescription | None = None
    spark_version: str | None = None
    columns: Columns | None = None

    @property
    def plan_fingerprint(self) -> str | None:
        return self.plan.fingerprint if self.plan is not None else None


def start_query(writer: DataStreamWriter, name: str, live_directory: LiveDirectory) -> SupervisedQuery:
    """Start a query, replacing the writer's name and checkpoint location."""
    if is_described_query(writer):
        session = session_of(writer)
        refuse_unknown_state(live_directory, release_of(session.version))
        refuse_names_without_offsets(session.version, lambda name: session.conf.get(name, None))
    named = writer.queryName(name).option("checkpointLocation", live_directory.spark_location)
    table, output = table_of(writer), named_output(writer)
    with active_in_thread(session_of(writer)) if is_described_query(writer) else nullcontext():
        query = named.start() if table is None else named.toTable(table)
    return SupervisedQuery(query, output_of_started(query, output))


def jvm_pid(spark: SparkSession) -> int | None:
    from pyspark.sql import SparkSession as ClassicSession

    jvm: Any = spark.sparkContext._jvm if isinstance(spark, ClassicSession) else None
    return None if jvm is None else int(jvm.java.lang.ProcessHandle.current().pid())


def _asks_jvm(method: _Method) -> _Method:

    @functools.wraps(method)
    def asking(self: SupervisedQuery, *args: Any, **kwargs: Any) -> Any:
        self.call = object()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.call = None

    return cast("_Method", asking)


class SupervisedQuery:
    """A started query; `call` identifies the call that waits for the JVM at this moment."""

    def __init__(self, query: StreamingQuery, output: NamedOutput | None = None) -> None:
        self.call: object | None = None
        self._query = query
        self._output = output
        self._seen = ("", -1)
        self._facts: QueryFacts | None = None

    @property
    def query_id(self) -> str:
        return str(self._query.id)

    @_asks_jvm
    def wait(self, timeout_s: float) -> bool:
        """Wait, at least 1 ms; return whether the query has ended or failed."""
        from pyspark.errors import StreamingQueryException

        try:
            return bool(self._query.awaitTermination(max(timeout_s, 0.001)))  # type: ignore[arg-type]
        except StreamingQueryException:
            return True

    @_asks_jvm
    def progress(self) -> QueryProgress | None:
        return next(self._reports(), None)

    @_asks_jvm
    def recent_progress(self) -> list[QueryProgress]:
        """Return reports of batches since the last call, oldest first.

        Spark keeps the newest `spark.sql.streaming.numRecentProgressUpdates` (100).
        """
        news: list[QueryProgress] = []
        for report in self._reports():
            if (report.run_id, report.batch_id) == self._seen:
                break
            news.append(report)
        if news:
            self._seen = (news[0].run_id, news[0].batch_id)
        return news[::-1]

    @_asks_jvm
    def facts(self) -> QueryFacts:
        if self._facts is not None:
            return self._facts
        execution = execution_of(self._query)
        if execution is None:
            return QueryFacts()
        planned = not str(self._query.status["message"]).startswith(STARTING)
        facts = QueryFacts(
            mode=mode_of_execution(_class_name(execution), _class_name(execution.trigger())),
            # Earlier, the call would block until the sources are initialized.
            plan=plan_of_query(self._query) if planned else None,
            columns=columns_of_query(self._query),
            spark_version=str(execution.sparkSession().version()),
        )
        if planned:
            self._facts = facts
        return facts

    @_asks_jvm
    def is_idle(self) -> bool:
        status = self._query.status
        starting = str(status["message"]).startswith(STARTING)
        return not (starting or status["isTriggerActive"] or status["isDataAvailable"])

    @_asks_jvm
    def activity(self) -> QueryActivity:
        return activity_of(self._query)

    @_asks_jvm
    def tasks(self) -> TaskCounts | None:
        """Count the query's tasks; None over Spark Connect.

        Jobs that a `foreachBatch` function starts in other threads are not in the query's job group.
        """
        return seen_in(self._query, lambda execution: _tasks(execution, str(self._query.runId)))

    @_asks_jvm
    def stack(self) -> list[str]:
        return seen_in(self._query, _stack) or []

    def stop(self, *, within_ms: int | None = None) -> None:
        """Stop the query and wait; raise QueryStopError if it may still run.

        Without `within_ms`, `spark.sql.streaming.stopTimeout` limits the wait (unlimited by default).
        """
        try:
            if within_ms is not None:
                self._limit_stop(within_ms)
            self._query.stop()
        except Exception as error:  # a stop that raises the query's own error has stopped the query
            if self._may_run():
                raise QueryStopError(
                    f"The query {self._query.name!r} does not stop: {error}. It may still write; stop the Spark "
                    "application before anything else uses its live directory, or raise "
                    "spark.sql.streaming.stopTimeout."
                ) from error

    def _may_run(self) -> bool:
        try:
            return bool(self._query.isActive)
        except Exception:  # noqa: BLE001 - a broken bridge says nothing about the JVM
            return True

    def _limit_stop(self, within_ms: int) -> None:
        execution = execution_of(self._query)
        if execution is not None:
            conf = execution.sparkSession().sessionState().conf()
            conf.setConfString("spark.sql.streaming.stopTimeout", str(within_ms))

    @_asks_jvm
    def exception(self) -> str | None:
        """Return the failure, if any, without secrets."""
        error = self._query.exception()
        if error is None:
            return None
        trace = getattr(error, "_stackTrace", None) or getattr(error, "getStackTrace", lambda: None)()
        causes = [line.strip() for line in str(trace or "").splitlines() if line.startswith("Caused by:")]
        # The rest is the logical plan.
        text = str(error).partition("=== Streaming Query ===")[0].strip()
        return without_secrets("\n".join([text, *(cause for cause in dict.fromkeys(causes) if cause not in text)]))

    @_asks_jvm
    def trace(self) -> str | None:
        from pyspark import SparkContext

        query: Any = getattr(self._query, "_jsq", None)
        jvm: Any = SparkContext._jvm
        if query is None or jvm is None or not query.exception().isDefined():
            return None
        error = query.exception().get()
        return without_secrets(str(jvm.org.apache.spark.util.Utils.exceptionString(error.getCause() or error)))

    def _reports(self) -> Iterator[QueryProgress]:
        for text in self._json_reports():
            report = QueryProgress.of(json.loads(text), self._output)
            if report.ran:
                yield report

    def _json_reports(self) -> Iterator[str]:
        jvm_query: Any = getattr(self._query, "_jsq", None)
        if jvm_query is None:
            yield from (report.json for report in reversed(self._query.recentProgress))
            return
        # One JVM call per report; PySpark makes dozens.
        reports = jvm_query.recentProgress()
        for index in range(len(reports) - 1, -1, -1):
            yield str(reports[index].json())


def _class_name(jvm_object: Any) -> str:
    return str(jvm_object.getClass().getSimpleName())
