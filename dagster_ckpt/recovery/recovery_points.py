"""The points that a recovery can continue from, in the order it tries them, and those that failed. Pure.

The live directory is tried first, then these: snapshots from the newest to the oldest and, ordered
by batch among them, what the live directory was created from. A point that failed twice with the
same error is not tried a third time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger, StreamRecord
from dagster_ckpt.catalog.recovery_records import OriginKind, PointFailure, StateOrigin

# Number of tries; a third one is not made.
TRIES = 2


@dataclass(frozen=True)
class RecoveryPoint:
    """A point that a stream can continue from if its live directory is unusable.

    Attributes:
        name: A stable name.
        batch_id: Its batch, if known.
        snapshot: The snapshot, or None for a live directory.
        directory: An earlier live directory of the stream to rewind to `batch_id`; None for a snapshot.
    """

    name: str
    batch_id: int | None
    snapshot: SnapshotRecord | None = None
    directory: str | None = None


def live_point(directory: str) -> str:
    """Name of the point for a live directory itself."""
    return f"live:{directory}"


def finish_point(directory: str) -> str:
    """Name of the point for a restore into a live directory whose sinks must still be rolled back."""
    return f"finish:{directory}"


def snapshot_point(snapshot_id: str) -> str:
    """Name of the point for a snapshot."""
    return f"snapshot:{snapshot_id}"


def batch_point(directory: str, batch_id: int) -> str:
    """Name of the point for a batch of a live directory."""
    return f"batch:{batch_id}:{directory}"


def point_of_origin(origin: StateOrigin | None) -> str | None:
    """Name of the point that a live directory was created from, or None."""
    if origin is None:
        return None
    if origin.kind is OriginKind.SNAPSHOT and origin.snapshot_id is not None:
        return snapshot_point(origin.snapshot_id)
    if origin.kind is OriginKind.DIRECTORY and origin.directory is not None and origin.batch_id is not None:
        return batch_point(origin.directory, origin.batch_id)
    return None


def failed_points(failures: Sequence[PointFailure]) -> dict[str, str]:
    """The points that are no longer tried, each with the reason.

    Args:
        failures: Recovery failures, oldest first.
    """
    tries = Counter((failure.point, failure.error) for failure in failures)
    return {
        failure.point: f"{failure.error}: {failure.detail}"
        for failure in failures
        if failure.is_certain or tries[failure.point, failure.error] >= TRIES
    }


def recovery_points(
    stream: StreamRecord, snapshots: Sequence[SnapshotRecord], *, batch_is_retained: bool, snapshot_is_gone: bool
) -> list[RecoveryPoint]:
    """The points that a stream can continue from, in the order to try them, without its live directory.

    Args:
        stream: The stream, with the origin of its live directory.
        snapshots: Snapshots to recover from, in the order to try them.
        batch_is_retained: Whether the directory from which the live one was created still has its
            batch.
        snapshot_is_gone: Whether the snapshot from which the live directory was created is known to be
            deleted.
    """
    points = [
        RecoveryPoint(snapshot_point(snapshot.snapshot_id), snapshot.batch_id, snapshot=snapshot)
        for snapshot in snapshots
    ]
    origin = stream.origin
    if origin is None:
        return points
    if origin.kind is OriginKind.DIRECTORY and origin.directory is not None and origin.batch_id is not None:
        if batch_is_retained:
            name = batch_point(origin.directory, origin.batch_id)
            _insert(points, RecoveryPoint(name, origin.batch_id, directory=origin.directory))
        origin = origin.earlier
    if origin is not None and origin.kind is OriginKind.SNAPSHOT and not snapshot_is_gone:
        snapshot = snapshot_of_origin(stream, origin)
        listed = {point.snapshot.snapshot_id for point in points if point.snapshot is not None}
        if snapshot is not None and snapshot.snapshot_id not in listed:
            _insert(points, RecoveryPoint(snapshot_point(snapshot.snapshot_id), snapshot.batch_id, snapshot=snapshot))
    return points


def snapshot_of_origin(stream: StreamRecord, origin: StateOrigin) -> SnapshotRecord | None:
    """The snapshot that a state came from, even if the catalog does not list it."""
    if origin.snapshot_id is None or origin.location is None:
        return None
    return SnapshotRecord(
        snapshot_id=origin.snapshot_id,
        stream_id=stream.stream_id,
        execution_id=None,
        kind=origin.snapshot_kind or "SAVEPOINT",
        number=origin.snapshot_number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.UNKNOWN,
        timeline=stream.timeline,
        location=origin.location,
        batch_id=origin.batch_id,
        query_id=origin.query_id,
    )


def _insert(points: list[RecoveryPoint], point: RecoveryPoint) -> None:
    """Insert a point before the first one with an earlier batch."""
    batch_id = -1 if point.batch_id is None else point.batch_id
    place = next((at for at, other in enumerate(points) if _batch(other) < batch_id), len(points))
    points.insert(place, point)


def _batch(point: RecoveryPoint) -> int:
    return -1 if point.batch_id is None else point.batch_id
