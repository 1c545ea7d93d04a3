"""Savepoints made from another snapshot: a promoted copy, or one with edited state.

An edit restores the snapshot into a temporary directory, rewrites its state, compares the result with the original and
stores it; it needs no lease. The ids of all edits in a state are in the file `metadata` of its directory and in the
headers of its snapshots. Without that of an edit, a snapshot may have the state from before it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.records import CompletedSnapshot, SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.client.description import find_snapshot
from dagster_ckpt.client.state_browsing import LIVE, session_of_process
from dagster_ckpt.errors import CkptError, OptionError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.recovery.checkpoint_retention import is_outside
from dagster_ckpt.recovery.live_directories import (
    restore_into,
    scratch_copies,
    scratch_directory,
    snapshot_location,
)
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.store import StoredSnapshot, sources_in
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER
from dagster_ckpt.spark.checkpoint_dir.cut import STATE_EDITS
from dagster_ckpt.spark.checkpoint_dir.inspect import state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.spark.checkpoint_dir.state_files import CHAIN, LAYOUT
from dagster_ckpt.state.diff import Change
from dagster_ckpt.state.editing import StateEdit, edit_rows
from dagster_ckpt.state.reading import StateName
from dagster_ckpt.state.rewriter import rewriter_for
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, holding, is_owned_by_stream
from dagster_ckpt.stream.start_from import checked_label
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_THE_ORIGINAL = frozenset({"label", "schedule", "promoted_from"})


class SavepointIdentity:
    def __init__(self, number: int, trigger: SnapshotTrigger, label: str | None) -> None:
        self.snapshot_id = str(uuid.uuid4())
        self.number, self.trigger, self.label = number, trigger, label

    def header(self, original: SnapshotHeader, **changed: Any) -> SnapshotHeader:
        """Return the original's header with this identity, `changed` fields, and additional `properties`."""
        inherited = {name: value for name, value in original.properties.items() if name not in _OF_THE_ORIGINAL}
        properties = {**inherited, "trigger": self.trigger.value, **changed.pop("properties", {})}
        properties |= {"label": self.label} if self.label is not None else {}
        return original.model_copy(
            update={
                "snapshot_id": self.snapshot_id,
                "number": self.number,
                "kind": SnapshotKind.SAVEPOINT,
                "properties": properties,
                **changed,
            }
        )


def derive_savepoint(
    stream: StreamHandle,
    original: SnapshotRecord,
    write: Callable[[SavepointIdentity], tuple[StoredSnapshot, SnapshotHeader]],
    *,
    trigger: SnapshotTrigger,
    label: str | None,
    target_directory: str | None,
    purpose: str,
    state_rows: int | None,
    began_ms: int,
) -> SnapshotRecord:
    """Write and register a savepoint of a stream, which may be running.

    The original is held for this `purpose` until the catalog lists the savepoint.
    """
    snapshots = stream.catalog.snapshots
    identity = SavepointIdentity(stream.catalog.streams.allocate_number(stream.stream_id), trigger, label)
    location: str | None = None
    try:
        begun = snapshots.start(
            None,
            stream_id=stream.stream_id,
            snapshot_id=identity.snapshot_id,
            number=identity.number,
            trigger=trigger,
            timeline=original.timeline,
            label=label,
            target_directory=target_directory,
        )
        with holding(stream.catalog, [original, begun], f"{purpose} {identity.snapshot_id}"):
            stored, header = write(identity)
            location = stored.location
            facts = _facts(stored, header, original, state_rows, wall_clock_ms() - began_ms)
            return snapshots.complete(None, identity.snapshot_id, facts)
    except BaseException as error:
        snapshots.fail(None, identity.snapshot_id, str(error) or type(error).__name__)
        # The catalog may have registered it before the error: delete only what it does not list.
        if location is not None and all(each.location != location for each in snapshots.completed(stream.stream_id)):
            stream.store.discard(location)
        raise


def _facts(
    stored: StoredSnapshot, header: SnapshotHeader, original: SnapshotRecord, state_rows: int | None, duration_ms: int
) -> CompletedSnapshot:
    return CompletedSnapshot(
        stored.location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        state_rows=state_rows,
        watermark=original.watermark,
        duration_ms=duration_ms,
        properties=dict(header.properties),
    )


# Property of an edited savepoint: from which snapshot, by whom, why, and what changed.
EDIT = "edit"


