"""Surveys the sinks of a start: facts for `sink_ownership.py`, and its verdicts for users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dagster_ckpt.catalog.pending_restore import Emptied, Forked, ToBatch, ToSnapshot
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.errors import CkptError, SharedSinkError, StorageAccessError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.recovery.plan import (
    Clone,
    FinishRestore,
    RecoveryPlan,
    Restore,
    RestoreAndReplay,
    Resume,
    Rewind,
    StartEmpty,
)
from dagster_ckpt.sinks.file_sink import FileSink, copied_files, unexpected_file
from dagster_ckpt.sinks.file_sink_log import Past, files_of, past_of, read_log_at_hand
from dagster_ckpt.sinks.file_sink_repair import LogTrouble, damaged_log, log_trouble
from dagster_ckpt.sinks.registry import described_sink, logs_in_snapshot, other_sinks, sinks_in, sinks_of
from dagster_ckpt.sinks.sink import FoundSink, Replay, Sink, SinkEffect, SinkForecast, distinct, newest_batch
from dagster_ckpt.sinks.sink_ownership import Judgement, NamedSinks, Refusal, SinkFacts, Start, Verdict, judge
from dagster_ckpt.sinks.table import TableSink
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import (
    KnownSink,
    identities_of_sinks,
    is_moved_output,
    known_in,
    known_of_executions,
    query_ids_of,
    sinks_written,
    with_moved_logs,
)
from dagster_ckpt.stream.liveness import is_held


@dataclass(frozen=True)
class Aim:
    """Where a start brings the query, as sinks see it.

    Attributes:
        batch_id: The batch it continues after; -1 is before the first.
        originals: Folders of the stream that a fork comes from.
        is_unfinished: The start was judged before, and interrupted while sinks were rolled back.
        noted_batch: The batch of the snapshot, if not `batch_id`.
        mapped: As in `Forked`.
    """

    start: Start
    batch_id: int
    location: str | None = None
    snapshot_id: str | None = None
    sinks: Sequence[str] = ()
    originals: Sequence[str] = ()
    is_unfinished: bool = False
    noted_batch: int | None = None
    mapped: Sequence[str] | None = None
    fork_of: str | None = None

    def is_mapped(self, place: str) -> bool:
        return self.mapped is None or any(same_folder(place, mapped) for mapped in self.mapped)


@dataclass(frozen=True)
class Survey:
    """What a start does with sinks; those of `to_settle` are checked for the batch in flight."""

    aim: Aim
    judgements: tuple[Judgement, ...]
    to_settle: tuple[str, ...] = ()

    def allows(self, sink: Sink) -> bool:
        return any(each.verdict is Verdict.ROLL_BACK and each.sink.is_same(sink) for each in self.judgements)

    def of(self, verdict: Verdict) -> list[Sink]:
        return [each.sink for each in self.judgements if each.verdict is verdict]

    def forecasts(self) -> list[SinkForecast]:
        return [found for each in self.judgements if (found := _forecast(each, self.aim)) is not None]

    def refuse(self, stream_id: str) -> None:
        _refuse(
            self.judgements,
            f"Stream {stream_id!r} is not started, nothing was changed: it would write to a folder where it could lose "
            "rows, its own or another's.",
            _ADVICE,
        )


def _refuse(judgements: Sequence[Judgement], what: str, advice: str) -> None:
    refused = [each for each in judgements if each.verdict is Verdict.REFUSE]
    if refused:
        reasons = " ".join(f"{each.sink.place}: {each.refusal}." for each in refused)
        advised = dict.fromkeys(_advice(each, advice) for each in refused)
        raise SharedSinkError(f"{what} {reasons} {' '.join(advised)}")


def _advice(judgement: Judgement, otherwise: str) -> str:
    if judgement.refusal is Refusal.ANOTHER_STREAMS and judgement.owner is not None:
        otherwise = f"{_to_continue(judgement.owner)} {otherwise}"
    return _ADVICE_FOR.get(judgement.refusal, otherwise)


def _to_continue(other: str) -> str:
    return (
        f"To continue stream {other!r} under another name, stop it (dagster-ckpt stop {other}) and set "
        f"stream_id={other!r} in the new definition."
    )


_REBUILD = (
    "`dagster-ckpt rebuild-output` for the stream writes the log again from the snapshots that captured it; or put "
    "it back from a backup."
)
_ADVICE_FOR: dict[Refusal | None, str] = {
    Refusal.LOG_IS_GONE: _REBUILD,
    Refusal.LOG_HAS_GAP: _REBUILD,
    Refusal.FORMER_OUTPUT: "Let the query write to the folder where it wrote last, or to a new, empty one; readers "
    "then read each of its folders.",
    Refusal.FILES_ELSEWHERE: "`dagster-ckpt relocate-output` for the folder lets its log list the files that are "
    "there.",
}
_ADVICE = "Let the query write to a new, empty folder, or to the one that its state belongs to."


def survey_sinks(stream: StreamHandle, plan: RecoveryPlan, output: NamedOutput | None = None) -> Survey:
    return _survey(stream, _aim(stream, plan), output)


def refuse_to_clean(stream: StreamHandle) -> None:
    """Refuse to delete files in a folder that no longer belongs to the stream."""
    record = stream.catalog.streams.get(stream.stream_id)
    commit = LiveDirectory(record.live_directory).positions().commit if record.live_directory is not None else None
    newest = next(iter(stream.catalog.snapshots.restorable(stream.stream_id)), None)
    aim = Aim(Start.CLEAN, BEFORE_THE_FIRST_BATCH if commit is None else commit)
    if newest is not None:
        aim = replace(aim, location=newest.location, snapshot_id=newest.snapshot_id, noted_batch=newest.batch_id)
    _refuse(
        _survey(stream, aim, None).judgements,
        f"Nothing is deleted for stream {stream.stream_id!r}: which files of a folder are unneeded is not certain.",
        "Delete unneeded files there by hand.",
    )


def refuse_copies(logs: Mapping[str, Sequence[SinkEntry]], outputs: Sequence[tuple[str, str]], batch_id: int) -> None:
    judgements = []
    originals = [FileSink.at(path) for path in logs]
    for old, new in outputs:
        sink = FileSink.at(new)
        facts = SinkFacts(Start.FORKED, batch_id, ours=False, noted=True, originals=sink.is_among(originals))
        if not facts.originals:
            at_hand = read_log_at_hand(new, batch_id)
            anothers = unexpected_file(new, old, logs[old]) if at_hand.last_batch is None else None
            if anothers is not None:
                raise SharedSinkError(
                    f"No rows are copied to {new}: {anothers} exists there, and Spark ignores every file that the log "
                    "of a file sink does not list. Name an empty folder."
                )
            past = past_of(at_hand, copied_files(old, new, logs[old]))
            facts = replace(facts, last=at_hand.last_batch, past=past)
        judgements.append(judge(sink, facts))
    _refuse(judgements, "No rows are copied, nothing was changed.", "Name an empty folder.")


def _survey(stream: StreamHandle, aim: Aim, output: NamedOutput | None) -> Survey:
    logs: Mapping[str, Sequence[SinkEntry]] = (
        logs_in_snapshot(stream.store, aim.location) if aim.location is not None else {}
    )
    reported = stream.catalog.executions.last_sinks(stream.stream_id)
    last_sinks = sinks_of(list(dict.fromkeys([*aim.sinks, *sinks_written(stream), *reported])))
    ours = [sink for sink in [*last_sinks, *_noted_tables(stream, aim)] if sink.rolls_back]
    described = described_sink(output)
    if aim.start is Start.TO_SNAPSHOT:
        logs = with_moved_logs(logs, [described] if described is not None else ours)
    noted = [(FileSink.at(path), entries) for path, entries in logs.items()]
    others = {
        other: sinks_of(names) for other, names in stream.catalog.executions.sinks_by_other(stream.stream_id).items()
    }
    named = NamedSinks.of(output, last_sinks, [sink for sink, _ in noted] if aim.start is not Start.CLEAN else [])
    if aim.start in (Start.TO_SNAPSHOT, Start.TO_BATCH, Start.EMPTY):
        ours += [sink for sink in named.sinks if not sink.is_among(ours) and _was_written(stream, sink)]
    left_behind = aim.is_unfinished or aim.snapshot_id not in {
        snapshot.snapshot_id for snapshot in stream.catalog.snapshots.restorable(stream.stream_id)
    }
    lasts = [(sink, newest_batch(sink, None)) for sink in named.sinks if isinstance(sink, FileSink)]
    planned = _planned(stream) if aim.start in (Start.RESUME, Start.CLEAN) else None
    judgements = []
    former = sinks_of(_ever_written(stream))
    originals = [FileSink.at(path) for path in aim.originals]
    for sink in distinct([*(sink for sink, _ in noted), *named.sinks, *ours, *originals]):
        entries = next((entries for each, entries in noted if each.is_same(sink)), None)
        owner = next((other for other, theirs in others.items() if sink.is_among(theirs)), None)
        facts = SinkFacts(
            aim.start,
            aim.batch_id,
            named=named.names(sink),
            ours=sink.is_among(ours),
            former=sink.is_among(former) and not sink.is_among(ours),
            others_known=bool(last_sinks),
            noted=entries is not None,
            originals=sink.is_among(originals),
            anothers=owner is not None,
            mapped=aim.is_mapped(sink.place or sink.name),
            last=next((last for each, last in lasts if each.is_same(sink)), None),
            planned=planned,
            left_behind=left_behind,
            has_log=isinstance(sink, FileSink),
            knows_queries=sink.knows_queries,
        )
        facts = replace(facts, trouble=_trouble(sink, facts))
        if _is_moved(stream, sink, facts, ours):
            facts = replace(facts, ours=True)
        judged = judge(sink, _compared(sink, facts, entries, aim))
        judgements.append(judged if aim.start is Start.CLEAN else replace(judged, owner=owner))
    if output is not None and output.place is not None and not named.sinks and not aim.is_mapped(output.place):
        judgements.append(Judgement(Sink(output.place, output.place), Verdict.REFUSE, Refusal.NOT_MAPPED))
    to_settle = [sink.name for sink in named.sinks]
    if not (named.is_seen and named.sinks):
        # The query may write to a table that its description does not name.
        to_settle += [
            sink.name for sink in last_sinks if not isinstance(sink, FileSink) and not sink.is_among(named.sinks)
        ]
    return Survey(aim, tuple(judgements), tuple(to_settle))


def _ever_written(stream: StreamHandle) -> list[str]:
    reported = [(each.progress or {}).get("sinks") for each in stream.catalog.executions.of_stream(stream.stream_id)]
    return list(dict.fromkeys(str(sink) for sinks in reported if isinstance(sinks, list) for sink in sinks))


def _was_written(stream: StreamHandle, sink: Sink) -> bool:
    """Whether the stream wrote to a table that it last wrote to under another name, or before another table."""
    executions = stream.catalog.executions
    identities = {
        known for each in executions.of_stream(stream.stream_id) for known in identities_of_sinks(each).values()
    }
    # A stream that continues the state of another one may have had its query id.
    theirs = {(each.progress or {}).get("query_id") for each in executions.newest_by_other(stream.stream_id).values()}
    own = [each for each in query_ids_of(stream) if sink.knows_queries and each not in theirs]
    if not isinstance(sink, TableSink) or not (identities or own):
        return False
    try:
        found = sink.look()
        if found is not None and found.identity in identities:
            return True
        return any(newest_batch(sink, each) is not None for each in own)
    except CkptError:
        # Its forecast says why it cannot be read.
        return True


def _is_moved(stream: StreamHandle, sink: Sink, facts: SinkFacts, ours: Sequence[Sink]) -> bool:
    is_asked = facts.start is Start.RESUME and facts.named and not facts.ours and not facts.anothers
    if not is_asked or facts.last is None or not isinstance(sink, FileSink):
        return False
    return is_moved_output(stream, sink, ours)


def _noted_tables(stream: StreamHandle, aim: Aim) -> list[Sink]:
    if aim.start is not Start.TO_SNAPSHOT or aim.location is None:
        return []
    return other_sinks(stream.store.manifest(aim.location).header.properties) or []


def _compared(sink: Sink, facts: SinkFacts, entries: Sequence[SinkEntry] | None, aim: Aim) -> SinkFacts:
    if not isinstance(sink, FileSink) or not facts.named or (entries is None and facts.ours):
        return facts
    if _is_written_back(sink, facts, entries):
        return replace(facts, past=Past.SAME, trouble=None)
    at_hand = read_log_at_hand(sink.folder, aim.batch_id if aim.noted_batch is None else aim.noted_batch)
    past = past_of(at_hand, files_of(entries, sink.folder)) if entries is not None else facts.past
    return replace(facts, blank=at_hand.is_blank, past=past)


def _is_written_back(sink: FileSink, facts: SinkFacts, entries: Sequence[SinkEntry] | None) -> bool:
    if facts.start is not Start.TO_SNAPSHOT or not facts.ours or facts.anothers or not entries:
        return False
    return damaged_log(sink.folder, entries) is not None


_TROUBLES = {LogTrouble.GAP: Refusal.LOG_HAS_GAP, LogTrouble.ELSEWHERE: Refusal.FILES_ELSEWHERE}


def _trouble(sink: Sink, facts: SinkFacts) -> Refusal | None:
    if not isinstance(sink, FileSink) or not facts.named or facts.last is None:
        return None
    found = log_trouble(sink.folder)
    if found is LogTrouble.GAP and facts.start is Start.TO_BATCH:
        # A roll-back that the power cut off left newer entries, which this one removes.
        found = log_trouble(sink.folder, facts.batch_id)
    return _TROUBLES[found] if found is not None else None


def refuse_shared_folder(stream: StreamHandle, output: NamedOutput | None) -> None:
    sink = described_sink(output)
    if sink is None or sink.knows_queries:
        return
    for other in stream.catalog.executions.of_other_streams(stream.stream_id):
        if not sink.is_among(sinks_of(other.sinks)):
            continue
        if is_held(stream.catalog.leases.current(other.stream_id)):
            raise SharedSinkError(
                f"Stream {stream.stream_id!r} is not started: it would write to {sink.place}, where stream "
                f"{other.stream_id!r} writes (run {other.run_id}). Each would silently skip batches of the other. Give "
                "it its own folder."
            )


def _aim(stream: StreamHandle, plan: RecoveryPlan) -> Aim:
    to_batch = BEFORE_THE_FIRST_BATCH if plan.to_batch is None else plan.to_batch
    match plan:
        case Restore(snapshot=snapshot):
            return Aim(Start.TO_SNAPSHOT, to_batch, snapshot.location, snapshot.snapshot_id)
        case Rewind() | RestoreAndReplay():
            return Aim(Start.TO_BATCH, to_batch)
        case StartEmpty():
            return Aim(Start.EMPTY, BEFORE_THE_FIRST_BATCH)
        case Resume() | Clone():
            return Aim(Start.RESUME, to_batch)
        case FinishRestore():
            return _aim_of_unfinished(stream.catalog.streams.get(stream.stream_id))


def _aim_of_unfinished(record: StreamRecord) -> Aim:
    match record.pending_restore:
        case Forked() as forked:
            commit = LiveDirectory(record.live_directory).positions().commit if record.live_directory else None
            return Aim(
                Start.FORKED,
                max(forked.batch_id, commit if commit is not None else forked.batch_id),
                sinks=[FileSink.at(path).name for path in forked.outputs],
                originals=forked.parent_outputs,
                mapped=forked.mapped,
                fork_of=forked.of_stream_id if forked.imported_from is None else None,
            )
        case ToSnapshot(location=location, batch_id=batch_id):
            to_batch = BEFORE_THE_FIRST_BATCH if batch_id is None else batch_id
            return Aim(Start.TO_SNAPSHOT, to_batch, location, is_unfinished=True)
        case ToBatch(batch_id=batch_id, sinks=sinks):
            return Aim(Start.TO_BATCH, batch_id, sinks=sinks, is_unfinished=True)
        case Emptied(sinks=sinks):
            return Aim(Start.EMPTY, BEFORE_THE_FIRST_BATCH, sinks=sinks, is_unfinished=True)
        case _:
            return Aim(Start.EMPTY, BEFORE_THE_FIRST_BATCH, is_unfinished=True)


def _planned(stream: StreamHandle) -> int | None:
    live = stream.catalog.streams.get(stream.stream_id).live_directory
    return LiveDirectory(live).positions().offset if live is not None else None


def _forecast(judgement: Judgement, aim: Aim) -> SinkForecast | None:
    sink = judgement.sink.name
    if judgement.verdict is Verdict.LEAVE and aim.start is not Start.RESUME:
        return SinkForecast(sink, SinkEffect.UNTOUCHED, "The query about to start does not write there.")
    if judgement.verdict is Verdict.BEGIN:
        return SinkForecast(
            sink,
            SinkEffect.STARTS,
            f"The query has not written there before: the sink has batches after {aim.batch_id}.",
        )
    if judgement.verdict is Verdict.REFUSE:
        return SinkForecast(sink, SinkEffect.REFUSED, f"Not started: {judgement.refusal}.", _advice(judgement, _ADVICE))
    return None


def missing_batches(
    found: FoundSink, known: KnownSink, batch_id: int, sink: Sink, brought_back: int | None = None
) -> SinkForecast | None:
    """Decide whether a sink lacks batches that the query does not write again. Pure.

    Such a table or topic was created again, or restored from an older copy. The start's roll-back brings back undone
    batches up to `brought_back`.
    """
    expected = known.expected(batch_id)
    if expected is None or expected < 0:
        return None
    what = f"The {sink.noun} {sink.place or sink.name}"
    kept = found.batch if found.is_certain and found.batch is not None else -1
    first = kept + 1
    which = (
        f"batch {first} of this stream is" if first == expected else f"batches {first} to {expected} of this stream are"
    )
    lost = f"{which} not in it" if first <= expected else ""
    # A snapshot does not help if the table is another one.
    older = ""
    if found.identity is None:
        reason = f"{what} no longer exists; it had batches up to {expected} of this stream."
    elif known.identity is not None and known.identity != found.identity:
        reason = f"{what} has another id: was {known.identity}, is {found.identity}. It was dropped and created again"
        reason += f": {lost}." if lost else "."
    elif found.is_certain and lost and (brought_back is None or brought_back < expected):
        reason = f"{what}: {lost}. It was created again, restored, or replaced by an older copy."
        older = f"from a snapshot of batch {kept} or before, or " if kept >= 0 else ""
    else:
        return None
    advice = (
        f"Put the {sink.noun} back, such as from a backup, and start again. Or start {older}with start_from=empty and "
        "discard_state: the query then writes all that its sources still have. With accept_loss, it continues in the "
        f"{sink.noun} as it is, without these batches."
    )
    return SinkForecast(sink.name, SinkEffect.LOSE, reason, advice)


def forecast_sinks(
    stream: StreamHandle, survey: Survey, output: NamedOutput | None, replay: Replay | None = None
) -> list[SinkForecast]:
    """Forecast sinks that the query must not write to, or that are neither continued nor rolled back."""
    return [
        *survey.forecasts(),
        *_forecast_shared(stream, survey, output),
        *_forecast_missing_batches(stream, survey, output, replay),
    ]


def _forecast_missing_batches(
    stream: StreamHandle, survey: Survey, output: NamedOutput | None, replay: Replay | None
) -> tuple[SinkForecast, ...]:
    """Forecast tables and topics that lack batches from before the start: of `output`, or those written last."""
    aim = survey.aim
    # A restore that is being finished was judged when it began. A fork has its own tables.
    if aim.batch_id < 0 or aim.is_unfinished or aim.start not in (Start.RESUME, Start.TO_SNAPSHOT, Start.TO_BATCH):
        return ()
    executions = stream.catalog.executions.of_stream(stream.stream_id)
    properties: Mapping[str, Any] | None = None
    if aim.start is Start.TO_SNAPSHOT and aim.location is not None:
        properties = stream.store.manifest(aim.location).header.properties
    described = described_sink(output)
    if properties is not None:
        sinks = sinks_in(properties)
    elif described is not None:
        sinks = [described]
    else:
        sinks = sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))
    forecasts = []
    for sink in sinks:
        known = known_of_executions(executions, sink)
        then = known_in(properties, sink) if properties is not None else None
        if then is not None:
            known = then if then.identity is not None or known is None else replace(then, identity=known.identity)
        is_written = described is None or described.is_same(sink)
        if known is None or not is_written:
            continue
        forecast = _missing(stream, sink, known, aim.batch_id, output=output, replay=replay)
        if forecast is not None:
            forecasts.append(forecast)
    return tuple(forecasts)


def _forecast_shared(stream: StreamHandle, survey: Survey, output: NamedOutput | None) -> tuple[SinkForecast, ...]:
    """Forecast a sink that another stream wrote to last, if this one starts from the beginning or is its fork.

    `sink_ownership.py` judges folders of files. Imports and adopted queries do not start from the beginning.
    """
    aim, sink = survey.aim, described_sink(output)
    starts_empty = aim.start is Start.EMPTY or (aim.start is Start.RESUME and aim.batch_id < 0)
    if sink is None or sink.place is None or isinstance(sink, FileSink) or aim.is_unfinished:
        return ()
    executions = stream.catalog.executions
    if aim.fork_of is not None and sink.is_among(sinks_of(executions.last_sinks(aim.fork_of))):
        return (
            SinkForecast(
                sink.name,
                SinkEffect.SHARED,
                f"Stream {aim.fork_of!r}, of which this one is a fork, wrote to {sink.place} last: rows after batch "
                f"{aim.batch_id} would be there twice.",
                "Let the fork write elsewhere. If both streams should write there, or the original never runs again "
                "and has written no later batch, start this one once with accept_loss.",
            ),
        )
    if not starts_empty or sink.is_among(sinks_of(executions.last_sinks(stream.stream_id))):
        return ()
    others = executions.sinks_by_other(stream.stream_id)
    other = next((each for each, names in others.items() if sink.is_among(sinks_of(names))), None)
    if other is None:
        return ()
    return (
        SinkForecast(
            sink.name,
            SinkEffect.SHARED,
            f"Stream {other!r} of this catalog wrote to {sink.place} last, and this start reads its sources from the "
            "beginning: rows that both read would be there twice.",
            f"{_to_continue(other)} To start from the beginning, write elsewhere. If both streams "
            "should write there, start this one once with accept_loss.",
        ),
    )


def _missing(
    stream: StreamHandle,
    sink: Sink,
    known: KnownSink,
    batch_id: int,
    *,
    output: NamedOutput | None,
    replay: Replay | None,
) -> SinkForecast | None:
    try:
        found = sink.look(query_ids_of(stream))
        brought_back = sink.batch_after(replay) if replay is not None and replay.roll_back_tables else None
    except StorageAccessError as error:
        # In a preview, leave it out: the start asks again.
        is_start = output is not None and known.identity is not None
        return SinkForecast(sink.name, SinkEffect.UNREACHABLE, str(error)) if is_start else None
    return missing_batches(found, known, batch_id, sink, brought_back) if found is not None else None
