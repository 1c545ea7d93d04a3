"""Restart a stream: start it, stopping the query that runs as late as possible."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from dagster_ckpt.catalog.desired_states import AlertUntil
from dagster_ckpt.catalog.records import ExecutionRecord, RequestRecord
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.errors import CkptError, RequestFailedError, RequestTimeoutError
from dagster_ckpt.operations.lifecycle import preview, request_start, suspend
from dagster_ckpt.operations.requests import await_answer, await_stop, is_running, withdrawing
from dagster_ckpt.recovery.rewind_preview import RewindPreview, refuse_loss
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.start_from import StartFrom


def restart(
    stream: StreamHandle,
    start_from: StartFrom,
    *,
    origin: str,
    timeout_s: float = REQUEST_TIMEOUT_S,
    report: Callable[[str], None] = lambda _sentence: None,
    suspend_first: bool = False,
) -> RewindPreview:
    """Start a stream, suspending it first if it is running. Returns once the query is started.

    What the catalog, the storage and the sinks tell is checked first. If a supervisor launches the runs of the stream,
    the new run is launched beside the running query: it checks what only the new code tells (its plan, its sources and
    its sink) and then suspends the query, see `hand_over`. If the start is refused, or no run is launched, the query
    runs on. Otherwise, or with `suspend_first`, the new code is checked by its start, after the query was suspended. If
    that is refused, a query that was running is started again from where it stopped, unless that is what was refused.

    The snapshot to start from is held from before the query is suspended until the start is answered.

    Raises:
        StreamNotFoundError: The stream was never started.
        SnapshotNotFoundError: The named snapshot does not exist; a running stream continues.
        LiveDirectoryError: There is no state to start from; a running stream continues.
        RowsAtRiskError: A sink could lose rows, and `start_from` does not accept that; a running stream
            continues.
        SinkRollbackError: A sink that must be rolled back cannot be; a running stream continues.
        StateRewriteError: The state cannot be rewritten as wanted; a running stream continues.
        UnsupportedSparkError: The installed Spark cannot rewrite state; a running stream continues.
        RequestFailedError: The start failed, or no code location defines the stream, which continues.
        RequestTimeoutError: No run was launched in time.
    """
    ahead = preview(stream, start_from)
    for message in ahead.messages():
        report(message)
    refuse_loss(stream, ahead, accept_loss=start_from.accept_loss)
    _refuse_undefined(stream)
    was_running, before = is_running(stream), stream.catalog.executions.latest(stream.stream_id)
    is_launched = before is not None and before.is_launched
    hands_over = was_running and is_launched and not suspend_first
    request_id = str(uuid.uuid4())
    with (
        holding(stream.catalog, [ahead.plan.snapshot], f"restart by {origin}"),
        withdrawing(stream, request_id),
    ):
        if hands_over:
            request = request_start(stream, start_from, origin=origin, request_id=request_id, hands_over=True)
            report("the new run checks its code while the query runs, and then suspends it")
        else:
            request = _ask_for_restart(stream, start_from, origin, timeout_s, report, request_id=request_id)
        report(
            "waiting for the supervisor sensor, which must be on, or for the service that runs the program, to start it"
        )
        try:
            await_answer(stream, request, timeout_s=timeout_s)
        except (RequestFailedError, RequestTimeoutError) as error:
            if hands_over and _is_same_query(stream, before):
                _explain(error, report)
                raise
            if isinstance(error, RequestFailedError):
                # The process that has refused the start answers before it ends.
                await_stop(stream, timeout_s)
            if was_running and start_from != StartFrom() and not is_running(stream):
                _go_on(stream, origin, report, error)
            raise
    return ahead


def _refuse_undefined(stream: StreamHandle) -> None:
    """Refuse to stop a query that no loaded code could start again, as far as the supervisor sensor has reported it."""
    row = stream.catalog.desired_states.find(stream.stream_id)
    if row is not None and row.alert_until is AlertUntil.DEFINED and is_running(stream):
        raise RequestFailedError(f"Stream {stream.stream_id!r} is not restarted, nothing was changed: {row.alert}.")


def _is_same_query(stream: StreamHandle, before: ExecutionRecord | None) -> bool:
    """Whether the query of an execution still runs."""
    now = stream.catalog.executions.latest(stream.stream_id)
    return is_running(stream) and now is not None and before is not None and now.execution_id == before.execution_id


def _explain(error: CkptError, report: Callable[[str], None]) -> None:
    report("the running query was not stopped and goes on")
    if isinstance(error, RequestTimeoutError):
        report(
            "no run has checked the start: is the supervisor sensor on, does a loaded code location define the stream, "
            "and is there room for a second run beside the running one? suspend_first stops the query before that"
        )


_UNCHECKED = (
    "the plan and the sources of the new code are checked by its start only, after the running query is suspended: if "
    "they are refused, the stream is down until you put the previous code back and start it"
)


def _go_on(stream: StreamHandle, origin: str, report: Callable[[str], None], error: CkptError) -> None:
    """Start a query again that was suspended for a start that is refused."""
    request_start(stream, StartFrom(), origin=origin)
    report(f"the start was refused ({error}), so the query is started again where it stopped")


def _ask_for_restart(
    stream: StreamHandle,
    start_from: StartFrom,
    origin: str,
    timeout_s: float,
    report: Callable[[str], None],
    *,
    request_id: str,
) -> RequestRecord:
    if not is_running(stream):
        return request_start(stream, start_from, origin=origin, request_id=request_id)
    report(_UNCHECKED)
    suspend(stream, origin=origin, timeout_s=timeout_s)
    report("suspended the running query")
    try:
        return request_start(stream, start_from, origin=origin, request_id=request_id)
    except CkptError as error:
        # For example a batch that Spark has purged in the meantime: the error is raised, and the
        # query continues.
        _go_on(stream, origin, report, error)
        raise
