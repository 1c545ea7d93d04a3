"""Decides the next step towards a stream's desired state. Pure: row, observation and policy in, one step out.

What a user does with a stream by hand becomes its desired state: a stream that a user canceled is
not started again, and one that a user started is not stopped.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, RequestStatus, StartCause
from dagster_ckpt.config.modes import DesiredState
from dagster_ckpt.operations import upgrade as upgrades
from dagster_ckpt.operations.managed_stream import (
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
    stay,
)
from dagster_ckpt.policies.upgrade import UpgradePolicy

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
    """Decide the next step for one stream.

    Args:
        row: The desired state and the progress towards it.
        declared: The state in the asset's definition, used unless an operator set another one. None:
            not managed.
        policy: How it is upgraded to another code version.
        seen: The observed state.
    """
    desired = row.desired or declared
    if not seen.is_alive and row.alert_until is AlertUntil.STOPPED:
        row = replace(row, alert=None, alert_until=None)
    if row.broken is not None:
        return stay(row, f"nothing is done for it: its row cannot be read: {row.broken}")
    under_way = row.upgrade if row.upgrade is not None and not row.upgrade.phase.is_over else None
    if under_way is not None and under_way.phase.goes_back:
        return upgrades.advance(row, under_way, policy, seen)
    if desired is None:
        return stay(row, "it is not managed")
    if seen.start_pending:
        return stay(row, "a start that somebody asked for goes first")
    if desired is not DesiredState.RUNNING:
        return _to_stopped(row, desired, under_way, policy, seen)
    if under_way is not None:
        return upgrades.advance(row, under_way, policy, seen)
    return _to_running(row, policy, seen)


def is_steady(
    row: DesiredRecord, declared: DesiredState | None, execution: ExecutionRecord | None, code_version: str | None
) -> bool:
    """Whether a stream needs no closer look: it is still in its desired state, as far as its catalog rows show."""
    desired = row.desired or declared
    if desired is None:
        return row.upgrade is None or row.upgrade.phase.is_over
    if row.reached != row.generation or execution is None or row.broken is not None:
        return False
    runs = execution.status in (ExecutionStatus.STARTING, ExecutionStatus.RUNNING)
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
        dropped = stay(row, f"the upgrade is given up: it is to be {desired.value}").with_changes(upgrade=None)
        is_start = request is not None and request.kind is RequestKind.START
        return dropped.with_changes(*((Withdraw(request.request_id),) if request is not None and is_start else ()))
    if seen.is_alive:
        return _stop(row, desired, policy, seen).with_changes(holds_restart=True)
    quiet = cancel_pending(seen)
    if quiet:
        return stay(row, "it does not run").with_changes(*quiet, holds_restart=True)
    if row.reached == row.generation:
        return stay(row, f"it is {desired.value}")
    execution = seen.execution
    is_canceled = execution is None or execution.status is ExecutionStatus.CANCELED or seen.run_succeeded
    if desired is DesiredState.CANCELED and not is_canceled:
        return stay(row, "its checkpoints are kept or deleted as its clean-up says").with_changes(Run(StepRun.CANCEL))
    return stay(row, f"it is {desired.value}").with_changes(reached=True)


def _stop(row: DesiredRecord, desired: DesiredState, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    execution = seen.execution
    is_by_hand = execution is not None and execution.cause is StartCause.MANUAL and not seen.is_ours
    if is_by_hand and execution is not None and execution.started_at_ms > row.changed_at_ms:
        return stay(row, "somebody has started it by hand").with_changes(Adopt(DesiredState.RUNNING))
    first, again = _STOP_BY[desired]
    request = seen.request
    asked = ask_to_stop(
        row,
        seen,
        first,
        again=again,
        since_ms=row.changed_at_ms,
        timeout_ms=policy.stop_timeout_ms,
        reason=f"to be {desired.value}",
    )
    has_failed = request is not None and request.status is RequestStatus.FAILED and bool(asked.actions)
    if request is not None and has_failed and request.kind is RequestKind.STOP_WITH_SAVEPOINT:
        alert = f"the savepoint failed ({request.error}): it is stopped without one, its live directory is kept"
        return asked.with_changes(alert=alert)
    return asked


def _to_running(row: DesiredRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    last = row.upgrade
    if last is not None and _is_refused(last, seen):
        if seen.is_alive and not seen.runs_another_version:
            return move(row, last, UpgradePhase.STABLE, "somebody has started it by hand")
        return stay(row, f"code version {seen.code_version} is not started: {last.reason}").with_changes(
            holds_restart=True
        )
    if last is not None and last.phase is UpgradePhase.ROLLED_BACK and not seen.is_alive:
        return upgrades.start(policy, seen)
    if seen.runs_another_version and (seen.is_alive or seen.life is StreamLife.TO_BE_RESTARTED):
        return upgrades.start(policy, seen)
    if seen.is_alive:
        return stay(row, "it runs").with_changes(reached=True, alert=None)
    if seen.life is StreamLife.TO_BE_RESTARTED:
        return stay(row, "the restart strategy decides")
    return _start(row, policy, seen)


def _is_refused(upgrade: UpgradeRecord, seen: ObservedStream) -> bool:
    # After a failed rollback a user must decide where the stream continues, with any code version.
    is_same = upgrade.to_version == seen.code_version or upgrade.phase is UpgradePhase.ROLLBACK_FAILED
    return upgrade.phase.refuses and is_same


def _start(row: DesiredRecord, policy: UpgradePolicy, seen: ObservedStream) -> Decision:
    execution, request = seen.execution, seen.request
    if seen.open_request is not None:
        if seen.open_request.kind is RequestKind.START:
            return stay(row, "waits for its run")
        return stay(row, "nobody is left to stop").with_changes(Withdraw(seen.open_request.request_id))
    if execution is not None and (execution.ended_at_ms or 0) > row.changed_at_ms and not upgrades.is_stop_of(seen):
        by_hand = _ENDED_BY_HAND.get(execution.status)
        if by_hand is not None:
            return stay(row, f"it was stopped by hand or ended by itself: {execution.reason}").with_changes(
                Adopt(by_hand)
            )
        if not seen.runs_another_version:
            alert = "it failed for good, and is started again by a person or with another code version: "
            return stay(row, "it failed for good").with_changes(alert=f"{alert}{execution.reason}")
    if execution is not None and seen.runs_another_version:
        return upgrades.start(policy, seen)
    failed = request if request is not None and request.status is RequestStatus.FAILED else None
    if failed is not None and seen.now_ms < (failed.resolved_at_ms or 0) + upgrades.RETRY_MS:
        return stay(row, f"the start failed, it is asked for again: {failed.error}")
    step = f"start after {failed.request_id}" if failed is not None else "start"
    asked = ask(row, "start from latest", step, RequestKind.START, start_from="latest")
    return asked.with_changes(alert=f"it could not be started: {failed.error}") if failed is not None else asked
