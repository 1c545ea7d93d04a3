"""The process of a stream, without Spark: it answers requests, and starts again when it is asked to."""

from __future__ import annotations

import threading
import uuid

from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestRecord, RequestStatus, StartCause
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.snapshotting import savepoint_of_stopped_stream
from tests.support.as_writer import LONG_MS, as_writer
from tests.support.golden_stream import STREAM, GoldenStream


class StreamProgram:
    """The process of the stream, without Spark: it answers each request, and starts again when it is asked to."""

    def __init__(self, golden: GoldenStream) -> None:
        self._golden = golden
        self._catalog = golden.stream.catalog
        self._over = threading.Event()
        self._start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        self._execution_id = str(uuid.uuid4())
        holder = this_holder(self._execution_id, "a program", None)
        self._lease = self._catalog.leases.acquire(STREAM, holder, LONG_MS)
        writer = as_writer(self._catalog, STREAM).executions
        writer.start(self._execution_id, run_id="a program", cause=StartCause.MANUAL, holder=holder)
        writer.running(self._execution_id, live_directory=self._golden.live_url, recovery={})

    def _run(self) -> None:
        while not self._over.wait(0.02):
            for request in self._catalog.requests.pending(STREAM):
                self._answer(request)

    def _answer(self, request: RequestRecord) -> None:
        snapshot_id = None
        if request.kind is RequestKind.START:
            self._start()
        elif request.kind is RequestKind.CHECKPOINT:
            snapshot_id = self._golden.snapshot().snapshot_id
        elif request.kind is not RequestKind.SUSPEND:
            label = request.arguments.get("label")
            snapshot_id = savepoint_of_stopped_stream(self._golden.stream, label=label).snapshot_id
        answer = as_writer(self._catalog, STREAM).requests.resolve
        answer(request.request_id, RequestStatus.COMPLETED, snapshot_id=snapshot_id)
        if request.kind in (RequestKind.SUSPEND, RequestKind.STOP_WITH_SAVEPOINT):
            self.stop()

    def stop(self) -> None:
        end = as_writer(self._catalog, STREAM).executions.end
        end(self._execution_id, ExecutionStatus.SUSPENDED, "it was asked to", settled=True)
        self._catalog.leases.release(self._lease)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
