"""The points that a recovery can continue from, in order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import (
    OriginKind,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StateOrigin,
    StreamRecord,
)
from dagster_ckpt.spark.doctor.finding import Code
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.modes import SnapshotKind

# Spark can load the state of a snapshot, but not that of the live directory.
NOT_LOADABLE = "STATE_NOT_LOADABLE"
# Found by reading a point, not in a message of Spark.
_PROVEN = {*(code.value for code in Code), "SnapshotCorruptError", "SnapshotNotFoundError", NOT_LOADABLE}


_LIVE = "live:"


@dataclass(frozen=True)
class RecoveryPoint:
    name: str
    batch_id: int | None
    snapshot: SnapshotRecord | None = None
    directory: str | None = None


def live_point(directory: str) -> str:
    return f"{_LIVE}{directory}"


def finish_point(directory: str) -> str:
    return f"finish:{directory}"


def snapshot_point(snapshot_id: str) -> str:
    return f"snapshot:{snapshot_id}"


def batch_point(directory: str, batch_id: int) -> str:
    return f"batch:{batch_id}:{directory}"


def point_of_origin(origin: StateOrigin | None) -> str | None:
    if origin is None:
        return None
    if origin.kind is OriginKind.SNAPSHOT and origin.snapshot_id is not None:
        return snapshot_point(origin.snapshot_id)
    if origin.kind is OriginKind.DIRECTORY and origin.directory is not None and origin.batch_id is not None:
        return batch_point(origin.directory, origin.batch_id)
    return None


def failed_points(failures: Sequence[PointFailure]) -> dict[str, str]:
    """Return the damaged points, with what was found there.

    A start examines its live directory itself: earlier findings there count only if nothing but Spark sees them.
    """
    return {
        failure.point: f"{failure.error}: {failure.detail}"
        for failure in failures
        if failure.error in _PROVEN
        and failure.is_certain
        and (failure.error == NOT_LOADABLE or not failure.point.startswith(_LIVE))
    }


def recovery_points(
    stream: StreamRecord, snapshots: Sequence[SnapshotRecord], *, batch_is_retained: bool, snapshot_is_gone: bool
) -> list[RecoveryPoint]:
    """Return the points besides the live directory, in order.

    `batch_is_retained`: the directory that the live one was created from still has that batch.
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
    of_snapshot = origin is not None and origin.kind in (OriginKind.SNAPSHOT, OriginKind.ADOPTED)
    if origin is not None and of_snapshot and not snapshot_is_gone:
        snapshot = snapshot_of_origin(stream, origin)
        listed = {point.snapshot.snapshot_id for point in points if point.snapshot is not None}
        if snapshot is not None and snapshot.snapshot_id not in listed:
            _insert(points, RecoveryPoint(snapshot_point(snapshot.snapshot_id), snapshot.batch_id, snapshot=snapshot))
    return points


def snapshot_of_origin(stream: StreamRecord, origin: StateOrigin) -> SnapshotRecord | None:
    if origin.snapshot_id is None or origin.location is None:
        return None
    return SnapshotRecord(
        snapshot_id=origin.snapshot_id,
        stream_id=stream.stream_id,
        execution_id=None,
        kind=origin.snapshot_kind or SnapshotKind.SAVEPOINT,
        number=origin.snapshot_number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.UNKNOWN,
        timeline=stream.timeline,
        location=origin.location,
        batch_id=origin.batch_id,
        query_id=origin.query_id,
    )


def _insert(points: list[RecoveryPoint], point: RecoveryPoint) -> None:
    place = next((at for at, other in enumerate(points) if batch_of(other) < batch_of(point)), len(points))
    points.insert(place, point)


def batch_of(point: RecoveryPoint) -> int:
    return -1 if point.batch_id is None else point.batch_id


@dataclass(frozen=True)
class SkippedSnapshot:
    snapshot: SnapshotRecord
    why: str


@dataclass(frozen=True)
class SnapshotChoice:
    snapshot: SnapshotRecord | None
    replayed_batches: int | None
    skipped: tuple[SkippedSnapshot, ...]

    @property
    def message(self) -> str:
        if self.snapshot is None:
            tried = f" ({len(self.skipped)} were tried)" if self.skipped else ""
            return f"There is no snapshot of this stream that can be restored{tried}."
        replay = "" if self.replayed_batches is None else f"; {self.replayed_batches} batches would be processed again"
        return f"Use {describe_snapshot(self.snapshot)} (start_from={self.snapshot.snapshot_id}){replay}."

    def as_record(self) -> dict[str, Any]:
        return {
            "snapshot_id": self.snapshot.snapshot_id if self.snapshot else None,
            "location": self.snapshot.location if self.snapshot else None,
            "batch_id": self.snapshot.batch_id if self.snapshot else None,
            "replayed_batches": self.replayed_batches,
            "message": self.message,
            "skipped": [{"snapshot_id": item.snapshot.snapshot_id, "why": item.why} for item in self.skipped],
        }


def choose_snapshot(
    snapshots: Sequence[SnapshotRecord],
    *,
    newest_batch: int | None,
    problems: Callable[[SnapshotRecord], Sequence[str]],
) -> SnapshotChoice:
    """Choose the newest snapshot without `problems`, which is called from the newest on.

    One after `newest_batch`, the newest known commit, belongs to another history.
    """
    skipped: list[SkippedSnapshot] = []
    for snapshot in sorted(snapshots, key=_age, reverse=True):
        if newest_batch is not None and snapshot.batch_id is not None and snapshot.batch_id > newest_batch:
            skipped.append(SkippedSnapshot(snapshot, f"its batch is later than {newest_batch}, the newest known batch"))
            continue
        found = problems(snapshot)
        if found:
            skipped.append(SkippedSnapshot(snapshot, found[0]))
            continue
        replayed = None if newest_batch is None or snapshot.batch_id is None else newest_batch - snapshot.batch_id
        return SnapshotChoice(snapshot, replayed, tuple(skipped))
    return SnapshotChoice(None, None, tuple(skipped))


def _age(snapshot: SnapshotRecord) -> tuple[int, int]:
    return (-1 if snapshot.batch_id is None else snapshot.batch_id, -1 if snapshot.number is None else snapshot.number)
