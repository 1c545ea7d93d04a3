"""A start beside the running query: its process checks the code that it loaded, and only then suspends the query."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import HANDS_OVER, RequestKind, RequestRecord, RequestStatus
from dagster_ckpt.catalog.transitions import log_message
from dagster_ckpt.errors import CatalogError, RequestFailedError
from dagster_ckpt.operations.lifecycle import request_start, suspend
from dagster_ckpt.operations.requests import is_running
from dagster_ckpt.operations.start_check import check_start
from dagster_ckpt.recovery.plan_check import refuse_plan_change
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def hands_over(stream: StreamHandle, request_id: str | None) -> bool:
    """Whether a start request makes its process stop the query that runs."""
    request = stream.catalog.requests.find(request_id) if request_id is not None else None
    return request is not None and _is_open(request) and bool(request.arguments.get(HANDS_OVER)) and is_running(stream)


def hand_over(
    stream: StreamHandle,
    request_id: str | None,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] | None = None,
) -> None:
    """Before a start: check it with the loaded code while the old query runs, then suspend that query.

    Does nothing if no query runs, or if the request does not ask for it. If the start is refused, the request fails
    with the reason and the query runs on.

    Args:
        stream: The stream.
        request_id: The request that this process answers, if any.
        describe: Creates the unstarted writer.
        start_from: Where it will start.
        interrupted: Whether this process is asked to stop.
        report: Called with a message for every step; default: the stream's log.

    Raises:
        CkptError: The start is refused, or the query could not be suspended.
        RequestFailedError: The request was withdrawn; then the query runs on, or is started again where it stopped.
    """
    if request_id is None or not hands_over(stream, request_id):
        return
    tell = report or (lambda message: log_message(stream.stream_id, message))
    try:
        _check(stream, describe, start_from, tell)
        request = stream.catalog.requests.get(request_id)
        if interrupted() or not _is_open(request):
            raise RequestFailedError(f"The start of stream {stream.stream_id!r} was withdrawn; its query runs on.")
        tell("the loaded code can continue; suspending the running query")
        try:
            suspend(stream, origin=request.origin)
        except RequestFailedError:
            # It may have ended by itself meanwhile.
            if is_running(stream):
                raise
    except Exception as error:
        with suppress(CatalogError):
            stream.catalog.requests.fail_start(request_id, f"{type(error).__name__}: {error}")
        raise
    if not _is_open(stream.catalog.requests.get(request_id)):
        pending = stream.catalog.requests.pending(stream.stream_id)
        if not any(each.kind is RequestKind.START for each in pending):
            request_start(stream, StartFrom(), origin=request.origin)
        raise RequestFailedError(
            f"The start of stream {stream.stream_id!r} was withdrawn while the running query was stopped for it, so "
            "that query is started again where it stopped."
        )


def _check(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    report: Callable[[str], None],
) -> None:
    describe()
    change = check_start(stream, describe, start_from, report=report).change
    if change is not None and not change.is_accepted and not start_from.accept_plan_change:
        refuse_plan_change(
            stream.stream_id, change.differences, came_from=change.came_from, fingerprint=change.fingerprint
        )


def _is_open(request: RequestRecord) -> bool:
    return request.status is RequestStatus.PENDING
