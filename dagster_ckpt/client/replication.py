"""Verified copies of snapshots in a second storage. The catalog lists no copy."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.savepoint_sets import SAVEPOINT_SET
from dagster_ckpt.client.connection import storage_place
from dagster_ckpt.client.description import find_snapshot
from dagster_ckpt.client.examination import ALL
from dagster_ckpt.config.checkpoint_options import checked_storage
from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.errors import CkptError, OptionError, SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.io.location import folders_overlap
from dagster_ckpt.policies.retention import (
    KeptBecause,
    RetainedSnapshot,
    RetentionContext,
    RetentionPolicy,
    decide_retention,
)
from dagster_ckpt.recovery.checkpoint_retention import ORPHAN_AGE_MS, objects_of
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.snapshot.garbage_collection import VERIFIED_NAME
from dagster_ckpt.snapshot.manifest import Manifest, checkpoint_number
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.reader import DELETE_DAMAGED_COPY
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import (
    DEPLOYMENT,
    describe_snapshot,
    holding,
    is_owned_by_stream,
    record_of,
    retained,
)
from dagster_ckpt.values.durations import size

_NONE_DELETED = "no older copy was deleted, because a copy to keep is missing, damaged or not verified"


@dataclass(frozen=True)
class Replica:
    """A copy of a snapshot.

    Attributes:
        copied_bytes: Bytes written for it now; 0 if it was there.
        is_verified: Whether all its bytes were read now, and none differs.
        problems: Why it cannot be restored; unless it was there before, it was deleted again.
    """

    snapshot_id: str
    name: str
    location: str
    copied_bytes: int
    problems: tuple[str, ...] = ()
    is_verified: bool = False

    def message(self) -> str:
        done = f"copied, {size(self.copied_bytes)} written" if self.copied_bytes else "is there"
        read = "every byte verified" if self.is_verified else "not read again"
        return self.problems[0] if self.problems else f"{done}, {read}"


@dataclass(frozen=True)
class Replication:
    """Result of `Client.replicate`.

    Attributes:
        failed: Copies that could not be made, read or deleted; the next call tries again.
        skipped: Snapshots of `all` that were deleted before they were copied.
        swept: Deleted objects that interrupted copies had left.
    """

    stream_id: str
    to: str
    replicas: tuple[Replica, ...]
    deleted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return not self.failed and not any(each.problems for each in self.replicas)

    def messages(self) -> list[str]:
        lines = [f"{each.name}: {each.message()}: {each.location}" for each in self.replicas]
        lines += self.skipped
        lines += [f"deleted the copy {location}" for location in self.deleted]
        lines += [f"deleted {location}, which an interrupted copy left" for location in self.swept]
        return [*lines, *self.failed] or ["nothing to copy"]


def replicate(
    stream: StreamHandle,
    reference: str,
    to: str | CheckpointStorage,
    *,
    keep: RetentionPolicy | None,
    verify: bool,
    progress: Progress | None,
) -> Replication:
    storage = checked_storage(to)
    place, source, target = storage_place(storage), stream.store, open_store(storage, stream.stream_id)
    if place is None or not isinstance(source, ObjectSnapshotStore) or not isinstance(target, ObjectSnapshotStore):
        raise OptionError("Snapshots are copied between folders, but one of the two storages is a class of your own.")
    chosen = _chosen(stream, reference)
    _refuse_overlap(stream, place, chosen)
    there, unreadable = _copies(stream, target)
    gone = [each for each in chosen if _is_gone(source, each)]
    chosen = [each for each in chosen if each not in gone]
    if keep is not None:
        # Do not copy again and again what the policy then deletes.
        kept = _kept(stream, _queue(stream, target, there, chosen), keep)
        chosen = [each for each in chosen if each.snapshot_id in kept]
    replicas: list[Replica] = []
    failed: list[str] = []
    report = progress or (lambda _done, _total: None)
    for snapshot in chosen:
        try:
            with holding(stream.catalog, [snapshot], f"replicate {uuid.uuid4()}"):
                replicas.append(_copied(source, target, snapshot, verify=verify, progress=report, there=there))
        except SnapshotNotFoundError:
            gone.append(snapshot)
        except CkptError as error:
            failed.append(f"{describe_snapshot(snapshot)} was not copied and verified: {error}")
    lost: dict[str, str] = {}
    if verify and reference == ALL:
        known = {each.snapshot_id for each in stream.catalog.snapshots.completed(stream.stream_id)}
        known -= {each.snapshot_id for each in gone}
        lost = dict(_damaged(target, [at for at, each in there.items() if each.header.snapshot_id not in known]))
    deleted: list[str] = []
    swept: tuple[str, ...] = ()
    # A missing or unread copy may be one for which an older one is deleted.
    is_safe = not failed and not unreadable and not any(each.problems for each in replicas)
    tried = {_name(each.location or "") for each in chosen}
    failed += [why for location, why in unreadable.items() if _name(location) not in tried]
    failed += [f"{why} (its original is gone)" for why in lost.values()]
    copied = {each.header.snapshot_id for each in there.values()} if reference == ALL else set[str]()
    missing, skipped = _uncopied(stream, [each for each in gone if each.snapshot_id not in copied], reference)
    failed += missing
    if keep is not None:
        deleted, not_deleted = _delete_older(stream, target, keep, lost) if is_safe else ([], [_NONE_DELETED])
        failed += not_deleted
        try:
            swept = tuple(each.location for each in target.sweep(older_than_ms=ORPHAN_AGE_MS))
        except CkptError as error:
            failed.append(f"what interrupted copies left in {place} was not deleted: {error}")
    return Replication(stream.stream_id, place, tuple(replicas), tuple(deleted), tuple(failed), swept, tuple(skipped))


def _chosen(stream: StreamHandle, reference: str) -> list[SnapshotRecord]:
    """Return the snapshots to copy, oldest first, so that later ones share the objects of earlier ones."""
    if reference == ALL:
        return list(reversed(stream.catalog.snapshots.completed(stream.stream_id)))
    return [find_snapshot(stream.catalog, stream.stream_id, reference)]


def _is_gone(source: ObjectSnapshotStore, snapshot: SnapshotRecord) -> bool:
    try:
        return not source.has(snapshot_location(snapshot))
    except CkptError:
        # The copy reports why.
        return False


def _uncopied(stream: StreamHandle, gone: Sequence[SnapshotRecord], reference: str) -> tuple[list[str], list[str]]:
    """Return which snapshots are missing, and which were deleted as they may be. No older copy is kept for them."""
    now = stream.catalog.snapshots.by_id([each.snapshot_id for each in gone])
    missing: list[str] = []
    skipped: list[str] = []
    for each in gone:
        current = now.get(each.snapshot_id, each)
        # To remove a savepoint, a user deletes its folder.
        is_missing = current.status is SnapshotStatus.COMPLETED and is_owned_by_stream(current)
        message = f"{describe_snapshot(each)} was not copied: there is no snapshot at {each.location} any more"
        (missing if is_missing or reference != ALL else skipped).append(message)
    return missing, skipped


def _refuse_overlap(stream: StreamHandle, place: str, chosen: Sequence[SnapshotRecord]) -> None:
    """Refuse a folder that overlaps originals, which the policy of the copies might delete."""
    savepoints = getattr(stream.storage, "savepoint_location", None)
    own = [storage_place(stream.storage), savepoints.url if savepoints is not None else None, stream.live_root]
    for folder in (*own, *(each.location for each in chosen)):
        if folder is not None and folders_overlap(place, folder):
            raise OptionError(f"to is {place}, which overlaps {folder}. Copy to another bucket or folder.")


def _copied(
    source: ObjectSnapshotStore,
    target: ObjectSnapshotStore,
    snapshot: SnapshotRecord,
    *,
    verify: bool,
    progress: Progress,
    there: Collection[str],
) -> Replica:
    original = snapshot_location(snapshot)
    stored = target.copy(original, source, progress=progress)
    # A call that was interrupted before it read its copy left it without the mark.
    is_read = verify or stored.incremental_bytes > 0 or not target.is_verified(stored.location)
    problems = target.verify(stored.location) if is_read else []
    if problems and not source.verify(original):
        # A damaged object may be shared by other copies, so only an intact original replaces it.
        stored = target.copy(original, source, progress=progress, again=True)
        problems = target.verify(stored.location)
    if problems and stored.location not in there:
        # The original may be damaged, which `verify` reports.
        target.discard(stored.location)
    elif problems:
        # Without the mark, the next call reads it again; no older copy is deleted for it.
        target.put_companion(stored.location, VERIFIED_NAME, None)
    elif is_read:
        target.note_verified(stored.location)
    name = describe_snapshot(snapshot)
    return Replica(
        snapshot.snapshot_id, name, stored.location, stored.incremental_bytes, tuple(problems), is_read and not problems
    )


def _damaged(target: ObjectSnapshotStore, locations: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Read copies, mark the intact ones, and return the others, with why."""
    for location in sorted(locations):
        try:
            problems = target.verify(location)
            if problems:
                target.put_companion(location, VERIFIED_NAME, None)
                yield location, f"{location} is damaged: {problems[0]}"
            else:
                target.note_verified(location)
        except CkptError as error:
            yield location, f"{location} could not be read and marked: {error}"


