"""The process of a running stream as the catalog shows it, for tests of requests to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dagster_ckpt.catalog.records import HANDS_OVER, ExecutionStatus, RequestKind, RequestRecord, RequestStatus
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import HOLDER, STREAM
from tests.support.rewind_history import History


def subsume_checkpoints(history: History) -> None:
    discard(history.shelf.stream, subsume(history.shelf.stream), reason="subsumed", lease=None)


class RunningProcess:
    """The process of a running stream, as far as the catalog shows it: a lease, and answers to requests."""

    def __init__(
        self,
        history: History,
        *,
        before_the_stop: Callable[[], None],
        after_the_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.history = history
        self.catalog = history.shelf.stream.catalog
        self.lease = self.catalog.leases.acquire(STREAM, HOLDER, 600_000)
        self.starts: list[RequestRecord] = []
        self._before_the_stop = before_the_stop
        self._after_the_stop = after_the_stop
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> RunningProcess:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # What is asked for last is still answered.
        self._once()
        self._over.set()
        self._thread.join()

    def _answer(self) -> None:
        while not self._over.wait(0.01):
            self._once()

    def _once(self) -> None:
        with self._lock:
            for request in self.catalog.requests.pending(STREAM):
                if request.kind is RequestKind.SUSPEND:
                    self._before_the_stop()
                    stopped = (ExecutionStatus.SUSPENDED, "asked")
                    asked = request.request_id
                    if self.catalog.executions.end(self.lease, "first", *stopped, settled=True, request_id=asked):
                        self._after_the_stop()
                        self.catalog.leases.release(self.lease)
                elif request.kind is RequestKind.START and not request.arguments.get(HANDS_OVER):
                    self._start(request)

    def _start(self, request: RequestRecord) -> None:
        subsume_checkpoints(self.history)
        self.starts.append(request)
        as_writer(self.catalog).requests.resolve(request.request_id, RequestStatus.COMPLETED)
