"""Failures of recoveries count against what was restored: snapshots with the same state fail together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from blake3 import blake3

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.errors import SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.recovery.recovery_points import snapshot_point
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import STATE

_Key = tuple[int | None, str]


def state_digest(store: SnapshotStore, location: str) -> str | None:
    """Digest over the names and contents of a snapshot's state files, from its manifest; None if it has none.

    Raises:
        SnapshotNotFoundError: There is no snapshot.
        SnapshotCorruptError: Its metadata is truncated or modified.
        StorageAccessError: The storage cannot be reached.
    """
    digest, is_empty = blake3(), True
    for entry in sorted(store.manifest(location).files, key=attrgetter("path")):
        if entry.path.partition("/")[0] == STATE:
            digest.update(f"{entry.path}\0{entry.digest}\n".encode())
            is_empty = False
    return None if is_empty else digest.hexdigest()


def with_equal_content(
    store: SnapshotStore, failures: Sequence[PointFailure], snapshots: Sequence[SnapshotRecord]
) -> list[PointFailure]:
    """The failures, and each failure at a snapshot once more for every other snapshot of its batch and state.

    A restore of damaged state, followed by a checkpoint of it, makes the same damage available under
    another id. Manifests are read only if a snapshot failed and there is another one of its batch.

    Args:
        store: The store of the snapshots.
        failures: Failures of recoveries, oldest first.
        snapshots: The snapshots that exist.
    """
    points = {snapshot_point(each.snapshot_id): each for each in snapshots}
    batches = {points[failure.point].batch_id for failure in failures if failure.point in points}
    alike = {name: each for name, each in points.items() if each.batch_id in batches}
    if len(alike) <= len(batches):
        return [*failures]
    keys = {name: key for name, each in alike.items() if (key := _key(store, each)) is not None}
    counted = []
    for failure in failures:
        key = keys.get(failure.point)
        counted.append(failure)
        others = (name for name, other in keys.items() if other == key and name != failure.point)
        counted += [replace(failure, point=name) for name in others if key is not None]
    return counted


def _key(store: SnapshotStore, snapshot: SnapshotRecord) -> _Key | None:
    try:
        digest = state_digest(store, snapshot.location or "")
    except (SnapshotNotFoundError, SnapshotCorruptError):
        return None
    return None if digest is None else (snapshot.batch_id, digest)
