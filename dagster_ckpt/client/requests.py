"""Sends requests to a stream's process, and waits for answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import RequestKind, RequestRecord, RequestStatus, SnapshotRecord
from dagster_ckpt.errors import CatalogError, RequestFailedError, RequestTimeoutError
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import DesiredState

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle

POLL_S = 0.5
# Several processes may request the same start, which has one id.
_AGAIN = uuid.UUID("0a5d7c1e-8d3b-4f7b-9b0f-2f4c2f0f6d52")


def is_running(stream: StreamHandle) -> bool:
    """Whether an execution of the stream holds its lease and may be alive."""
    return has_living_holder(stream.catalog, stream.stream_id)


def has_query(stream: StreamHandle) -> bool:
    """Whether a query is running that can answer, not only a run that waits to restart one."""
    return is_running(stream) and not _is_between_restarts(stream)


def _is_between_restarts(stream: StreamHandle) -> bool:
    latest = stream.catalog.executions.latest(stream.stream_id)
    return latest is not None and latest.status.is_over


def require_running(stream: StreamHandle, participle: str) -> None:
    """Refuse a stream that is not running; `participle`, such as "suspended", completes the message."""
    stream.catalog.streams.get(stream.stream_id)
    if not is_running(stream):
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not running, so it cannot be {participle}. Its snapshots are unchanged."
        )


def ask(
    stream: StreamHandle,
    kind: RequestKind,
    arguments: dict[str, str | None],
    *,
    origin: str,
    timeout_s: float,
) -> RequestRecord:
    """Submit a request to a running stream and wait for the answer.

    Raises:
        RequestFailedError: It failed or was withdrawn, or the run ended before it answered.
        RequestTimeoutError: No answer came in time; the request was withdrawn.
    """
    request_id = str(uuid.uuid4())
    with withdrawing(stream, request_id):
        request = stream.catalog.requests.submit(
            stream.stream_id, kind, arguments=arguments, origin=origin, request_id=request_id
        )
        return await_process(stream, request, timeout_s=timeout_s)


def await_process(
    stream: StreamHandle, request: RequestRecord, *, timeout_s: float, poll_s: float | None = None
) -> RequestRecord:
    """Wait for an answer while the stream's process is alive; raises as `ask`."""

    def cannot_answer() -> str | None:
        if not is_running(stream):
            return "the stream's run ended before it answered"
        if request.kind is RequestKind.SAVEPOINT and _is_between_restarts(stream):
            return "the query failed, and its run waits to start another one"
        return None

    return await_answer(stream, request, timeout_s=timeout_s, abort_reason=cannot_answer, poll_s=poll_s)


def await_answer(
    stream: StreamHandle,
    request: RequestRecord,
    *,
    timeout_s: float,
    abort_reason: Callable[[], str | None] = lambda: None,
    poll_s: float | None = None,
) -> RequestRecord:
    """Wait for an answer, and withdraw the request if none comes; raises as `ask`.

    `abort_reason` is called at each poll: a reason ends the wait.
    """
    deadline = time.monotonic() + timeout_s
    with withdrawing(stream, request.request_id):
        while True:
            answer = stream.catalog.requests.get(request.request_id)
            if answer.status is RequestStatus.COMPLETED:
                return answer
            what = _describe(answer)
            if answer.status is RequestStatus.FAILED:
                raise RequestFailedError(f"{what} failed: {answer.error}")
            if answer.status not in (RequestStatus.PENDING, RequestStatus.ACCEPTED):
                raise RequestFailedError(f"{what} is {answer.status.value}: it was withdrawn. Submit it again.")
            why = abort_reason()
            if why is not None and stream.catalog.requests.withdraw(request.request_id):
                raise RequestFailedError(f"{what} was withdrawn: {why}")
            if time.monotonic() >= deadline and stream.catalog.requests.withdraw(request.request_id):
                raise RequestTimeoutError(
                    f"{what} had no answer within {timeout_s:.0f} s and was withdrawn. Check the log of the stream's "
                    "run: a batch that takes longer than this, or a query without a committed batch, cannot answer."
                )
            time.sleep(poll_s or POLL_S)


@contextmanager
def withdrawing(stream: StreamHandle, request_id: str) -> Iterator[None]:
    """Withdraw a request, submitted before or within the context, if that raises; the exception gets a note."""
    try:
        yield
    except BaseException as error:
        with suppress(CatalogError):
            requests = stream.catalog.requests
            if requests.withdraw(request_id) and (request := requests.find(request_id)) is not None:
                error.add_note(f"{_describe(request)} was withdrawn")
        raise


def _describe(request: RequestRecord) -> str:
    return f"{request.kind.value} of stream {request.stream_id!r} (request {request.request_id})"


def await_stop(stream: StreamHandle, timeout_s: float, *, poll_s: float | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(stream):
        if time.monotonic() >= deadline:
            raise RequestTimeoutError(
                f"Stream {stream.stream_id!r} accepted the request to stop but is still running after {timeout_s:.0f} "
                "s. Check the log of its run; terminate the run if it hangs. Its snapshots are safe."
            )
        time.sleep(poll_s or POLL_S)


def start_again(stream: StreamHandle, start_id: str, *, origin: str) -> bool:
    """Request a start where the query stopped, once, if it was stopped for a start that failed.

    Returns whether it was. A stream that is desired to be down stays down.
    """
    row = stream.catalog.desired_states.find(stream.stream_id)
    is_to_run = row is None or row.desired in (None, DesiredState.RUNNING)
    if not is_to_run or not stream.catalog.requests.stopped_for(start_id):
        return False
    stream.catalog.requests.submit(
        stream.stream_id,
        RequestKind.START,
        arguments=StartFrom().as_record(),
        origin=origin,
        request_id=str(uuid.uuid5(_AGAIN, start_id)),
    )
    return True


def snapshot_of(stream: StreamHandle, answer: RequestRecord) -> SnapshotRecord:
    if answer.snapshot_id is None:
        raise RequestFailedError(
            f"Request {answer.request_id} of stream {stream.stream_id!r} ended without a snapshot."
        )
    return stream.catalog.snapshots.get(answer.snapshot_id)
