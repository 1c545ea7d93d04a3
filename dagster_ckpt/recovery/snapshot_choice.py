"""Chooses the snapshot to go back to if a live directory is unusable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.stream.snapshot_names import describe_snapshot


@dataclass(frozen=True)
class SkippedSnapshot:
    """A snapshot that was not chosen.

    Attributes:
        snapshot: The snapshot.
        why: What is wrong with it.
    """

    snapshot: SnapshotRecord
    why: str


@dataclass(frozen=True)
class SnapshotChoice:
    """The snapshot to use.

    Attributes:
        snapshot: The newest one that can be restored, or None.
        replayed_batches: Committed batches that would be processed again; None if unknown.
        skipped: Newer ones that cannot be restored.
    """

    snapshot: SnapshotRecord | None
    replayed_batches: int | None
    skipped: tuple[SkippedSnapshot, ...]

    @property
    def message(self) -> str:
        """The choice as one sentence."""
        if self.snapshot is None:
            tried = f" ({len(self.skipped)} were tried)" if self.skipped else ""
            return f"There is no snapshot of this stream that can be restored{tried}."
        replay = "" if self.replayed_batches is None else f"; {self.replayed_batches} batches would be processed again"
        return f"Use {describe_snapshot(self.snapshot)} (start_from={self.snapshot.snapshot_id}){replay}."

    def as_record(self) -> dict[str, Any]:
        """The choice as plain data."""
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
    """Choose the newest snapshot that can be restored.

    Args:
        snapshots: Completed snapshots of the stream's timeline.
        newest_batch: The newest batch that the query is known to have committed; None if unknown. A
            snapshot of a later batch belongs to another history of the stream.
        problems: Returns what is wrong with a snapshot; called from the newest on, until one has no
            problems.
    """
    skipped: list[SkippedSnapshot] = []
    for snapshot in sorted(snapshots, key=_age, reverse=True):
        if newest_batch is not None and snapshot.batch_id is not None and snapshot.batch_id > newest_batch:
            skipped.append(SkippedSnapshot(snapshot, f"it is of a later batch than {newest_batch}, the newest known"))
            continue
        found = problems(snapshot)
        if found:
            skipped.append(SkippedSnapshot(snapshot, found[0]))
            continue
        replayed = None if newest_batch is None or snapshot.batch_id is None else newest_batch - snapshot.batch_id
        return SnapshotChoice(snapshot, replayed, tuple(skipped))
    return SnapshotChoice(None, None, tuple(skipped))


def _age(snapshot: SnapshotRecord) -> tuple[int, int]:
    """Sort key that increases with a snapshot's content; one without a batch sorts before batch 0."""
    return (-1 if snapshot.batch_id is None else snapshot.batch_id, -1 if snapshot.number is None else snapshot.number)
