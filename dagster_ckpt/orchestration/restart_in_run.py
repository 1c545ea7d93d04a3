"""Restarts a stream within its Dagster run after its process or JVM died.

The run's process starts no Spark. It forks a child that runs the stream, and another one after that child's death,
which saves the sensor, the launch of a run and the imports. Lease, fencing, restart strategy and recovery are those of
a restart in a new run, which follows if this process does not restart the stream.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

import dagster as dg
from pyspark import SparkContext
from pyspark.sql import SparkSession

from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from dagster_ckpt.errors import QueryStalledError
from dagster_ckpt.orchestration._compat import check_captured_interrupt
from dagster_ckpt.orchestration.child_process import (
    ChildTracebackError,
    Died,
    Raised,
    Returned,
    Spare,
    Standby,
    in_child,
)
from dagster_ckpt.orchestration.run_status import (
    CRASHED,
    END_KEY,
    RunWatch,
    StepContext,
    goes_on_without,
    run_failure,
    worker_of,
)
from dagster_ckpt.policies.restart import FailureHistory, RestartAt, decide_restart
from dagster_ckpt.runtime.execution_end import record_death
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import JVM_GRACE_S

T = TypeVar("T")

_RESTARTABLE = (CRASHED, QueryStalledError.__name__)
_LOOK_S = 0.1


def can_restart_in_run(context: StepContext) -> bool:
    """Whether a launcher started this process for the run, on Linux, and Spark is not started in it."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    # A notebook or test that executes a job itself wants the session; its run has no origin.
    worker = worker_of(context.instance, context.run.run_id)
    if context.run.remote_job_origin is None or worker is None or worker.pid != os.getpid():
        return False
    # Other streams of the run do not wait: the supervisor sensor restarts this one in a separate run.
    if goes_on_without(context.instance, context.run, context.op_execution_context.op.name):
        return False
    return SparkContext._gateway is None and SparkSession.getActiveSession() is None


def restarting_in_run(
    context: StepContext,
    open_stream: Callable[[], StreamHandle],
    work: Callable[[], T],
    *,
    prepare: Callable[[], Callable[[], bool]] | None,
) -> T:
    """Run a stream in a child process, and in another one each time it dies and the restart strategy allows it.

    All functions are called in children, so that they share no connection with this process. `prepare` starts Spark in
    a spare process; None for no spare.
    """
    start = partial(Spare, prepare, work) if prepare is not None else None
    standby = Standby(start, context.log.info)
    try:
        return _restarting(context, open_stream, work, standby)
    finally:
        standby.end()


def _restarting(
    context: StepContext, open_stream: Callable[[], StreamHandle], work: Callable[[], T], standby: Standby[T]
) -> T:
    failed: str | None = None
    spare: Spare[T] | None = None
    while True:
        if spare is not None:
            end = spare.take_over(interrupted=check_captured_interrupt, meanwhile=standby.tend)
        else:
            end = in_child(work, interrupted=check_captured_interrupt, meanwhile=standby.tend)
        if isinstance(end, Returned):
            return end.value
        what = _why_another_may_continue(end)
        if what is None or check_captured_interrupt():
            raise _as_raised(end)
        context.log.warning(f"{what}. The restart strategy decides whether another process continues in this run.")
        wait = partial(_await_restart, context, open_stream, after=failed, was_spare=spare is not None)
        answer = in_child(wait, interrupted=check_captured_interrupt)
        failed = answer.value if isinstance(answer, Returned) else None
        if failed is None or check_captured_interrupt():
            raise _as_raised(end)
        spare = standby.take()
        which = f"the spare process {spare.pid}" if spare is not None else "another process"
        context.log.info(f"Starting the stream in {which} of this run.")


def _why_another_may_continue(end: Raised | Died) -> str | None:
    if isinstance(end, Died):
        return f"The process of the stream, {end.pid}, {end.how}"
    if isinstance(end.error, dg.Failure):
        kind = end.error.metadata.get(END_KEY)
        if kind is not None and kind.value in _RESTARTABLE:
            return end.error.description or str(kind.value)
    return None


def _as_raised(end: Raised | Died) -> BaseException:
    if isinstance(end, Raised):
        end.error.__cause__ = ChildTracebackError(end.trace)
        return end.error
    text = f"The process of the stream, {end.pid}, {end.how}. The supervisor sensor decides whether it is restarted."
    return run_failure(text, CRASHED)


def _await_restart(
    context: StepContext, open_stream: Callable[[], StreamHandle], *, after: str | None, was_spare: bool
) -> str | None:
    """Wait until this run may restart a failed stream; return the execution that failed, or None if it may not.

    Only an execution whose query ran is restarted here: a machine that cannot start one is left to the next run. A
    spare that ends before its execution begins is no failure.
    """
    stream = open_stream()
    watch = RunWatch(context.instance, context.run.run_id, signalled=check_captured_interrupt)
    failed = _failed_execution(stream, context.run.run_id, watch)
    if failed is None:
        return None
    if failed.execution_id == after:
        return after if was_spare else None
    now_ms = stream.catalog.now_ms()
    failures = stream.catalog.executions.failures_since_manual_start(stream.stream_id)
    decision = decide_restart(
        stream.restart, FailureHistory(tuple(failures) or (now_ms,)), now_ms, Random(failed.execution_id)
    )
    if not isinstance(decision, RestartAt):
        return None
    deadline = time.monotonic() + (decision.at_ms - now_ms) / 1000
    while time.monotonic() < deadline:
        if watch.should_stop():
            return None
        time.sleep(_LOOK_S)
    return failed.execution_id


def _failed_execution(stream: StreamHandle, run_id: str, watch: RunWatch) -> ExecutionRecord | None:
    """Return the newest execution of the run if its query ran and failed; record its death."""
    executions = stream.catalog.executions
    deadline = time.monotonic() + 2 * JVM_GRACE_S
    while True:
        latest = executions.latest(stream.stream_id)
        if latest is None or latest.run_id != run_id or latest.live_directory is None:
            return None
        if not latest.status.is_over:
            latest = record_death(stream.catalog, latest)
        if latest.status.is_over:
            return latest if latest.status is ExecutionStatus.FAILED and not latest.settled else None
        # The JVM ends a moment after its Python process.
        if time.monotonic() > deadline or watch.should_stop():
            return None
        time.sleep(_LOOK_S)