@dataclass(frozen=True)
class EditedState:
    """Result of `Client.edit_state`.

    Attributes:
        skipped: Unchanged states, whose keys do not have the columns of the condition.
        still_there: Snapshots of the stream without the edit.
    """

    savepoint: SnapshotRecord
    edited_from: SnapshotRecord
    changes: Mapping[StateName, Mapping[Change, int]]
    skipped: tuple[StateName, ...]
    still_there: tuple[SnapshotRecord, ...]

    @property
    def rows(self) -> int:
        return sum(sum(counts.values()) for counts in self.changes.values())

    def messages(self) -> list[str]:
        made = f"{describe_snapshot(self.savepoint)} was created from {describe_snapshot(self.edited_from)}"
        messages = [f"{made}: {self.savepoint.location}"]
        for name, counts in self.changes.items():
            changed = ", ".join(f"{number} rows {change.lower()}" for change, number in counts.items() if number)
            messages.append(f"{name}: {changed or 'no row matches'}")
        messages += [f"{name}: unchanged, its key does not have the columns of the condition" for name in self.skipped]
        if self.still_there:
            names = ", ".join(describe_snapshot(each) for each in self.still_there)
            messages.append(f"older snapshots contain the previous state until they are deleted: {names}")
        named = self.savepoint.label or self.savepoint.snapshot_id
        messages.append(
            "so does the live directory until the stream is started from the savepoint. What is left then: "
            f"dagster-ckpt state remaining {self.savepoint.stream_id} {named}"
        )
        return messages


def edit_state(
    stream: StreamHandle,
    edits: Sequence[StateEdit],
    *,
    snapshot: str,
    reason: str,
    origin: str,
    label: str | None = None,
    target_directory: str | None = None,
    spark: SparkSession | None = None,
    report: Callable[[str], None] = lambda _message: None,
) -> EditedState:
    checked_label(label)
    if not reason.strip():
        raise OptionError("reason is empty. Give the reason of the edit; the savepoint records it.")
    if snapshot == LIVE:
        raise OptionError(
            "The live directory cannot be edited, only a snapshot. Take a savepoint first, and edit that."
        )
    began_ms = wall_clock_ms()
    session = spark if spark is not None else session_of_process()
    # Refuse a session that cannot write state, before anything is copied.
    rewriter_for(session)
    original = find_snapshot(stream.catalog, stream.stream_id, snapshot)
    report(f"copying the snapshot {snapshot}")
    with (
        holding(stream.catalog, [original], "edit of state"),
        scratch_directory(stream) as restored,
        scratch_directory(stream) as scratch,
    ):
        restore_into(stream, snapshot_location(original), restored, is_scratch=True)
        report(f"writing the edited state of {describe_snapshot(original)}")
        edited = edit_rows(session, restored, scratch, edits, report=report)
        done = {
            "id": edited.rewrite_id,
            "edited_from": original.snapshot_id,
            "location": original.location,
            "by": origin,
            "reason": reason,
            "changes": {str(name): {k.value: v for k, v in counts.items()} for name, counts in edited.changes.items()},
        }
        savepoint = derive_savepoint(
            stream,
            original,
            lambda identity: _write(stream, original, scratch, identity, edit=done, target_directory=target_directory),
            trigger=SnapshotTrigger.EDIT,
            label=label,
            target_directory=target_directory,
            purpose="edited savepoint",
            state_rows=None,
            began_ms=began_ms,
        )
        older = [
            each
            for each in stream.catalog.snapshots.completed(stream.stream_id)
            if edited.rewrite_id not in each.state_edits
        ]
        return EditedState(savepoint, original, edited.changes, edited.skipped, tuple(older))


def _write(
    stream: StreamHandle,
    original: SnapshotRecord,
    rewritten: LiveDirectory,
    identity: SavepointIdentity,
    *,
    edit: Mapping[str, object],
    target_directory: str | None,
) -> tuple[StoredSnapshot, SnapshotHeader]:
    location = snapshot_location(original)
    manifest = stream.store.manifest(location)
    with staged_cut(rewritten, carry_in_flight=True) as staged:
        # Only the rows differ: query, sinks and position in the input stay.
        own = {name: staged.cut.properties[name] for name in (CHAIN, LAYOUT, STATE_EDITS)}
        properties = {**own, EDIT: dict(edit), "parent_snapshot_id": original.snapshot_id}
        header = identity.header(manifest.header, created_at_ms=wall_clock_ms(), properties=properties)
        of_sinks = [entry for entry in manifest.files if entry.path.startswith(f"{SINKS_FOLDER}/")]
        files = [*staged.stage(staged.files), *sources_in(stream.store, location, of_sinks)]
        stored = stream.store.write_savepoint(header, files, target_directory=target_directory)
    return stored, header


_MAY_HAVE_BYTES = (
    SnapshotStatus.COMPLETED,
    SnapshotStatus.DELETING,
    SnapshotStatus.IN_PROGRESS,
    SnapshotStatus.BROKEN,
)


