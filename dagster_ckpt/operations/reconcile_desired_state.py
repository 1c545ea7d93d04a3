"""Brings one managed stream a step closer to its desired state: observe, decide, act, record.

The order makes a crash harmless: actions can be repeated (requests have fixed ids, runs have keys)
and are recorded only afterwards. After a crash in between, the same decision is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind
from dagster_ckpt.config.modes import DesiredState
from dagster_ckpt.operations.desired_state import decide
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
)
from dagster_ckpt.policies.upgrade import UpgradePolicy
from dagster_ckpt.stream.liveness import holds_lease

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
