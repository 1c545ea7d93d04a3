"""Forking and importing: a stream continues from another's state as an independent query.

An import copies a snapshot of another deployment at once, as this catalog can put no hold on it.

A crash is harmless: the directory is built under a temporary name, and one transaction assigns it and its output to the
stream. What the first start must check stays recorded until it succeeds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StateOrigin
from dagster_ckpt.errors import (
    InputGoneError,
    LiveDirectoryError,
    NothingCommittedError,
    OptionError,
    RequestFailedError,
    SharedSinkError,
    SnapshotCorruptError,
)
from dagster_ckpt.io.location import folders_overlap, same_folder
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.recovery.plan import FinishRestore, RecoveryFacts, RecoveryPlan, Rewind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.sink_survey import refuse_copies
from dagster_ckpt.recovery.source_inputs import InputStatus, reasons, source_inputs
from dagster_ckpt.recovery.undone_reads import unfinished_upstream, with_undone_reads
from dagster_ckpt.sinks.file_sink import FileSink, fork_output, unexpected_file
from dagster_ckpt.sinks.file_sink_log import own_past
from dagster_ckpt.sinks.registry import captured_sinks, logs_in_snapshot, other_sinks, sink_of, sinks_of
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id, state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.ownership import check_places, claim_live_folder, fence_predecessor, refuse_unfinished_adoption
from dagster_ckpt.stream.snapshots import DEPLOYMENT, describe_snapshot, foreign_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint, is_location
from dagster_ckpt.values.durations import monotonic_ms


@dataclass(frozen=True)
class Fork:
    """A stream forked from another one, perhaps by an import.

    `outputs` maps folders of the original's file sinks to those with a copy of their rows. The fork must not write to
    `parent_outputs`.
    """

    stream_id: str
    of_stream_id: str
    source: str
    batch_id: int
    query_id: str
    live_directory: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    parent_outputs: tuple[str, ...] = ()
    of_deployment: str | None = None


def fork(
    original: StreamHandle,
    stream: StreamHandle,
    start_from: StartFrom,
    *,
    origin: str,
    outputs: Mapping[str, str] | None = None,
    replace_state: bool = False,
) -> Fork:
    """Fork a stream into another one, whose next start continues there; arguments as of `Client.fork`."""
    if original.stream_id == stream.stream_id:
        raise OptionError(f"Stream {stream.stream_id!r} cannot be forked into itself. Name another one, or rewind it.")
    facts = recovery_facts(original, start_from, predecessor_ended=True)
    # The first start of the fork cannot judge this: what it has read is not recorded.
    if start_from.chooses_its_point and (unfinished := unfinished_upstream(original.catalog, facts.stream)):
        raise RequestFailedError(
            f"Stream {original.stream_id!r} reads {', '.join(unfinished)}, with an unfinished restore: the fork might "
            "keep rows that it undoes. Start it first, or name a snapshot to fork from. Nothing was changed."
        )
    facts = with_undone_reads(original.catalog, facts)
    plan = _plan_fork(original, facts)

    def check() -> None:
        with holding(original.catalog, [plan.snapshot], f"fork into {stream.stream_id}"):
            _refuse_gone_inputs(original, stream, facts, plan)

    def build(target: LiveDirectory, still_mine: StillMine) -> ForkedState:
        with holding(original.catalog, [plan.snapshot], f"fork into {stream.stream_id}"):
            return _build_fork(original, plan, target, dict(outputs or {}), still_mine)

    return assign_state(
        stream,
        build,
        verb="fork",
        origin=origin,
        outputs=outputs or {},
        replace_state=replace_state,
        plan=plan.snapshot.plan if plan.snapshot is not None else facts.stream.plan or {},
        check=check,
    )


@dataclass(frozen=True)
class ForkedState:
    live_directory: str
    query_id: str
    source: str
    pending: Forked


def assign_state(
    stream: StreamHandle,
    build: Callable[[LiveDirectory, StillMine], ForkedState],
    *,
    verb: str,
    origin: str,
    outputs: Mapping[str, str],
    replace_state: bool,
    plan: Mapping[str, Any],
    check: Callable[[], None],
    of_deployment: str | None = None,
) -> Fork:
    """Let the next start of a stream that is not running continue from another stream's state.

    `plan` describes the query that wrote the state. `check` is called under the lease, before anything is written.
    """
    above = stream.token_in_use(stream.register())
    acquired = acquire_for(stream.catalog, stream.stream_id, verb, origin, above=above)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        record = stream.catalog.streams.get(stream.stream_id)
        refuse_unfinished_adoption(record)
        committed = stream.catalog.executions.last_batch(stream.stream_id, record.live_directory)
        if committed is not None and not replace_state:
            raise RequestFailedError(
                f"Stream {stream.stream_id!r} has already committed batches, up to {committed}. Continuing from "
                "another state discards them: confirm with replace_state, or name another stream."
            )
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        check()
        # While the catalog still names the directory where a lost holder's query may run.
        fence_predecessor(stream, acquired, still_mine=lease.check)
        started_ms = monotonic_ms()
        claim_live_folder(stream)
        made = build(stream.new_live_directory(record.live_generation, lease.record.token), lease.step)
        stream.catalog.streams.switch_live_directory(
            lease.record,
            made.live_directory,
            origin=StateOrigin(OriginKind.FORK, batch_id=made.pending.batch_id),
            pending_restore=made.pending,
            plan=plan,
            state_edits=state_edits(LiveDirectory(made.live_directory)),
            duration_ms=monotonic_ms() - started_ms,
        )
    return Fork(
        stream_id=stream.stream_id,
        of_stream_id=made.pending.of_stream_id,
        source=made.source,
        batch_id=made.pending.batch_id,
        query_id=made.query_id,
        live_directory=made.live_directory,
        outputs=outputs,
        parent_outputs=made.pending.parent_outputs,
        of_deployment=of_deployment,
    )


def _plan_fork(original: StreamHandle, facts: RecoveryFacts) -> RecoveryPlan:
    if facts.start_from.point is StartPoint.EMPTY:
        raise OptionError(
            "A fork continues from existing state: set start_from to latest, batch-<n> or a snapshot, not to empty."
        )
    plan = plan_recovery(facts)
    if isinstance(plan, FinishRestore):
        raise RequestFailedError(
            f"Stream {original.stream_id!r} has an unfinished restore: start it first, or name a snapshot to fork from."
        )
    if plan.to_batch is None:
        raise NothingCommittedError(
            f"Stream {original.stream_id!r} has not committed a batch to continue from: {plan.reason}."
        )
    return plan


def _refuse_gone_inputs(original: StreamHandle, stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan) -> None:
    inputs = source_inputs(original, facts, plan, active_session())
    lacking = " ".join(reasons(inputs, status) for status in (InputStatus.GONE, InputStatus.REPEATED)).strip()
    if lacking and not facts.start_from.accept_loss:
        raise InputGoneError(
            f"Stream {original.stream_id!r} is not forked into {stream.stream_id!r} after batch {plan.to_batch}, "
            f"nothing was changed: the fork would read again what the original has read since, and would lack rows or "
            f"have some twice. {lacking} Put back the files that are read again, with their modification times and no "
            "others, or fork from a newer snapshot. To fork nevertheless, set accept_loss.",
            lacking,
        )


def _build_fork(
    original: StreamHandle, plan: RecoveryPlan, target: LiveDirectory, outputs: Mapping[str, str], still_mine: StillMine
) -> ForkedState:
    query_id = str(uuid.uuid4())
    if plan.snapshot is not None:
        restore_into(original, snapshot_location(plan.snapshot), target, new_query_id=query_id, marked=True)
        batch_id, source = int(plan.to_batch or 0), describe_snapshot(plan.snapshot)
        logs = _logs_of_snapshot(original, snapshot_location(plan.snapshot))
    else:
        live = LiveDirectory(plan.directory or original.catalog.streams.get(original.stream_id).live_directory or "")
        at_batch = plan.to_batch if isinstance(plan, Rewind) else None
        batch_id = clone(live, target, at_batch=at_batch, marked=True).batch_id
        give_query_id(target, query_id)
        source = f"its live directory at batch {batch_id}"
        logs = {folder: own_past(folder, batch_id) for folder in _folders_written(original)}
    give_outputs(logs, outputs, batch_id, still_mine)
    pending = Forked(
        of_stream_id=original.stream_id,
        batch_id=batch_id,
        parent_outputs=tuple(logs),
        outputs=tuple(outputs.values()),
        snapshot_id=plan.snapshot.snapshot_id if plan.snapshot is not None else None,
    )
    return ForkedState(target.url, query_id, source, pending)


def give_outputs(
    logs: Mapping[str, Sequence[SinkEntry]],
    outputs: Mapping[str, str],
    batch_id: int,
    still_mine: StillMine,
    *,
    may_link: bool = True,
) -> None:
    """Copy rows of other folders up to a batch, with `may_link` by hard links on one disk; may be repeated."""
    chosen: list[tuple[str, str]] = []
    for old, new in outputs.items():
        path = next((path for path in logs if same_folder(path, old)), None)
        if path is None:
            raise SharedSinkError(
                f"No file sink of the original writes to {old}; its file sinks write to: {', '.join(logs) or 'none'}. "
                "Name one of these folders."
            )
        chosen.append((path, new))
    refuse_copies(logs, chosen, batch_id)
    for old, new in chosen:
        fork_output(old, new, batch_id, logs[old], still_mine=still_mine, may_link=may_link)


def _logs_of_snapshot(stream: StreamHandle, location: str) -> dict[str, list[SinkEntry]]:
    logs = logs_in_snapshot(stream.store, location)
    # The fork may not write to the original's current folders either.
    return logs | {path: [] for path in _folders_written(stream) if path not in logs}


def _folders_written(stream: StreamHandle) -> list[str]:
    sinks = sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))
    return [sink.folder for sink in sinks if isinstance(sink, FileSink)]


# Ids derived from deployment, stream and directory identify the remains of an interrupted import.
_QUERY_IDS = uuid.UUID("6f0c3f0e-6a0b-4e0b-9d43-8f1f6a3f9c21")


@dataclass(frozen=True)
class _MovedSink:
    """A sink of the snapshot; `new` replaces the place `old` in its name, if that has one."""

    name: str
    old: str | None
    new: str


def import_snapshot(
    stream: StreamHandle,
    location: str,
    *,
    outputs: Mapping[str, str],
    origin: str,
    with_rows: bool = False,
    replace_state: bool = False,
    progress: Progress | None = None,
) -> Fork:
    """Import a snapshot of another deployment into a stream, whose next start from `latest` continues there.

    An interrupted import can be repeated. `outputs` maps each sink (a file sink by its folder) to a folder, table or
    topic; the first start is refused if its query writes elsewhere.
    """
    snapshot = foreign_snapshot(stream, location)
    logs = logs_in_snapshot(stream.store, snapshot_location(snapshot))
    sinks = _moved_sinks(snapshot, outputs)
    _refuse_taken(stream, snapshot, sinks, logs if with_rows else {})
    folders = {path: sink.new for path in logs for sink in sinks if sink.name == path} if with_rows else {}

    def build(target: LiveDirectory, still_mine: StillMine) -> ForkedState:
        query_id = _query_id_in(stream, target)
        place = snapshot_location(snapshot)
        restore_into(stream, place, target, new_query_id=query_id, marked=True, progress=progress)
        batch_id = snapshot.batch_id or 0
        give_outputs(logs, folders, batch_id, still_mine, may_link=False)
        pending = Forked(
            of_stream_id=snapshot.stream_id,
            batch_id=batch_id,
            parent_outputs=tuple(logs),
            outputs=tuple(folders.values()),
            imported_from=snapshot.location,
            mapped=tuple(sink.new for sink in sinks),
        )
        source = f"{describe_snapshot(snapshot)} ({snapshot.location})"
        return ForkedState(target.url, query_id, source, pending)

    return assign_state(
        stream,
        build,
        verb="import",
        origin=origin,
        outputs={sink.name: sink.new for sink in sinks},
        replace_state=replace_state,
        plan=snapshot.plan,
        # Before the folder is claimed: the original may use it unmarked.
        check=lambda: _refuse_anothers_place(stream),
        of_deployment=str(snapshot.properties.get(DEPLOYMENT, "unknown")),
    )


def _moved_sinks(snapshot: SnapshotRecord, outputs: Mapping[str, str]) -> list[_MovedSink]:
    named = _sinks_of(snapshot)
    mapped = {old.strip(): new.strip() for old, new in outputs.items()}
    known = named or {old: sink_of(old).place or old for old in mapped}
    listed = ", ".join(known) or "none; name the place that its query writes to"
    moved = []
    for name, old in known.items():
        matches = [key for key in mapped if key == name or (old is not None and same_folder(key, old))]
        if not matches or not mapped[matches[0]]:
            raise SharedSinkError(
                f"{snapshot.location} is not imported, nothing was changed: its sink {name} is not mapped. Map it in "
                f"outputs to the place where the imported stream writes instead. Sinks of the snapshot: {listed}."
            )
        moved.append(_MovedSink(name, old, mapped.pop(matches[0])))
    if mapped or not moved:
        what = f"{', '.join(mapped)} is not one of its sinks" if mapped else "it names no sink, and outputs names none"
        raise SharedSinkError(
            f"{snapshot.location} is not imported, nothing was changed: {what}. Sinks of the snapshot: {listed}."
        )
    return moved


def _sinks_of(snapshot: SnapshotRecord) -> dict[str, str | None]:
    captured, others = captured_sinks(snapshot.properties), other_sinks(snapshot.properties)
    if captured is None or ("other_sinks" in snapshot.properties and others is None):
        raise SnapshotCorruptError(
            f"{snapshot.location} does not record which sinks its query wrote to, so the imported stream might write "
            "to the same ones. Import another snapshot."
        )
    folders: dict[str, str | None] = {sink.place or sink.name: sink.place for sink in captured}
    # A table known by its name alone has no other place.
    return folders | {sink.name: sink.place if sink.place != sink.name else None for sink in others or ()}


def _refuse_taken(
    stream: StreamHandle, snapshot: SnapshotRecord, sinks: Sequence[_MovedSink], logs: Mapping[str, Sequence[SinkEntry]]
) -> None:
    originals = [sink.old or sink.name for sink in sinks]
    others = list(_places_of_others(stream))
    for before, sink in enumerate(sinks):
        why = _why_taken(sink, snapshot, originals, others, sinks[:before])
        unexpected = unexpected_file(sink.new, originals[before], logs.get(sink.name, ())) if _is_folder(sink) else None
        if why is None and unexpected is not None:
            why = f"{unexpected} already exists there"
        if why is not None:
            raise SharedSinkError(
                f"{snapshot.location} is not imported, nothing was changed: {sink.name} is mapped to {sink.new}, but "
                f"{why}. Name an empty folder, or a table or topic that nothing else writes to."
            )


def _why_taken(
    sink: _MovedSink,
    snapshot: SnapshotRecord,
    originals: Sequence[str],
    others: Sequence[str],
    before: Sequence[_MovedSink],
) -> str | None:
    for original in originals:
        if _meet(sink, original):
            return f"it is, or overlaps, {original}, where the original writes"
    if _is_folder(sink) and folders_overlap(sink.new, snapshot_location(snapshot)):
        return "it overlaps the snapshot"
    for other in before:
        if _meet(sink, other.new):
            return f"{other.name} is mapped to it as well"
    if any(_meet(sink, place) for place in others):
        return "another stream of this catalog writes there, or will"
    return None


def _is_folder(sink: _MovedSink) -> bool:
    return sink.name == sink.old or is_location(sink.new) or sink.new.startswith("file:")


def _meet(sink: _MovedSink, place: str) -> bool:
    return folders_overlap(sink.new, place) if _is_folder(sink) else same_folder(sink.new, place)


def _places_of_others(stream: StreamHandle) -> Iterator[str]:
    for sink in stream.catalog.executions.sinks_of_others(stream.stream_id):
        yield sink_of(sink).place or sink
    for other in stream.catalog.streams.all():
        pending = other.pending_restore
        if other.stream_id != stream.stream_id and isinstance(pending, Forked):
            yield from (*(pending.mapped or ()), *pending.outputs)


def _refuse_anothers_place(stream: StreamHandle) -> None:
    if stream.catalog.streams.get(stream.stream_id).live_generation > 0 or stream.catalog.snapshots.completed(
        stream.stream_id
    ):
        return
    # Directories of interrupted imports, recognized by query id, do not count.
    directories = [
        built.live.url
        for built in stream.live_directories()
        if not built.is_unfinished
        and built.live.positions().commit is not None
        and live_query_id(built.live) != _query_id_in(stream, built.live)
    ]
    found = [*directories, *stream.store.checkpoints()]
    if found:
        raise LiveDirectoryError(
            f"Nothing was imported into stream {stream.stream_id!r}: this catalog has no execution of it, but its "
            f"folders contain {', '.join(found[:8])}. The deployment that the snapshot comes from may be using them. "
            "Give this deployment its own checkpoint storage and its own folder of live directories, or import into "
            "a stream with another id."
        )


def _query_id_in(stream: StreamHandle, live: LiveDirectory) -> str:
    name = live.url.rstrip("/").rsplit("/", 1)[-1]
    return str(uuid.uuid5(_QUERY_IDS, f"{stream.catalog.deployment_id}/{stream.stream_id}/{name}"))
