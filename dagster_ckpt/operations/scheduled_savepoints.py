"""Deletes the savepoints of a schedule that exceed its history."""

from __future__ import annotations

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, StreamRecord
from dagster_ckpt.policies.savepoint_history import SavepointHistory, ScheduledSavepoint, leaving_history
from dagster_ckpt.recovery.retention import RetentionReport, discard
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot


def apply_savepoint_history(stream: StreamHandle, schedule: str, history: SavepointHistory) -> RetentionReport:
    """Delete savepoints that exceed the history of one schedule: mark, bytes, forget, like every snapshot.

    Ages are measured by the catalog's clock, which dated the savepoints; their order is by number.

    Only savepoints that this schedule took are considered: never those of a user or another
    schedule, nor one that a start has claimed (the stream treats it as a checkpoint). The preferred
    savepoint and the one that the current timeline began with are kept.

    Args:
        stream: The stream.
        schedule: Name of the schedule.
        history: Its limits.

    Returns:
        What was deleted, and what was kept with the reason. Failed deletions stay DELETING in the
        catalog, and `housekeeping` retries them.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    taken = {
        snapshot.snapshot_id: snapshot
        for snapshot in stream.catalog.snapshots.of_stream(
            stream.stream_id, kind=SnapshotKind.SAVEPOINT.value, status=SnapshotStatus.COMPLETED
        )
        if snapshot.schedule == schedule and not snapshot.claimed
    }
    # The catalog lists them newest first, by number.
    savepoints = [
        ScheduledSavepoint(snapshot.snapshot_id, snapshot.completed_at_ms or 0, _held_because(snapshot, record))
        for snapshot in reversed(taken.values())
    ]
    report = RetentionReport(
        kept=tuple(
            f"{describe_snapshot(taken[savepoint.snapshot_id])}: {savepoint.held_because}"
            for savepoint in savepoints
            if savepoint.held_because is not None
        )
    )
    for leaving in leaving_history(savepoints, history, now_ms=stream.catalog.now_ms()):
        reason = f"history of {schedule}: {leaving.reason}"
        report = report.and_then(discard(stream, [taken[leaving.snapshot_id]], reason=reason, lease=None))
    return report


def _held_because(snapshot: SnapshotRecord, stream: StreamRecord) -> str | None:
    if snapshot.snapshot_id == stream.preferred_savepoint_id:
        return "it is the preferred savepoint"
    if snapshot.snapshot_id == stream.restored_snapshot_id:
        return "the current timeline began with it"
    return None
