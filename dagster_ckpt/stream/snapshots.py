"""Snapshots of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import (
    BROKEN_SINCE_MS,
    PROBLEM_IN_STATE,
    PROVEN_AT_MS,
    HoldKind,
    LeaseRecord,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
)
from dagster_ckpt.errors import CatalogError, CkptError, OptionError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.policies.retention import RetainedKind, RetainedSnapshot, snapshot_to_recover_from
from dagster_ckpt.snapshot.garbage_collection import NOTES_NAME, logging_failure
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader, checkpoint_number
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore, SnapshotNotes, read_notes
from dagster_ckpt.stream.lease import repeating
from dagster_ckpt.stream.start_from import StartFrom, is_location
from dagster_ckpt.values.durations import utc_time
from dagster_ckpt.values.modes import RecoveryClaimMode, SnapshotKind
from dagster_ckpt.values.redaction import refuse_user_info

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle


def write_notes(stream: StreamHandle, snapshot_id: str) -> None:
    """Write what only the catalog knows of a snapshot into its folder, for a catalog that is rebuilt.

    A failure is only logged. In the folder of another stream, from which this one started, that stream writes them.
    """
    snapshot = stream.catalog.snapshots.by_id([snapshot_id]).get(snapshot_id)
    if snapshot is None or snapshot.location is None or not isinstance(stream.store, ObjectSnapshotStore):
        return
    if snapshot.stream_id != stream.stream_id:
        return
    tag = next((each for each in stream.catalog.holds.on(snapshot_id) if each.kind is HoldKind.TAG), None)
    notes = SnapshotNotes(
        tagged_by=tag.holder if tag is not None else None,
        label=snapshot.label if tag is not None else None,
        problem=snapshot.verified_problem,
        problem_in_state=snapshot.properties.get(PROBLEM_IN_STATE) if snapshot.verified_problem is not None else None,
        broken_since_ms=snapshot.properties.get(BROKEN_SINCE_MS),
        proven_at_ms=snapshot.properties.get(PROVEN_AT_MS),
    )
    with logging_failure(snapshot.location):
        stream.store.put_companion(snapshot.location, NOTES_NAME, notes.encoded())


@dataclass(frozen=True)
class Noted:
    snapshot: SnapshotRecord
    tagged_by: str | None = None


def as_noted(stream: StreamHandle, snapshot: SnapshotRecord) -> Noted:
    content = None
    if isinstance(stream.store, ObjectSnapshotStore) and snapshot.location is not None:
        content = stream.store.companion(snapshot.location, NOTES_NAME)
    notes = read_notes(content)
    noted = {
        PROBLEM_IN_STATE: notes.problem_in_state,
        BROKEN_SINCE_MS: notes.broken_since_ms,
        PROVEN_AT_MS: notes.proven_at_ms,
    }
    found = replace(
        snapshot,
        label=notes.label if notes.label is not None else snapshot.label,
        properties={**snapshot.properties, **{name: value for name, value in noted.items() if value is not None}},
        verified_problem=notes.problem,
        verified_at_ms=notes.proven_at_ms if notes.problem is None else notes.broken_since_ms,
    )
    return Noted(found, notes.tagged_by)


def newest_for_recovery(snapshots: Sequence[SnapshotRecord], *, prefer_checkpoint: bool) -> SnapshotRecord | None:
    """The snapshot that an automatic recovery uses, of restorable ones, newest first.

    `prefer_checkpoint`: the newest checkpoint, if any, as Flink's `CompletedCheckpointStore.getLatestCheckpoint` before
    FLINK-20427.
    """
    oldest_first = [retained(snapshot) for snapshot in reversed(snapshots)]
    chosen = snapshot_to_recover_from(oldest_first, prefer_checkpoint=prefer_checkpoint)
    return next(
        (snapshot for snapshot in snapshots if chosen is not None and snapshot.snapshot_id == chosen.snapshot_id), None
    )


def retained(snapshot: SnapshotRecord) -> RetainedSnapshot:
    return RetainedSnapshot(
        snapshot.snapshot_id,
        _retained_kind(snapshot),
        taken_at_ms=snapshot.completed_at_ms or 0,
        number=snapshot.number or 0,
        batch_id=snapshot.batch_id,
        full_bytes=snapshot.full_bytes or 0,
        new_bytes=snapshot.incremental_bytes or 0,
        is_verified=snapshot.verified_at_ms is not None and snapshot.verified_problem is None,
        label=snapshot.label,
    )


def _retained_kind(snapshot: SnapshotRecord) -> RetainedKind:
    if is_owned_by_stream(snapshot):
        return RetainedKind.CHECKPOINT
    return RetainedKind.STOP_WITH_SAVEPOINT if snapshot.trigger is SnapshotTrigger.STOP else RetainedKind.SAVEPOINT


def is_owned_by_stream(snapshot: SnapshotRecord) -> bool:
    """The stream deletes a checkpoint, and a savepoint that a start claimed."""
    return snapshot.kind is SnapshotKind.CHECKPOINT or snapshot.claimed


def describe_snapshot(snapshot: SnapshotRecord) -> str:
    # An attempt that failed early has none.
    return snapshot.name if snapshot.batch_id is None else f"{snapshot.name} at batch {snapshot.batch_id}"


def is_named(snapshot: SnapshotRecord, reference: str) -> bool:
    location = (snapshot.location or "").rstrip("/")
    plain = reference.rstrip("/").removesuffix("/_metadata")
    names = {snapshot.snapshot_id, location, location.removeprefix("file://"), snapshot.label}
    return plain in names | {snapshot.reference}


def named(snapshots: Sequence[SnapshotRecord], reference: str) -> SnapshotRecord | None:
    """The snapshot that a reference names, if any; OptionError if several have this label."""
    found = [snapshot for snapshot in snapshots if is_named(snapshot, reference)]
    if len(found) > 1:
        ids = "\n".join(
            f"- {each.snapshot_id}: {describe_snapshot(each)}, {utc_time(each.completed_at_ms or 0)}" for each in found
        )
        raise OptionError(
            f"{len(found)} snapshots of stream {found[0].stream_id!r} have the label {reference!r}. Name one by its "
            f"id:\n{ids}"
        )
    return found[0] if found else None


# How long a killed reader keeps a snapshot from being deleted.
HOLD_TTL_MS = 60_000


@contextmanager
def holding(
    catalog: Catalog, snapshots: Sequence[SnapshotRecord | None], reader: str, *, ttl_ms: int = HOLD_TTL_MS
) -> Iterator[None]:
    """Keep snapshots from being deleted during the context; None and unregistered ones are skipped.

    Raises SnapshotNotFoundError if one was deleted after it was listed. The catalog shows the `reader`; the
    holds of a killed process last `ttl_ms`.
    """
    wanted = [snapshot for snapshot in snapshots if snapshot is not None]
    holds = catalog.holds.use(wanted, holder=reader, ttl_ms=ttl_ms) if wanted else []
    if not holds:
        yield
        return
    ids = [hold.hold_id for hold in holds]

    def renew() -> None:
        # If the holds expire while the catalog is unavailable, the reader fails with an error.
        catalog.holds.renew(ids, ttl_ms)

    try:
        with repeating(renew, every_s=ttl_ms / 3000, name=f"hold-{wanted[0].stream_id}"):
            yield
    finally:
        # Without the catalog, the holds expire.
        with suppress(CatalogError):
            catalog.holds.release(ids)


@contextmanager
def holding_location(stream: StreamHandle, location: str, reader: str) -> Iterator[None]:
    known = stream.catalog.snapshots.at_location(stream.stream_id, location)
    with holding(stream.catalog, [known], reader):
        yield


# Properties of a snapshot: the deployment whose catalog recorded it, the live directory that it is a cut of, and name
# and type of each column that the query writes.
DEPLOYMENT = "deployment_id"
TAKEN_FROM = "live_directory"
COLUMNS = "columns"


def unregistered_snapshot(
    stream: StreamHandle, start_from: StartFrom, listed: Sequence[SnapshotRecord]
) -> SnapshotRecord | None:
    """The unregistered snapshot at the location that a start names, if any.

    Raises SnapshotNotFoundError if it is another stream's or deployment's, or was to be claimed.
    """
    location = (start_from.reference or "").rstrip("/").removesuffix("/_metadata")
    if not is_location(location) or any(is_named(snapshot, location) for snapshot in listed):
        return None
    try:
        header = stream.store.manifest(location).header
    except SnapshotNotFoundError:
        # The plan's own error lists the available snapshots.
        return None
    if start_from.claim_mode is RecoveryClaimMode.CLAIM:
        raise SnapshotNotFoundError(
            f"{location} cannot be claimed by stream {stream.stream_id!r}: the catalog does not list it, so other "
            "streams may start from it. Start from it with NO_CLAIM; once a checkpoint is complete it may be deleted."
        )
    if header.stream_id != stream.stream_id:
        raise SnapshotNotFoundError(
            f"{location} is a snapshot of stream {header.stream_id!r}, not of {stream.stream_id!r}. A restore rolls "
            "back the file sinks that the snapshot names, and those are the other stream's. Name a snapshot of this "
            "stream. To continue from it as an independent query, use fork_stream_job or, if it belongs to another "
            "deployment, import_stream_job."
        )
    of_deployment = header.properties.get(DEPLOYMENT)
    if of_deployment != stream.catalog.deployment_id:
        raise SnapshotNotFoundError(
            f"{location} is a snapshot of stream {header.stream_id!r} in "
            + (f"deployment {of_deployment}" if of_deployment else "an unnamed deployment")
            + f", but this catalog belongs to deployment {stream.catalog.deployment_id}. Nothing was changed: the "
            "sinks that the snapshot names belong to the other deployment. To continue from it as an independent "
            "query with its own sinks, use import_stream_job (import_snapshot). If this catalog replaces one that "
            "was lost, first assign it to that deployment: "
            f"Catalog(url).take_over_deployment({str(of_deployment)!r})."
        )
    return record_of(header, location, timeline=stream.catalog.streams.get(stream.stream_id).timeline)


def foreign_snapshot(stream: StreamHandle, location: str) -> SnapshotRecord:
    refuse_user_info("The location of the snapshot", location)
    folder = location.strip().rstrip("/").removesuffix("/_metadata")
    if not is_location(folder):
        raise OptionError(
            f"{location!r} is not the location of a snapshot, and this catalog does not list snapshots of another "
            "deployment. Give the URL of the snapshot's folder."
        )
    header = stream.store.manifest(folder).header
    if header.properties.get(DEPLOYMENT) == stream.catalog.deployment_id or stream.catalog.snapshots.by_id(
        [header.snapshot_id]
    ):
        raise SnapshotNotFoundError(
            f"{folder} is a snapshot of stream {header.stream_id!r} of this deployment. Start stream "
            f"{header.stream_id!r} from it, or let another stream continue from it with fork_stream_job."
        )
    return record_of(header, folder, timeline=0)


def readable_manifest(stream: StreamHandle, location: str) -> Manifest | None:
    """The manifest, or None if it is missing, damaged or of an unknown format. Raises StorageAccessError."""
    try:
        return stream.store.manifest(location)
    except StorageAccessError:
        raise
    except CkptError:
        return None


def record_of(header: SnapshotHeader, location: str, *, timeline: int) -> SnapshotRecord:
    return SnapshotRecord(
        snapshot_id=header.snapshot_id,
        stream_id=header.stream_id,
        execution_id=None,
        kind=header.kind,
        number=header.number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.UNKNOWN,
        timeline=timeline,
        location=location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        properties=dict(header.properties),
        created_at_ms=header.created_at_ms,
    )


def advance_checkpoint_id(stream: StreamHandle, restored: SnapshotRecord | None, lease: LeaseRecord) -> int:
    """Raise a stream's counter above its stored checkpoints and the restored snapshot; returns the next number.

    A catalog that was lost or restored counts from below, and no number may be written twice. Flink too continues from
    the restored checkpoint's number.
    """
    names = (location.rstrip("/").rpartition("/")[2] for location in stream.store.checkpoints())
    used = [number for name in names if (number := checkpoint_number(name)) is not None]
    if restored is not None and restored.number is not None:
        used.append(restored.number)
    counted = stream.catalog.streams.get(stream.stream_id).next_number
    beyond = max(used, default=0) + 1
    if beyond > counted:
        stream.catalog.streams.count_from(lease, beyond)
    return max(beyond, counted)