def _copies(stream: StreamHandle, target: ObjectSnapshotStore) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Return the copies of the stream's snapshots, and why others cannot be read. Raises StorageAccessError."""
    found: dict[str, Manifest] = {}
    unreadable: dict[str, str] = {}
    for location in [*target.checkpoints(), *target.savepoints()]:
        try:
            manifest = target.manifest(location)
        except SnapshotNotFoundError:
            # Another process deleted it.
            continue
        except SnapshotCorruptError as error:
            unreadable[location] = f"the copy {location} is damaged: {error} {DELETE_DAMAGED_COPY}"
            continue
        header = manifest.header
        if header.stream_id != stream.stream_id:
            continue
        owner = header.properties.get(DEPLOYMENT)
        if owner != stream.catalog.deployment_id:
            raise OptionError(
                f"{location} is a snapshot of stream {header.stream_id!r} of deployment {owner}, but this catalog "
                f"belongs to deployment {stream.catalog.deployment_id}. Copy to a folder of its own."
            )
        found[location] = manifest
    if unreadable:
        # Savepoints of other streams are in the same folder.
        own = {_name(each.location or "") for each in stream.catalog.snapshots.of_stream(stream.stream_id)}
        unreadable = {
            at: why for at, why in unreadable.items() if checkpoint_number(_name(at)) is not None or _name(at) in own
        }
    return found, unreadable


