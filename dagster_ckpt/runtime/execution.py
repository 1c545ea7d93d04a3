"""Run a stream in this process until it ends."""

from __future__ import annotations

import logging
import os
import subprocess
import time
import uuid
from functools import cache
from random import Random

from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import (
    BATCH_INPUTS,
    IS_LAUNCHED,
    PROGRAM,
    REQUESTED_BY,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.errors import CatalogError, LeaseLostError, QueryStalledError, StartStoppedError
from dagster_ckpt.policies.restart import FailureHistory, RestartAt, decide_restart
from dagster_ckpt.recovery.examination import Examiner
from dagster_ckpt.runtime.execution_end import Settlement, stop_before_restart
from dagster_ckpt.runtime.run_request import EndKind, Outcome, QueryEnd, RunRequest, take_start
from dagster_ckpt.runtime.start import Start, StartedQuery
from dagster_ckpt.runtime.supervision import Supervisor
from dagster_ckpt.runtime.telemetry import reporting
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import monotonic_ms


def execute_stream(stream: StreamHandle, request: RunRequest) -> Outcome:
    """Run a stream, with its restarts in place, until its last execution has ended in the catalog.

    The caller then applies retention.
    """
    record = stream.register()
    execution_id = str(uuid.uuid4())
    holder = this_holder(execution_id, request.run_id, request.jvm_pid)
    acquired = acquire(
        stream.catalog,
        stream.stream_id,
        holder,
        ttl_ms=request.ttl_ms,
        holder_is_over=request.holder_is_over,
        interrupted=request.interrupted,
        above=stream.token_in_use(record),
    )
    with (
        reporting(stream.catalog, stream.stream_id),
        LeaseKeeper(stream.catalog, acquired.record, ttl_ms=request.ttl_ms) as lease,
    ):
        take_start(stream, request, lease.record)
        start = request.start_request_id
        hands_over = start is not None and stream.catalog.requests.stopped_for(start)
        return StreamRun(stream, request, acquired, lease, hands_over=hands_over).until_the_end(execution_id)


class StreamRun:
    def __init__(
        self,
        stream: StreamHandle,
        request: RunRequest,
        acquired: AcquiredLease,
        lease: LeaseKeeper,
        *,
        hands_over: bool = False,
    ) -> None:
        self._stream = stream
        self._hands_over = hands_over
        self._request = request
        self._lease = lease
        self._acquired = acquired
        self._settlement = Settlement(stream, request, lease)
        self._predecessor_ended = acquired.predecessor_ended
        self._examiner = Examiner(stream)

    def until_the_end(self, execution_id: str) -> Outcome:
        start_from = self._request.start_from
        cause = self._request.cause
        suspended: str | None = None
        while True:
            ended = self._execute(execution_id, start_from, cause, suspended)
            end = self._settlement.query_ended(execution_id, ended)
            if end.kind is EndKind.STALLED:
                # A restart in place would wait for the same thing in this process or its JVM.
                raise QueryStalledError(
                    f"Stream {self._stream.stream_id!r}: {end.reason}. Its restart strategy decides whether a new "
                    "process continues."
                )
            if end.kind is EndKind.FAILED:
                outcome = await_restart(self._stream, self._request, self._lease, execution_id, end)
                if outcome is not None:
                    return outcome
            elif end.kind is not EndKind.SAVEPOINT_FAILED:
                return Outcome(end, execution_id)
            # A restart resumes where the query stopped, wherever the run itself started.
            execution_id, start_from, cause = str(uuid.uuid4()), StartFrom(), StartCause.RESTART_IN_PLACE
            suspended = end.reason if end.kind is EndKind.SAVEPOINT_FAILED else None
            self._predecessor_ended = True

    def _execute(self, execution_id: str, start_from: StartFrom, cause: StartCause, suspended: str | None) -> QueryEnd:
        """`suspended` is why the query before was suspended, if its end is not recorded yet."""
        self._stream.catalog.executions.start(
            self._lease.record,
            execution_id,
            run_id=self._request.run_id,
            cause=cause,
            holder=this_holder(execution_id, self._request.run_id, self._request.jvm_pid),
            code_version=self._stream.code_version,
            suspended=suspended,
        )
        while True:
            start = Start(
                self._stream,
                self._request,
                self._acquired,
                self._lease,
                execution_id=execution_id,
                start_from=start_from,
                cause=cause,
                predecessor_ended=self._predecessor_ended,
                examiner=self._examiner,
            )
            try:
                started = start.run()
                break
            except StartStoppedError as stopped:
                if start.stopped is None:
                    raise
                stopped_as = self._settlement.start_stopped(execution_id, start.stopped, start.stopped_by, str(stopped))
                if stopped_as is not None:
                    return stopped_as
            except Exception as error:
                self._settlement.start_failed(execution_id, error, cause)
                raise
        try:
            end = self._supervise(execution_id, started)
        except Exception as error:
            # If the JVM was killed, for example, only a new run can continue.
            self._settlement.failed(execution_id, f"{type(error).__name__}: {error}")
            raise
        return start.examined(started, end) if end.kind is EndKind.FAILED else end

    def _requested_by(self) -> dict[str, object]:
        asked = self._stream.catalog.requests.find(self._request.start_request_id)
        return {} if asked is None else {REQUESTED_BY: asked.origin}

    def _supervise(self, execution_id: str, started: StartedQuery) -> QueryEnd:
        stream = self._stream
        application = self._request.application
        try:
            stream.catalog.executions.running(
                self._lease.record,
                execution_id,
                live_directory=started.prepared.live.url,
                recovery={
                    **started.as_record(),
                    **({IS_LAUNCHED: True} if self._request.is_launched else {}),
                    **({BATCH_INPUTS: list(self._request.batch_inputs)} if self._request.batch_inputs else {}),
                    **self._requested_by(),
                    PROGRAM: running_program(),
                },
                application=application.as_record() if application is not None else None,
            )
            if isinstance(stream.catalog.streams.get(stream.stream_id).pending_restore, Forked):
                # In this order, so that a marked directory always has its pending restore in the catalog.
                started.prepared.live.note_in_use()
                stream.catalog.streams.restore_finished(self._lease.record)
            self._settlement.answer_start_request(RequestStatus.COMPLETED, None)
            supervisor = Supervisor(
                stream,
                execution_id,
                started.prepared,
                started.query,
                self._lease,
                interrupted=self._request.interrupted,
                predecessor_ended=self._predecessor_ended,
                hands_over=self._hands_over,
                wall_clock=self._request.wall_clock,
            )
            self._hands_over = False
        except Exception:
            # Nothing else refers to this query, and it must not outlive the lease.
            started.query.stop()
            raise
        return supervisor.run()


def await_restart(
    stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str, end: QueryEnd
) -> Outcome | None:
    """Wait for the restart that the strategy decides on, or return the outcome if there is none."""
    # The catalog dates the failures. A monotonic clock measures the delay.
    now_ms = stream.catalog.now_ms()
    failures = stream.catalog.executions.failures_since_manual_start(stream.stream_id)
    history = FailureHistory(tuple(failures) or (now_ms,))
    decision = decide_restart(stream.restart, history, now_ms, Random(execution_id))
    if not isinstance(decision, RestartAt):
        return Outcome(end, execution_id, decision.reason)
    delay_ms = max(0, decision.at_ms - now_ms)
    message = f"Restarting stream {stream.stream_id} in {delay_ms} ms: {decision.reason}"
    log_transition(stream.stream_id, message, level=logging.WARNING)
    stopped = _wait_until(monotonic_ms() + delay_ms, stream, request, lease, execution_id)
    return Outcome(stopped, execution_id) if stopped is not None else None


def _wait_until(
    until_ms: int, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str
) -> QueryEnd | None:
    stop_requests = StopRequests(stream, lease, execution_id)
    while monotonic_ms() < until_ms:
        if request.interrupted():
            return QueryEnd(EndKind.INTERRUPTED, "the process was asked to stop before the restart")
        if lease.lost is not None:
            return QueryEnd(EndKind.LEASE_LOST, str(lease.lost))
        stopped = stop_requests.carry_out()
        if stopped is not None:
            return stopped
        time.sleep(0.1)
    return stop_requests.carry_out()


class StopRequests:
    def __init__(self, stream: StreamHandle, lease: LeaseKeeper, execution_id: str) -> None:
        self._stream = stream
        self._lease = lease
        self._execution_id = execution_id
        self._tried: list[RequestRecord] = []

    def carry_out(self) -> QueryEnd | None:
        """Return how a request ends the run; None without one, or if the catalog is unavailable."""
        catalog, lease = self._stream.catalog, self._lease.record
        try:
            # A request whose answer was lost comes first: the stop may have been recorded.
            for request in [*self._tried, *catalog.requests.pending(self._stream.stream_id)]:
                end = QueryEnd.requested_by(request, ", between two restarts")
                if end is None:
                    continue
                self._tried = [request]
                if stop_before_restart(catalog, lease, self._execution_id, end, asked_by=request):
                    return end
                self._tried = []
        except LeaseLostError as error:
            return QueryEnd(EndKind.LEASE_LOST, str(error))
        except CatalogError:
            return None
        return None


# In order of preference; the first one is Dagster's variable of a code location.
_IMAGES = ("DAGSTER_CURRENT_IMAGE", "DAGSTER_CONTAINER_IMAGE")
_COMMITS = ("DAGSTER_CLOUD_GIT_SHA", "GIT_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
_GIT_TIMEOUT_S = 5


@cache
def running_program() -> dict[str, str]:
    """The container image and commit of this process, by which you find the code to roll an upgrade back to."""
    found = {"image": _first(_IMAGES), "commit": _first(_COMMITS) or _checked_out()}
    return {name: value for name, value in found.items() if value}


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _checked_out() -> str | None:
    command = ("git", "rev-parse", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
