"""Apply retention on request: the clean-up option, interrupted deletions, and the history of a schedule."""

from __future__ import annotations

from collections.abc import Collection

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, StreamRecord
from dagster_ckpt.errors import NothingCommittedError
from dagster_ckpt.policies.guard import decide_retention, needed_of_history
from dagster_ckpt.policies.retention import RetentionContext, RetentionPolicy
from dagster_ckpt.recovery.retention import (
    RetentionReport,
    apply_terminal_retention,
    discard,
    housekeeping,
    newest_proven,
)
from dagster_ckpt.runtime.settlement import settle_execution
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, retained
from dagster_ckpt.values.modes import SnapshotKind, TerminalState
from dagster_ckpt.values.validation import policy_name


def apply_retention(
    stream: StreamHandle,
    *,
    state: TerminalState | None = None,
    execution_id: str | None = None,
    dry_run: bool = False,
) -> RetentionReport:
    """Finish interrupted deletions, remove orphaned bytes and, on request, apply the clean-up option.

    Args:
        stream: The stream.
        state: How it ended: its clean-up option decides what is kept. None: nothing that is listed as
            completed is deleted.
        execution_id: The execution that ended; default: the newest one.
        dry_run: Only report what would be deleted and removed.

    Raises:
        NothingCommittedError: The stream was never started, but a state is given.
    """
    finished = housekeeping(stream, dry_run=dry_run)
    if state is None:
        return finished
    if execution_id is None:
        latest = stream.catalog.executions.latest(stream.stream_id)
        if latest is None:
            raise NothingCommittedError(
                f"Stream {stream.stream_id!r} was never started: there is nothing to keep or delete."
            )
        execution_id = latest.execution_id
    if dry_run:
        return finished.and_then(apply_terminal_retention(stream, execution_id, state, dry_run=True))
    return finished.and_then(settle_execution(stream, execution_id, state))


def apply_savepoint_history(stream: StreamHandle, schedule: str, history: RetentionPolicy) -> RetentionReport:
    """Delete the savepoints that the history of a schedule does not keep: mark, bytes, forget, as always.

    Ages are measured by the catalog's clock, which dated the savepoints; their order is by number.

    Only savepoints that this schedule took are considered: never those of a user or another
    schedule, nor one that a start has claimed (the stream treats it as a checkpoint). The preferred
    savepoint, the one that the current timeline began with, the newest one and the newest proven
    one are kept regardless of the history.

    Args:
        stream: The stream.
        schedule: Name of the schedule.
        history: The policy that decides which of its savepoints are kept.

    Returns:
        What was deleted, and what was kept with the reason. Failed deletions stay DELETING in the
        catalog, and `housekeeping` retries them.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    proven = newest_proven(stream.catalog.snapshots.restorable(stream.stream_id))
    taken = {
        snapshot.snapshot_id: snapshot
        for snapshot in stream.catalog.snapshots.of_stream(
            stream.stream_id, kind=SnapshotKind.SAVEPOINT, status=SnapshotStatus.COMPLETED
        )
        if snapshot.schedule == schedule and not snapshot.claimed
    }
    # The catalog lists them newest first, by number.
    savepoints = [*reversed(taken.values())]
    held = {
        snapshot.snapshot_id: reason
        for snapshot in savepoints
        if (reason := _held_because(snapshot, record, proven)) is not None
    }
    queue = [retained(snapshot) for snapshot in savepoints]
    context = RetentionContext(stream.catalog.now_ms())
    decision = decide_retention(history, queue, context, needed=needed_of_history(queue, held))
    kept = tuple(f"{describe_snapshot(taken[snapshot_id])}: {reason}" for snapshot_id, reason in held.items())
    if decision.problem is not None:
        kept += (f"everything: the history of {schedule} failed: {decision.problem}",)
    doomed = [taken[each.snapshot_id] for each in decision.dropped]
    reason = f"history of {schedule}: {policy_name(history)}"
    return RetentionReport(kept=kept).and_then(discard(stream, doomed, reason=reason, lease=None))


def _held_because(snapshot: SnapshotRecord, stream: StreamRecord, proven: Collection[str]) -> str | None:
    if snapshot.snapshot_id == stream.preferred_savepoint_id:
        return "it is the preferred savepoint"
    if snapshot.snapshot_id == stream.restored_snapshot_id:
        return "the current timeline began with it"
    if snapshot.snapshot_id in proven:
        return "it is the newest snapshot whose state was loaded with success"
    return None
