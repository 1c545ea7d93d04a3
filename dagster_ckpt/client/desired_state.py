"""Decides how a managed stream reaches its desired state, and how an upgrade proceeds. Pure: no I/O, no clock.

What a user does with a stream by hand becomes its desired state. docs/upgrades.md shows the phases of an upgrade;
ROLLED_BACK and ROLLBACK_FAILED are recorded by the run that restores the stream.

Modes and fallbacks are those of the Flink Kubernetes Operator (`AbstractJobReconciler`), except that only one version
of the code is loaded: a stream that was rolled back stays down until another version is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    ExecutionRecord,
    ExecutionStatus,
    RequestKind,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.client.managed_stream import (
    STOPPING,
    Adopt,
    Decision,
    ObservedStream,
    Run,
    StepRun,
    StreamLife,
    Withdraw,
    ask,
    ask_to_stop,
    cancel_pending,
    move,
    overdue,
    stay,
)
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.values.durations import rounded_duration
from dagster_ckpt.values.modes import DesiredState

_ENDED_BY_HAND = {
    ExecutionStatus.FINISHED: DesiredState.SUSPENDED,
    ExecutionStatus.SUSPENDED: DesiredState.SUSPENDED,
    ExecutionStatus.CANCELED: DesiredState.CANCELED,
}
_STOP_BY = {
    DesiredState.SUSPENDED: (RequestKind.STOP_WITH_SAVEPOINT, RequestKind.SUSPEND),
    DesiredState.CANCELED: (RequestKind.CANCEL, RequestKind.CANCEL),
}


def decide(row: DesiredRecord, declared: DesiredState | None, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    """Decide the next step; `declared`, from the asset's definition, applies unless `row.desired` is set."""
    desired = row.desired or declared
    if not seen.is_alive and row.alert_until is AlertUntil.STOPPED:
        row = replace(row, alert=None, alert_until=None)
    if row.broken is not None:
        return stay(row, f"no action: its row cannot be read: {row.broken}")
    under_way = row.upgrade if row.upgrade is not None and not row.upgrade.phase.is_over else None
    if under_way is not None and under_way.phase.goes_back:
        return advance_upgrade(row, under_way, policy, seen)
    if desired is None:
        return stay(row, "it is not managed")
    if seen.start_pending:
        return stay(row, "a start requested by a user takes precedence")
    if desired is not DesiredState.RUNNING:
        return _to_stopped(row, desired, under_way, policy, seen)
    if under_way is not None:
        return advance_upgrade(row, under_way, policy, seen)
    return _to_running(row, policy, seen)


def is_steady(
    row: DesiredRecord, declared: DesiredState | None, execution: ExecutionRecord | None, code_version: str | None
) -> bool:
    """Whether the catalog's rows alone show that the stream is in its desired state."""
    desired = row.desired or declared
    if desired is None:
        return row.upgrade is None or row.upgrade.phase.is_over
    if row.reached != row.generation or execution is None or row.broken is not None:
        return False
    runs = not execution.status.is_over
    if desired is DesiredState.RUNNING:
        is_over = row.upgrade is None or row.upgrade.phase is UpgradePhase.STABLE
        return runs and is_over and code_version in (None, execution.code_version)
    return not runs and execution.settled


def _to_stopped(
    row: DesiredRecord,
    desired: DesiredState,
    under_way: UpgradeRecord | None,
    policy: UpgradePolicy,
    seen: ObservedStream,
) -> Decision:
    request = seen.open_request
    if under_way is not None:
        dropped = stay(row, f"upgrade aborted, desired state changed to {desired.value}").with_changes(upgrade=None)
        is_start = request is not None and request.kind is RequestKind.START
        return dropped.with_changes(*((Withdraw(request.request_id),) if request is not None and is_start else ()))
    if seen.is_alive:
        return _stop(row, desired, policy, seen).with_changes(holds_restart=True)
    quiet = cancel_pending(seen)
    if quiet:
        return stay(row, "it is not running").with_changes(*quiet, holds_restart=True)
    if row.reached == row.generation:
        return stay(row, f"it is {desired.value}")
    execution = seen.execution
    is_canceled = execution is None or execution.status is ExecutionStatus.CANCELED or seen.run_succeeded
    if desired is DesiredState.CANCELED and not is_canceled:
        return stay(row, "its clean-up option decides which checkpoints are kept").with_changes(Run(StepRun.CANCEL))
    return stay(row, f"it is {desired.value}").with_changes(reached=True)