def _name(location: str) -> str:
    return location.rstrip("/").rpartition("/")[2]


def _delete_older(
    stream: StreamHandle, target: ObjectSnapshotStore, policy: RetentionPolicy, damaged: Collection[str]
) -> tuple[list[str], list[str]]:
    """Delete the copies that a policy does not keep; return them, and why others stay."""
    try:
        dropped, failed = _dropped(stream, target, policy, damaged)
    except CkptError as error:
        return [], [f"no older copy was deleted: {error}"]
    deleted: list[str] = []
    for location in dropped:
        try:
            target.discard(location)
            deleted.append(location)
        except CkptError as error:
            failed.append(f"{location} was not deleted: {error}")
    return deleted, failed


def _dropped(
    stream: StreamHandle, target: ObjectSnapshotStore, policy: RetentionPolicy, damaged: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the copies that a policy does not keep, or why they stay: one that it keeps is damaged or not verified."""
    there, unreadable = _copies(stream, target)
    queue = _queue(stream, target, there)
    kept = _kept(stream, queue, policy)
    at = {manifest.header.snapshot_id: location for location, manifest in there.items()}
    dropped = [at[each.snapshot_id] for each in queue if each.snapshot_id not in kept]
    if unreadable or not set(damaged) <= set(dropped):
        return [], [_NONE_DELETED]
    unread = [at[each] for each in kept if not target.is_verified(at[each])] if dropped else []
    found = dict(_damaged(target, unread))
    return ([], [*found.values(), _NONE_DELETED]) if found else (dropped, [])


def _kept(stream: StreamHandle, queue: Sequence[RetainedSnapshot], policy: RetentionPolicy) -> Collection[str]:
    known = stream.catalog.snapshots.by_id([each.snapshot_id for each in queue])
    proven = [each.snapshot_id for each in queue if each.snapshot_id in known and known[each.snapshot_id].is_proven]
    needed = {each.snapshot_id: KeptBecause.NEWEST for each in queue[-1:]}
    needed |= dict.fromkeys(proven[-1:], KeptBecause.PROVEN)
    in_sets = [snapshot_id for snapshot_id, snapshot in known.items() if SAVEPOINT_SET in snapshot.properties]
    needed |= dict.fromkeys([*stream.catalog.holds.tagged(stream.stream_id), *in_sets], KeptBecause.IN_USE)
    decision = decide_retention(policy, queue, RetentionContext(stream.catalog.now_ms()), needed=needed)
    return decision.kept.keys()


def _queue(
    stream: StreamHandle,
    target: ObjectSnapshotStore,
    there: Mapping[str, Manifest],
    chosen: Sequence[SnapshotRecord] = (),
) -> list[RetainedSnapshot]:
    known = stream.catalog.snapshots.by_id([manifest.header.snapshot_id for manifest in there.values()])
    found = {each.snapshot_id: (each.place, retained(each)) for each in chosen}
    for location, manifest in there.items():
        header = manifest.header
        timeline, label = header.properties.get("timeline"), header.properties.get("label")
        record = record_of(header, location, timeline=timeline if isinstance(timeline, int) else 0)
        listed = known.get(header.snapshot_id)
        copied = RetainedSnapshot(
            header.snapshot_id,
            # The catalog may have renewed the snapshot since.
            taken_at_ms=(listed.completed_at_ms if listed is not None else None) or header.created_at_ms,
            number=header.number or 0,
            batch_id=header.batch_id,
            full_bytes=manifest.full_bytes,
            new_bytes=manifest.full_bytes,
            label=label if isinstance(label, str) else None,
            objects=objects_of(target, location),
        )
        found[header.snapshot_id] = record.place, copied
    return [copied for _, copied in sorted(found.values(), key=itemgetter(0))]
