"""Stops a start that is canceled, suspended or interrupted before its query runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LeaseRecord, RequestKind, RequestRecord, RequestStatus
from dagster_ckpt.catalog.transitions import log_message
from dagster_ckpt.errors import CatalogError, StartStoppedError
from dagster_ckpt.runtime.checkpoint_messages import CheckpointFailureReason
from dagster_ckpt.runtime.run import ENDS_BY_REQUEST, EndKind, QueryEnd
from dagster_ckpt.runtime.supervision import REQUEST_POLL_MS
from dagster_ckpt.values.durations import Clock, monotonic_ms


class StartWatch:
    """Checks between the steps of a start whether it has to stop; the next start finishes what it left."""

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
                if request.kind in ENDS_BY_REQUEST:
                    reason = f"{request.kind.value.lower()} requested by {request.origin}, while it started"
                    self.end, self.request = QueryEnd(ENDS_BY_REQUEST[request.kind], reason), request
                    return
                if request.kind is RequestKind.STOP_WITH_SAVEPOINT and request.created_at_ms >= self._since_ms:
                    self._refuse(request)

    def _refuse(self, request: RequestRecord) -> None:
        """Such a request can be carried out only once the query runs, which may take hours."""
        reason = CheckpointFailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
        error = (
            f"{reason.name}: Stream {self._stream_id!r} is still starting, so there is no query to stop. Suspend or "
            "cancel the start, and take a savepoint of the stopped stream, or submit the request again when the query "
            "is running."
        )
        log_message(self._stream_id, f"refused to stop with a savepoint, requested by {request.origin}: {error}")
        self._catalog.requests.resolve(self._lease, request.request_id, RequestStatus.FAILED, error=error)
