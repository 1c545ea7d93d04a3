"""Recording the end of an execution, and answering the request that asked for its start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dagster_ckpt.catalog.records import ExecutionStatus, RequestStatus, StartCause
from dagster_ckpt.catalog.transitions import log_message
from dagster_ckpt.errors import (
    CatalogError,
    LeaseLostError,
    LiveDirectoryError,
    PlanChangedError,
    RecoveryExhaustedError,
    RowsAtRiskError,
    SharedSinkError,
    SnapshotNotFoundError,
    StateAtRiskError,
    StateBackendChangeError,
    StatePartitionsError,
)
from dagster_ckpt.runtime.run import EndKind, QueryEnd, RunRequest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper

# The start cannot be done as requested, and a retry does not help.
_REFUSALS = (
    *(SnapshotNotFoundError, LiveDirectoryError, RowsAtRiskError, SharedSinkError, StateAtRiskError),
    *(PlanChangedError, StateBackendChangeError, StatePartitionsError),
)


_STATUS = {
    EndKind.FINISHED: ExecutionStatus.FINISHED,
    EndKind.ENDED_BY_ITSELF: ExecutionStatus.SUSPENDED,
    EndKind.SUSPENDED: ExecutionStatus.SUSPENDED,
    EndKind.FAILED: ExecutionStatus.FAILED,
    EndKind.SAVEPOINT_FAILED: ExecutionStatus.SUSPENDED,
    EndKind.STALLED: ExecutionStatus.FAILED,
}


class Settlement:
    """Records in the catalog how the executions of one run end.

    Args:
        stream: The stream.
        request: What the run was asked to do.
        lease: The lease that makes this process the writer.
    """

    def __init__(self, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper) -> None:
        self._stream = stream
        self._request = request
        self._lease = lease
        self._executions = stream.catalog.executions

    def query_ended(self, execution_id: str, end: QueryEnd) -> QueryEnd:
        """Record the end of a query.

        Returns:
            The end, or LEASE_LOST if the catalog refused the write because another execution is the writer.
        """
        status = _STATUS.get(end.kind)
        if end.kind is EndKind.INTERRUPTED and self._request.was_canceled():
            # Written while the lease is held: a successor that waits for it would assume that this process died.
            status = ExecutionStatus.CANCELED
        if status is not None:
            settled = end.kind in (EndKind.SUSPENDED, EndKind.SAVEPOINT_FAILED)
            try:
                self._executions.end(self._lease.record, execution_id, status, end.reason, settled=settled)
            except LeaseLostError as error:
                end = QueryEnd(EndKind.LEASE_LOST, str(error))
        if end.kind is EndKind.LEASE_LOST:
            self._note_loss(execution_id, end.reason)
        return end

    def start_stopped(self, execution_id: str, end: QueryEnd, request_id: str | None, message: str) -> QueryEnd:
        """Record that a start was stopped before it started its query, and answer the requests that wait for it.

        Args:
            execution_id: The execution.
            end: Why it was stopped.
            request_id: The CANCEL or SUSPEND request that stopped it, if any.
            message: The same for the run's log and for the request that asked for the start.
        """
        if request_id is None:
            # Otherwise the end of the execution is recorded, and logged with it.
            log_message(self._stream.stream_id, message)
        try:
            self.answer_start_request(RequestStatus.FAILED, message)
            if request_id is not None:
                status = _STATUS.get(end.kind, ExecutionStatus.CANCELED)
                # The execution ends before the request is answered: see `Supervisor`.
                self._executions.end(
                    self._lease.record, execution_id, status, end.reason, settled=end.kind is EndKind.SUSPENDED
                )
                # From here on the start is stopped, whether or not the answer is recorded: see `restart`.
                with suppress(CatalogError):
                    self._stream.catalog.requests.resolve(self._lease.record, request_id, RequestStatus.COMPLETED)
        except LeaseLostError as error:
            return QueryEnd(EndKind.LEASE_LOST, str(error))
        return end

    def start_failed(self, execution_id: str, error: Exception, cause: StartCause) -> None:
        """Record that a start raised an error.

        Raises:
            LeaseLostError: Another execution is the writer.
        """
        reason = f"{type(error).__name__}: {error}"
        # A refused start is settled. After any other error the restart strategy decides.
        is_refused = isinstance(error, _REFUSALS)
        self.failed(execution_id, reason, settled=is_refused)
        self.answer_start_request(RequestStatus.FAILED, reason)
        if is_refused and (cause is not StartCause.MANUAL or isinstance(error, RecoveryExhaustedError)):
            # No user waits for this start, and no other start follows.
            self._executions.record_terminal_failure(execution_id, reason)

    def failed(self, execution_id: str, reason: str, *, settled: bool = False) -> None:
        """Record that an execution failed.

        Raises:
            LeaseLostError: Another execution is the writer. That also explains the failure: this execution read files
                that its successor was changing.
        """
        try:
            self._executions.end(self._lease.record, execution_id, ExecutionStatus.FAILED, reason, settled=settled)
        except LeaseLostError:
            self._note_loss(execution_id, reason)
            raise

    def answer_start_request(self, status: RequestStatus, error: str | None) -> None:
        """Resolve the request that this run answers, if there is one."""
        if self._request.start_request_id is not None:
            self._stream.catalog.requests.resolve(
                self._lease.record, self._request.start_request_id, status, error=error
            )

    def _note_loss(self, execution_id: str, reason: str) -> None:
        # The only write left to this process, and only to its own execution. A successor that has started has already
        # ended this execution.
        with suppress(CatalogError):
            self._executions.end_unheld(execution_id, ExecutionStatus.FAILED, reason)


Change = Callable[[], object]


class RetryQueue:
    """Catalog writes, applied in order and retried until the catalog accepts them.

    A write may be applied twice, because the response to it may be lost: each has to be idempotent. A process that has
    lost the lease drops its pending writes; they are its successor's to make.
    """

    def __init__(self) -> None:
        self._pending: deque[Change] = deque()

    def run(self, change: Change) -> None:
        """Apply a write after all pending ones, now if the catalog is available."""
        self._pending.append(change)
        self.retry()

    def retry(self) -> None:
        """Apply the pending writes until one fails."""
        try:
            while self._pending:
                self._pending[0]()
                self._pending.popleft()
        except LeaseLostError:
            self._pending.clear()
        except CatalogError:
            return
