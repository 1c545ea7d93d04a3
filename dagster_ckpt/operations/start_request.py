"""Determines what a driver was started for: a START request in the catalog contains the starting point.

A user starts a stream with a START request, or by running its program on a terminal. Any other
start of a stream that has run before counts as a restart by a cluster or a service manager:
recovery failures are remembered, and the restart strategy keeps counting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import RequestKind, RequestRecord, RequestStatus, StartCause
from dagster_ckpt.config.modes import RecoveryClaimMode
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.operations.launch import START_REQUEST_VARIABLE
from dagster_ckpt.stream.start_from import StartFrom


@dataclass(frozen=True)
class StartOrder:
    """How a driver starts its stream.

    Attributes:
        start_from: Where to start.
        cause: Whether a user or a restart started it.
        request_id: The START request that it answers, if any.
        run_id: The Dagster run that launched it, if any.
        has_supervisor: Whether it was launched by a supervisor that relaunches it after an interrupt.
    """

    start_from: StartFrom = field(default_factory=StartFrom)
    cause: StartCause = StartCause.MANUAL
    request_id: str | None = None
    run_id: str | None = None
    has_supervisor: bool = False


def is_by_hand() -> bool:
    """Whether this process is interactive: a Python shell or notebook, or started on a terminal."""
    has_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    return has_terminal or hasattr(sys, "ps1")


def cause_unasked(catalog: Catalog, stream_id: str) -> StartCause:
    """The cause of a start without a request: a user or a restart."""
    if is_by_hand() or catalog.executions.latest(stream_id) is None:
        return StartCause.MANUAL
    return StartCause.RESTART_NEW_RUN


def start_order(
    catalog: Catalog, stream_id: str, *, otherwise: StartFrom, environment: Mapping[str, str] = os.environ
) -> StartOrder:
    """Determine what this driver was started for.

    A driver that was launched for a request follows that request once. If its cluster starts it
    again, it continues from the latest state. A driver started by anything else takes the oldest
    open request for which no driver is launched.

    Args:
        catalog: The catalog.
        stream_id: The stream.
        otherwise: Where to start if there is no request.
        environment: Names the request that a driver was launched for.

    Raises:
        RequestFailedError: That request has failed or was withdrawn, or belongs to another stream.
        CatalogError: There is no such request.
    """
    launched_for = environment.get(START_REQUEST_VARIABLE)
    if launched_for:
        return _of_launched(catalog, catalog.requests.get(launched_for), stream_id)
    for request in catalog.requests.pending(stream_id):
        if request.kind is RequestKind.START and "run_id" not in request.arguments:
            return StartOrder(
                start_from=_start_from(request.arguments),
                cause=_cause_of(catalog, request),
                request_id=request.request_id,
            )
    return StartOrder(start_from=otherwise, cause=cause_unasked(catalog, stream_id))


def _cause_of(catalog: Catalog, request: RequestRecord) -> StartCause:
    is_restart = request.arguments.get("cause") == StartCause.RESTART_NEW_RUN.value
    latest = catalog.executions.latest(request.stream_id)
    # An execution began for this request, and its process was killed before it could answer.
    has_started = latest is not None and latest.started_at_ms >= request.created_at_ms
    return StartCause.RESTART_NEW_RUN if is_restart or has_started else StartCause.MANUAL


def _of_launched(catalog: Catalog, request: RequestRecord, stream_id: str) -> StartOrder:
    if request.stream_id != stream_id or request.kind is not RequestKind.START:
        raise RequestFailedError(
            f"{START_REQUEST_VARIABLE} names request {request.request_id}, which is {request.kind.value} of stream "
            f"{request.stream_id!r} and no START of {stream_id!r}. Give the program the stream id of the asset that "
            "launches it."
        )
    launch = catalog.launches.get(request.request_id)
    run_id = launch.run_id if launch is not None else request.arguments.get("run_id")
    if request.status is RequestStatus.COMPLETED:
        return StartOrder(cause=StartCause.RESTART_NEW_RUN, run_id=run_id, has_supervisor=True)
    if request.status is not RequestStatus.PENDING:
        raise RequestFailedError(
            f"The start of stream {stream_id!r} that this process was launched for (request {request.request_id}) is "
            f"{request.status.value}: {request.error or 'nobody waits for it any more'}. Start the stream again."
        )
    return StartOrder(
        start_from=_start_from(request.arguments),
        cause=_cause_of(catalog, request),
        request_id=request.request_id,
        run_id=run_id,
        has_supervisor=True,
    )


def _start_from(arguments: Mapping[str, Any]) -> StartFrom:
    return StartFrom.parse(
        str(arguments.get("start_from", "latest")),
        new_query_id=bool(arguments.get("new_query_id", False)),
        accept_loss=bool(arguments.get("accept_loss", False)),
        claim_mode=RecoveryClaimMode(arguments.get("claim_mode", RecoveryClaimMode.NO_CLAIM.value)),
        accept_plan_change=bool(arguments.get("accept_plan_change", False)),
        discard_state=bool(arguments.get("discard_state", False)),
        no_safety_savepoint=bool(arguments.get("no_safety_savepoint", False)),
    )
