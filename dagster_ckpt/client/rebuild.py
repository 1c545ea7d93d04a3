"""Rebuilds a lost catalog.

Only the catalog is changed, in one repeatable transaction. A new, empty catalog becomes the record of the deployment
that the snapshots name; those of others are never registered. The query of the lost catalog may still run, so the next
start fences it and continues in a fresh directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

from dagster_ckpt.catalog.records import (
    ExecutionStatus,
    Holder,
    SnapshotRecord,
    SnapshotTrigger,
    StartCause,
    StreamRecord,
)
from dagster_ckpt.catalog.streams import RebuiltStream
from dagster_ckpt.client.connection import storage_place
from dagster_ckpt.client.savepoint_set import register_sets
from dagster_ckpt.errors import (
    CkptError,
    LiveDirectoryError,
    OptionError,
    StorageAccessError,
    StreamNotFoundError,
)
from dagster_ckpt.sinks.registry import sinks_in
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory, state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import read_metadata
from dagster_ckpt.spark.checkpoint_dir.state_files import LAYOUT
from dagster_ckpt.stream.handle import BuiltDirectory, StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.ownership import IF_LOST, owner_of_live_folder, refuse_unfinished_adoption, unclaimed_directory
from dagster_ckpt.stream.snapshots import DEPLOYMENT, TAKEN_FROM, Noted, as_noted, describe_snapshot, record_of
from dagster_ckpt.stream.start_from import checked_label


class ContinueFrom(StrEnum):
    LIVE = "live"
    NEWEST = "newest"


# Names no process that can be found, so that its end does not count as orderly.
_LOST = Holder("rebuilt", "rebuilt", "unknown", 0, None, "unknown")

# More leases than any stream takes between two snapshots.
_TOKENS_PER_SNAPSHOT = 1_000


@dataclass(frozen=True)
class RebuildReport:
    """Result of `Client.rebuild`.

    Attributes:
        live_directory: Where the next start continues; None: from the newest snapshot.
        undecided: Savepoints with edited state from which the stream may have been started; a plain start does not use
            them.
    """

    stream_id: str
    registered: tuple[str, ...]
    live_directory: str | None
    skipped: tuple[str, ...]
    undecided: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    incomplete_sets: tuple[str, ...] = ()

    @property
    def found_only_damage(self) -> bool:
        return bool(self.skipped) and not self.registered and self.live_directory is None

    def messages(self) -> list[str]:
        where = self.live_directory or "the newest snapshot, which is restored if there is one"
        return [
            *(f"registered {name}" for name in (*self.registered, *self.sets)),
            *self.incomplete_sets,
            *(f"skipped {what}" for what in self.skipped),
            *(
                f"{name} has edited state and is newer than every other snapshot: if the stream had been started from "
                "it, start it from it again. A plain start would undo the edit"
                for name in self.undecided
            ),
            f"the next start of {self.stream_id} without start_from continues in {where}",
        ]


@dataclass(frozen=True)
class CatalogRebuild:
    streams: tuple[RebuildReport, ...]
    refused: Mapping[str, str]

    def messages(self) -> list[str]:
        lines = [f"{each.stream_id}: {message}" for each in self.streams for message in each.messages()]
        return [*lines, *(f"{stream_id} was not rebuilt: {why}" for stream_id, why in self.refused.items())]


def rebuild(
    stream: StreamHandle,
    *,
    origin: str,
    take_over_deployment: str | None = None,
    continue_from: ContinueFrom | None = None,
) -> RebuildReport:
    """Register what the catalog lacks of a stream.

    If it knows the live directory, only missing snapshots are added; if it was restored from an older backup, the
    newest live directory too.
    """
    found, skipped = _snapshots(stream)
    if not found and not skipped:
        _refuse_nothing(stream)
    if take_over_deployment is not None:
        stream.catalog.take_over_deployment(take_over_deployment, only_if_unused=True)
    owner = owner_of_live_folder(stream)
    if not _is_known(stream):
        _refuse_anothers(stream, found, owner)
    record = stream.register()
    above = max(stream.newest_token(), _token_above(found))
    acquired = acquire_for(stream.catalog, stream.stream_id, "rebuild", origin, above=above)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        known = {snapshot.snapshot_id for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id)}
        refuse_unfinished_adoption(record)
        found = _without_adoptions(stream, _of_this_deployment(stream, found, skipped), record, skipped)
        noted = [as_noted(stream, each) for each in found if each.snapshot_id not in known]
        missing = [each.snapshot for each in noted]
        undecided: list[SnapshotRecord] = []
        numbers = [snapshot.number or 0 for snapshot in found]
        next_number = max(numbers, default=0) + 1
        if record.live_generation > 0 and not stream.directories_ahead(record):
            live_directory = record.live_directory
            live = LiveDirectory(live_directory) if live_directory is not None else None
            if live is not None and _is_abandoned(live, found, continue_from):
                stream.catalog.streams.forget_live_directory(lease.record)
                live_directory = None
            stream.catalog.rebuilding.add_snapshots(lease.record, missing, next_number=next_number)
        else:
            is_ours = owner is None or owner == stream.catalog.deployment_id
            built = stream.live_directories() if is_ours else []
            half_made = {each.live.url: why for each in built if (why := _why_half_made(each)) is not None}
            skipped += [f"{url}: {why}" for url, why in half_made.items()]
            usable = [each for each in built if each.live.url not in half_made]
            if usable and _is_abandoned(usable[-1].live, found, continue_from):
                skipped.append(f"{usable[-1].live.url}: it is an old copy, and continue_from is newest")
                usable = []
            generation = max((each.generation for each in built), default=0)
            rebuilt, batch = _stream(found, missing, next_number, usable, generation)
            rebuilt = replace(rebuilt, timeline=max(rebuilt.timeline, record.timeline))
            undecided = _undecided(found) if rebuilt.live_directory is None else []
            if rebuilt.live_directory is not None or missing:
                _note_execution(stream, lease, rebuilt, batch)
                stream.catalog.rebuilding.register(lease.record, rebuilt)
            live_directory = rebuilt.live_directory
        _tag_again(stream, lease, noted)
    names = tuple(describe_snapshot(snapshot) for snapshot in missing)
    maybe = tuple(map(describe_snapshot, undecided))
    sets, incomplete = register_sets(stream, found)
    return RebuildReport(stream.stream_id, names, live_directory, tuple(skipped), maybe, tuple(sets), tuple(incomplete))


def _tag_again(stream: StreamHandle, lease: LeaseKeeper, noted: Sequence[Noted]) -> None:
    listed = stream.catalog.snapshots.by_id([each.snapshot.snapshot_id for each in noted])
    for each in noted:
        if each.tagged_by is not None and each.snapshot.snapshot_id in listed:
            snapshot_id = each.snapshot.snapshot_id
            stream.catalog.holds.tag(snapshot_id, label=None, holder=each.tagged_by, lease=lease.record)


def _is_abandoned(live: LiveDirectory, found: Sequence[SnapshotRecord], continue_from: ContinueFrom | None) -> bool:
    """Whether the stream leaves its live directory, an old copy, for a newer snapshot.

    A rewind always makes a new directory, so one behind a snapshot taken of it was put back. If `continue_from` does
    not decide, that is refused.
    """
    state = inspect_live_directory(live)
    if state.status is not LiveStatus.GOOD or state.batch_id is None:
        return False
    newest = max((each.timeline for each in found), default=0)
    later = [
        each
        for each in found
        if each.timeline == newest
        and not each.edit
        and (each.batch_id or 0) > state.batch_id
        and _last_part(str(each.properties.get(TAKEN_FROM, live.url))) == _last_part(live.url)
    ]
    if not later or continue_from is ContinueFrom.LIVE:
        return False
    if continue_from is None:
        name = describe_snapshot(later[-1])
        raise LiveDirectoryError(
            f"Nothing was registered: the live directory {live.url} stands at batch {state.batch_id}, but {name} was "
            "taken later. The directory is an old copy, such as from a backup of the disk, or the stream was taken "
            "back by an earlier version of this package. Choose where the stream continues, with continue_from "
            f"(--continue-from): 'newest' restores {name} and leaves the directory as it is; 'live' continues at batch "
            f"{state.batch_id} of the directory, runs the later batches again, and no recovery uses {name} any more."
        )
    return True


def _last_part(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _refuse_nothing(stream: StreamHandle) -> None:
    """Refuse a stream without state, as of a wrong folder: it would start empty."""
    has_run = any(each.stream_id == stream.stream_id and each.live_generation for each in stream.catalog.streams.all())
    if has_run or stream.live_directories():
        return
    storage = storage_place(stream.storage) or repr(stream.storage)
    raise StreamNotFoundError(
        f"Nothing of stream {stream.stream_id!r} was found: no snapshot in {storage}, and no live directory in "
        f"{stream.live_folder}. Nothing was registered. Check the stream's id, the folder of the checkpoints "
        "(--storage on the command line) and the folder of the live directories (--live-root)."
    )


def _token_above(found: Sequence[SnapshotRecord]) -> int:
    """Return a token above those that the lost catalog issued, if no live directory names the newest.

    Kafka's markers would take a lower one for a former holder's.
    """
    return _TOKENS_PER_SNAPSHOT * max((snapshot.number or 0 for snapshot in found), default=0)


def _is_known(stream: StreamHandle) -> bool:
    try:
        record = stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        return False
    return record.live_generation > 0 or bool(stream.catalog.snapshots.of_stream(stream.stream_id))


def _refuse_anothers(stream: StreamHandle, found: Sequence[SnapshotRecord], folder_owner: str | None) -> None:
    own = stream.catalog.deployment_id
    named = {str(snapshot.properties[DEPLOYMENT]) for snapshot in found if DEPLOYMENT in snapshot.properties}
    if own in named and folder_owner in (None, own):
        return
    owners = sorted({*named, *([folder_owner] if folder_owner is not None else [])} - {own})
    if owners:
        raise LiveDirectoryError(
            f"The folders of stream {stream.stream_id!r} belong to deployment {', '.join(owners)}, but this catalog "
            f"belongs to deployment {own}. Nothing was registered. If the other deployment still exists, both use the "
            "same folders by mistake: give this one its own folders. "
            f"{IF_LOST.format(owner=folder_owner or owners[0])}"
        )


def _snapshots(stream: StreamHandle) -> tuple[list[SnapshotRecord], list[str]]:
    found: dict[str, SnapshotRecord] = {}
    skipped: list[str] = []
    for location in [*stream.store.checkpoints(), *stream.store.savepoints()]:
        try:
            manifest = stream.store.manifest(location)
            problems = stream.store.verify(location, deep=False)
        except StorageAccessError as error:
            # Without the newest snapshot, the next plain start would go back.
            raise StorageAccessError(
                f"{location} could not be read, so nothing of stream {stream.stream_id!r} was registered: {error}. "
                "Rebuild it again once the storage can be reached."
            ) from error
        except CkptError as error:
            skipped.append(f"{location}: {error}")
            continue
        header = manifest.header
        if header.stream_id != stream.stream_id:
            continue
        if problems:
            skipped.append(f"{location}: {problems[0]}")
            continue
        record = _record(header, location, manifest.full_bytes, manifest.file_count)
        first = found.setdefault(record.snapshot_id, record)
        if first is not record:
            skipped.append(f"{location}: it is a copy of {first.location}")
    return sorted(found.values(), key=attrgetter("place")), skipped


def _of_this_deployment(stream: StreamHandle, found: list[SnapshotRecord], skipped: list[str]) -> list[SnapshotRecord]:
    own = stream.catalog.deployment_id
    for snapshot in found:
        if snapshot.properties.get(DEPLOYMENT) != own:
            of = snapshot.properties.get(DEPLOYMENT) or "an unnamed deployment"
            skipped.append(f"{snapshot.location}: it belongs to {of}, but this catalog belongs to {own}")
    return [snapshot for snapshot in found if snapshot.properties.get(DEPLOYMENT) == own]


def _without_adoptions(
    stream: StreamHandle, found: list[SnapshotRecord], record: StreamRecord, skipped: list[str]
) -> list[SnapshotRecord]:
    if record.live_directory is not None:
        return found
    unclaimed = {each.snapshot_id: unclaimed_directory(stream, each) for each in found}
    for snapshot in found:
        directory = unclaimed[snapshot.snapshot_id]
        if directory is not None:
            skipped.append(
                f"{snapshot.location}: it was taken when {directory} was adopted, and no start has taken that "
                "directory over. Its query may still run: adopt it again"
            )
    return [each for each in found if unclaimed[each.snapshot_id] is None]


def _record(header: SnapshotHeader, location: str, full_bytes: int, file_count: int) -> SnapshotRecord:
    properties = header.properties
    timeline, trigger, schedule = properties.get("timeline"), properties.get("trigger"), properties.get("schedule")
    return replace(
        record_of(header, location, timeline=timeline if isinstance(timeline, int) else 0),
        trigger=SnapshotTrigger(trigger) if trigger in set(SnapshotTrigger) else SnapshotTrigger.MANUAL,
        full_bytes=full_bytes,
        file_count=file_count,
        label=_label(properties.get("label")),
        schedule=schedule if isinstance(schedule, str) else None,
        completed_at_ms=header.created_at_ms,
    )


def _label(value: object) -> str | None:
    try:
        return checked_label(value) if isinstance(value, str) else None
    except OptionError:
        return None


def _stream(
    found: Sequence[SnapshotRecord],
    missing: Sequence[SnapshotRecord],
    next_number: int,
    built: Sequence[BuiltDirectory],
    generation: int,
) -> tuple[RebuiltStream, int | None]:
    timeline = max((snapshot.timeline for snapshot in found), default=0)
    begins, restored = _begins(found)
    live, batch = _where_it_stood(built, found)
    later = [
        snapshot for snapshot in found if snapshot.timeline == timeline and (snapshot.batch_id or 0) > (batch or 0)
    ]
    if live is not None and batch is not None and later:
        # Rewound since, so these belong to the previous timeline.
        past = [snapshot for snapshot in found if snapshot.timeline == timeline and (snapshot.batch_id or 0) <= batch]
        begins[timeline + 1] = (timeline, batch)
        restored[timeline + 1] = past[-1].snapshot_id if past else None
        timeline += 1
    newest = next((each for each in reversed(found) if each.timeline == timeline and not each.edit), None)
    of_newest = newest.state_edits if newest is not None else ()
    rebuilt = RebuiltStream(
        snapshots=missing,
        next_number=next_number,
        live_directory=live.live.url if live is not None else None,
        live_generation=generation,
        timeline=timeline,
        restored_snapshot_id=restored.get(timeline),
        begins=begins,
        plan=_plan(found, live.live if live is not None else None),
        state_edits=state_edits(live.live) if live is not None else of_newest,
    )
    return rebuilt, batch


def _plan(found: Sequence[SnapshotRecord], live: LiveDirectory | None) -> Mapping[str, Any] | None:
    known = found[-1].properties if found else {}
    metadata = read_metadata(live.folder) if live is not None else None
    if metadata is not None and metadata.plan is not None and [metadata.rewrite_id] not in known.get(LAYOUT, ()):
        return metadata.plan
    plan = known.get("plan")
    return plan if isinstance(plan, dict) else None


def _undecided(found: Sequence[SnapshotRecord]) -> list[SnapshotRecord]:
    others = max((each.number or 0 for each in found if not each.edit), default=0)
    return [each for each in found if each.edit and (each.number or 0) > others]


def _begins(found: Sequence[SnapshotRecord]) -> tuple[dict[int, tuple[int, int]], dict[int, str | None]]:
    """Return where each timeline branches off, and from which snapshot, if known."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in found}
    first: dict[int, SnapshotRecord] = {}
    for snapshot in found:
        first.setdefault(snapshot.timeline, snapshot)
    begins: dict[int, tuple[int, int]] = {}
    restored: dict[int, str | None] = {}
    for timeline, snapshot in first.items():
        parent = by_id.get(str(snapshot.properties.get("parent_snapshot_id")))
        if parent is not None and parent.timeline != timeline and parent.batch_id is not None:
            begins[timeline] = (parent.timeline, parent.batch_id)
            restored[timeline] = parent.snapshot_id
    return begins, restored


