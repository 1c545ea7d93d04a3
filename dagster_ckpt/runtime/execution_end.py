"""Record the end of an execution, answer its requests, and apply retention.

`Settlement` writes under the run's lease; `settle_run` and `settle_execution` then take their own. The next execution
or `record_death` records that a process died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    ExecutionStatus,
    LeaseRecord,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.errors import (
    CatalogError,
    LeaseLostError,
    LiveDirectoryError,
    PlanChangedError,
    RecoveryExhaustedError,
    RowsAtRiskError,
    SharedSinkError,
    SnapshotNotFoundError,
    SourceChangedError,
    StateAtRiskError,
    StateBackendChangeError,
    StatePartitionsError,
    StateRewriteError,
    UnsupportedSparkError,
)
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport, apply_terminal_retention
from dagster_ckpt.runtime.run_request import EndKind, Outcome, QueryEnd, RunRequest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.liveness import Liveness, holder_liveness
from dagster_ckpt.values.modes import TerminalState

# Errors that a retry does not cure.
_REFUSALS = (
    *(SnapshotNotFoundError, LiveDirectoryError, RowsAtRiskError, SharedSinkError, StateAtRiskError),
    *(PlanChangedError, SourceChangedError, StateBackendChangeError, StatePartitionsError, StateRewriteError),
    UnsupportedSparkError,
)


@dataclass(frozen=True)
class _End:
    status: ExecutionStatus | None
    settled: bool = False
    terminal: TerminalState | None = None


_ENDS = {
    EndKind.FINISHED: _End(ExecutionStatus.FINISHED, terminal=TerminalState.FINISHED),
    # A suspended execution keeps all its snapshots: its next start continues.
    EndKind.ENDED_BY_ITSELF: _End(ExecutionStatus.SUSPENDED, settled=True),
    EndKind.SUSPENDED: _End(ExecutionStatus.SUSPENDED, settled=True),
    EndKind.CANCEL_REQUESTED: _End(ExecutionStatus.CANCELED, terminal=TerminalState.CANCELED),
    # No restart is allowed any more: otherwise the run would not have ended.
    EndKind.FAILED: _End(ExecutionStatus.FAILED, terminal=TerminalState.FAILED),
    # The next execution records it: after a death before that, the stream has to be restarted.
    EndKind.SAVEPOINT_FAILED: _End(None),
    # A new process may continue.
    EndKind.STALLED: _End(ExecutionStatus.FAILED),
    # See `RunRequest.interrupted_as`.
    EndKind.INTERRUPTED: _End(None),
    EndKind.LEASE_LOST: _End(None),
}


def record_end(
    catalog: Catalog, lease: LeaseRecord, execution_id: str, end: QueryEnd, *, asked_by: RequestRecord | None = None
) -> bool:
    """Record how an execution ended, unless it has already ended.

    A request for this end is answered in the same transaction, so that a process killed after the answer stays stopped.
    False if it was withdrawn: nothing is recorded, and the query must continue.
    """
    meaning = _ENDS[end.kind]
    if meaning.status is None:
        return True
    return catalog.executions.end(
        lease,
        execution_id,
        meaning.status,
        end.reason,
        settled=meaning.settled,
        request_id=asked_by.request_id if asked_by is not None else None,
        snapshot_id=end.savepoint.snapshot_id if end.savepoint is not None else None,
    )


def stop_before_restart(
    catalog: Catalog, lease: LeaseRecord, execution_id: str, end: QueryEnd, *, asked_by: RequestRecord | None = None
) -> bool:
    """Record that a failed or dead execution is not restarted.

    False if there was nothing to stop, or the request was withdrawn.
    """
    meaning = _ENDS[end.kind]
    request_id = asked_by.request_id if asked_by is not None else None
    return catalog.executions.stopped(
        lease,
        execution_id,
        meaning.status or ExecutionStatus.CANCELED,
        end.reason,
        settled=meaning.settled,
        request_id=request_id,
    )


def record_death(catalog: Catalog, execution: ExecutionRecord) -> ExecutionRecord:
    """Record that the process of an execution died, as an observer without its lease.

    Changes nothing if it has ended, lives on this machine with its lease, or renews it meanwhile.
    """
    lease = catalog.leases.current(execution.stream_id)
    held = lease if lease is not None and lease.execution_id == execution.execution_id else None
    if held is None or held.expired or holder_liveness(held) is not Liveness.ALIVE:
        catalog.executions.end_unheld(execution.execution_id, ExecutionStatus.FAILED, "its process died", seen=held)
    return catalog.executions.get(execution.execution_id)


def settle_run(stream: StreamHandle, outcome: Outcome, *, is_canceled: bool = False) -> RetentionReport | None:
    """Apply retention after a run has released its lease; None if the stream may continue."""
    state = _ENDS[outcome.end.kind].terminal
    if outcome.end.kind is EndKind.INTERRUPTED and is_canceled:
        state = TerminalState.CANCELED
    if state is None:
        return None
    failure = outcome.terminal_failure or outcome.end.reason
    report = settle_execution(stream, outcome.execution_id, state, failure=failure)
    if report != RetentionReport():
        for message in report.messages(unlogged=True):
            log_message(stream.stream_id, message)
    return report


def settle_execution(
    stream: StreamHandle, execution_id: str, state: TerminalState, *, failure: str | None = None
) -> RetentionReport:
    """Apply retention for the state in which a stream ended (`failure`: why it is not restarted). May be repeated."""
    report = apply_terminal_retention(stream, execution_id, state)
    if state is TerminalState.FAILED and failure is not None:
        stream.catalog.executions.record_terminal_failure(execution_id, failure)
    return report


class Settlement:
    def __init__(self, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper) -> None:
        self._stream = stream
        self._request = request
        self._lease = lease
        self._executions = stream.catalog.executions

    def query_ended(self, execution_id: str, end: QueryEnd) -> QueryEnd:
        """Record the end of a query; LEASE_LOST if the catalog refuses it.

        If a stop with a savepoint was withdrawn meanwhile, its end is SAVEPOINT_FAILED.
        """
        try:
            if not record_end(self._stream.catalog, self._lease.record, execution_id, end, asked_by=end.asked_by):
                end = QueryEnd(EndKind.SAVEPOINT_FAILED, "the stop request was withdrawn, the query continues")
            status = self._request.interrupted_as() if end.kind is EndKind.INTERRUPTED else None
            if status is not None:
                # While the lease is held: a successor that waits for it would assume that this process died.
                settled = status is ExecutionStatus.SUSPENDED
                self._executions.end(self._lease.record, execution_id, status, end.reason, settled=settled)
        except LeaseLostError as error:
            end = QueryEnd(EndKind.LEASE_LOST, str(error))
        if end.kind is EndKind.LEASE_LOST:
            self._note_loss(execution_id, end.reason)
        return end

    def start_stopped(
        self, execution_id: str, end: QueryEnd, asked_by: RequestRecord | None, message: str
    ) -> QueryEnd | None:
        """Record that a start was stopped, and answer the requests that wait for it with `message`.

        None if the request `asked_by` was withdrawn meanwhile: start again.
        """
        try:
            if asked_by is None:
                log_message(self._stream.stream_id, message)
            elif not record_end(self._stream.catalog, self._lease.record, execution_id, end, asked_by=asked_by):
                return None
            self.answer_start_request(RequestStatus.FAILED, message)
        except LeaseLostError as error:
            return QueryEnd(EndKind.LEASE_LOST, str(error))
        return end

    def start_failed(self, execution_id: str, error: Exception, cause: StartCause) -> None:
        reason = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        # A refused start is settled. After any other error the restart strategy decides.
        is_refused = isinstance(error, _REFUSALS)
        self.failed(execution_id, reason, settled=is_refused)
        self.answer_start_request(RequestStatus.FAILED, reason)
        if is_refused and (cause is not StartCause.MANUAL or isinstance(error, RecoveryExhaustedError)):
            # No user waits for this start, and no other start follows.
            self._executions.record_terminal_failure(execution_id, reason)

    def failed(self, execution_id: str, reason: str, *, settled: bool = False) -> None:
        """Record a failure, unless the catalog is unavailable: then `record_death` does.

        Raises LeaseLostError, which explains it, if a successor has the lease.
        """
        try:
            # An error here must not hide the failure.
            with suppress(CatalogError):
                self._executions.end(self._lease.record, execution_id, ExecutionStatus.FAILED, reason, settled=settled)
        except LeaseLostError:
            self._note_loss(execution_id, reason)
            raise

    def answer_start_request(self, status: RequestStatus, error: str | None) -> None:
        if self._request.start_request_id is not None:
            self._stream.catalog.requests.resolve(
                self._lease.record, self._request.start_request_id, status, error=error
            )

    def _note_loss(self, execution_id: str, reason: str) -> None:
        # The only write left to this process. A successor that has started has already ended this execution.
        with suppress(CatalogError):
            self._executions.end_unheld(execution_id, ExecutionStatus.FAILED, reason)


Change = Callable[[], object]


class RetryQueue:
    """Catalog writes, applied in order and retried until the catalog accepts them.

    They must be idempotent: a response may be lost. A process without the lease drops them.
    """

    def __init__(self) -> None:
        self._pending: deque[Change] = deque()

    def run(self, change: Change) -> None:
        self._pending.append(change)
        self.retry()

    def retry(self) -> None:
        try:
            while self._pending:
                self._pending[0]()
                self._pending.popleft()
        except LeaseLostError:
            self._pending.clear()
        except CatalogError:
            return
