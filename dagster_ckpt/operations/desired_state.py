"""Reconciles a managed stream with its desired state: observe, decide, carry out, record.

`decide` is pure: row, observation and policy in, one step out. What a user does with a stream by hand becomes its
desired state: a stream that a user canceled is not started again, and one that a user started is not stopped.

The order makes a crash harmless: actions can be repeated (requests have fixed ids, runs have keys)
and are recorded only afterwards. After a crash in between, the same decision is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, RequestStatus, StartCause
from dagster_ckpt.operations import upgrade as upgrades
from dagster_ckpt.operations.managed_stream import (
    ORIGIN,
    Adopt,
    Ask,
    Decision,
    ObservedStream,
    Run,
    Settle,
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
from dagster_ckpt.stream.liveness import holds_lease
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
        return stay(row, f"no action: its row cannot be read: {row.broken}")
    under_way = row.upgrade if row.upgrade is not None and not row.upgrade.phase.is_over else None
    if under_way is not None and under_way.phase.goes_back:
        return upgrades.advance(row, under_way, policy, seen)
    if desired is None:
        return stay(row, "it is not managed")
    if seen.start_pending:
        return stay(row, "a start requested by a user takes precedence")
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
            return stay(row, "waiting for its run")
        return stay(row, "no process is left to stop").with_changes(Withdraw(seen.open_request.request_id))
    if execution is not None and (execution.ended_at_ms or 0) > row.changed_at_ms and not upgrades.is_stop_of(seen):
        by_hand = _ENDED_BY_HAND.get(execution.status)
        if by_hand is not None:
            return stay(row, f"a user stopped it, or its input ended: {execution.reason}").with_changes(Adopt(by_hand))
        if not seen.runs_another_version:
            alert = "it failed for good; start it by hand or load another code version: "
            return stay(row, "it failed for good").with_changes(alert=f"{alert}{execution.reason}")
    if execution is not None and seen.runs_another_version:
        return upgrades.start(policy, seen)
    failed = request if request is not None and request.status is RequestStatus.FAILED else None
    if failed is not None and seen.now_ms < (failed.resolved_at_ms or 0) + upgrades.RETRY_MS:
        return stay(row, f"the start failed and is requested again: {failed.error}")
    step = f"start after {failed.request_id}" if failed is not None else "start"
    next_step = ask(row, "start from latest", step, RequestKind.START, start_from="latest")
    return next_step.with_changes(alert=f"it could not be started: {failed.error}") if failed is not None else next_step


_FAILED = (ExecutionStatus.FAILED, ExecutionStatus.STARTING, ExecutionStatus.RUNNING, ExecutionStatus.BROKEN)


@dataclass(frozen=True)
class Definition:
    """A stream as defined by the loaded code.

    Attributes:
        stream_id: The stream.
        declared: Its desired state unless an operator sets another one; None: it is not managed.
        policy: How it is upgraded to another code version.
        code_version: Version of the code.
    """

    stream_id: str
    declared: DesiredState | None
    policy: UpgradePolicy
    code_version: str | None


@dataclass(frozen=True)
class StepRuns:
    """The runs that were launched for one step.

    Attributes:
        failed: How many have ended without success.
        succeeded: Whether one succeeded.
    """

    failed: int = 0
    succeeded: bool = False


@dataclass(frozen=True)
class Orchestrator:
    """Queries to the orchestrator that launches runs.

    Attributes:
        run_is_over: Whether a run has ended, or is unknown.
        start_request_of: Id of the start request that a run answers, if any.
        runs_of_step: The runs that were launched for a step, by its name.
    """

    run_is_over: Callable[[str], bool]
    start_request_of: Callable[[str], str | None]
    runs_of_step: Callable[[str], StepRuns]


@dataclass(frozen=True)
class Step:
    """The result of one reconciliation.

    Attributes:
        decision: The decision, which has been carried out.
        step_name: Name of the step that `run` performs; it stays the same until the step is done.
        run: Work for a run, if any. If one is already in progress, no other is launched.
    """

    decision: Decision
    step_name: str
    run: StepRun | None = None


def reconcile_desired(catalog: Catalog, row: DesiredRecord, definition: Definition, orchestrator: Orchestrator) -> Step:
    """Observe a stream, decide, act and record. Long work is returned for a run to perform.

    Raises:
        CatalogError: The catalog is unavailable; the next reconciliation continues.
    """
    seen = observe(catalog, row, definition, orchestrator)
    decision = decide(row, definition.declared, definition.policy, seen)
    return carry_out(catalog, row, decision)


def observe(catalog: Catalog, row: DesiredRecord, definition: Definition, orchestrator: Orchestrator) -> ObservedStream:
    """A stream as observed in the catalog and the orchestrator."""
    stream_id = row.stream_id
    execution = catalog.executions.latest(stream_id)
    snapshots = catalog.snapshots.restorable(stream_id)
    starts = [request for request in catalog.requests.pending(stream_id) if request.kind is RequestKind.START]
    runs = orchestrator.runs_of_step(step_name(row))
    progress = (execution.progress if execution is not None else None) or {}
    return ObservedStream(
        life=_life(catalog, execution, orchestrator),
        now_ms=catalog.now_ms(),
        code_version=definition.code_version,
        execution=execution,
        is_ours=execution is not None and _is_ours(catalog, orchestrator.start_request_of(execution.run_id)),
        request=catalog.requests.find(row.request_id),
        start_pending=any(request.origin != ORIGIN for request in starts),
        has_state=bool(snapshots) or catalog.streams.get(stream_id).live_directory is not None,
        newest_snapshot=next(iter(snapshots), None),
        is_healthy=progress.get("batch_id") is not None or _has_snapshot_since(catalog, row),
        is_idle=bool(progress.get("idle")),
        runs_failed=runs.failed,
        run_succeeded=runs.succeeded,
    )


def carry_out(catalog: Catalog, row: DesiredRecord, decision: Decision) -> Step:
    """Carry out a decision, then record it."""
    run: StepRun | None = None
    for action in decision.actions:
        if isinstance(action, Ask):
            catalog.requests.submit(
                row.stream_id,
                action.kind,
                arguments=action.arguments,
                origin=ORIGIN,
                request_id=action.request_id,
            )
        elif isinstance(action, Withdraw):
            catalog.requests.withdraw(action.request_id, only_pending=action.only_pending)
        elif isinstance(action, Settle):
            catalog.executions.settle(action.execution_id, ExecutionStatus.FAILED)
        elif isinstance(action, Adopt):
            # This also records it; decisions based on the previous desired state are void.
            catalog.desired_states.put(row.stream_id, action.desired, origin=decision.reason)
        else:
            assert isinstance(action, Run)
            run = action.step
    _record(catalog, row, decision)
    return Step(decision, step_name(row), run)


def step_name(row: DesiredRecord) -> str:
    """Name of a stream's current step, for the runs that perform it."""
    is_under_way = row.upgrade is not None and not row.upgrade.phase.is_over
    phase = row.upgrade.phase.value if row.upgrade is not None and is_under_way else "STATE"
    return f"{row.stream_id}/{row.generation}/{phase}"