def _why_half_made(built: BuiltDirectory) -> str | None:
    if built.live.is_not_in_use():
        return (
            "the restore, rewind, fork or import that built it did not finish, so no query was started in it. A start "
            "continues from the previous state; run a fork or an import again"
        )
    if built.is_unfinished:
        return "it was not moved into place, because the process that built it was killed"
    return None


def _where_it_stood(
    built: Sequence[BuiltDirectory], found: Sequence[SnapshotRecord]
) -> tuple[BuiltDirectory | None, int | None]:
    """Return the newest directory and its batch, if it is complete.

    An older one is used only if no snapshot can be restored instead.
    """
    for place, each in enumerate(reversed(built)):
        state = inspect_live_directory(each.live)
        if state.status is LiveStatus.GOOD:
            return each, state.batch_id
        if found and place == 0 and state.status is not LiveStatus.EMPTY:
            return None, None
    return None, None


def _note_execution(stream: StreamHandle, lease: LeaseKeeper, rebuilt: RebuiltStream, batch: int | None) -> None:
    newest = rebuilt.snapshots[-1].properties if rebuilt.snapshots else {}
    sinks = [sink.name for sink in sinks_in(newest)]
    execution_id = str(uuid.uuid4())
    executions = stream.catalog.executions
    executions.start(lease.record, execution_id, run_id="rebuilt from storage", cause=StartCause.MANUAL, holder=_LOST)
    if rebuilt.live_directory is not None:
        executions.running(lease.record, execution_id, live_directory=rebuilt.live_directory, recovery={})
    progress = {"sinks": sinks} | ({"batch_id": batch} if batch is not None else {})
    executions.heartbeat(lease.record, execution_id, progress)
    reason = "its catalog was lost; registered again from its storage"
    executions.end(lease.record, execution_id, ExecutionStatus.SUSPENDED, reason, settled=True)
