"""Edit the state in a snapshot: the result is a new savepoint, and nothing else changes.

The snapshot is restored into a temporary directory, its state is rewritten there with other rows,
and the result is compared with the original and stored. A start from the savepoint then continues
with the edited state. No live directory is touched, and no lease is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.records import CompletedSnapshot, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import OptionError, StateRewriteError
from dagster_ckpt.operations.state_browsing import LIVE, StreamState
from dagster_ckpt.recovery.prepare import snapshot_location
from dagster_ckpt.recovery.scratch import scratch_directory
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader, SnapshotKind
from dagster_ckpt.snapshot.reuse import Source, SourceFile
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.spark.checkpoint_dir.state.growth import CHAIN, LAYOUT
from dagster_ckpt.spark.state.diff import Change, StateDifference, differences, paired
from dagster_ckpt.spark.state.editing import PlannedEdit, StateEdit, check_edited, plan_edit
from dagster_ckpt.spark.state.reading import StateName, StateReader
from dagster_ckpt.spark.state.rewriting import rewrite_state
from dagster_ckpt.spark.state.spark_rewriter import require_rewriter
from dagster_ckpt.stream.handle import StreamHandle, wall_clock_ms
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import checked_label

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Property of a savepoint with edited state: from which snapshot, who, why, and what changed.
EDIT = "edit"


@dataclass(frozen=True)
class EditedState:
    """The result of an edit.

    Attributes:
        savepoint: The new savepoint.
        edited_from: The snapshot that was edited.
        changes: Number of rows by change, for each state that was edited.
        skipped: States whose keys do not have the columns of the condition; they are unchanged.
        still_there: Snapshots of the stream that are older than the savepoint: they keep what was forgotten.
    """

    savepoint: SnapshotRecord
    edited_from: SnapshotRecord
    changes: Mapping[StateName, Mapping[Change, int]]
    skipped: tuple[StateName, ...]
    still_there: tuple[SnapshotRecord, ...]

    @property
    def rows(self) -> int:
        """Number of rows that were removed, added or changed."""
        return sum(sum(counts.values()) for counts in self.changes.values())

    def messages(self) -> list[str]:
        """The result, as messages."""
        made = f"{describe_snapshot(self.savepoint)} was made of {describe_snapshot(self.edited_from)}"
        messages = [f"{made}: {self.savepoint.location}"]
        for name, counts in self.changes.items():
            changed = ", ".join(f"{number} rows {change.lower()}" for change, number in counts.items() if number)
            messages.append(f"{name}: {changed or 'no row has such a key'}")
        messages += [f"{name}: unchanged, its key does not have the columns of the condition" for name in self.skipped]
        if self.still_there:
            names = ", ".join(describe_snapshot(each) for each in self.still_there)
            messages.append(f"older snapshots keep the state as it was until they are deleted: {names}")
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
) -> EditedState:
    """Make a savepoint of a snapshot, with other rows in its state.

    Args:
        stream: The stream; it may be running and is not changed.
        edits: What to change, in this order.
        snapshot: `latest`, or the id, number (`chk-7`), label or location of a snapshot.
        reason: Why, as the savepoint records it.
        origin: Who edits, as the savepoint records it.
        label: A name to start from later.
        target_directory: Folder for the savepoint, instead of the configured one.
        spark: The session that reads and writes; default: the one of this process.

    Raises:
        UnsupportedSparkError: This Spark cannot write state.
        StateRewriteError: The state cannot be edited like this, or the result is not what was asked for.
        SnapshotNotFoundError: There is no such snapshot.
        OptionError: No reason is given, or the label or operator is wrong.
        StorageAccessError: The savepoint cannot be written.
    """
    checked_label(label)
    if not reason.strip():
        raise OptionError("Say why the state is edited: the savepoint records it.")
    if snapshot == LIVE:
        raise OptionError("An edit makes a savepoint of a snapshot. Take a savepoint first, and name it.")
    began_ms = wall_clock_ms()
    with StreamState(stream, snapshot, spark=spark) as state, scratch_directory(stream) as scratch:
        require_rewriter(state.spark)
        if state.snapshot is None or not state.states:
            raise StateRewriteError(f"{state} has no state to edit.")
        # All are checked before the first is carried out.
        planned = [plan_edit(edit, state.reader) for edit in edits]

        def change(store: Any, rows: Any) -> Any:
            for edit in planned:
                rows = edit.apply(store, rows)
            return rows

        rewritten = rewrite_state(state.spark, state.live, scratch, change_rows=change)
        after = StateReader(state.spark, scratch, rewritten.batch_id)
        compared = differences(state.reader, after, paired(state.states, after.states))
        changes = _checked(planned, compared, after)
        done = {
            "edited_from": state.snapshot.snapshot_id,
            "location": state.snapshot.location,
            "by": origin,
            "reason": reason,
            "changes": {str(name): {k.value: v for k, v in counts.items()} for name, counts in changes.items()},
        }
        savepoint = _store(stream, _Order(state.snapshot, scratch, done, label, target_directory, began_ms))
        skipped = tuple(dict.fromkeys(name for edit in planned for name in edit.skipped))
        older = [
            each
            for each in stream.catalog.snapshots.completed(stream.stream_id)
            if each.snapshot_id != savepoint.snapshot_id
        ]
        return EditedState(savepoint, state.snapshot, changes, skipped, tuple(older))


def _checked(
    planned: Sequence[PlannedEdit], compared: Sequence[StateDifference], after: StateReader
) -> dict[StateName, Mapping[Change, int]]:
    """The changes of each edited state, after a proof that nothing else changed."""
    edited = {name for edit in planned for name in edit.states}
    changes = {}
    for difference in compared:
        if difference.name in edited:
            check_edited(planned, difference, after)
            changes[difference.name] = difference.counts
        elif not difference.is_empty:
            raise StateRewriteError(
                f"{difference.name} differs although no edit names it. No savepoint was made. Please report this, with "
                "the versions of Spark and dagster-ckpt."
            )
    return changes


@dataclass(frozen=True)
class _Order:
    """The savepoint to make.

    Attributes:
        original: The snapshot that was edited.
        rewritten: The directory with the edited state.
        edit: What was done, by whom and why.
        label: A name to start from.
        target_directory: Folder for it, instead of the configured one.
        began_ms: When the edit began.
    """

    original: SnapshotRecord
    rewritten: LiveDirectory
    edit: Mapping[str, Any]
    label: str | None
    target_directory: str | None
    began_ms: int


def _store(stream: StreamHandle, order: _Order) -> SnapshotRecord:
    snapshots, original = stream.catalog.snapshots, order.original
    snapshot_id, number = str(uuid.uuid4()), stream.catalog.streams.allocate_number(stream.stream_id)
    begun = snapshots.start_of_stopped(
        stream.stream_id,
        snapshot_id=snapshot_id,
        number=number,
        trigger=SnapshotTrigger.EDIT,
        timeline=original.timeline,
        label=order.label,
    )
    try:
        with holding(stream.catalog, [begun], f"edited savepoint {snapshot_id}"):
            stored, header = _write(stream, order, {"snapshot_id": snapshot_id, "number": number})
    except BaseException as error:
        snapshots.fail_of_stopped(snapshot_id, str(error) or type(error).__name__)
        raise
    facts = CompletedSnapshot(
        stored.location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        rows=None,
        state_rows=None,
        watermark=original.watermark,
        duration_ms=wall_clock_ms() - order.began_ms,
        properties=dict(header.properties),
    )
    return snapshots.complete_of_stopped(snapshot_id, facts)


def _write(
    stream: StreamHandle, order: _Order, named: Mapping[str, str | int]
) -> tuple[StoredSnapshot, SnapshotHeader]:
    location = snapshot_location(order.original)
    manifest = stream.store.manifest(location)
    with staged_cut(order.rewritten, carry_in_flight=True) as staged:
        # Everything but the rows stays: the query, its sinks, its position in the input.
        taken = {name: value for name, value in manifest.header.properties.items() if name not in ("label", "schedule")}
        own = {name: staged.cut.properties[name] for name in (CHAIN, LAYOUT)}
        properties = {**taken, **own, "trigger": SnapshotTrigger.EDIT.value, EDIT: dict(order.edit)}
        properties |= {"parent_snapshot_id": order.original.snapshot_id}
        properties |= {"label": order.label} if order.label is not None else {}
        changed = {**named, "kind": SnapshotKind.SAVEPOINT, "created_at_ms": wall_clock_ms(), "properties": properties}
        header = manifest.header.model_copy(update=changed)
        files = [*staged.stage(staged.files), *_sink_logs(stream, location, manifest.files)]
        stored = stream.store.write_savepoint(header, files, target_directory=order.target_directory)
    return stored, header


def _sink_logs(stream: StreamHandle, location: str, entries: Iterable[FileEntry]) -> list[Source]:
    """What a snapshot carries of its sinks."""

    def read(entry: FileEntry) -> BytesIO:
        found: list[bytes] = []

        def keep(_entry: FileEntry, chunks: Iterable[bytes]) -> None:
            found.extend(chunks)

        stream.store.extract(location, keep, only=entry.path.__eq__)
        return BytesIO(b"".join(found))

    return [
        SourceFile(entry.path, entry.size, entry.identity, partial(read, entry), entry.token)
        for entry in entries
        if entry.path.startswith(f"{SINKS_FOLDER}/")
    ]