def _record(catalog: Catalog, row: DesiredRecord, decision: Decision) -> None:
    is_new = decision.reached and row.reached != row.generation
    after = (decision.upgrade, decision.alert, decision.alert_until, decision.request_id)
    if not is_new and not decision.begins and after == (row.upgrade, row.alert, row.alert_until, row.request_id):
        return
    catalog.desired_states.advance(
        row,
        upgrade=decision.upgrade,
        alert=decision.alert,
        alert_until=decision.alert_until,
        request_id=decision.request_id,
        reached=decision.reached,
        begins=decision.begins,
    )


def _life(catalog: Catalog, execution: ExecutionRecord | None, orchestrator: Orchestrator) -> StreamLife:
    if execution is None:
        return StreamLife.NEVER_STARTED
    # A lease held by another run belongs to a fork, a rollback, or a start whose execution has not
    # begun yet.
    if holds_lease(catalog, execution.stream_id, execution.run_id):
        return StreamLife.ALIVE
    if not orchestrator.run_is_over(execution.run_id):
        return StreamLife.ALIVE
    if not execution.settled and execution.status in _FAILED:
        return StreamLife.TO_BE_RESTARTED
    return StreamLife.ENDED


def _is_ours(catalog: Catalog, request_id: str | None) -> bool:
    request = catalog.requests.find(request_id)
    return request is not None and request.origin == ORIGIN


def _has_snapshot_since(catalog: Catalog, row: DesiredRecord) -> bool:
    upgrade = row.upgrade
    if upgrade is None or upgrade.phase is not UpgradePhase.UPGRADING:
        return False
    since_ms = upgrade.started_at_ms or 0
    return any((snapshot.completed_at_ms or 0) > since_ms for snapshot in catalog.snapshots.completed(row.stream_id))
