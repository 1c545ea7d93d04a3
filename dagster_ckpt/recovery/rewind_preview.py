"""Previews a start, and keeps the current state before a rewind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import LeaseRecord, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import (
    CkptError,
    InputGoneError,
    LeaseLostError,
    RestoreError,
    RowsAtRiskError,
    SharedSinkError,
    SinkRollbackError,
    StorageAccessError,
)
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.recovery.plan import (
    Clone,
    FinishRestore,
    RecoveryFacts,
    RecoveryPlan,
    Restore,
    RestoreAndReplay,
    Resume,
    Rewind,
    StartEmpty,
)
from dagster_ckpt.recovery.sink_survey import Survey, forecast_sinks, survey_sinks
from dagster_ckpt.recovery.source_inputs import InputStatus, SourceInput, reasons, source_inputs
from dagster_ckpt.recovery.source_mapping import source_changes
from dagster_ckpt.recovery.undone_reads import ReaderOfStream
from dagster_ckpt.sinks.batch_in_flight import forecast_in_flight
from dagster_ckpt.sinks.registry import sink_of, sinks_of
from dagster_ckpt.sinks.sink import Replay, Sink, SinkEffect, SinkForecast, distinct
from dagster_ckpt.sinks.sink_ownership import Verdict
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, SinkEntry, logs_of_sinks
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, OFFSETS, LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.spark.query.sources import Distance, SourceDistance, distance
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import query_ids_of, sinks_of_snapshot, sinks_written, with_moved_logs
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream, write_notes
from dagster_ckpt.stream.snapshotting import savepoint_of_stopped_stream
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_EFFECTS = {
    InputStatus.GONE: SinkEffect.LOSE,
    InputStatus.REPEATED: SinkEffect.DUPLICATE,
    InputStatus.UNKNOWN: SinkEffect.UNKNOWN,
}


@dataclass(frozen=True)
class RowCount:
    rows: int | None
    is_exact: bool

    def __str__(self) -> str:
        if self.rows is None:
            return "unknown"
        return f"{self.rows:,}" if self.is_exact else f"at least {self.rows:,}"


@dataclass(frozen=True)
class RewindPreview:
    """What a start would undo and process again.

    Attributes:
        sources: What is read again, by source, if the offsets show it.
        left: Later snapshots, newest first, of the former timeline.
        undone_since_ms: The earliest time at which an undone batch may have been written, in ms since the epoch.
    """

    plan: RecoveryPlan
    rows: RowCount
    sources: tuple[SourceDistance, ...]
    span_ms: int | None
    left: tuple[SnapshotRecord, ...]
    sinks: tuple[SinkForecast, ...]
    undone_since_ms: int | None = None
    safety_savepoint: str | None = None
    undone_edits: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    inputs: tuple[SourceInput, ...] = ()
    source_changes: tuple[str, ...] = ()
    readers: tuple[ReaderOfStream, ...] = ()
    survey: Survey | None = field(default=None, repr=False)

    @property
    def gone(self) -> str:
        return reasons(self.inputs, InputStatus.GONE)

    @property
    def repeated(self) -> str:
        return reasons(self.inputs, InputStatus.REPEATED)

    @property
    def batches(self) -> int:
        return self.plan.rewound_batches

    @property
    def undoes(self) -> bool:
        return bool(self.batches or self.left)

    @property
    def losing(self) -> tuple[SinkForecast, ...]:
        return tuple(sink for sink in self.sinks if sink.effect is SinkEffect.LOSE)

    @property
    def downstream(self) -> str:
        if not self.undoes:
            return "No committed batch is undone."
        snapshots = f", with {len(self.left)} snapshots reported since" if self.left else ""
        return (
            f"Consumers that read the output of batches {(self.plan.to_batch or 0) + 1} to "
            f"{self.plan.from_batch}{snapshots} have read rows that are written again, and must re-read them."
        )

    def messages(self) -> list[str]:
        lines = [self.plan.reason]
        if self.batches:
            span = "unknown" if self.span_ms is None else f"{self.span_ms / 1000:,.1f} s"
            lines.append(
                f"{self.batches} committed {'batch is' if self.batches == 1 else 'batches are'} processed again (from "
                f"batch {self.plan.from_batch} back to {self.plan.to_batch}), rows: {self.rows}, time: {span}"
            )
        lines += self.source_changes
        lines += [f"this undoes an edit of the state: {edit}" for edit in self.undone_edits]
        lines += self.state
        lines += [each.reason for each in self.inputs if each.reason]
        lines += [self.safety_savepoint] if self.safety_savepoint is not None else []
        lines += [f"sink {sink.sink}: {sink.effect}. {sink.reason} {sink.advice}".rstrip() for sink in self.sinks]
        lines += [reader.message() for reader in self.readers]
        return lines


def preview_rewind(
    stream: StreamHandle,
    facts: RecoveryFacts,
    plan: RecoveryPlan,
    output: NamedOutput | None = None,
    session: SparkSession | None = None,
    *,
    is_running: bool = False,
) -> RewindPreview:
    """Determine what a planned start would undo and process again, even while the query runs.

    If it undoes nothing, only sinks with an uncommitted batch, or which the query must not write to, are listed. A
    running query finishes its batch in flight before it stops. `session` gives access to the sources' files.
    """
    survey = survey_sinks(stream, plan, output)
    inputs = source_inputs(stream, facts, plan, session)
    if isinstance(plan, Resume | Clone | FinishRestore):
        in_flight = () if is_running else _sinks_in_flight(stream, facts, plan, survey)
        going_on = (*forecast_sinks(stream, survey, output), *in_flight)
        return RewindPreview(plan, RowCount(0, is_exact=True), (), 0, (), going_on, inputs=inputs, survey=survey)
    to_batch = BEFORE_THE_FIRST_BATCH if plan.to_batch is None else plan.to_batch
    live = LiveDirectory(facts.stream.live_directory) if facts.stream.live_directory else None
    snapshot_files = _snapshot_files(stream, plan)
    apart = _distance(live, plan, snapshot_files)
    rolled_back = survey.of(Verdict.ROLL_BACK)
    entries = _log_entries(stream, plan, snapshot_files, rolled_back)
    replay = Replay(
        to_batch=to_batch,
        query_id=_query_id(plan, live),
        keeps_query_id=_keeps_query_id(plan),
        in_flight=_in_flight(plan, to_batch),
        log_entries=entries,
        query_ids=query_ids_of(stream),
        roll_back_tables=stream.options.roll_back_tables,
    )
    judged = forecast_sinks(stream, survey, output, replay)
    left = [snapshot for snapshot in facts.snapshots if (snapshot.batch_id or 0) > to_batch]
    affected = distinct([*_sinks(stream, plan), *rolled_back])
    sinks = (*judged, *(sink.forecast(replay) for sink in affected if not _is_judged(sink, judged)))
    return RewindPreview(
        plan=plan,
        rows=_rows(stream, facts, plan, to_batch, apart),
        sources=apart.sources if apart else (),
        span_ms=apart.span_ms if apart and apart.span_ms is not None else plan.rewound_ms,
        left=tuple(left),
        sinks=tuple(_with_inputs(each, inputs) for each in sinks),
        undone_since_ms=_undone_since_ms(facts, plan, apart),
        safety_savepoint=describe_safety_savepoint(facts, plan),
        undone_edits=undone_edits(stream, facts, plan),
        inputs=inputs,
        source_changes=source_changes(stream, plan),
        survey=survey,
    )


def _with_inputs(forecast: SinkForecast, inputs: Sequence[SourceInput]) -> SinkForecast:
    """Promise each row once only if the sources still have it."""
    if forecast.effect is not SinkEffect.EXACT:
        return forecast
    for status, effect in _EFFECTS.items():
        found = reasons(inputs, status)
        if found:
            return replace(forecast, effect=effect, reason=found)
    return forecast


def undone_edits(stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan) -> tuple[str, ...]:
    if not facts.stream.state_edits or isinstance(plan, Rewind | FinishRestore):
        return ()
    kept: Sequence[str] = ()
    if plan.snapshot is not None:
        kept = replace(plan.snapshot, properties=dict(_properties(stream, plan.snapshot))).state_edits
    listed = stream.catalog.snapshots.of_stream(stream.stream_id)
    known = {str(each.edit.get("id")): each for each in listed if each.edit}
    return tuple(_described(edit, known.get(edit)) for edit in facts.stream.state_edits if edit not in kept)


def _described(edit: str, savepoint: SnapshotRecord | None) -> str:
    if savepoint is None:
        return f"edit {edit}, whose savepoint the catalog does not list"
    return f"{describe_snapshot(savepoint)} ({savepoint.edit.get('reason')}, by {savepoint.edit.get('by')})"


# A start with an unreachable sink is refused, and tried again.
_KEEPS_EACH_ROW = frozenset(
    {SinkEffect.EXACT, SinkEffect.SKIP, SinkEffect.UNTOUCHED, SinkEffect.STARTS, SinkEffect.UNREACHABLE}
)


def why_kept(facts: RecoveryFacts, plan: RecoveryPlan, ahead: RewindPreview) -> str | None:
    """Return why the stream keeps rows that were undone upstream: None if going back loses and repeats no others."""
    if not facts.undone.went_back or not isinstance(plan, Restore | Rewind):
        return None
    against = [f"sink {each.sink}: {each.reason}" for each in ahead.sinks if each.effect not in _KEEPS_EACH_ROW]
    return ahead.gone or ahead.repeated or next(iter(against), None)


def keeping(facts: RecoveryFacts, why: str) -> RecoveryFacts:
    return replace(facts, undone=facts.undone.kept(why))


def _is_judged(sink: Sink, judged: Sequence[SinkForecast]) -> bool:
    return any(sink.is_same(sink_of(each.sink)) for each in judged)


def refuse_loss(stream: StreamHandle, preview: RewindPreview, *, accept_loss: bool) -> None:
    """Refuse a start that could lose or repeat rows, unless accepted.

    Acceptance does not help if a sink must not be written to, does not answer, or cannot be rolled back.
    """
    start = f"Stream {stream.stream_id!r} is not started ({preview.plan.reason}), nothing was changed"

    def sinks(effect: SinkEffect) -> str:
        return " ".join(
            f"{sink.sink}: {sink.reason} {sink.advice}".rstrip() for sink in preview.sinks if sink.effect is effect
        )

    if refused := sinks(SinkEffect.REFUSED):
        raise SharedSinkError(f"{start}. {refused}")
    if unreachable := sinks(SinkEffect.UNREACHABLE):
        raise StorageAccessError(f"{start}: {unreachable}")
    if irreversible := sinks(SinkEffect.IRREVERSIBLE):
        raise SinkRollbackError(f"{start}: {irreversible}")
    if accept_loss:
        return
    if shared := sinks(SinkEffect.SHARED):
        raise SharedSinkError(f"{start}. {shared}")
    if preview.gone:
        raise InputGoneError(
            f"{start}: its sources no longer have what it would read again. {preview.gone} Put these files back, with "
            "their modification times and no others, or start from a newer snapshot, after which they are not read. To "
            "continue without their rows, start with accept_loss.",
            preview.gone,
        )
    if preview.repeated:
        raise RowsAtRiskError(
            f"{start}: rows would be read twice. {preview.repeated} Remove these files from the folder, or "
            "restore their old modification times. To read them twice, start with accept_loss."
        )
    if losing := sinks(SinkEffect.LOSE):
        raise RowsAtRiskError(
            f"{start}: rows could be lost. {losing} Follow the advice for each sink, or start with accept_loss to "
            "accept the loss."
        )


def _sinks(stream: StreamHandle, plan: RecoveryPlan) -> list[Sink]:
    then = sinks_of_snapshot(stream, plan.snapshot) if plan.snapshot is not None else ()
    return distinct(sinks_of([*then, *sinks_written(stream)]))


def _sinks_in_flight(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, survey: Survey
) -> tuple[SinkForecast, ...]:
    live = facts.stream.live_directory
    if live is None or not isinstance(plan, Resume | Clone):
        return ()
    allowed = stream.options.roll_back_tables
    return tuple(forecast_in_flight(LiveDirectory(live), survey.to_settle, roll_back_tables=allowed))


def _properties(stream: StreamHandle, snapshot: SnapshotRecord) -> Mapping[str, object]:
    return snapshot.properties or stream.store.manifest(snapshot_location(snapshot)).header.properties


def _snapshot_files(stream: StreamHandle, plan: RecoveryPlan) -> dict[str, bytes]:
    if plan.snapshot is None:
        return {}
    planned = f"{OFFSETS}/{plan.snapshot.batch_id}"
    return read_files(
        stream.store,
        snapshot_location(plan.snapshot),
        lambda path: path == planned or path.startswith(f"{SINKS_FOLDER}/"),
    )


def _log_entries(
    stream: StreamHandle, plan: RecoveryPlan, files: Mapping[str, bytes], rolled_back: Sequence[Sink]
) -> dict[str, Sequence[SinkEntry]] | None:
    if plan.snapshot is None:
        return None
    logs = logs_of_sinks(_properties(stream, plan.snapshot), files)
    return with_moved_logs(logs, [*sinks_of(sinks_written(stream)), *rolled_back])


def _distance(live: LiveDirectory | None, plan: RecoveryPlan, files: Mapping[str, bytes]) -> Distance | None:
    if live is None or plan.from_batch is None or plan.to_batch is None or plan.from_batch < plan.to_batch:
        return None
    return distance(live, files.get(f"{OFFSETS}/{plan.to_batch}"), plan.from_batch, plan.to_batch)


def _undone_since_ms(facts: RecoveryFacts, plan: RecoveryPlan, apart: Distance | None) -> int | None:
    if plan.to_batch is None:
        return facts.stream.created_at_ms
    if apart is not None and apart.earlier_at_ms:
        return apart.earlier_at_ms
    return (plan.snapshot.created_at_ms or None) if plan.snapshot is not None else None


def _keeps_query_id(plan: RecoveryPlan) -> bool:
    return not (isinstance(plan, StartEmpty) or (isinstance(plan, Restore | Rewind) and plan.new_query_id))


def _query_id(plan: RecoveryPlan, live: LiveDirectory | None) -> str | None:
    if isinstance(plan, RestoreAndReplay):
        return plan.query_id
    if plan.snapshot is not None:
        return plan.snapshot.query_id
    return live_query_id(live) if live is not None else None


def _in_flight(plan: RecoveryPlan, to_batch: int) -> int | None:
    match plan:
        case RestoreAndReplay():
            return plan.in_flight
        case Rewind(source_offsets=None, sources=None):
            return to_batch + 1
        case Restore(source_offsets=None, sources=None):
            carried = plan.snapshot.properties.get("in_flight_batch")
            return carried if isinstance(carried, int) else None
        case _:
            return None


def _rows(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, to_batch: int, apart: Distance | None
) -> RowCount:
    if not plan.rewound_batches and plan.to_batch is not None:
        return RowCount(0, is_exact=True)
    if apart is not None and apart.sources and all(source.rows is not None for source in apart.sources):
        return RowCount(sum(source.rows or 0 for source in apart.sources), is_exact=True)
    # Subsumed snapshots, too: the catalog keeps their figures.
    taken = [
        snapshot
        for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id)
        if snapshot.batch_id is not None and snapshot.rows is not None and snapshot.timeline == facts.stream.timeline
    ]
    taken.sort(key=lambda snapshot: snapshot.number or 0)
    # A snapshot counts the rows since the previous one.
    counted = [
        later.rows or 0
        for earlier, later in pairwise(taken)
        if (earlier.batch_id or 0) >= to_batch and (later.batch_id or 0) <= (plan.from_batch or 0)
    ]
    if not counted:
        return RowCount(None, is_exact=False)
    ends = {snapshot.batch_id for snapshot in taken}
    return RowCount(sum(counted), is_exact=plan.from_batch in ends and to_batch in ends)


LABEL = "before-rewind-"


def leaves_something_behind(plan: RecoveryPlan, start_from: StartFrom) -> bool:
    if not isinstance(plan, Restore | Rewind):
        return False
    # Positions of former sources are lost with the directory.
    goes_back = plan.rewound_batches > 0 and start_from.point is not StartPoint.LATEST
    return goes_back or plan.sources is not None


def describe_safety_savepoint(facts: RecoveryFacts, plan: RecoveryPlan, *, migrates: bool = False) -> str | None:
    if not (migrates or leaves_something_behind(plan, facts.start_from)):
        return None
    if facts.start_from.no_safety_savepoint:
        return f"no safety savepoint is taken: state and output after batch {plan.to_batch} can be lost permanently"
    kept = f"before that, a savepoint {LABEL}<n> of batch {facts.live_batch} is taken, so that you can return to it"
    return kept + _unedited(facts, plan)


def _unedited(facts: RecoveryFacts, plan: RecoveryPlan) -> str:
    if plan.snapshot is None or set(plan.snapshot.state_edits) <= set(facts.stream.state_edits):
        return ""
    return (
        f"; it contains the state from before the edit of {describe_snapshot(plan.snapshot)}: delete it if that must "
        "not stay, or start with no_safety_savepoint"
    )


def take_safety_savepoint(
    stream: StreamHandle,
    facts: RecoveryFacts,
    plan: RecoveryPlan,
    start_from: StartFrom,
    lease: LeaseRecord,
    *,
    migrates: bool = False,
) -> str | None:
    """Before a rewind or migration, take a savepoint or tag the newest snapshot; return a message if so."""
    if start_from.no_safety_savepoint or not (migrates or leaves_something_behind(plan, start_from)):
        return None
    label = f"{LABEL}{stream.catalog.streams.get(stream.stream_id).next_number}"
    why = "the live directory is not intact"
    if facts.live is not None and facts.live.status is LiveStatus.GOOD:
        try:
            kept = savepoint_of_stopped_stream(stream, label=label, trigger=SnapshotTrigger.REWIND, lease=lease)
        except LeaseLostError:
            raise
        except CkptError as error:
            why = str(error)
        else:
            what = "change" if migrates else "rewind"
            took = f"took the savepoint {label} at batch {kept.batch_id}: start from it to undo the {what}"
            return took + _unedited(facts, plan)
    newest = next((snapshot for snapshot in facts.snapshots if (snapshot.batch_id or 0) > (plan.to_batch or 0)), None)
    if newest is None:
        if facts.live is None or facts.live.status is not LiveStatus.GOOD:
            return None
        raise RestoreError(
            f"Stream {stream.stream_id!r} is not started ({plan.reason}), nothing was changed: no savepoint of its "
            f"current position could be taken, and it has no snapshot newer than batch {plan.to_batch}: {why} Repair "
            "that, or start with no_safety_savepoint; the rewind then cannot be undone."
        )
    return _tag(stream, newest, label, why, lease) + _unedited(facts, plan)


def _tag(stream: StreamHandle, snapshot: SnapshotRecord, label: str, why: str, lease: LeaseRecord) -> str:
    if not is_owned_by_stream(snapshot):
        return f"{describe_snapshot(snapshot)} stays, so that you can return to it ({why})"
    stream.catalog.holds.tag(snapshot.snapshot_id, label=label, holder="the rewind after it", lease=lease)
    write_notes(stream, snapshot.snapshot_id)
    return f"tagged {describe_snapshot(snapshot)} as {label}, so that you can return to it until it is released ({why})"
