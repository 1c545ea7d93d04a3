"""The points that a recovery can go on from, in the order in which it tries them, and which of them have failed. Pure.

The live directory is tried first, then these: snapshots from the newest on, and in between, by its batch, what the live
directory was made from. A point that failed is not tried a third time with the same error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger, StreamRecord
from dagster_ckpt.catalog.recovery_records import OriginKind, PointFailure, StateOrigin

# The third try is the one too many.
TRIES = 2


@dataclass(frozen=True)
class RecoveryPoint:
    """Something that a stream can go on from when its live directory is of no use.

    Attributes:
        name: The same at each look.
        batch_id: The batch it stands at, where known.
        snapshot: The snapshot, or None for a live directory.
        directory: A live directory that the stream had before, to be gone back in to `batch_id`; None for a snapshot.
    """

    name: str
    batch_id: int | None
    snapshot: SnapshotRecord | None = None
    directory: str | None = None


def live_point(directory: str) -> str:
    """Name of the point that a live directory itself is."""
    return f"live:{directory}"


def finish_point(directory: str) -> str:
    """Name of the point that a restore into a live directory is whose sinks are still to be rolled back."""
    return f"finish:{directory}"


def snapshot_point(snapshot_id: str) -> str:
    """Name of the point that a snapshot is."""
    return f"snapshot:{snapshot_id}"


def batch_point(directory: str, batch_id: int) -> str:
    """Name of the point that a batch of a live directory is."""
    return f"batch:{batch_id}:{directory}"


def point_of_origin(origin: StateOrigin | None) -> str | None:
    """Name of the point that a live directory was made from, or None where it was made from none."""
    if origin is None:
        return None
    if origin.kind is OriginKind.SNAPSHOT and origin.snapshot_id is not None:
        return snapshot_point(origin.snapshot_id)
    if origin.kind is OriginKind.DIRECTORY and origin.directory is not None and origin.batch_id is not None:
        return batch_point(origin.directory, origin.batch_id)
    return None


def failed_points(failures: Sequence[PointFailure]) -> dict[str, str]:
    """The points that are not tried any more, each with the reason.

    Args:
        failures: What recoveries failed at, oldest first.
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
    """What a stream can go on from, in the order in which it is to be tried; its live directory is not among them.

    Args:
        stream: The stream, with the origin of its live directory.
        snapshots: Snapshots to recover from, in the order in which they are to be tried.
        batch_is_retained: Whether the directory that the live one was made from still has its batch.
        snapshot_is_gone: Whether the snapshot that the live directory was made from is known to be deleted.
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
    """The snapshot that a state came from, also where the catalog does not list it."""
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
    """Put a point before the first that stands at an earlier batch."""
    batch_id = -1 if point.batch_id is None else point.batch_id
    place = next((at for at, other in enumerate(points) if _batch(other) < batch_id), len(points))
    points.insert(place, point)


def _batch(point: RecoveryPoint) -> int:
    return -1 if point.batch_id is None else point.batch_id
