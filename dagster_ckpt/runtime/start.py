"""Start a query.

If a start fails, its point is examined. Damage is noted in the catalog, and the next point is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.catalog.records import SOURCE_IDENTITIES, RequestRecord, StartCause
from dagster_ckpt.errors import (
    CatalogError,
    CkptError,
    InputGoneError,
    LeaseLostError,
    LiveDirectoryError,
    RestoreError,
    RowsAtRiskError,
    StartStoppedError,
    StateRewriteError,
    StorageAccessError,
)
from dagster_ckpt.recovery.adopt import take_over
from dagster_ckpt.recovery.checkpoint_retention import settle_dead_attempts
from dagster_ckpt.recovery.examination import Examiner, refuse_broken_sinks
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import StateRewrite
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
from dagster_ckpt.recovery.planning import with_newer_point
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.recovery.query_plan_check import check_plan, check_state
from dagster_ckpt.recovery.replay import LostBatches, lost_batches, replay
from dagster_ckpt.recovery.rewind_preview import (
    RewindPreview,
    keeping,
    preview_rewind,
    refuse_loss,
    take_safety_savepoint,
    why_kept,
)
from dagster_ckpt.recovery.sink_survey import Survey, refuse_shared_folder
from dagster_ckpt.recovery.source_change import refuse_changed_sources
from dagster_ckpt.recovery.source_check import (
    continue_behind_roll_backs,
    refuse_gone_records,
    refuse_unrestored_upstream,
)
from dagster_ckpt.recovery.source_mapping import plan_of_start
from dagster_ckpt.recovery.state_migration import PlannedMigration, refuse_two_rewrites, state_migration
from dagster_ckpt.recovery.undone_reads import downstream_readers, reads_at_start, with_undone_reads
from dagster_ckpt.recovery.undone_topics import continue_behind_topics
from dagster_ckpt.runtime.run_request import QueryEnd, RunRequest, StartWatch
from dagster_ckpt.runtime.start_failures import StartFailures
from dagster_ckpt.sinks.kafka.sink import TransactionalKafkaSink
from dagster_ckpt.sinks.kafka.undone import TopicEnd
from dagster_ckpt.sinks.kafka.writer import StreamOwner, with_transactions
from dagster_ckpt.sinks.registry import described_sink
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.query.description import described_field, is_described_query, session_of
from dagster_ckpt.spark.query.output import KafkaPlace, NamedOutput, named_output
from dagster_ckpt.spark.query.plan import PlanDescription, plan_of_writer
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, source_identities
from dagster_ckpt.state.rewriter import rewriter_for
from dagster_ckpt.stream.edges import READS, Read, reads_as_record
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import SINK_IDS, query_ids_of, seen_sinks, topic_end_in
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.ownership import check_places, fence_predecessor, refuse_a_fenced_directory, refuse_unclaimed
from dagster_ckpt.stream.snapshots import advance_checkpoint_id, holding
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.tracing import span

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


_T = TypeVar("_T")
# Effects on sinks that leave no doubt about what a roll-back does.
_ROLLED_BACK = frozenset({SinkEffect.EXACT, SinkEffect.SKIP, SinkEffect.UNTOUCHED, SinkEffect.STARTS})
_WAIT_S = 0.25


@dataclass(frozen=True)
class StartedQuery:
    plan: RecoveryPlan
    prepared: PreparedStart
    query: SupervisedQuery
    sources: Sequence[SourceIdentity] | None = None
    reads: Sequence[Read] = ()

    def as_record(self) -> dict[str, object]:
        sources = {SOURCE_IDENTITIES: [each.as_record() for each in self.sources]} if self.sources is not None else {}
        return {**self.plan.as_record(), **sources, READS: reads_as_record(self.reads)}


@dataclass(frozen=True)
class Checked:
    query_plan: PlanDescription | None
    rewrite: StateRewrite | None
    sources: Sequence[SourceIdentity] | None
    lost: LostBatches | None
    survey: Survey | None


class Start:
    def __init__(
        self,
        stream: StreamHandle,
        request: RunRequest,
        acquired: AcquiredLease,
        lease: LeaseKeeper,
        *,
        execution_id: str,
        start_from: StartFrom,
        cause: StartCause,
        predecessor_ended: bool,
        examiner: Examiner,
    ) -> None:
        self._stream = stream
        self._examiner = examiner
        self._failures = StartFailures(stream, request, lease, execution_id, examiner)
        self._request = request
        self._acquired = acquired
        self._lease = lease
        self._execution_id = execution_id
        self._start_from = start_from
        self._cause = cause
        self._predecessor_ended = predecessor_ended
        self._watch = StartWatch(stream.catalog, lease.record, request.interrupted)
        self._replays = request.describe is not None
        self._without_input: Mapping[str, str] = {}
        self._keeps_undone: str | None = None

    @property
    def stopped(self) -> QueryEnd | None:
        return self._watch.end

    @property
    def stopped_by(self) -> RequestRecord | None:
        return self._watch.request

    def run(self) -> StartedQuery:
        with span("start", stream=self._stream.stream_id, cause=self._cause.value):
            return self._run()

    def _run(self) -> StartedQuery:
        stream = self._stream
        check_places(stream, self._start_from, predecessor_ended=self._predecessor_ended)
        if not self._predecessor_ended:
            with span("fence"):
                fence_predecessor(
                    stream, self._acquired, still_mine=self._still_mine, own_jvm_pid=self._request.jvm_pid
                )
        settle_dead_attempts(stream, self._lease.record)
        self._watch()
        if self._cause is StartCause.MANUAL:
            stream.catalog.recoveries.forget(self._lease.record)
        return self._start_at_best_point()

    def examined(self, started: StartedQuery, end: QueryEnd) -> QueryEnd:
        return self._failures.examined(started.prepared.live, end)

    def _still_mine(self) -> None:
        self._watch()
        self._lease.check()

    def _log(self, messages: Iterable[str]) -> None:
        for message in messages:
            log_message(self._stream.stream_id, message)

    def _start_at_best_point(self) -> StartedQuery:
        """After a damaged point try the next one; after one whose input is gone, a newer one."""
        stream = self._stream
        passed: set[str] = set()
        while True:
            facts = self._facts()
            plan = self._plan(facts)
            prepared: PreparedStart | None = None
            try:
                with holding(stream.catalog, [plan.snapshot], f"start of execution {self._execution_id}"):
                    checked = self._check(facts, plan)
                    lost, survey = checked.lost, checked.survey
                    if take_over(
                        stream,
                        self._lease,
                        resumes=isinstance(plan, Resume) and checked.rewrite is None,
                        still_mine=self._still_mine,
                    ):
                        # The query in it may have committed batches until it was fenced.
                        facts = self._facts()
                        plan = self._plan(facts)
                        lost, survey = self._lost_batches(facts, plan), None
                    if lost is not None:
                        plan, survey = self._replayed(facts, lost)
                    prepared = self._prepare(facts, plan, checked, survey)
                    refuse_a_fenced_directory(prepared.live)
                    self._watch()
                    proves = plan.snapshot.snapshot_id if isinstance(plan, Restore) and plan.donor is None else None
                    prepared = replace(prepared, began=prepared.live.positions(), proves=proves)
                    with span("start_query"):
                        query = self._request.start_query(prepared.live)
                    return StartedQuery(plan, prepared, query, checked.sources, reads_at_start(facts, plan))
            except InputGoneError as error:
                newer = with_newer_point(facts, plan, error.gone)
                if newer is None:
                    raise
                self._without_input = newer.without_input
                self._replays = self._request.describe is not None
            except Exception as error:
                # A point that the user named is never replaced by another one.
                if plan.point is None or not self._start_from.chooses_its_point or plan.point in passed:
                    raise
                if self._failures.passes_over(plan, prepared.live if prepared is not None else None, error):
                    passed.add(plan.point)
                elif prepared is None and _is_refused(error) and facts.undone.went_back:
                    self._keeps_undone = str(error)
                else:
                    raise

    @cached_property
    def _writer(self) -> DataStreamWriter:
        assert self._request.describe is not None
        return self._request.describe()

    def _of_query(self, ask: Callable[[DataStreamWriter], _T]) -> _T | None:
        return ask(self._writer) if self._request.describe is not None else None

    @cached_property
    def _output(self) -> NamedOutput | None:
        return self._of_query(named_output)

    @span("plan")
    def _plan(self, facts: RecoveryFacts) -> RecoveryPlan:
        return plan_of_start(self._stream, facts, self._request.describe)

    @span("facts")
    def _facts(self) -> RecoveryFacts:
        facts = recovery_facts(
            self._stream,
            self._start_from,
            predecessor_ended=self._predecessor_ended,
            is_automatic=self._cause is not StartCause.MANUAL,
            output=self._output,
            examiner=self._examiner,
        )
        facts = replace(facts, without_input=self._without_input)
        facts = with_undone_reads(self._stream.catalog, facts, keyed(self._sources) if self._sources else None)
        return facts if self._keeps_undone is None else keeping(facts, self._keeps_undone)

    @span("check")
    def _check(self, facts: RecoveryFacts, plan: RecoveryPlan) -> Checked:
        stream = self._stream
        refuse_unclaimed(stream, plan.snapshot)
        sources = self._unchanged_sources(plan)
        if not self._start_from.accept_loss:
            refuse_unrestored_upstream(stream.catalog, stream.stream_id, sources)
        lost = self._lost_batches(facts, plan)
        ahead = self._preview(facts, plan if lost is None else lost.plan())
        if lost is not None and ahead.gone:
            # Spark would run these batches all the same, and build state that lacks their rows.
            self._log([f"batches after {plan.to_batch} cannot be replayed: {ahead.gone}"])
            self._replays, lost = False, None
            ahead = self._preview(facts, plan)
        if lost is not None and (former := self._former_code(facts, lost)) is not None:
            instead = self._preview(facts, plan)
            if all(sink.effect in _ROLLED_BACK for sink in instead.sinks):
                self._log([f"the sinks go back instead of a replay of lost batches: {former}"])
                self._replays, lost, ahead = False, None, instead
            else:
                self._log([f"lost batches are replayed, and their state may not fit: {former}"])
        if (why := why_kept(facts, plan, ahead)) is not None:
            raise RowsAtRiskError(why)
        self._check_loss(ahead)
        # A fork and an unfinished restore continue where their directory stands.
        stands = (
            Resume(reason=plan.reason, from_batch=facts.live_batch, point=plan.point)
            if isinstance(plan, FinishRestore)
            else plan
        )
        self._check_sources(stands)
        stream.store.check_access()
        advance_checkpoint_id(stream, plan.snapshot, self._lease.record)
        query_plan = self._of_query(plan_of_writer)
        migration = state_migration(
            facts.stream, plan, query_plan, self._start_from, self._request.describe, rules=stream.state_migrations
        )
        rewrite = self._check_state(plan, migration)
        if migration is not None and not self._start_from.accept_loss:
            # With `accept_loss`, input may be gone; the migration itself then checks what it reads.
            migration.check_input(facts.stream, plan)
        if rewrite is not None and lost is not None:
            # Spark would run the lost batches with the state as it was, and the settings as they will be.
            self._replays, lost = False, None
            ahead = self._preview(facts, plan)
            self._check_loss(ahead)
        if migration is None:
            self._check_plan(plan, query_plan)
        refuse_shared_folder(stream, self._output)
        if isinstance(plan, Resume | Clone):
            refuse_broken_sinks(stream, LiveDirectory(facts.stream.live_directory or ""), self._output)
        self._watch()
        return Checked(query_plan, rewrite, sources, lost, ahead.survey)

    @span("prepare")
    def _prepare(
        self, facts: RecoveryFacts, plan: RecoveryPlan, checked: Checked, survey: Survey | None
    ) -> PreparedStart:
        stream = self._stream
        migrates = checked.rewrite is not None and checked.rewrite.migration is not None
        kept = take_safety_savepoint(stream, facts, plan, self._start_from, self._lease.record, migrates=migrates)
        if kept is not None:
            self._log([kept])
        self._report_readers(plan)
        self._watch()
        prepared = prepare(
            stream,
            plan,
            self._lease,
            self._output,
            survey=survey,
            rewrite=checked.rewrite,
            watch=self._watch,
            accept_undone=self._start_from.accept_undone,
            accept_loss=self._accepts_loss(plan),
        )
        if prepared.rewritten is not None:
            self._log([str(prepared.rewritten)])
        self._widen_schemas(prepared.live)
        self._skip_undone_versions(prepared.live)
        self._skip_undone_records(prepared.live, checked.sources)
        self._report_sinks(plan, prepared)
        # The restore may have outlived the lease.
        self._lease.check()
        query_plan = checked.query_plan
        stream.catalog.streams.note_plan(self._lease.record, query_plan.as_record() if query_plan is not None else None)
        self._note_output(prepared.live)
        # Checked again: two streams that start at the same moment see each other's output folder only now.
        refuse_shared_folder(stream, self._output)
        return prepared

    def _widen_schemas(self, live: LiveDirectory) -> None:
        batch_id = live.positions().commit
        if batch_id is None:
            return
        changed = widen_schemas(live.folder, batch_id, self._lease.step)
        if changed:
            self._log([f"{len(changed)} state schemas of Spark 3.5 now allow nulls"])

    def _skip_undone_versions(self, live: LiveDirectory) -> None:
        if not self._of_query(is_described_query):
            return
        self._log(
            continue_behind_roll_backs(
                self._stream.stream_id,
                live,
                self._writer,
                self._lease.step,
                accept_loss=self._start_from.accept_loss,
            )
        )

    def _skip_undone_records(self, live: LiveDirectory, sources: Sequence[SourceIdentity] | None) -> None:
        self._log(
            continue_behind_topics(
                self._stream,
                live,
                sources or (),
                self._lease.step,
                partial(self._run_planned, live),
                accept_loss=self._start_from.accept_loss,
            )
        )

    def _run_planned(self, live: LiveDirectory, batch: int) -> None:
        assert self._request.describe is not None
        self._note_output(live)
        writer = self._request.describe()
        # The stream's query may start with the same writer.
        trigger = described_field(writer._jwrite, "trigger")
        try:
            query = start_stream_query(self._stream, writer.trigger(once=True), live)
        finally:
            writer._jwrite.trigger(trigger)
        try:
            while not query.wait(_WAIT_S):
                self._still_mine()
            failure = query.exception()
        finally:
            query.stop()
        if live.positions().commit != batch:
            raise RestoreError(
                f"Stream {self._stream.stream_id!r} is not started: batch {batch}, which reads what comes before "
                f"undone records, failed. Start it again when that is mended. {failure or ''}"
            )

    def _former_code(self, facts: RecoveryFacts, lost: LostBatches) -> str | None:
        """Why replayed state may not match the sinks' rows of the lost batches: other code wrote them."""
        query_plan = self._of_query(plan_of_writer)
        if not lost.batches or (query_plan is not None and not query_plan.operators):
            return None
        if self._start_from.accept_plan_change:
            return "their rows are of a query with another plan"
        own, directory = self._stream.code_version, facts.stream.live_directory
        after = -1 if lost.restore.snapshot.batch_id is None else lost.restore.snapshot.batch_id
        ran = [
            each.code_version
            for each in self._stream.catalog.executions.of_stream(self._stream.stream_id)
            if each.live_directory == directory and each.newest_batch is not None and each.newest_batch > after
        ]
        others = sorted({version for version in ran if version not in (None, own)}) if own is not None else []
        return f"their rows are of code version {', '.join(map(str, others))}, and this is {own}" if others else None

    def _lost_batches(self, facts: RecoveryFacts, plan: RecoveryPlan) -> LostBatches | None:
        return lost_batches(self._stream, facts, plan, self._output) if self._replays else None

    @span("replay")
    def _replayed(self, facts: RecoveryFacts, lost: LostBatches) -> tuple[RecoveryPlan, Survey | None]:
        """Return the plan after a replay, or one that rolls sinks back, with its survey."""
        stream, describe = self._stream, self._request.describe
        if describe is None:
            return lost.restore, None
        try:
            return replay(stream, lost, self._lease, describe, watch=self._still_mine), None
        except (RestoreError, LiveDirectoryError) as error:
            self._replays = False
            self._log([f"{error} Sinks are rolled back instead, where that is possible"])
            ahead = self._preview(facts, lost.restore)
            self._check_loss(ahead)
            return lost.restore, ahead.survey

    def _preview(self, facts: RecoveryFacts, plan: RecoveryPlan) -> RewindPreview:
        is_described = self._of_query(is_described_query)
        session = session_of(self._writer) if is_described else None
        return preview_rewind(self._stream, facts, plan, self._output, session)

    def _check_loss(self, preview: RewindPreview) -> None:
        self._log(preview.messages())
        refuse_loss(self._stream, preview, accept_loss=self._accepts_loss(preview.plan))

    def _accepts_loss(self, plan: RecoveryPlan) -> bool:
        if self._start_from.accept_loss or not isinstance(plan, StartEmpty | FinishRestore):
            return self._start_from.accept_loss
        pending = self._stream.catalog.streams.get(self._stream.stream_id).pending_restore
        return isinstance(pending, SinkRollBack) and pending.accepts_loss

    @cached_property
    def _sources(self) -> Sequence[SourceIdentity] | None:
        return self._of_query(source_identities)

    def _unchanged_sources(self, plan: RecoveryPlan) -> Sequence[SourceIdentity] | None:
        self._log(refuse_changed_sources(self._stream, plan, self._sources))
        return self._sources

    def _check_sources(self, plan: RecoveryPlan) -> None:
        describe = self._request.describe
        if describe is not None:
            gone = refuse_gone_records(self._stream, plan, describe, accept_loss=self._start_from.accept_loss)
            self._log(f"the start was accepted without these records: {message}" for message in gone)

    def _check_state(self, plan: RecoveryPlan, migration: PlannedMigration | None) -> StateRewrite | None:
        checked = check_state(self._stream, plan, self._start_from)
        self._log([*checked.messages, *(migration.messages() if migration is not None else ())])
        if checked.rewrite is None and migration is None:
            return None
        if migration is not None:
            refuse_two_rewrites(self._stream.stream_id, checked.rewrite)
        session = session_of(self._writer) if self._request.describe is not None else active_session()
        if session is None:
            raise StateRewriteError(
                f"The state of stream {self._stream.stream_id!r} has to be rewritten, but this process has no Spark "
                "session to do it. Start the stream where its query runs."
            )
        # Refuses the start if no Spark can rewrite state.
        rewriter_for(session)
        return StateRewrite(session, checked.rewrite, partial(log_message, self._stream.stream_id), migration)

    def _check_plan(self, recovery: RecoveryPlan, plan: PlanDescription | None) -> None:
        accept = self._start_from.accept_plan_change
        self._log(check_plan(self._stream, recovery, plan, self._lease.record, accept=accept))

    def _report_readers(self, plan: RecoveryPlan) -> None:
        catalog, stream_id = self._stream.catalog, self._stream.stream_id
        if not isinstance(plan, StartEmpty | Restore | Rewind) or not catalog.executions.is_read(stream_id):
            return
        accepted = self._start_from.accept_undone
        # Nothing depends on this message.
        with suppress(CkptError):
            for reader in downstream_readers(catalog, stream_id, plan, accepted):
                if reader.has_read_undone is not False:
                    self._log([reader.message()])

    def _report_sinks(self, plan: RecoveryPlan, prepared: PreparedStart) -> None:
        self._log(f"rolled back the sink {place}" for place in prepared.rolled_back)
        if isinstance(plan, RestoreAndReplay) and not plan.rewound_batches:
            # No sink gets a batch again.
            return
        self._log(
            f"this sink cannot be rolled back and receives the rewound batches again: {sink}"
            for sink in prepared.may_repeat
        )

    def _note_output(self, live: LiveDirectory) -> None:
        """Record the query id now, in case the query is killed before it reports it.

        Without it, its batches in a table would be another writer's, which no roll-back undoes.
        """
        sink = described_sink(self._output)
        noted: dict[str, Any] = {"query_id": live_query_id(live)}
        if sink is not None:
            noted["sinks"] = [sink.name]
            noted[SINK_IDS] = seen_sinks([sink], query_ids_of(self._stream))
        self._stream.catalog.executions.heartbeat(self._lease.record, self._execution_id, noted)


