"""What a run of a stream is asked to do, and how its queries end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.records import (
    BatchInput,
    ExecutionStatus,
    LeaseRecord,
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotRecord,
    StartCause,
)
from dagster_ckpt.catalog.time_limits import DEFAULT_TTL_MS
from dagster_ckpt.errors import CatalogError, RestartWithdrawnError, StartStoppedError
from dagster_ckpt.runtime.checkpoint_messages import CheckpointFailureReason
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery
from dagster_ckpt.spark.query.session import SparkApplication
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import Clock, monotonic_ms, wall_clock_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


REQUEST_POLL_MS = 500


class EndKind(Enum):
    """How a query ended.

    FINISHED: Stopped with a savepoint.
    ENDED_BY_ITSELF: It processed all of a bounded input.
    SUSPENDED: A user stopped it in order to start it again later.
    FAILED: The query failed, or too many checkpoints did.
    SAVEPOINT_FAILED: The savepoint that it was stopped for failed; it is restarted.
    STALLED: It made no progress for longer than the stream allows, or its JVM did not answer.
    """

    FINISHED = "FINISHED"
    ENDED_BY_ITSELF = "ENDED_BY_ITSELF"
    SUSPENDED = "SUSPENDED"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    INTERRUPTED = "INTERRUPTED"
    FAILED = "FAILED"
    LEASE_LOST = "LEASE_LOST"
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"
    STALLED = "STALLED"


_ENDS_BY_REQUEST = {RequestKind.CANCEL: EndKind.CANCEL_REQUESTED, RequestKind.SUSPEND: EndKind.SUSPENDED}


@dataclass(frozen=True)
class QueryEnd:
    """The end of one query.

    Attributes:
        trace: The JVM's stack trace of a failure, if any.
        asked_by: The request for a stop with a savepoint, answered when the end is recorded.
    """

    kind: EndKind
    reason: str
    savepoint: SnapshotRecord | None = None
    trace: str | None = None
    asked_by: RequestRecord | None = None

    @staticmethod
    def requested_by(request: RequestRecord, when: str = "") -> QueryEnd | None:
        kind = _ENDS_BY_REQUEST.get(request.kind)
        reason = f"{request.kind.value.lower()} requested by {request.origin}{when}"
        return QueryEnd(kind, reason) if kind is not None else None


StartQuery = Callable[[LiveDirectory], SupervisedQuery]


@dataclass(frozen=True)
class RunRequest:
    """How to run a stream in this process.

    Attributes:
        describe: Returns the query that `start_query` will start, to check it before anything is changed.
        start_was_answered: Whether the start request was answered before this run, which is executed again.
        restart_of: The execution that is restarted; not if the stream was stopped since.
        jvm_pid: Pid of the query's JVM, or `UNSEEN_JVM` for Spark Connect. None: no JVM.
        interrupted_as: The status of an interrupted execution; None if the supervisor decides.
        holder_is_over: Whether the run of a lease holder is recorded as ended.
        is_launched: A supervisor launches the runs, also while another query of the stream runs.
    """

    run_id: str
    start_query: StartQuery
    describe: Callable[[], DataStreamWriter] | None = None
    start_from: StartFrom = field(default_factory=StartFrom)
    cause: StartCause = StartCause.MANUAL
    start_request_id: str | None = None
    start_was_answered: bool = False
    restart_of: str | None = None
    jvm_pid: int | None = None
    application: SparkApplication | None = None
    interrupted: Callable[[], bool] = lambda: False
    interrupted_as: Callable[[], ExecutionStatus | None] = lambda: None
    holder_is_over: Callable[[LeaseRecord], bool] = lambda _lease: False
    is_launched: bool = False
    batch_inputs: Sequence[BatchInput] = ()
    ttl_ms: int = DEFAULT_TTL_MS
    wall_clock: Clock = wall_clock_ms


@dataclass(frozen=True)
class Outcome:
    """`terminal_failure` is why a failed query is not restarted."""

    end: QueryEnd
    execution_id: str
    terminal_failure: str | None = None

    @property
    def savepoint(self) -> SnapshotRecord | None:
        return self.end.savepoint


_STOPPED = (ExecutionStatus.CANCELED, ExecutionStatus.SUSPENDED, ExecutionStatus.FINISHED)


def take_start(stream: StreamHandle, request: RunRequest, lease: LeaseRecord) -> None:
    """Take the start request under the lease.

    Refuses a start whose request was withdrawn or answered before that, and a restart of a stream that was stopped.
    """
    requests = stream.catalog.requests
    asked = requests.find(request.start_request_id)
    may_be_answered = request.start_was_answered and asked is not None and asked.status is not RequestStatus.WITHDRAWN
    if asked is not None and not may_be_answered and not requests.take_start(lease, asked.request_id):
        answer = requests.get(asked.request_id)
        what = "withdrawn" if answer.status is RequestStatus.WITHDRAWN else f"answered {answer.status.value}"
        why = f": {answer.error}" if answer.error is not None else ""
        raise RestartWithdrawnError(
            f"Stream {stream.stream_id!r} is not started, nothing was changed: the start requested by "
            f"{answer.origin} was {what}{why}. Request it again."
        )
    # Not `restart_of` itself: the stream may have been started and stopped by hand since.
    latest = stream.catalog.executions.latest(stream.stream_id) if request.restart_of is not None else None
    if latest is not None and latest.status in _STOPPED:
        raise RestartWithdrawnError(
            f"Stream {stream.stream_id!r} is not restarted, nothing was changed: it is {latest.status.value}, "
            f"{latest.reason}. Start it by hand."
        )


class StartWatch:
    """Checks between the steps of a start whether it has to stop; the next start finishes what is left."""

    def __init__(
        self, catalog: Catalog, lease: LeaseRecord, interrupted: Callable[[], bool], *, clock: Clock = monotonic_ms
    ) -> None:
        self._catalog = catalog
        self._lease = lease
        self._stream_id = lease.stream_id
        self._since_ms = catalog.now_ms()
        self._interrupted = interrupted
        self._clock = clock
        self._next_ms = clock() + REQUEST_POLL_MS
        self._looking = Lock()
        self.end: QueryEnd | None = None
        self.request: RequestRecord | None = None

    def __call__(self) -> None:
        """Raise StartStoppedError if the start has to stop; polls at most twice a second."""
        if self._clock() >= self._next_ms and self._looking.acquire(blocking=False):
            try:
                self._look()
                self._next_ms = self._clock() + REQUEST_POLL_MS
            finally:
                self._looking.release()
        if self.end is not None:
            raise StartStoppedError(f"Stream {self._stream_id!r} was not started: {self.end.reason}.")

    def _look(self) -> None:
        if self.end is not None:
            return
        if self._interrupted():
            self.end = QueryEnd(EndKind.INTERRUPTED, "the process was asked to stop while it started")
            return
        # A temporarily unavailable catalog does not stop a start.
        with suppress(CatalogError):
            for request in self._catalog.requests.pending(self._stream_id):
                end = QueryEnd.requested_by(request, ", while it started")
                if end is not None:
                    self.end, self.request = end, request
                    return
                if request.kind is RequestKind.STOP_WITH_SAVEPOINT and request.created_at_ms >= self._since_ms:
                    self._refuse(request)

    def _refuse(self, request: RequestRecord) -> None:
        """Refuse a stop-with-savepoint: its query may start only hours later."""
        reason = CheckpointFailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
        error = (
            f"{reason.name}: Stream {self._stream_id!r} is still starting, so there is no query to stop. Suspend or "
            "cancel the start, and take a savepoint of the stopped stream, or submit the request again when the query "
            "is running."
        )
        log_message(self._stream_id, f"refused to stop with a savepoint, requested by {request.origin}: {error}")
        self._catalog.requests.resolve(self._lease, request.request_id, RequestStatus.FAILED, error=error)
