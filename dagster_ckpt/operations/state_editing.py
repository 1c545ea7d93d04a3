"""Edit the state in a snapshot: the result is a new savepoint, and nothing else changes.

The snapshot is restored into a temporary directory, its state is rewritten there with other rows,
and the result is compared with the original and stored. A start from the savepoint then continues
with the edited state. No live directory is touched, and no lease is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import OptionError, StateRewriteError
from dagster_ckpt.operations.derived_savepoint import SavepointIdentity, derive_savepoint
from dagster_ckpt.operations.state_browsing import LIVE, StreamState, session_of_process
from dagster_ckpt.recovery.live_directories import scratch_directory, snapshot_location
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.store import StoredSnapshot, sources_in
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER
from dagster_ckpt.spark.checkpoint_dir.cut import STATE_EDITS
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import unwatched
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.spark.checkpoint_dir.state.growth import CHAIN, LAYOUT
from dagster_ckpt.spark.jobs import JobProgress, in_job_group
from dagster_ckpt.state.diff import Change, differences, paired
from dagster_ckpt.state.editing import PlannedEdit, StateEdit, check_edited, plan_edit
from dagster_ckpt.state.reading import StateName, StateReader
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.spark_rewriter import require_rewriter
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import checked_label
from dagster_ckpt.values.durations import wall_clock_ms

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
        still_there: Snapshots of the stream without the edit: they keep what was forgotten.
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
        report: Called with a message for every step, and every few seconds within a long one.

    Raises:
        UnsupportedSparkError: This Spark cannot write state.
        StateRewriteError: The state cannot be edited like this, or the result is not what was asked for.
        SnapshotNotFoundError: There is no such snapshot.
        OptionError: No reason is given, or the label or operator is wrong.
        StorageAccessError: The savepoint cannot be written.
    """
    checked_label(label)
    if not reason.strip():
        raise OptionError("reason is empty. Give the reason of the edit; the savepoint records it.")
    if snapshot == LIVE:
        raise OptionError(
            "The live directory cannot be edited, only a snapshot. Take a savepoint first, and edit that."
        )
    began_ms = wall_clock_ms()
    session = spark if spark is not None else session_of_process()
    require_rewriter(session)
    report(f"copying the snapshot {snapshot}")
    with StreamState(stream, snapshot, spark=session) as state, scratch_directory(stream) as scratch:
        if state.snapshot is None or not state.states:
            raise StateRewriteError(f"{state} has no state to edit.")
        # All are checked before the first is carried out.
        planned = [plan_edit(edit, state.reader) for edit in edits]

        def change(store: Any, rows: Any) -> Any:
            for edit in planned:
                rows = edit.apply(store, rows)
            return rows

        report(f"writing the edited state of {state}")
        rewritten = rewrite_state(session, state.live, scratch, change_rows=change, report=report)
        report("comparing the edited state with the original")
        after, progress = StateReader(session, scratch, rewritten.batch_id), JobProgress(report)
        check = partial(_checked, planned, state, after, progress)
        what = f"check edited state: {scratch.url}"
        changes = in_job_group(session.sparkContext, what, check, unwatched, progress)
        done = {
            "id": rewritten.rewrite_id,
            "edited_from": state.snapshot.snapshot_id,
            "location": state.snapshot.location,
            "by": origin,
            "reason": reason,
            "changes": {str(name): {k.value: v for k, v in counts.items()} for name, counts in changes.items()},
        }
        original = state.snapshot
        savepoint = derive_savepoint(
            stream,
            original,
            lambda identity: _write(stream, original, scratch, identity, edit=done, target_directory=target_directory),
            trigger=SnapshotTrigger.EDIT,
            label=label,
            purpose="edited savepoint",
            state_rows=None,
            began_ms=began_ms,
        )
        skipped = tuple(dict.fromkeys(name for edit in planned for name in edit.skipped))
        older = [
            each
            for each in stream.catalog.snapshots.completed(stream.stream_id)
            if rewritten.rewrite_id not in each.state_edits
        ]
        return EditedState(savepoint, state.snapshot, changes, skipped, tuple(older))


def _checked(
    planned: Sequence[PlannedEdit], before: StreamState, after: StateReader, progress: JobProgress
) -> dict[StateName, Mapping[Change, int]]:
    """The changes of each edited state, after a proof that nothing else changed."""
    edited = {name for edit in planned for name in edit.states}
    changes = {}
    for difference in differences(before.reader, after, paired(before.states, after.states)):
        progress.step = f"comparing {difference.name}"
        if difference.name in edited:
            check_edited(planned, difference, after)
            changes[difference.name] = difference.counts
        elif not difference.is_empty:
            raise StateRewriteError(
                f"{difference.name} differs although no edit names it. No savepoint was made. Please report this, with "
                "the versions of Spark and dagster-ckpt."
            )
    return changes


def _write(
    stream: StreamHandle,
    original: SnapshotRecord,
    rewritten: LiveDirectory,
    identity: SavepointIdentity,
    *,
    edit: Mapping[str, object],
    target_directory: str | None,
) -> tuple[StoredSnapshot, SnapshotHeader]:
    """Write the savepoint: the rewritten directory, and what the original carries of its sinks."""
    location = snapshot_location(original)
    manifest = stream.store.manifest(location)
    with staged_cut(rewritten, carry_in_flight=True) as staged:
        # Everything but the rows stays: the query, its sinks, its position in the input.
        own = {name: staged.cut.properties[name] for name in (CHAIN, LAYOUT, STATE_EDITS)}
        properties = {**own, EDIT: dict(edit), "parent_snapshot_id": original.snapshot_id}
        header = identity.header(manifest.header, created_at_ms=wall_clock_ms(), properties=properties)
        of_sinks = [entry for entry in manifest.files if entry.path.startswith(f"{SINKS_FOLDER}/")]
        files = [*staged.stage(staged.files), *sources_in(stream.store, location, of_sinks)]
        stored = stream.store.write_savepoint(header, files, target_directory=target_directory)
    return stored, header
