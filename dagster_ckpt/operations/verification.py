"""Proves that a snapshot can be restored: its bytes, its completeness and, on request, its state as read by Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import (
    CkptError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
    UnsupportedSparkError,
)
from dagster_ckpt.recovery.examination import snapshot_problems
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.state.reading import StateReader, StateRows
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, holding_location, is_named
from dagster_ckpt.stream.start_from import is_location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATEST = "latest"
ALL = "all"

# Receives how many of how many are done.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SnapshotVerification:
    """The result of verifying one snapshot.

    Attributes:
        location: Its location.
        header: Its header, if it can be read.
        deep: Whether every byte was compared with its digest.
        problems: What is wrong; empty if it can be restored.
        state: Rows by operator and store, as Spark reads them from a restored copy; None if not
            requested.
    """

    location: str
    header: SnapshotHeader | None
    deep: bool
    problems: tuple[str, ...]
    state: tuple[StateRows, ...] | None = None

    @property
    def passed(self) -> bool:
        """Whether it can be restored."""
        return not self.problems

    def as_record(self) -> dict[str, Any]:
        """The result as plain data."""
        header = self.header
        return {
            "location": self.location,
            "snapshot_id": header.snapshot_id if header else None,
            "kind": header.kind.value if header else None,
            "number": header.number if header else None,
            "batch_id": header.batch_id if header else None,
            "passed": self.passed,
            "deep": self.deep,
            "problems": list(self.problems),
            "state": None if self.state is None else [asdict(rows) for rows in self.state],
        }


def locations_of(stream: StreamHandle, reference: str) -> list[str]:
    """Locations of the snapshots that a reference names.

    Args:
        stream: The stream.
        reference: "latest", "all", or the id, number (`chk-7`), label or location of a snapshot; the
            location may be of one that the catalog does not list.

    Raises:
        SnapshotNotFoundError: There is none of this name.
    """
    listed = [
        snapshot for snapshot in stream.catalog.snapshots.completed(stream.stream_id) if snapshot.location is not None
    ]
    if reference == ALL:
        found = listed
    elif reference == LATEST:
        found = listed[:1]
    else:
        found = [snapshot for snapshot in listed if is_named(snapshot, reference)]
        if not found and is_location(reference):
            return [reference.rstrip("/").removesuffix("/_metadata")]
    if not found:
        known = ", ".join(map(describe_snapshot, listed[:8])) or "none"
        raise SnapshotNotFoundError(
            f"Stream {stream.stream_id!r} has no snapshot {reference!r}. It has: {known}. Name one of these."
        )
    return [snapshot.location or "" for snapshot in found]


def verify_snapshots(
    stream: StreamHandle,
    reference: str,
    *,
    deep: bool = True,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
) -> list[SnapshotVerification]:
    """Prove that snapshots can be restored, and record each result in the catalog at once.

    Args:
        stream: The stream.
        reference: As in `locations_of`.
        deep: As in `verify_snapshot`.
        spark: As in `verify_snapshot`.
        progress: Called after each snapshot with the number of verified snapshots and of all.

    Raises:
        SnapshotNotFoundError: There is none of this name, or the catalog has deleted it in the meantime.
        StorageAccessError: The storage cannot be reached, which says nothing about the snapshots.
    """
    locations = locations_of(stream, reference)
    verified: list[SnapshotVerification] = []
    for location in locations:
        verified.append(verify_snapshot(stream, location, deep=deep, spark=spark))
        record_verification(stream, verified[-1])
        if progress is not None:
            progress(len(verified), len(locations))
    return verified


def verify_snapshot(
    stream: StreamHandle, location: str, *, deep: bool = True, spark: SparkSession | None = None
) -> SnapshotVerification:
    """Prove that a snapshot can be restored.

    The checks run in this order, each only if the previous one found nothing: the data objects
    exist and are long enough; with `deep`, every byte matches its digest; all files that a resume
    after the snapshot's batch needs are among its files, in known formats; with a session, the
    snapshot is restored to a temporary copy and the state of every operator is read.

    Args:
        stream: The stream.
        location: The snapshot.
        deep: Read every byte.
        spark: A session to read the state with. The copy is created next to the stream's live
            directories and deleted afterwards.

    Raises:
        SnapshotNotFoundError: The catalog has deleted the snapshot, or is deleting it, which says
            nothing about its bytes.
        StorageAccessError: The storage cannot be reached, which says nothing about the snapshot.
        UnsupportedSparkError: The session's Spark cannot read the state, which says nothing about it.
    """
    with holding_location(stream, location, "verification"):
        verification = _verify_snapshot(stream, location, deep=deep, spark=spark)
    if not verification.passed:
        # A reader that was suspended for longer than its hold lasted may have read what was being
        # deleted.
        with holding_location(stream, location, "verification"):
            pass
    return verification


def _verify_snapshot(
    stream: StreamHandle, location: str, *, deep: bool, spark: SparkSession | None
) -> SnapshotVerification:
    problems = snapshot_problems(stream.store, location, deep=deep)
    try:
        header = stream.store.manifest(location).header
    except (SnapshotNotFoundError, SnapshotCorruptError) as trouble:
        return SnapshotVerification(location, None, deep, tuple(problems or [str(trouble)]))
    state = None
    if spark is not None and not problems:
        try:
            state = _read_state(stream, location, header.batch_id, spark)
        except (StorageAccessError, UnsupportedSparkError):
            raise
        except CkptError as trouble:
            problems = [str(trouble)]
    return SnapshotVerification(location, header, deep, tuple(problems), state)


def record_verification(stream: StreamHandle, verification: SnapshotVerification) -> None:
    """Record the result in the catalog, for the health check and for automatic restarts.

    A check of lengths alone does not clear a problem found by comparing every byte.
    """
    if verification.passed and not verification.deep:
        return
    listed = stream.catalog.snapshots.completed(stream.stream_id)
    problem = verification.problems[0] if verification.problems else None
    for snapshot in listed:
        if snapshot.location == verification.location:
            stream.catalog.snapshots.verified(
                snapshot.snapshot_id, problem, state_was_read=verification.state is not None
            )


def _read_state(stream: StreamHandle, location: str, batch_id: int, spark: SparkSession) -> tuple[StateRows, ...]:
    with scratch_directory(stream) as copy:
        # Without a donor: the snapshot must be proven, not the live directory.
        restore_into(stream, location, copy, is_scratch=True)
        return tuple(StateReader(spark, copy, batch_id).count())
