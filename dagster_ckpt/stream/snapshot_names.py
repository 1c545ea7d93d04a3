"""Names of snapshots, and how retention and recovery classify them."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotTrigger
from dagster_ckpt.policies.retention import Retained, RetainedKind, snapshot_to_recover_from

CHECKPOINT = "CHECKPOINT"
SAVEPOINT = "SAVEPOINT"


def newest_for_recovery(snapshots: Sequence[SnapshotRecord], *, prefer_checkpoint: bool) -> SnapshotRecord | None:
    """The snapshot that an automatic recovery uses.

    The newest one; with `prefer_checkpoint`, the newest checkpoint if there is any (Flink's
    CompletedCheckpointStore.getLatestCheckpoint before FLINK-20427).

    Args:
        snapshots: Restorable snapshots, newest first.
        prefer_checkpoint: Skip savepoints if a checkpoint exists.
    """
    oldest_first = [Retained(snapshot.snapshot_id, retained_kind(snapshot)) for snapshot in reversed(snapshots)]
    chosen = snapshot_to_recover_from(oldest_first, prefer_checkpoint=prefer_checkpoint)
    return next(
        (snapshot for snapshot in snapshots if chosen is not None and snapshot.snapshot_id == chosen.snapshot_id), None
    )


def retained_kind(snapshot: SnapshotRecord) -> RetainedKind:
    """How the rules of retention and recovery classify a snapshot."""
    if is_owned_by_stream(snapshot):
        return RetainedKind.CHECKPOINT
    return RetainedKind.STOP_WITH_SAVEPOINT if snapshot.trigger is SnapshotTrigger.STOP else RetainedKind.SAVEPOINT


def is_owned_by_stream(snapshot: SnapshotRecord) -> bool:
    """Whether the stream deletes a snapshot itself: a checkpoint, or a savepoint that a start claimed."""
    return snapshot.kind == CHECKPOINT or snapshot.claimed


def describe_snapshot(snapshot: SnapshotRecord) -> str:
    """Short name of a snapshot and its batch, for messages."""
    name = (
        f"chk-{snapshot.number}"
        if snapshot.kind == CHECKPOINT
        else f"savepoint {snapshot.label or snapshot.snapshot_id}"
    )
    return f"{name} at batch {snapshot.batch_id}"


def is_named(snapshot: SnapshotRecord, reference: str) -> bool:
    """Whether a reference is the id, label, location or, for a checkpoint, the `chk-<n>` of a snapshot."""
    location = (snapshot.location or "").rstrip("/")
    plain = reference.rstrip("/").removesuffix("/_metadata")
    names = {snapshot.snapshot_id, location, location.removeprefix("file://"), snapshot.label}
    if snapshot.kind == CHECKPOINT:
        names.add(f"chk-{snapshot.number}")
    return plain in names