def _is_refused(error: Exception) -> bool:
    """Whether an error refuses the start, and neither stopped it nor is an unavailable storage or catalog."""
    passing = (StorageAccessError, CatalogError, LeaseLostError, StartStoppedError)
    return isinstance(error, CkptError) and not isinstance(error, passing)


def start_stream_query(stream: StreamHandle, writer: DataStreamWriter, live: LiveDirectory) -> SupervisedQuery:
    """Start a query, in transactions if it asks for exactly once into Kafka."""
    catalog, stream_id = stream.catalog, stream.stream_id

    def restored(place: KafkaPlace, first: int) -> TopicEnd | None:
        snapshot_id = catalog.streams.get(stream_id).restored_snapshot_id or ""
        snapshot = catalog.snapshots.by_id([snapshot_id]).get(snapshot_id)
        if snapshot is None or snapshot.batch_id is None or snapshot.batch_id + 1 != first:
            return None
        return topic_end_in(snapshot.properties, TransactionalKafkaSink(str(place), str(place)))

    owner = StreamOwner(
        catalog.deployment_id,
        stream_id,
        partial(catalog.executions.of_stream, stream_id),
        went_back=lambda: bool(catalog.history.begins(stream_id)),
        restored=restored,
    )
    return start_query(with_transactions(writer, owner, live), stream.name, live)
