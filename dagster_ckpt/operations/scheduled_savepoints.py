"""Deleting the savepoints of a schedule that its history has no room for."""

from __future__ import annotations

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, StreamRecord
from dagster_ckpt.policies.savepoint_history import SavepointHistory, ScheduledSavepoint, leaving_history
from dagster_ckpt.recovery.retention import RetentionReport, discard
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshot_names import describe_snapshot


def apply_savepoint_history(stream: StreamHandle, schedule: str, history: SavepointHistory) -> RetentionReport:
    """Delete what the history of one schedule has no room for; by mark, bytes, forget, as every snapshot is deleted.

    Ages are those by the catalog's clock, which has dated the savepoints; their order is that of their numbers.

    Only savepoints that this schedule took are looked at: never one that a person took, one of another schedule, or
    one that a start has claimed (it is a checkpoint to the stream). The preferred savepoint and the one that the
    current timeline began with stay.

    Args:
        stream: The stream.
        schedule: Name of the schedule.
        history: Its limits.

    Returns:
        What was deleted, and what was kept with the reason. What could not be deleted stays DELETING in the catalog and
        is tried again by `housekeeping`.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    taken = {
        snapshot.snapshot_id: snapshot
        for snapshot in stream.catalog.snapshots.of_stream(
            stream.stream_id, kind=SnapshotKind.SAVEPOINT.value, status=SnapshotStatus.COMPLETED
        )
        if snapshot.schedule == schedule and not snapshot.claimed
    }
    # Ids are listed newest first, by number.
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
