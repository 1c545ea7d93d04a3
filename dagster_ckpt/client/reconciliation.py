"""What the supervisor does for a stream: observe, decide, carry out, record.

Actions can be repeated (requests have fixed ids, runs have keys) and are recorded afterwards, so after a crash the same
decision is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, SnapshotStatus, StartCause
from dagster_ckpt.client.desired_state import decide
from dagster_ckpt.client.managed_stream import (
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
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.errors import (
    RequestFailedError,
    RestoreError,
    SharedSinkError,
    SinkRollbackError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
)
from dagster_ckpt.policies.restart import FailureHistory, RestartAt, RestartPolicy, decide_restart
from dagster_ckpt.policies.upgrade import UpgradePolicy
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.sinks.registry import output_of
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_of_snapshot
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.liveness import holds_lease
from dagster_ckpt.stream.ownership import check_places, fence_predecessor
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import DesiredState, TerminalState

_FAILED = (ExecutionStatus.FAILED, ExecutionStatus.STARTING, ExecutionStatus.RUNNING, ExecutionStatus.BROKEN)


@dataclass(frozen=True)
class Definition:
    """A stream as the loaded code defines it.

    Attributes:
        declared: Its default desired state; None: it is not managed.
        failing: Returns the health checks that fail now.
    """

    stream_id: str
    declared: DesiredState | None
    policy: UpgradePolicy
    code_version: str | None
    failing: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True)
class StepRuns:
    failed: int = 0
    succeeded: bool = False


@dataclass(frozen=True)
class Orchestrator:
    """Queries to the orchestrator that launches runs.

    Attributes:
        has_ended: Whether the run of an execution has ended, is unknown, or is running only other steps.
    """

    has_ended: Callable[[ExecutionRecord], bool]
    start_request_of: Callable[[str], str | None]
    runs_of_step: Callable[[str], StepRuns]


@dataclass(frozen=True)
class Step:
    """The decision that was carried out, and work for a run, if any.

    A run is not launched twice, because `step_name` stays the same until the step is done.
    """

    decision: Decision
    step_name: str
    run: StepRun | None = None


def reconcile_desired(catalog: Catalog, row: DesiredRecord, definition: Definition, orchestrator: Orchestrator) -> Step:
    # A user may have changed the row since it was read.
    row = catalog.desired_states.find(row.stream_id) or row
    seen = observe(catalog, row, definition, orchestrator)
    decision = decide(row, definition.declared, definition.policy, seen)
    return carry_out(catalog, row, decision)


def observe(catalog: Catalog, row: DesiredRecord, definition: Definition, orchestrator: Orchestrator) -> ObservedStream:
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
        restarts=_restarts_since(catalog, row) if definition.policy.rollback_if_restarted else 0,
        failing=definition.failing() if definition.policy.rollback_if_unhealthy else (),
        runs_failed=runs.failed,
        run_succeeded=runs.succeeded,
    )


def carry_out(catalog: Catalog, row: DesiredRecord, decision: Decision) -> Step:
    run: StepRun | None = None
    for action in decision.actions:
        match action:
            case Ask(request_id, kind, arguments):
                catalog.requests.submit(row.stream_id, kind, arguments=arguments, origin=ORIGIN, request_id=request_id)
            case Withdraw(request_id, only_pending):
                catalog.requests.withdraw(request_id, only_pending=only_pending)
            case Settle(execution_id):
                catalog.executions.settle(execution_id, ExecutionStatus.FAILED)
            case Adopt(desired):
                # Recorded at once; decisions on the previous desired state are void.
                catalog.desired_states.put(row.stream_id, desired, origin=decision.reason, seen=row)
            case Run(step):
                run = step
    _record(catalog, row, decision)
    return Step(decision, step_name(row), run)


def step_name(row: DesiredRecord) -> str:
    """Name the current step, for its runs."""
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
    # Another run may hold the lease: a fork, a rollback, or a start without an execution yet.
    if holds_lease(catalog, execution.stream_id, execution.run_id):
        return StreamLife.ALIVE
    if not orchestrator.has_ended(execution):
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


def _restarts_since(catalog: Catalog, row: DesiredRecord) -> int:
    upgrade = row.upgrade
    if upgrade is None or upgrade.phase is not UpgradePhase.UPGRADING or upgrade.started_at_ms is None:
        return 0
    later = [e for e in catalog.executions.of_stream(row.stream_id) if e.started_at_ms > upgrade.started_at_ms]
    return sum(each.cause is not StartCause.MANUAL for each in later)


# A run takes longer to start its query, so a restart may be launched this much too early.
LAUNCH_MS = 2_000


class RecordedEnd(Enum):
    STILL_RUNNING = "STILL_RUNNING"
    SUCCEEDED = "SUCCEEDED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Wait:
    reason: str


@dataclass(frozen=True)
class Restart:
    reason: str


@dataclass(frozen=True)
class Retain:
    """Apply the clean-up option for its final state."""

    state: TerminalState
    reason: str


Verdict = Wait | Restart | Retain

# A process that dies after recording one has only failed to clean up.
_ON_PURPOSE = {
    ExecutionStatus.FINISHED: TerminalState.FINISHED,
    ExecutionStatus.SUSPENDED: TerminalState.SUSPENDED,
    ExecutionStatus.CANCELED: TerminalState.CANCELED,
}


def reconcile(
    recorded: RecordedEnd,
    ended: ExecutionStatus,
    strategy: RestartPolicy,
    failed_at_ms: Sequence[int],
    *,
    holds_lease: bool,
    now_ms: int,
    random: Random,
) -> Verdict:
    """Decide about an execution that ended unsettled: killed, or not stopped by its user. Pure.

    Args:
        ended: What the execution itself recorded.
        failed_at_ms: Its failures since a user last started the stream, with this one.
        holds_lease: If so, nothing is deleted under a query that may write, and a process not found dead is not
            replaced.
        random: For jitter; seeded per execution, so that every evaluation yields the same delay.
    """
    verdict = _decide(recorded, ended, strategy, failed_at_ms, now_ms=now_ms, random=random)
    if isinstance(verdict, Retain) and holds_lease:
        return Wait("its run has ended, but its process is still stopping")
    if isinstance(verdict, Restart) and holds_lease and not ended.is_over:
        return Wait("its run has ended, but its process still holds the lease")
    return verdict


def _decide(
    recorded: RecordedEnd,
    ended: ExecutionStatus,
    strategy: RestartPolicy,
    failed_at_ms: Sequence[int],
    *,
    now_ms: int,
    random: Random,
) -> Verdict:
    if recorded is RecordedEnd.STILL_RUNNING:
        return Wait("its run has not ended")
    if ended in _ON_PURPOSE:
        return Retain(_ON_PURPOSE[ended], f"it ended {ended.value} without cleaning up")
    if recorded is RecordedEnd.CANCELED:
        return Retain(TerminalState.CANCELED, "its run was canceled without cleaning up")
    if recorded is RecordedEnd.SUCCEEDED:
        return Retain(TerminalState.SUSPENDED, "its run succeeded without cleaning up")
    decision = decide_restart(strategy, FailureHistory(tuple(failed_at_ms) or (now_ms,)), now_ms, random)
    if not isinstance(decision, RestartAt):
        return Retain(TerminalState.FAILED, decision.reason)
    if now_ms + LAUNCH_MS < decision.at_ms:
        return Wait(f"{decision.reason}; the restart is due in {decision.at_ms - now_ms} ms")
    return Restart(decision.reason)


# No retry helps: a user must decide where the stream continues.
_FINAL = (SnapshotNotFoundError, SnapshotCorruptError, RestoreError, SharedSinkError)


def roll_back(
    stream: StreamHandle, *, run_id: str, report: Callable[[str], None] = lambda _message: None
) -> UpgradeRecord:
    """Roll back an upgrade and mark it afterwards, or let the supervisor sensor do so."""
    row = stream.catalog.desired_states.find(stream.stream_id)
    upgrade = row.upgrade if row is not None else None
    if upgrade is not None and upgrade.phase is UpgradePhase.ROLLING_BACK:
        return upgrade
    if row is not None and upgrade is not None and upgrade.phase.can_be_undone:
        return _order_rollback(stream, row, upgrade, run_id, report)
    if row is None or upgrade is None or upgrade.phase is not UpgradePhase.RESTORING or upgrade.snapshot_id is None:
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} has no upgrade to roll back. To go back to a snapshot use restart_stream_job."
        )
    with fenced_lease(stream, "rollback", run_id) as lease:
        try:
            source = restore_snapshot(stream, StartFrom(upgrade.snapshot_id), lease, report)
        except _FINAL as error:
            reason = f"{upgrade.reason}; the stream is stopped and cannot be rolled back: {error}"
            after = replace(upgrade, phase=UpgradePhase.ROLLBACK_FAILED, reason=reason)
        else:
            reason = f"rolled back to {source}, because: {upgrade.reason}{_continues_with(stream, upgrade)}"
            after = replace(upgrade, phase=UpgradePhase.ROLLED_BACK, reason=reason)
        alert = f"code version {after.to_version}: {reason}"
        stream.catalog.desired_states.advance(
            row, upgrade=after, alert=alert, request_id=row.request_id, lease=lease.record
        )
    return after


@contextmanager
def fenced_lease(stream: StreamHandle, verb: str, origin: str) -> Iterator[LeaseKeeper]:
    """Hold the lease of a stream that is not running, with its former holders fenced."""
    acquired = acquire_for(stream.catalog, stream.stream_id, verb, origin)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        fence_predecessor(stream, acquired, still_mine=lease.check)
        yield lease


def _continues_with(stream: StreamHandle, upgrade: UpgradeRecord) -> str:
    old = upgrade.from_version
    if old is None:
        return ""
    executions = stream.catalog.executions.of_stream(stream.stream_id)
    program = next((each.program for each in executions if each.code_version == old and each.program), {})
    which = f" ({', '.join(f'{name} {value}' for name, value in program.items())})" if program else ""
    return f"; load code version {old}{which}, or a newer one than {upgrade.to_version}, to continue there"


def _order_rollback(
    stream: StreamHandle, row: DesiredRecord, upgrade: UpgradeRecord, origin: str, report: Callable[[str], None]
) -> UpgradeRecord:
    """Let the supervisor sensor roll back an upgrade, if it can be undone."""
    catalog, snapshot_id = stream.catalog, upgrade.snapshot_id
    advice = "To go back to another snapshot, restart the stream from it"
    if snapshot_id is None or catalog.snapshots.get(snapshot_id).status is not SnapshotStatus.COMPLETED:
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not rolled back, nothing was changed: no snapshot from before the upgrade "
            f"to code version {upgrade.to_version} is left. {advice}."
        )
    preview = start_preview(stream, StartFrom(snapshot_id))
    for message in preview.messages():
        report(message)
    refuse_loss(stream, preview, accept_loss=False)
    ordered = replace(upgrade, phase=UpgradePhase.ROLLING_BACK, reason=f"{origin} asked for it")
    # The sensor may have rolled it back during the preview.
    is_same = catalog.desired_states.find(stream.stream_id) == row
    if not is_same or not catalog.desired_states.advance(
        row, upgrade=ordered, alert=row.alert, request_id=None, begins=True
    ):
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not rolled back: its desired state changed, or the snapshot is being "
            f"deleted. Try again. {advice}."
        )
    return ordered


def restore_snapshot(
    stream: StreamHandle, start_from: StartFrom, lease: LeaseKeeper, report: Callable[[str], None]
) -> str:
    """Restore the snapshot that `start_from` names, with its sinks; the next start continues there."""
    facts = recovery_facts(stream, start_from, predecessor_ended=True)
    plan = plan_recovery(facts)
    # Only the sink of the previous code, which starts next, is rolled back.
    output = output_of(sinks_of_snapshot(stream, plan.snapshot)) if plan.snapshot is not None else None
    preview = preview_rewind(stream, facts, plan, output)
    for message in preview.messages():
        report(message)
    if preview.undone_edits:
        raise RestoreError(
            f"this would undo an edit of the state: {', '.join(preview.undone_edits)}. Decide where the stream "
            "continues: restart it from the snapshot of your choice."
        )
    refuse_loss(stream, preview, accept_loss=False)
    try:
        prepared = prepare(stream, plan, lease, output, survey=preview.survey)
    except SinkRollbackError as error:
        # Not a refusal: the next try continues there.
        raise StorageAccessError(str(error)) from error
    for place in prepared.rolled_back:
        report(f"rolled back the sink {place}")
    return describe_snapshot(plan.snapshot) if plan.snapshot is not None else plan.reason
