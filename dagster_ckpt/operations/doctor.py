"""Diagnoses a stream's live directory: what is wrong, how far back it is intact, and which snapshot to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CkptError, LiveDirectoryError, NothingCommittedError, StorageAccessError
from dagster_ckpt.operations.verification import verify_snapshot
from dagster_ckpt.recovery.facts import known_query
from dagster_ckpt.recovery.recovery_points import SnapshotChoice, choose_snapshot
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.spark.checkpoint_dir.known_query import NOTHING_KNOWN
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_rewrite_id
from dagster_ckpt.spark.checkpoint_dir.state.growth import rewrite_of
from dagster_ckpt.spark.doctor.checksums import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.stream.handle import StreamHandle


@dataclass(frozen=True)
class StreamExamination:
    """The result of examining a stream.

    Attributes:
        stream_id: The stream.
        diagnosis: The diagnosis of its live directory.
        choice: The snapshot to use if the live directory must be abandoned.
    """

    stream_id: str
    diagnosis: Diagnosis
    choice: SnapshotChoice

    @property
    def messages(self) -> list[str]:
        """The result in a few sentences."""
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
        """The result as plain data."""
        return {
            "stream_id": self.stream_id,
            "messages": self.messages,
            **self.diagnosis.as_record(),
            "snapshot": self.choice.as_record(),
        }


def examine_live_directory(
    stream: StreamHandle, *, url: str | None = None, deep: bool = True, deep_snapshots: bool = False
) -> StreamExamination:
    """Examine a stream's live directory, whether or not a query is running in it. Changes nothing.

    Args:
        stream: The stream.
        url: Another directory than the stream's own, such as an old `live-<k>-<token>` or a copy.
        deep: Read the content of every state file that a resume needs.
        deep_snapshots: Compare every byte of the recommended snapshot with its digest; otherwise check
            lengths and completeness.

    Raises:
        StreamNotFoundError: The stream was never started.
        NothingCommittedError: The stream has no live directory.
        StorageAccessError: The storage cannot be reached, so there is no result.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    location = url or record.live_directory
    if location is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or its state was deleted when it was "
            "canceled. Start it first, or give the directory."
        )
    snapshots = stream.catalog.snapshots.restorable(stream.stream_id)
    diagnosis = diagnose(
        LiveDirectory(location),
        sinks=sinks_of(stream.catalog.executions.last_sinks(stream.stream_id)),
        expected_query_id=snapshots[0].query_id if snapshots else None,
        deep=deep,
        snapshot=_known_snapshot(stream, snapshots, LiveDirectory(location)) if deep else None,
        # Another directory may be of before a change of the plan.
        known=known_query(stream, record) if url is None else NOTHING_KNOWN,
    )

    def problems(snapshot: SnapshotRecord) -> Sequence[str]:
        return _problems(stream, snapshot, deep=deep_snapshots)

    reported = stream.catalog.executions.last_batch(stream.stream_id, location)
    known = [batch for batch in (diagnosis.batch_id, reported) if batch is not None]
    choice = choose_snapshot(snapshots, newest_batch=max(known, default=None), problems=problems)
    return StreamExamination(stream.stream_id, diagnosis, choice)


def _known_snapshot(
    stream: StreamHandle, snapshots: Sequence[SnapshotRecord], live: LiveDirectory
) -> KnownSnapshot | None:
    """The newest snapshot of the timeline whose list of files can be read.

    One from before a rewrite of the state has other files by the same names.
    """
    rewrite_id = _rewrite_of(live)
    for snapshot in snapshots:
        try:
            manifest = stream.store.manifest(snapshot.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # Its problems are reported when a snapshot is chosen.
            continue
        if rewrite_of(manifest.header.properties) != rewrite_id:
            continue
        return KnownSnapshot(snapshot.location or "", manifest.header.batch_id, list(manifest.files))
    return None


def _rewrite_of(live: LiveDirectory) -> str | None:
    try:
        return parse_rewrite_id(live.folder.read(METADATA), f"{live.url}/{METADATA}")
    except (FileNotFoundError, LiveDirectoryError):
        # Reported by the diagnosis.
        return None


def _problems(stream: StreamHandle, snapshot: SnapshotRecord, *, deep: bool) -> Sequence[str]:
    if snapshot.location is None:
        return ["the catalog does not record its location"]
    try:
        return verify_snapshot(stream, snapshot.location, deep=deep).problems
    except StorageAccessError:
        raise
    except CkptError as trouble:
        return [str(trouble)]
