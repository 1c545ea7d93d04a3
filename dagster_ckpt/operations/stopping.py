"""Requests a managed stream to stop, waits for it, and produces alerts if it does not. Pure."""

from __future__ import annotations

from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord
from dagster_ckpt.catalog.records import RequestKind, RequestRecord, RequestStatus
from dagster_ckpt.config.durations import iso_duration
from dagster_ckpt.operations.managed_stream import STOPPING, Decision, ObservedStream, ask, stay
from dagster_ckpt.stream.liveness import SILENCE_MS


def ask_to_stop(
    row: DesiredRecord,
    seen: ObservedStream,
    first: RequestKind,
    *,
    again: RequestKind,
    since_ms: int,
    timeout_ms: int | None,
    reason: str,
    step: str = "stop",
) -> Decision:
    """Request a stream to stop, then wait. If that fails, request it in another way, or alert users.

    Args:
        row: The managed stream.
        seen: The stream, which is alive.
        first: The first kind of request.
        again: The kind used if the first request failed, or if a later execution has begun since.
        since_ms: Earlier requests are unrelated.
        timeout_ms: Time to answer, and then again to end; None: unlimited.
        reason: The reason for the stop.
        step: A name for the request, unique within the generation.
    """
    request = seen.request
    execution = seen.execution
    if request is None or request.kind not in STOPPING or request.created_at_ms < since_ms:
        return ask(row, reason, step, first)
    is_open = seen.open_request is not None
    if is_open or execution is None or _ends(request, execution.started_at_ms):
        waits = f"waits for the answer to {request.kind.value}" if is_open else "waits until its run is over"
        waiting = stay(row, f"{reason}: {waits}")
        late = overdue(seen, timeout_ms)
        return waiting if late is None else waiting.with_changes(alert=late, alert_until=AlertUntil.STOPPED)
    why = f"{request.kind.value} came to nothing ({request.error or 'an execution began after it'})"
    return ask(row, f"{reason}: {why}", f"{step} {execution.execution_id}", again)


def overdue(seen: ObservedStream, timeout_ms: int | None) -> str | None:
    """Alert for a stream that has not answered the last request to stop in time, or has not ended.

    Args:
        seen: The stream.
        timeout_ms: Time to answer, and then again to end; None: unlimited.

    Returns:
        What was found and what to do, in a text that stays the same from call to call; None while there
        is time left.
    """
    request, execution = seen.request, seen.execution
    if request is None or execution is None or timeout_ms is None or request.kind not in STOPPING:
        return None
    is_answered = request.status is RequestStatus.COMPLETED
    since_ms = (request.resolved_at_ms or 0) if is_answered else request.created_at_ms
    # The waiting time of a withdrawn request ended with its withdrawal.
    now_ms = (request.resolved_at_ms or 0) if request.status is RequestStatus.WITHDRAWN else seen.now_ms
    if now_ms - since_ms < timeout_ms:
        return None
    limit = iso_duration(timeout_ms)
    kind = request.kind.value
    if is_answered:
        found = f"it has answered {kind}, but its run was not over {limit} later"
    elif request.status is RequestStatus.ACCEPTED:
        found = f"{kind} was taken up, but not answered within {limit}"
    else:
        found = f"nobody has taken {kind} up within {limit}"
    is_silent = seen.now_ms - execution.heartbeat_at_ms > SILENCE_MS
    life = "gives no sign of life, though its run or its lease goes on" if is_silent else "gives signs of life"
    process = f"process {execution.pid} on {execution.host}"
    return (
        f"it was not stopped: {found}; {process}, of run {execution.run_id}, {life}. Look into that run's log, then "
        "terminate the run, by force where it does not react, or end the process: what the query has committed is kept."
    )


def _ends(request: RequestRecord, started_at_ms: int) -> bool:
    """Whether the current execution answered it."""
    return request.status is RequestStatus.COMPLETED and started_at_ms <= (request.resolved_at_ms or 0)