@dataclass(frozen=True)
class RemainingState:
    """Result of `Client.remaining_state`: what does not have the edit.

    Attributes:
        snapshots: Those of the stream, newest first, each with who deletes it.
        directories: Live directories and temporary copies.
    """

    edited: SnapshotRecord
    snapshots: tuple[str, ...]
    directories: tuple[str, ...]

    @property
    def is_nowhere(self) -> bool:
        return not (self.snapshots or self.directories)

    def messages(self) -> list[str]:
        name = describe_snapshot(self.edited)
        if self.is_nowhere:
            return [f"no snapshot and no directory of the stream contains the state from before {name}"]
        return [f"contains the state from before {name}: {each}" for each in (*self.snapshots, *self.directories)]


def remaining_state(stream: StreamHandle, reference: str) -> RemainingState:
    edited = find_snapshot(stream.catalog, stream.stream_id, reference)
    edit = edited.edit.get("id")
    if not isinstance(edit, str):
        raise OptionError(
            f"The state of {describe_snapshot(edited)} was not edited. Name the savepoint that forgot the keys."
        )
    return RemainingState(edited, tuple(_snapshots(stream, edit)), tuple(_directories(stream, edit)))


def _snapshots(stream: StreamHandle, edit: str) -> Iterator[str]:
    known: set[str] = set()
    unreachable: set[str] = set()
    current = stream.catalog.streams.get(stream.stream_id)
    for each in stream.catalog.snapshots.of_stream(stream.stream_id):
        if each.status is SnapshotStatus.DELETED and edit not in each.state_edits:
            yield from _left_elsewhere(stream, each, unreachable)
        if each.status not in _MAY_HAVE_BYTES:
            continue
        known.add(each.location or "")
        # A snapshot being taken has no header yet, but its timeline began with the edits of the stream.
        is_of_edited = each.location is None and each.timeline == current.timeline and edit in current.state_edits
        if is_of_edited or edit in each.state_edits:
            continue
        if each.location is None or _header(stream, each.location) is not None:
            yield f"{describe_snapshot(each)}, {_who_deletes(stream, each)}: {each.location or 'being taken'}"
    for location in (*stream.store.checkpoints(), *stream.store.savepoints()):
        header = _header(stream, location) if location not in known else None
        is_ours = isinstance(header, str) or (header is not None and header.stream_id == stream.stream_id)
        if is_ours and edit not in _edits_of(header):
            yield f"a snapshot that the catalog does not list, which you delete: {location}"


def _left_elsewhere(stream: StreamHandle, deleted: SnapshotRecord, unreachable: set[str]) -> Iterator[str]:
    """Report a deleted checkpoint that is still in a folder which the stream used before: retention leaves it there."""
    if deleted.location is None or not is_outside(stream, deleted, deleted.location):
        return
    folder = _folder(deleted.location)
    if folder in unreachable:
        return
    try:
        header = _header(stream, deleted.location)
    except StorageAccessError as error:
        # A bucket of years ago must not hide the rest.
        unreachable.add(folder)
        yield f"perhaps checkpoints in {folder}, which cannot be read: {error}"
        return
    if isinstance(header, str) or (header is not None and header.snapshot_id == deleted.snapshot_id):
        yield f"{describe_snapshot(deleted)}, {_who_deletes(stream, deleted)}: {deleted.location}"


def _folder(location: str) -> str:
    return location.rstrip("/").rpartition("/")[0]


def _who_deletes(stream: StreamHandle, snapshot: SnapshotRecord) -> str:
    if snapshot.location is not None and is_outside(stream, snapshot, snapshot.location):
        return f"which you delete with the stream's folder {_folder(snapshot.location)}, in a storage used before"
    return "which the stream deletes" if is_owned_by_stream(snapshot) else "which you delete"


def _header(stream: StreamHandle, location: str) -> SnapshotHeader | str | None:
    try:
        return stream.store.manifest(location).header
    except SnapshotNotFoundError:
        return None
    except StorageAccessError:
        raise
    except CkptError as error:
        return str(error)


def _edits_of(header: SnapshotHeader | str | None) -> list[str]:
    edits = header.properties.get(STATE_EDITS) if isinstance(header, SnapshotHeader) else None
    return edits if isinstance(edits, list) else []


def _directories(stream: StreamHandle, edit: str) -> Iterator[str]:
    current = stream.catalog.streams.get(stream.stream_id).live_directory
    urls = {built.live.url for built in stream.live_directories()}
    for url in sorted(urls | ({current} if current is not None else set())):
        live = LiveDirectory(url)
        if live.exists() and not _has(live, edit):
            is_current = url == current
            yield f"the live directory {url}, " + (
                "in which the stream is: start it from the savepoint"
                if is_current
                else "which a later start deletes after its first checkpoint"
            )
    for copy in scratch_copies(stream):
        if not _has(copy, edit):
            yield f"the temporary copy {copy.url}, which its reader deletes, or six hours later the next one"


def _has(live: LiveDirectory, edit: str) -> bool:
    try:
        return edit in state_edits(live)
    except StorageAccessError:
        raise
    except CkptError:
        return False
