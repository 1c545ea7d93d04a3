"""Restarting a failed query in place: in the same process, under the same lease.

The restart strategy decides whether and when. A CANCEL or SUSPEND request ends the wait.
"""

from __future__ import annotations

import time
from contextlib import suppress
from random import Random

from dagster_ckpt.catalog.records import RequestStatus
from dagster_ckpt.errors import CatalogError, LeaseLostError
from dagster_ckpt.policies.restart import FailureHistory, RestartAt
from dagster_ckpt.runtime.run import Outcome, RunRequest
from dagster_ckpt.runtime.supervision import ENDS_BY_REQUEST, EndKind, QueryEnd
from dagster_ckpt.stream.handle import StreamHandle, monotonic_ms
from dagster_ckpt.stream.lease import LeaseKeeper


def await_restart(
    stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str, end: QueryEnd
) -> Outcome | None:
    """Wait until the restart strategy allows a failed query to start again.

    Args:
        stream: The stream.
        request: What the run was asked to do.
        lease: The lease that makes this process the writer.
        execution_id: The failed execution.
        end: How it failed.

    Returns:
        None to restart the query now. Otherwise the outcome of the run: no restart follows.
    """
    # The catalog dates the failures. A monotonic clock measures the delay.
    now_ms = stream.catalog.now_ms()
    failures = stream.catalog.executions.failures_since_manual_start(stream.stream_id)
    decision = stream.restart.decide(FailureHistory(tuple(failures) or (now_ms,)), now_ms, Random())
    request.report(f"the query failed: {end.reason}")
    request.report(decision.reason)
    if not isinstance(decision, RestartAt):
        return Outcome(end, execution_id, decision.reason)
    stopped = _wait_until(monotonic_ms() + decision.at_ms - now_ms, stream, request, lease, execution_id)
    return Outcome(stopped, execution_id) if stopped is not None else None


def _wait_until(
    until_ms: int, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str
) -> QueryEnd | None:
    """Wait, and return early if the run has to stop."""
    while monotonic_ms() < until_ms:
        if request.interrupted():
            return QueryEnd(EndKind.INTERRUPTED, "the process was told to stop before the restart")
        if lease.lost is not None:
            return QueryEnd(EndKind.LEASE_LOST, str(lease.lost))
        stopped = _stop_requested(stream, lease, execution_id)
        if stopped is not None:
            return stopped
        time.sleep(0.1)
    return _stop_requested(stream, lease, execution_id)


def _stop_requested(stream: StreamHandle, lease: LeaseKeeper, execution_id: str) -> QueryEnd | None:
    """Carry out a CANCEL or SUSPEND request while no query runs that could answer it."""
    catalog = stream.catalog
    try:
        pending = catalog.requests.pending(stream.stream_id)
        request = next((each for each in pending if each.kind in ENDS_BY_REQUEST), None)
        if request is None:
            return None
        kind, status = ENDS_BY_REQUEST[request.kind]
        reason = f"{request.kind.value.lower()} asked for by {request.origin}, between two restarts"
        settled = kind is EndKind.SUSPENDED
        catalog.executions.stopped(lease.record, execution_id, status, reason, settled=settled)
        # The execution is stopped from here on. If this answer is not recorded, the requester sees that the run
        # has ended.
        with suppress(CatalogError):
            catalog.requests.resolve(lease.record, request.request_id, RequestStatus.COMPLETED)
    except LeaseLostError as error:
        return QueryEnd(EndKind.LEASE_LOST, str(error))
    except CatalogError:
        return None
    return QueryEnd(kind, reason)
