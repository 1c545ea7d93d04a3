"""Compares the code of a stream with its state, without a start, and with its batches.

The functions that the start itself calls judge the state, so the verdict is that of the start. Batches are replayed
without output, each from the state that the stream had before it, so that one difference is not reported for every
later batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.client.debugging import BatchDebug
from dagster_ckpt.client.preflight import MOST_ROWS, TRIAL_TIMEOUT_S, ahead_of
from dagster_ckpt.errors import (
    CkptError,
    InputGoneError,
    LiveDirectoryError,
    RecoveryExhaustedError,
    RequestFailedError,
    SnapshotNotFoundError,
    StorageAccessError,
    StreamNotFoundError,
    UnsupportedSparkError,
)
from dagster_ckpt.policies.upgrade import UnexpectedRows
from dagster_ckpt.recovery.compatibility_report import (
    Action,
    CompatibilityReport,
    Part,
    Step,
    operator_steps,
    source_steps,
)
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, StartEmpty
from dagster_ckpt.recovery.query_plan_check import check_state, old_plan, plan_change
from dagster_ckpt.recovery.rewind_preview import refuse_loss
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.recovery.source_change import judge_sources
from dagster_ckpt.recovery.source_check import refuse_gone_records
from dagster_ckpt.recovery.source_mapping import plan_of_start, source_changes
from dagster_ckpt.recovery.undone_reads import with_undone_reads
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.description import is_described_query, session_of
from dagster_ckpt.spark.query.output import named_output
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.sources import source_identities
from dagster_ckpt.state.diff import differences, paired
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint
from dagster_ckpt.values.durations import rounded_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


OUTPUT = "output"
_SHOWN = 3
# A replay is slower: it shares the machine with the old code, and its caches are cold.
_SLOWER, _TOLERATED_MS = 2, 5_000


class _DiffersError(Exception): ...


def verify_batches(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    count: int,
    *,
    unexpected: UnexpectedRows | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None],
) -> None:
    """Compare the newest `count` batches with the loaded code's, and record the result like that of a preflight.

    What cannot be compared, such as output of a sink that does not record batches, is only reported.
    """
    live = LiveDirectory(stream.catalog.streams.get(stream.stream_id).live_directory or "")
    newest = live.positions().commit
    batches = range(max(newest - count + 1, 0), newest + 1) if newest is not None else range(0)
    comparison = _Comparison(stream, describe, live, unexpected, report)
    found: list[str] = []
    differs: str | None = None
    pace: list[Pace] = []
    for batch_id in batches:
        if interrupted():
            raise RequestFailedError(f"The comparison for the start of stream {stream.stream_id!r} was interrupted.")
        try:
            results = ", ".join(comparison.of(batch_id, pace))
        except _DiffersError as difference:
            differs = f"batch {batch_id}: {difference}"
            break
        found.append(f"batch {batch_id}: {results}")
        report(found[-1])
    differs = differs or slower_than_input(pace)
    reason = differs or "; ".join(found) or "there is no batch to compare yet"
    compared = PreflightRecord(
        stream.code_version, differs is None, reason, max(batches, default=None), stream.catalog.now_ms()
    )
    stream.catalog.desired_states.note_preflight(stream.stream_id, compared)
    if differs is not None:
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not started, nothing was changed: the loaded code does something else. "
            f"{differs}. If this is intended, return only what must not differ from unexpected_rows, or start the "
            "stream without verify_batches."
        )


@dataclass(frozen=True)
class Pace:
    """How long a batch took in the replay, and how long after its predecessor the stream committed it."""

    batch_id: int
    took_ms: int
    every_ms: int

    @property
    def is_slow(self) -> bool:
        return self.took_ms > _SLOWER * self.every_ms + _TOLERATED_MS


def committed_every_ms(stream: StreamHandle, live: LiveDirectory, batch_id: int) -> int | None:
    """Return the time between the commits of a batch and its predecessor, by the storage's clock.

    None if one is purged, or older than the execution: a restore dates all commits at its own time.
    """
    running = stream.catalog.executions.latest(stream.stream_id)
    try:
        before, at = (live.folder.status(f"{COMMITS}/{each}").modified_at_ms for each in (batch_id - 1, batch_id))
    except FileNotFoundError:
        return None
    if at is None or before is None or running is None or before < running.started_at_ms:
        return None
    return at - before


def slower_than_input(pace: Sequence[Pace]) -> str | None:
    if not pace or not all(each.is_slow for each in pace):
        return None
    best = min(pace, key=lambda each: each.took_ms - each.every_ms)
    return (
        f"it is slower than the input: batch {best.batch_id} takes {rounded_duration(best.took_ms)}, and the stream "
        f"committed it {rounded_duration(best.every_ms)} after the batch before it"
    )


@dataclass(frozen=True)
class _Comparison:
    stream: StreamHandle
    describe: Callable[[], DataStreamWriter]
    live: LiveDirectory
    unexpected: UnexpectedRows | None
    report: Callable[[str], None]

    def of(self, batch_id: int, pace: list[Pace]) -> Iterator[str]:
        with BatchDebug(
            self.stream,
            batch_id,
            lambda _session: self.describe(),
            spark=session_of(self.describe()),
            timeout_s=TRIAL_TIMEOUT_S,
            report=self.report,
        ) as batch:
            if batch.error is not None:
                raise _DiffersError(f"it fails: {batch.error}")
            every_ms = committed_every_ms(self.stream, self.live, batch_id)
            if batch.took_ms is not None and every_ms is not None:
                pace.append(Pace(batch_id, batch.took_ms, every_ms))
            if batch.sink.rows is None:
                yield f"its output is not compared, because {batch.sink.says}"
            else:
                self._refuse(OUTPUT, batch.difference)
                yield f"the same {batch.output.count():,} rows of output"
            yield from self._state_of(batch)

    def _state_of(self, batch: BatchDebug) -> Iterator[str]:
        after = batch.reader_after
        newest = self.stream.catalog.snapshots.newest_checkpoint(self.stream.stream_id)
        rows = (newest.state_rows if newest is not None else None) or 0
        if after is None:
            if batch.without_state is not None:
                yield f"its state is not compared: {batch.without_state}"
            return
        if rows > MOST_ROWS:
            yield f"its state is not compared: {rows:,} rows are more than {MOST_ROWS:,}"
            return
        try:
            with self._state_of_the_stream(batch) as before:
                for state in differences(before, after, paired(before.states, after.states)):
                    if state.note is not None and not state.is_empty:
                        raise _DiffersError(f"{state.name}: {state.note}")
                    self._refuse(str(state.name), state.rows)
        except (LiveDirectoryError, UnsupportedSparkError) as error:
            yield f"its state is not compared: {error}"
        else:
            yield "the same state"

    @contextmanager
    def _state_of_the_stream(self, batch: BatchDebug) -> Iterator[StateReader]:
        with scratch_directory(self.stream) as copy:
            clone(self.live, copy, at_batch=batch.batch_id, is_scratch=True)
            with readers_of(batch.spark, copy, [batch.batch_id]) as readers:
                yield readers[batch.batch_id]

    def _refuse(self, what: str, rows: DataFrame) -> None:
        left = rows if self.unexpected is None else self.unexpected(what, rows)
        shown = left.limit(_SHOWN).toJSON().collect()
        if shown:
            raise _DiffersError(f"{what} differs in {left.count():,} rows, such as {'; '.join(shown)}")


def check_code(
    stream: StreamHandle, describe: Callable[[], DataStreamWriter], start_from: StartFrom
) -> CompatibilityReport:
    try:
        stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        return CompatibilityReport(stream.stream_id, "nothing: the stream was never started", ())
    return _CodeCheck(stream, describe, start_from).run()


@dataclass
class _CodeCheck:
    stream: StreamHandle
    describe: Callable[[], DataStreamWriter]
    start_from: StartFrom
    notes: list[str] = field(default_factory=list)

    def run(self) -> CompatibilityReport:
        stream = self.stream
        try:
            facts, plan = self._planned()
        except StorageAccessError as error:
            facts, plan = None, self._newest(error)
        except (RecoveryExhaustedError, SnapshotNotFoundError):
            raise
        except CkptError as error:
            return self._report("its state", [Step(Part.STATE, "start", Action.REFUSE, str(error))])
        if isinstance(plan, StartEmpty):
            return self._report("nothing: the start begins with empty state", [])
        with holding(stream.catalog, [plan.snapshot], "check of code"):
            steps = [step for judge in self._judges(facts, plan) for step in judge]
        where = describe_snapshot(plan.snapshot) if plan.snapshot is not None else f"batch {plan.to_batch}"
        return self._report(where, steps)

    def _report(self, compared_with: str, steps: list[Step]) -> CompatibilityReport:
        return CompatibilityReport(self.stream.stream_id, compared_with, steps, tuple(dict.fromkeys(self.notes)))

    def _planned(self) -> tuple[RecoveryFacts, RecoveryPlan]:
        start_from = self.start_from
        if start_from.point is StartPoint.EMPTY:
            start_from = replace(start_from, discard_state=True)
        facts = recovery_facts(
            self.stream,
            start_from,
            predecessor_ended=True,
            remembers=False,
            output=named_output(self.describe()),
        )
        facts = with_undone_reads(self.stream.catalog, facts)
        return facts, plan_of_start(self.stream, facts, self.describe)

    def _newest(self, error: StorageAccessError) -> RecoveryPlan:
        newest = next(iter(self.stream.catalog.snapshots.restorable(self.stream.stream_id)), None)
        if newest is None:
            raise error
        self.notes.append(f"compared with the catalog only: {error}")
        return Restore(reason="the newest snapshot in the catalog", snapshot=newest)

    def _judges(self, facts: RecoveryFacts | None, plan: RecoveryPlan) -> Iterator[list[Step]]:
        yield self._judged(Part.SOURCE, "all", lambda: self._sources(plan))
        yield self._judged(Part.OPERATOR, "all", lambda: self._operators(plan))
        yield self._judged(Part.STATE, "layout", lambda: self._state(plan))
        is_elsewhere = facts is None or (
            isinstance(plan, Restore)
            and self.start_from.point is StartPoint.LATEST
            and facts.live is not None
            and facts.live.status is LiveStatus.MISSING
        )
        yield self._judged(Part.SINK, "output", lambda: self._sinks(None if is_elsewhere else facts, plan))

    def _judged(self, part: Part, name: str, judge: Callable[[], list[Step]]) -> list[Step]:
        try:
            return judge()
        except StorageAccessError as error:
            # Nothing was compared; a reason rules out the verdict SAME.
            return [Step(part, name, Action.KEEP, f"not compared: {error}")]
        except CkptError as error:
            return [Step(part, name, Action.REFUSE, str(error))]

    def _sources(self, plan: RecoveryPlan) -> list[Step]:
        judgement = judge_sources(self.stream, plan, source_identities(self.describe()))
        steps = list(source_steps(judgement)) if judgement is not None else []
        self.notes.extend(source_changes(self.stream, plan))
        if any(step.action is not Action.KEEP for step in steps) and (judgement is None or judgement.mapping is None):
            # Without a mapping, the needed offsets are unknown.
            return steps
        try:
            gone = refuse_gone_records(self.stream, plan, self.describe, accept_loss=self.start_from.accept_loss)
        except InputGoneError as error:
            return [*steps, Step(Part.SOURCE, "input", Action.REFUSE, str(error))]
        self.notes.extend(f"accepted without these records: {each}" for each in gone)
        return steps

    def _operators(self, plan: RecoveryPlan) -> list[Step]:
        record = self.stream.catalog.streams.get(self.stream.stream_id)
        new = plan_of_writer(self.describe())
        change = plan_change(record, plan, new)
        steps = operator_steps(old_plan(record, plan), new, self.start_from, self.stream.state_migrations)
        is_accepted = change is not None and (change.is_accepted or self.start_from.accept_plan_change)
        if change is None or not is_accepted or not change.fits:
            return list(steps)
        return [
            replace(step, action=Action.KEEP, reason=f"accepted: {step.reason}", options={})
            if step.action is not Action.KEEP
            else step
            for step in steps
        ]

    def _state(self, plan: RecoveryPlan) -> list[Step]:
        checked = check_state(self.stream, plan, self.start_from)
        if checked.rewrite is not None:
            asked = self.start_from.state_partitions
            options: dict[str, str | bool | int] = {"state_partitions": asked} if asked is not None else {}
            return [Step(Part.STATE, "layout", Action.MIGRATE, "; ".join(checked.messages), options)]
        self.notes.extend(checked.messages)
        return [Step(Part.STATE, "layout", Action.KEEP)]

    def _sinks(self, facts: RecoveryFacts | None, plan: RecoveryPlan) -> list[Step]:
        stream, output = self.stream, named_output(self.describe())
        refuse_shared_folder(stream, output)
        if facts is not None:
            writer = self.describe()
            session = session_of(writer) if is_described_query(writer) else None
            ahead = ahead_of(stream, facts, plan, output, session)
            refuse_loss(stream, ahead, accept_loss=self.start_from.accept_loss)
        else:
            self.notes.append("the live directory cannot be reached from here: what sinks have is not compared")
        sink, before = described_sink(output), sinks_of(sinks_written(stream))
        name = sink.name if sink is not None else "output"
        is_other = sink is not None and bool(before) and not sink.is_among(before)
        was = ", ".join(each.name for each in before)
        return [Step(Part.SINK, name, Action.KEEP, f"the query wrote to {was}" if is_other else "")]
