"""Stop, cancel and start a stream, and preview what a start would do.

A running stream receives a request through a row in the catalog, which its own process answers. A
stream that is not running is modified directly, under the same lease that a run would take.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    RequestKind,
    RequestRecord,
    SnapshotRecord,
)
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.config.state_backend import OnStateChange
from dagster_ckpt.errors import CkptError, LeaseHeldError, LiveDirectoryError, RequestFailedError
from dagster_ckpt.operations.requests import (
    ask,
    await_stop,
    is_running,
    require_running,
    snapshot_of,
)
from dagster_ckpt.recovery.examination import Examiner, is_suspicious
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.plan_check import check_state
from dagster_ckpt.recovery.planning import plan_recovery, with_newer_point
from dagster_ckpt.recovery.replay import lost_batches
from dagster_ckpt.recovery.retention import RetentionReport
from dagster_ckpt.recovery.rewind_preview import RewindPreview, preview_rewind, refuse_loss
from dagster_ckpt.runtime.run import EndKind, QueryEnd
from dagster_ckpt.runtime.settlement import settle_execution, stop_before_restart
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint, checked_label
from dagster_ckpt.values.modes import DesiredState, TerminalState
from dagster_ckpt.values.redaction import refuse_user_info


@dataclass(frozen=True)
class StopResult:
    """How a stream was stopped.

    Attributes:
        stream_id: The stream.
        was_running: Whether a query was running; otherwise the stream was between two restarts.
        savepoint: The savepoint that it was stopped with, or None.
        retention: What the clean-up option deleted and kept, if it was applied here. The process of a
            running query applies it itself.
    """

    stream_id: str
    was_running: bool
    savepoint: SnapshotRecord | None = None
    retention: RetentionReport | None = None

    def messages(self) -> list[str]:
        """The result as log messages."""
        if self.was_running:
            lines = [f"the running query of {self.stream_id} was stopped"]
        else:
            lines = [f"{self.stream_id} was between two restarts, and will not be restarted"]
        if self.savepoint is not None:
            lines.append(f"{describe_snapshot(self.savepoint)}: {self.savepoint.location}")
        return [*lines, *(self.retention.messages() if self.retention is not None else ())]


def stop_with_savepoint(
    stream: StreamHandle,
    *,
    origin: str,
    label: str | None = None,
    target_directory: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> StopResult:
    """Stop a running stream at a batch boundary and take a savepoint of the final state.

    If the savepoint fails, the query continues.

    Raises:
        StreamNotFoundError: The stream was never started.
        OptionError: The label means another starting point or is not valid, or the folder contains user
            credentials.
        RequestFailedError: The stream is not running, or the savepoint failed.
        RequestTimeoutError: No answer in time; the request was withdrawn.
    """
    checked_label(label)
    refuse_user_info("target_directory", target_directory)
    require_running(stream, "stopped with a savepoint")
    arguments = {"label": label, "target_directory": target_directory}
    answer = ask(stream, RequestKind.STOP_WITH_SAVEPOINT, arguments, origin=origin, timeout_s=timeout_s)
    savepoint = snapshot_of(stream, answer)
    await_stop(stream, timeout_s)
    return StopResult(stream.stream_id, was_running=True, savepoint=savepoint)


def suspend(stream: StreamHandle, *, origin: str, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
    """Stop a stream and keep everything, so that it can be started again.

    A stream that failed and waits for its restart is not restarted.

    Raises:
        StreamNotFoundError: The stream was never started.
        RequestFailedError: The stream is not running, and no restart is pending.
        RequestTimeoutError: It did not stop in time.
    """
    if _stop_between_restarts(stream, origin, EndKind.SUSPENDED) is not None:
        return StopResult(stream.stream_id, was_running=False)
    require_running(stream, "suspended")
    ask(stream, RequestKind.SUSPEND, {}, origin=origin, timeout_s=timeout_s)
    await_stop(stream, timeout_s)
    return StopResult(stream.stream_id, was_running=True)


def cancel(stream: StreamHandle, *, origin: str, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
    """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted.

    A stream that failed and waits for its restart is not restarted.

    Raises:
        StreamNotFoundError: The stream was never started.
        RequestFailedError: The stream is not running, and no restart is pending.
        RequestTimeoutError: It did not stop in time.
    """
    stopped = _stop_between_restarts(stream, origin, EndKind.CANCEL_REQUESTED)
    if stopped is not None:
        report = settle_execution(stream, stopped, TerminalState.CANCELED)
        return StopResult(stream.stream_id, was_running=False, retention=report)
    require_running(stream, "canceled")
    ask(stream, RequestKind.CANCEL, {}, origin=origin, timeout_s=timeout_s)
    await_stop(stream, timeout_s)
    return StopResult(stream.stream_id, was_running=True)


def _stop_between_restarts(stream: StreamHandle, origin: str, kind: EndKind) -> str | None:
    """Stop a stream whose last execution failed or died and awaits a restart; returns that execution, or None."""
    last = stream.catalog.executions.latest(stream.stream_id)
    if last is None or last.settled or is_running(stream):
        return None
    holder = this_holder(f"stop-{uuid.uuid4()}", origin, None)
    try:
        # A restart that begins in the meantime holds the lease and gets a request like any running
        # stream.
        acquired = acquire(stream.catalog, stream.stream_id, holder)
    except LeaseHeldError:
        return None
    verb = "canceled" if kind is EndKind.CANCEL_REQUESTED else "suspended"
    reason = f"{verb} by {origin} between two restarts; it had ended {last.status.value}: {last.reason}"
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        found = stop_before_restart(stream.catalog, lease.record, last.execution_id, QueryEnd(kind, reason))
    return last.execution_id if found else None


def accept_plan_change(stream: StreamHandle, fingerprint: str) -> None:
    """Accept, once, that code with a different plan continues from a stream's state.

    Args:
        stream: The stream.
        fingerprint: Fingerprint of the plan, as shown in the error; other changes are still refused.

    Raises:
        StreamNotFoundError: The stream was never started.
    """
    stream.catalog.streams.accept_plan(stream.stream_id, fingerprint)


def set_desired_state(
    stream: StreamHandle,
    desired: DesiredState | None,
    *,
    origin: str,
    retry_refused: bool = False,
    accept_plan_change: bool = False,
) -> DesiredRecord:
    """Set the desired state of a stream; the supervisor sensor reconciles it, even if the stream was never started.

    Args:
        stream: The stream.
        desired: The state; None to use the one in the asset's definition.
        origin: Who sets it, as the catalog shows it.
        retry_refused: Retry a code version that a preflight refused, or that was rolled back.
        accept_plan_change: Accept the plan that the last preflight refused, and retry it.

    Raises:
        RequestFailedError: The last preflight refused no plan, so there is no known change to accept.
    """
    stream.register()
    if accept_plan_change:
        row = stream.catalog.desired_states.find(stream.stream_id)
        refused = row.preflight.refused_plan if row is not None and row.preflight is not None else None
        if refused is None:
            raise RequestFailedError(
                f"Stream {stream.stream_id!r} has no plan change to accept: its last preflight did not refuse one. "
                "Run a preflight first, which shows the differences."
            )
        stream.catalog.streams.accept_plan(stream.stream_id, refused)
        retry_refused = True
    return stream.catalog.desired_states.put(stream.stream_id, desired, origin=origin, retry_refused=retry_refused)


def preview_start(stream: StreamHandle, start_from: StartFrom) -> RecoveryPlan:
    """The plan of a start, without carrying it out.

    Raises:
        StreamNotFoundError: The stream was never started.
        SnapshotNotFoundError: The named snapshot does not exist.
        LiveDirectoryError: There is no state to start from.
    """
    return plan_recovery(recovery_facts(stream, start_from, predecessor_ended=True, remembers=False))


def preview(stream: StreamHandle, start_from: StartFrom) -> RewindPreview:
    """What a start would undo and process again, and the effect on each sink. Works while the stream is running.

    Raises:
        StreamNotFoundError: The stream was never started.
        SnapshotNotFoundError: The named snapshot does not exist.
        LiveDirectoryError: There is no state to start from, or the batch is not retained.
        RecoveryExhaustedError: Every point that the stream could continue from is damaged.
        StateRewriteError: The state cannot be rewritten as wanted.
        UnsupportedSparkError: The installed Spark cannot rewrite state.
    """
    facts = recovery_facts(stream, start_from, predecessor_ended=True, remembers=False)
    while True:
        plan = plan_recovery(facts)
        try:
            with holding(stream.catalog, [plan.snapshot], "preview"):
                lost = lost_batches(stream, facts, plan)
                running, replayed = is_running(stream), plan if lost is None else lost.plan()
                ahead = preview_rewind(stream, facts, replayed, is_running=running)
                if lost is not None and ahead.gone:
                    # As the start does: it replays nothing that the sources no longer have.
                    ahead = preview_rewind(stream, facts, plan, is_running=running)
                newer = with_newer_point(facts, plan, ahead.gone) if ahead.gone and not start_from.accept_loss else None
                if newer is not None:
                    facts = newer
                    continue
                return replace(ahead, state=tuple(_check_rewrite(stream, ahead.plan, start_from)))
        except CkptError as error:
            if plan.point is None or start_from.point is not StartPoint.LATEST or not is_suspicious(error):
                raise
            damage = Examiner(stream).damage_of_point(plan)
            if damage is None:
                raise
            # The start will skip it as well.
            failed = PointFailure(0, "preview", plan.point, damage.error, damage.detail, True, plan.to_batch, 0)
            facts = replace(facts, failures=[*facts.failures, failed])


def request_start(
    stream: StreamHandle,
    start_from: StartFrom,
    *,
    origin: str,
    request_id: str | None = None,
    hands_over: bool = False,
) -> RequestRecord:
    """Request a start of the stream; the supervisor sensor launches the run.

    The starting point is checked first, so that an unknown name raises here.

    Args:
        stream: The stream.
        start_from: The starting point.
        origin: Who requests it, as the catalog shows it.
        request_id: Its id; default: a new one.
        hands_over: The stream runs: the run that is launched checks its code, and then suspends the query.

    Raises:
        StreamNotFoundError: The stream was never started.
        SnapshotNotFoundError: The named snapshot does not exist.
        LiveDirectoryError: There is no state to start from.
        RowsAtRiskError: A sink could lose rows, and `start_from` does not accept that.
        SinkRollbackError: A sink that must be rolled back cannot be.
    """
    ahead = preview(stream, start_from)
    refuse_loss(stream, ahead, accept_loss=start_from.accept_loss)
    listed = listed_snapshot(stream, ahead.plan.snapshot)
    return stream.catalog.requests.submit(
        stream.stream_id,
        RequestKind.START,
        arguments={**start_from.as_record(), **({HANDS_OVER: True} if hands_over else {})},
        origin=origin,
        request_id=request_id,
        holding=listed.snapshot_id if listed is not None else None,
    )


def _check_rewrite(stream: StreamHandle, plan: RecoveryPlan, start_from: StartFrom) -> Sequence[str]:
    """Refuse a rewrite of state that the start would refuse, before a running query is suspended for it."""
    if start_from.state_partitions is not None:
        return check_state(stream, plan, start_from).messages
    if stream.on_backend_change is OnStateChange.CONVERT:
        # The start recovers from a live directory that cannot be read.
        with suppress(LiveDirectoryError):
            return check_state(stream, plan, start_from).messages
    return ()


def listed_snapshot(stream: StreamHandle, snapshot: SnapshotRecord | None) -> SnapshotRecord | None:
    """The snapshot as the catalog lists it at this location, or None."""
    if snapshot is None:
        return None
    listed = stream.catalog.snapshots.by_id([snapshot.snapshot_id]).get(snapshot.snapshot_id)
    return listed if listed is not None and listed.location == snapshot.location else None
