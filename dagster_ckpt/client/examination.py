"""Proves that snapshots can be restored, and diagnoses live directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.description import LATEST, unknown_snapshot
from dagster_ckpt.errors import (
    CkptError,
    NothingCommittedError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
    UnsupportedSparkError,
)
from dagster_ckpt.recovery.examination import diagnose_live_directory, snapshot_problems
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory
from dagster_ckpt.recovery.recovery_points import SnapshotChoice, choose_snapshot
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis
from dagster_ckpt.state.reading import StateReader, StateRows
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import holding_location, is_named, write_notes
from dagster_ckpt.stream.start_from import is_location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL = "all"


@dataclass(frozen=True)
class SnapshotVerification:
    """Result of `Client.verify` for one snapshot.

    Attributes:
        state: Rows by operator and store; None if not requested.
        state_was_read: Spark read the state, or could not.
    """

    location: str
    header: SnapshotHeader | None
    deep: bool
    problems: tuple[str, ...]
    state: tuple[StateRows, ...] | None = None
    state_was_read: bool = False

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_record(self) -> dict[str, Any]:
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
        raise unknown_snapshot(stream.stream_id, reference, listed)
    return [snapshot.location or "" for snapshot in found]


def verify_snapshot(
    stream: StreamHandle, location: str, *, deep: bool = True, spark: SparkSession | None = None
) -> SnapshotVerification:
    """Prove that a snapshot can be restored.

    Each check runs only if the previous one found nothing: the data objects exist and are long enough; with `deep`,
    every byte matches its digest; all files for a resume are there, in known formats; with a session, a temporary copy
    of every operator's state can be read.
    """
    with holding_location(stream, location, "verification"):
        verification = _verify_snapshot(stream, location, deep=deep, spark=spark)
    if not verification.passed:
        # A process suspended for longer than its hold lasts may have read a snapshot being deleted.
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
    state, reads_state = None, spark is not None and not problems
    if spark is not None and reads_state:
        try:
            state = _read_state(stream, location, header.batch_id, spark)
        except (StorageAccessError, UnsupportedSparkError):
            raise
        except CkptError as trouble:
            problems = [str(trouble)]
    return SnapshotVerification(location, header, deep, tuple(problems), state, reads_state)


def record_verification(stream: StreamHandle, verification: SnapshotVerification) -> SnapshotVerification:
    """Record a verification; return it with a recorded problem that it does not clear, because it read less.

    A check of lengths alone does not clear a problem found in the bytes, nor one of the bytes a problem in the state.
    """
    if verification.passed and not verification.deep:
        return verification
    listed = stream.catalog.snapshots.completed(stream.stream_id)
    problem = verification.problems[0] if verification.problems else None
    for snapshot in listed:
        if snapshot.location == verification.location:
            was_read = verification.state_was_read
            now = stream.catalog.snapshots.verified(snapshot.snapshot_id, problem, state_was_read=was_read)
            if now != snapshot.verified_problem or (was_read and not snapshot.is_proven):
                write_notes(stream, snapshot.snapshot_id)
            if now != problem:
                left = f"{now} (every byte is as written; only verify_state_job, which reads the state, clears this)"
                return replace(verification, problems=(left,))
    return verification


def _read_state(stream: StreamHandle, location: str, batch_id: int, spark: SparkSession) -> tuple[StateRows, ...]:
    with scratch_directory(stream) as copy:
        # Nothing comes from the live directory: the snapshot itself must be proven.
        restore_into(stream, location, copy, is_scratch=True)
        return tuple(StateReader(spark, copy, batch_id).count())


@dataclass(frozen=True)
class StreamExamination:
    stream_id: str
    diagnosis: Diagnosis
    choice: SnapshotChoice

    @property
    def messages(self) -> list[str]:
        diagnosis = self.diagnosis
        if diagnosis.can_resume:
            first = "Spark can resume in the live directory as it is."
        else:
            first = "Spark cannot resume in the live directory as it is."
        good = diagnosis.good_back_to
        if good is None:
            second = "No committed batch in it is intact."
        elif good == diagnosis.batch_id:
            second = f"It is intact up to its newest committed batch, {good}."
        else:
            second = (
                f"It is intact up to batch {good} (start_from=batch-{good}); the newest commit is {diagnosis.batch_id}."
            )
        use = self.choice.message
        if diagnosis.can_resume and self.choice.snapshot is not None:
            use = f"No snapshot is needed. To go back to one all the same: {use}"
        return [first, second, use]

    def as_record(self) -> dict[str, Any]:
        return {
            "stream_id": self.stream_id,
            "messages": self.messages,
            **self.diagnosis.as_record(),
            "snapshot": self.choice.as_record(),
        }


def examine_live_directory(
    stream: StreamHandle, *, url: str | None = None, deep: bool = True, deep_snapshots: bool = False
) -> StreamExamination:
    record = stream.catalog.streams.get(stream.stream_id)
    location = url or record.live_directory
    if location is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or its state was deleted when it was "
            "canceled. Start it first, or give the directory."
        )
    snapshots = stream.catalog.snapshots.restorable(stream.stream_id)
    diagnosis = diagnose_live_directory(
        stream,
        LiveDirectory(location),
        sinks=stream.catalog.executions.last_sinks(stream.stream_id),
        deep=deep,
        looks_back=True,
    )

    def problems(snapshot: SnapshotRecord) -> Sequence[str]:
        return _problems(stream, snapshot, deep=deep_snapshots)

    reported = stream.catalog.executions.last_batch(stream.stream_id, location)
    known = [batch for batch in (diagnosis.batch_id, reported) if batch is not None]
    choice = choose_snapshot(snapshots, newest_batch=max(known, default=None), problems=problems)
    return StreamExamination(stream.stream_id, diagnosis, choice)


def _problems(stream: StreamHandle, snapshot: SnapshotRecord, *, deep: bool) -> Sequence[str]:
    if snapshot.location is None:
        return ["the catalog does not record its location"]
    try:
        return verify_snapshot(stream, snapshot.location, deep=deep).problems
    except StorageAccessError:
        raise
    except CkptError as trouble:
        return [str(trouble)]