def _stop(row: DesiredRecord, desired: DesiredState, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    execution = seen.execution
    is_by_hand = execution is not None and execution.cause is StartCause.MANUAL and not seen.is_ours
    if is_by_hand and execution is not None and execution.started_at_ms > row.changed_at_ms:
        return stay(row, "a user has started it").with_changes(Adopt(DesiredState.RUNNING))
    first, again = _STOP_BY[desired]
    request = seen.request
    next_step = ask_to_stop(
        row,
        seen,
        first,
        again=again,
        since_ms=row.changed_at_ms,
        timeout_ms=policy.stop_timeout_ms,
        reason=f"to be {desired.value}",
    )
    has_failed = request is not None and request.status is RequestStatus.FAILED and bool(next_step.actions)
    if request is not None and has_failed and request.kind is RequestKind.STOP_WITH_SAVEPOINT:
        alert = (
            f"the savepoint failed ({request.error}): the stream is stopped without one and its live directory is kept"
        )
        return next_step.with_changes(alert=alert)
    return next_step


def _to_running(row: DesiredRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    last = row.upgrade
    if last is not None and _is_refused(last, seen):
        if seen.is_alive and not seen.runs_another_version:
            return move(row, last, UpgradePhase.STABLE, "a user has started it")
        return stay(row, f"code version {seen.code_version} is not started: {last.reason}").with_changes(
            holds_restart=True
        )
    if last is not None and last.phase is UpgradePhase.ROLLED_BACK and not seen.is_alive:
        return begin_upgrade(policy, seen)
    if seen.runs_another_version and (seen.is_alive or seen.life is StreamLife.TO_BE_RESTARTED):
        return begin_upgrade(policy, seen)
    if seen.is_alive:
        return stay(row, "it runs").with_changes(reached=True, alert=None)
    if seen.life is StreamLife.TO_BE_RESTARTED:
        # Its query has run, so an alert about a failed start is out of date.
        return stay(row, "the restart strategy decides").with_changes(alert=None)
    return _start(row, policy, seen)


def _is_refused(upgrade: UpgradeRecord, seen: ObservedStream) -> bool:
    # After a failed rollback a user must decide where the stream continues.
    is_same = upgrade.to_version == seen.code_version or upgrade.phase is UpgradePhase.ROLLBACK_FAILED
    return upgrade.phase.refuses and is_same


def _start(row: DesiredRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    execution, request = seen.execution, seen.request
    if seen.open_request is not None:
        if seen.open_request.kind is RequestKind.START:
            return stay(row, "waiting for its run")
        return stay(row, "no process is left to stop").with_changes(Withdraw(seen.open_request.request_id))
    if execution is not None and (execution.ended_at_ms or 0) > row.changed_at_ms and not is_stop_of(seen):
        by_hand = _ENDED_BY_HAND.get(execution.status)
        if by_hand is not None:
            return stay(row, f"a user stopped it, or its input ended: {execution.reason}").with_changes(Adopt(by_hand))
        if not seen.runs_another_version:
            alert = f"it failed for good; {_SET_AGAIN}: {execution.reason}"
            return stay(row, "it failed for good").with_changes(alert=alert)
    if execution is not None and seen.runs_another_version:
        return begin_upgrade(policy, seen)
    failed = request if request is not None and _came_to_nothing(request) else None
    if failed is None:
        return ask(row, "start from latest", "start", RequestKind.START, start_from="latest")
    why = failed.error or _WITHDRAWN
    alert = f"it could not be started: {why}"
    if seen.now_ms < (failed.resolved_at_ms or 0) + RETRY_MS:
        is_bad = failed.error is not None or row.alert is not None
        next_step = stay(row, f"the start failed and is requested again: {why}")
        return next_step.with_changes(alert=alert) if is_bad else next_step
    step = f"start after {failed.request_id}"
    return ask(row, "start from latest", step, RequestKind.START, start_from="latest").with_changes(alert=alert)


_WITHDRAWN = "its run was terminated before the query ran"
_SET_AGAIN = "set RUNNING again or load another code version"


def _came_to_nothing(request: RequestRecord) -> bool:
    is_withdrawn = request.kind is RequestKind.START and request.status is RequestStatus.WITHDRAWN
    return is_withdrawn or request.status is RequestStatus.FAILED


# Runs without a result after which the upgrade is refused.
PREFLIGHT_RUNS = 3
# The wait before a failed start is requested again.
RETRY_MS = 60_000


def begin_upgrade(policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    running = seen.execution.code_version if seen.execution is not None else None
    needs_preflight = policy.preflight and policy.mode is not UpgradeMode.STATELESS and seen.has_state
    phase = UpgradePhase.PREFLIGHT if needs_preflight else UpgradePhase.STOPPING
    if policy.mode is UpgradeMode.HAND_OVER and seen.is_alive and seen.has_state:
        phase = UpgradePhase.HANDING_OVER
    reason = f"code version {seen.code_version} is loaded, but {running} was started last"
    upgrade = UpgradeRecord(
        phase, running, seen.code_version, policy.mode, seen.now_ms, reason, failing_before=seen.failing
    )
    return Decision(reason, upgrade, None, None, begins=True, holds_restart=True)


def advance_upgrade(
    row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream
) -> Decision:
    match upgrade.phase:
        case UpgradePhase.PREFLIGHT:
            return _preflight(row, upgrade, policy, seen)
        case UpgradePhase.HANDING_OVER:
            return _handing_over(row, upgrade, policy, seen)
        case UpgradePhase.STOPPING:
            return _stopping(row, upgrade, policy, seen)
        case UpgradePhase.STARTING:
            return _starting(row, upgrade, policy, seen)
        case UpgradePhase.UPGRADING:
            return _upgrading(row, upgrade, policy, seen)
        case UpgradePhase.ROLLING_BACK:
            return _rolling_back(row, upgrade, policy, seen)
    return _restoring(row, upgrade, seen)


def _preflight(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    if seen.code_version != upgrade.to_version:
        if seen.runs_another_version:
            return begin_upgrade(policy, seen)
        return stay(row, "the running code version was loaded again: no upgrade").with_changes(upgrade=None)
    if seen.is_alive and not seen.runs_another_version:
        return move(row, upgrade, UpgradePhase.STABLE, "a user has started it")
    result = row.preflight
    if result is not None and result.code_version == upgrade.to_version and result.at_ms >= upgrade.began_at_ms:
        if result.passed:
            return move(row, upgrade, UpgradePhase.STOPPING, f"preflight: {result.reason}")
        return move(row, upgrade, UpgradePhase.REFUSED, f"refused by the preflight: {result.reason}")
    if seen.runs_failed >= PREFLIGHT_RUNS:
        reason = f"{seen.runs_failed} preflights ended without a result; see the logs of their runs"
        return move(row, upgrade, UpgradePhase.REFUSED, reason)
    return stay(row, "running the new code on a copy of the state").with_changes(
        Run(StepRun.PREFLIGHT), holds_restart=True
    )


def _handing_over(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    request, execution = seen.request, seen.execution
    if seen.code_version != upgrade.to_version:
        dropped = (Withdraw(request.request_id),) if request is not None and seen.open_request is not None else ()
        if seen.runs_another_version:
            return begin_upgrade(policy, seen).with_changes(*dropped)
        return stay(row, "the running code version was loaded again: no upgrade").with_changes(*dropped, upgrade=None)
    if execution is not None and not seen.runs_another_version:
        began_ms = execution.started_at_ms
        return move(row, upgrade, UpgradePhase.UPGRADING, "the new code has taken over", started_at_ms=began_ms)
    newest = seen.newest_snapshot
    # A rollback restores the newest snapshot that the old code took.
    noted = replace(upgrade, snapshot_id=newest.snapshot_id if newest is not None else None)
    has_stopped = execution is not None and execution.status is ExecutionStatus.SUSPENDED
    late = _late_hand_over(request, policy.hand_over_timeout_ms, seen.now_ms)
    if seen.open_request is not None:
        # Once the old code has stopped, nothing but this start continues the stream.
        ends = (Withdraw(seen.open_request.request_id),) if late is not None and not has_stopped else ()
        waits = stay(row, late or "the run of the new code checks it beside the old code")
        return waits.with_changes(*ends, upgrade=noted, holds_restart=True)
    if request is not None and seen.is_alive:
        if has_stopped:
            return stay(row, "waiting for the old code to end").with_changes(upgrade=noted, holds_restart=True)
        return move(row, upgrade, UpgradePhase.REFUSED, f"not handed over: {request.error or late or _WITHDRAWN}")
    if not seen.is_alive:
        # The old code died, or was stopped for code that did not start.
        old = execution.execution_id if execution is not None else None
        next_step = move(row, noted, UpgradePhase.STARTING, "it is not running", old_execution_id=old)
        return next_step.with_changes(*cancel_pending(seen))
    start = {"start_from": "latest", HANDS_OVER: True, **_verification(policy)}
    asked = ask(row, "start the new code beside the old", "hand over", RequestKind.START, **start)
    return asked.with_changes(upgrade=noted, holds_restart=True)


def _late_hand_over(request: RequestRecord | None, timeout_ms: int | None, now_ms: int) -> str | None:
    if request is None or timeout_ms is None or (request.resolved_at_ms or now_ms) - request.created_at_ms < timeout_ms:
        return None
    limit = rounded_duration(timeout_ms)
    return f"the new code has not taken over within {limit}, and cannot any more. Terminate its run if it still runs"


def _verification(policy: UpgradePolicy) -> dict[str, int]:
    return {"verify_batches": policy.verify_batches} if policy.verify_batches else {}


def _stopping(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    if not seen.is_alive:
        snapshot_id = seen.request.snapshot_id if seen.request is not None else None
        if snapshot_id is None and seen.newest_snapshot is not None:
            snapshot_id = seen.newest_snapshot.snapshot_id
        old = seen.execution.execution_id if seen.execution is not None else None
        return move(
            row, upgrade, UpgradePhase.STARTING, "it is not running", snapshot_id=snapshot_id, old_execution_id=old
        ).with_changes(*cancel_pending(seen))
    first, why = _way_to_stop(upgrade.mode, policy.max_checkpoint_age_ms, seen)
    request = seen.request
    late = overdue(seen, policy.stop_timeout_ms)
    if late is not None and request is not None and request.status is RequestStatus.PENDING:
        # Withdraw before aborting: a stream that stops after all is upgraded.
        return stay(row, late).with_changes(Withdraw(request.request_id, only_pending=True), holds_restart=True)
    if late is not None and request is not None and request.status is RequestStatus.WITHDRAWN:
        return move(row, upgrade, UpgradePhase.REFUSED, late)
    failed = (
        request is not None
        and request.kind is RequestKind.STOP_WITH_SAVEPOINT
        and request.status in (RequestStatus.FAILED, RequestStatus.WITHDRAWN)
    )
    if failed and (upgrade.mode is not UpgradeMode.SAVEPOINT or seen.newest_snapshot is None):
        assert request is not None
        reason = f"the savepoint failed ({request.error or 'it was withdrawn'}), so the stream continues unchanged"
        return move(row, upgrade, UpgradePhase.REFUSED, reason)
    next_step = ask_to_stop(
        row,
        seen,
        first,
        again=RequestKind.SUSPEND,
        since_ms=upgrade.began_at_ms,
        timeout_ms=policy.stop_timeout_ms,
        reason=why,
    )
    return next_step.with_changes(holds_restart=True)


def _way_to_stop(mode: UpgradeMode, oldest_ms: int | None, seen: ObservedStream) -> tuple[RequestKind, str]:
    if mode is UpgradeMode.SAVEPOINT:
        return RequestKind.STOP_WITH_SAVEPOINT, "stop with a savepoint"
    if mode is UpgradeMode.STATELESS or oldest_ms is None:
        return RequestKind.SUSPEND, "stop"
    began_ms = seen.execution.started_at_ms if seen.execution is not None else 0
    newest_ms = (seen.newest_snapshot.completed_at_ms or 0) if seen.newest_snapshot is not None else 0
    if seen.now_ms - max(newest_ms, began_ms) <= oldest_ms:
        return RequestKind.SUSPEND, "stop: the newest snapshot is recent enough"
    return RequestKind.STOP_WITH_SAVEPOINT, "stop with a savepoint: the newest snapshot is too old"


def _starting(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    execution = seen.execution
    if execution is not None and execution.execution_id != upgrade.old_execution_id:
        return move(
            row,
            upgrade,
            UpgradePhase.UPGRADING,
            "the new code was started",
            started_at_ms=execution.started_at_ms,
            to_version=execution.code_version or upgrade.to_version,
        )
    request = seen.request
    if seen.open_request is not None:
        return stay(row, "waiting for the run of the new code").with_changes(holds_restart=True)
    if request is not None and seen.now_ms < (request.resolved_at_ms or 0) + RETRY_MS:
        return stay(row, f"the start failed and is requested again: {request.error}").with_changes(holds_restart=True)
    # State that the new code has made is kept.
    is_new = execution is not None and execution.code_version == upgrade.to_version
    has_state = is_new and execution is not None and execution.live_directory is not None
    start_from = "empty" if upgrade.mode is UpgradeMode.STATELESS and not has_state else "latest"
    # With the policy, a user has confirmed that the state is discarded.
    where: dict[str, Any] = {"start_from": start_from, **({"discard_state": True} if start_from == "empty" else {})}
    if upgrade.mode is UpgradeMode.HAND_OVER:
        where |= _verification(policy)
    next_step = ask(row, f"start from {start_from}", f"start {upgrade.starts}", RequestKind.START, **where)
    alert = f"the new code could not be started: {request.error}" if request is not None else row.alert
    return next_step.with_changes(upgrade=replace(upgrade, starts=upgrade.starts + 1), alert=alert, holds_restart=True)


def _upgrading(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    if seen.is_healthy and not policy.observes:
        return move(row, upgrade, UpgradePhase.STABLE, _WORKS)
    if seen.runs_another_version:
        return begin_upgrade(policy, seen)
    ended = seen.execution if seen.life is StreamLife.ENDED else None
    if ended is not None and ended.status is not ExecutionStatus.FAILED:
        return move(row, upgrade, UpgradePhase.STABLE, f"a user stopped it: {ended.status.value}")
    if ended is not None and (ended.ended_at_ms or 0) <= row.changed_at_ms:
        why = "a user has set RUNNING again"
        return move(row, upgrade, UpgradePhase.STARTING, why, old_execution_id=ended.execution_id)
    reason = f"failed for good: {ended.reason}" if ended is not None else None
    if policy.rollback_after_ms is None:
        alert = f"the new code failed for good; {_SET_AGAIN}: {ended.reason}" if ended is not None else None
        return stay(row, reason or _WAITS).with_changes(alert=alert)
    over = seen.now_ms - (upgrade.started_at_ms or 0) >= policy.rollback_after_ms
    reason = reason or _regression(upgrade, policy, seen, over=over)
    if reason is not None:
        return move(row, upgrade, UpgradePhase.ROLLING_BACK, reason)
    if over:
        return _observed(row, upgrade, policy, seen)
    return stay(row, f"{_WORKS}; it is observed" if seen.is_healthy else _WAITS)


_WAITS = "waiting for the first batch or checkpoint"
_WORKS = "the new code has committed a batch or completed a checkpoint"


def _observed(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    if seen.is_healthy:
        return move(row, upgrade, UpgradePhase.STABLE, _WORKS)
    if seen.is_alive and seen.is_idle:
        return move(row, upgrade, UpgradePhase.STABLE, "the new code is running and waiting for data")
    no_batch = f"no batch and no checkpoint in {policy.rollback_after_ms} ms"
    return move(row, upgrade, UpgradePhase.ROLLING_BACK, no_batch)


def _regression(upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream, *, over: bool) -> str | None:
    if policy.rollback_if_restarted and (seen.restarts or seen.life is StreamLife.TO_BE_RESTARTED):
        failed = f": {seen.execution.reason}" if seen.execution is not None and seen.execution.reason else ""
        return f"the new code failed and was to be restarted{failed}"
    if not policy.rollback_if_unhealthy:
        return None
    # The new code has to catch up first, so its lag counts only at the end.
    early = () if over else (HealthCheck.SOURCE_LAG,)
    failing = [each for each in seen.failing if each not in (*upgrade.failing_before, *early)]
    return f"health checks that did not fail before the upgrade: {', '.join(failing)}" if failing else None


def _rolling_back(row: DesiredRecord, upgrade: UpgradeRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    if seen.is_alive:
        began_ms = upgrade.started_at_ms or upgrade.began_at_ms
        stop = RequestKind.SUSPEND
        next_step = ask_to_stop(
            row,
            seen,
            stop,
            again=stop,
            since_ms=began_ms,
            timeout_ms=policy.stop_timeout_ms,
            reason="stop the new code",
            step="roll back",
        )
        return next_step.with_changes(holds_restart=True)
    if upgrade.snapshot_id is None:
        reason = f"{upgrade.reason}; the stream was stopped, and no snapshot from before the upgrade exists"
        return move(row, upgrade, UpgradePhase.ROLLBACK_FAILED, reason).with_changes(*cancel_pending(seen))
    return move(row, upgrade, UpgradePhase.RESTORING, upgrade.reason).with_changes(*cancel_pending(seen))


def _restoring(row: DesiredRecord, upgrade: UpgradeRecord, seen: ObservedStream) -> Decision:
    if seen.is_alive:
        return move(row, upgrade, UpgradePhase.STABLE, "a user has started it")
    return stay(row, "rolling back to the snapshot taken before the upgrade").with_changes(
        Run(StepRun.ROLL_BACK), holds_restart=True
    )


def is_stop_of(seen: ObservedStream) -> bool:
    """Whether a request of the supervisor ended the newest execution."""
    request, execution = seen.request, seen.execution
    return (
        request is not None
        and execution is not None
        and request.kind in STOPPING
        and request.status is RequestStatus.COMPLETED
        and request.created_at_ms >= execution.started_at_ms
    )
