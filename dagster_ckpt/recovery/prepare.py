"""Carries out a recovery plan: prepares a live directory for Spark and rolls the sinks back to its state.

The order makes a crash harmless: a directory is built under a temporary name and renamed; one transaction switches the
stream to it and records that sinks must be rolled back; that is done, repeatably; the record is cleared.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dagster_ckpt.catalog.pending_restore import Emptied, Forked, PendingRestore, SinkRollBack, ToBatch, ToSnapshot
from dagster_ckpt.catalog.records import OriginKind, StateOrigin, StreamRecord
from dagster_ckpt.errors import RestoreError, SinkRollbackError, SnapshotCorruptError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.recovery.live_directories import Building, StateRewrite, restore_into, snapshot_location
from dagster_ckpt.recovery.plan import Clone, FinishRestore, RecoveryPlan, Restore, RestoreAndReplay, Resume, Rewind
from dagster_ckpt.recovery.sink_survey import Survey, survey_sinks
from dagster_ckpt.recovery.source_check import move_sources
from dagster_ckpt.sinks.batch_in_flight import settle_in_flight
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import begin_log
from dagster_ckpt.sinks.registry import captured_sinks, logs_in_snapshot, sinks_in, sinks_of
from dagster_ckpt.sinks.sink import RollBack, Sink, newest_batch, roll_back
from dagster_ckpt.sinks.sink_ownership import Verdict
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id, state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, LiveDirectory, Positions
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone, give_positions, give_query_id
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.state.rewriting import Rewritten
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import query_ids_of, sinks_of_snapshot, sinks_written, with_moved_logs
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.ownership import claim_live_folder
from dagster_ckpt.values.durations import monotonic_ms
from dagster_ckpt.values.tracing import span


@dataclass(frozen=True)
class PreparedStart:
    """What Spark is started on.

    Attributes:
        may_repeat: Names of sinks that this process cannot roll back.
        began: Positions in the live directory just before the query started.
        proves: Id of the snapshot from whose bytes alone the live directory was restored.
    """

    live: LiveDirectory
    rolled_back: tuple[str, ...] = ()
    may_repeat: tuple[str, ...] = ()
    rewritten: Rewritten | None = None
    began: Positions | None = None
    proves: str | None = None


def prepare(
    stream: StreamHandle,
    plan: RecoveryPlan,
    lease: LeaseKeeper,
    output: NamedOutput | None = None,
    *,
    survey: Survey | None = None,
    rewrite: StateRewrite | None = None,
    watch: Watch = no_op,
    accept_undone: str = "",
    accept_loss: bool = False,
) -> PreparedStart:
    """Create the live directory that the plan requires, and roll back the sinks.

    Only the sinks of `output` are changed, or the known ones if it is None. A `survey` must be current. With `rewrite`,
    the query always continues in a new directory. `watch` is called while files are written and before the switch, and
    may raise.
    """
    sinks = survey if survey is not None else survey_sinks(stream, plan, output)
    sinks.refuse(stream.stream_id)
    record = stream.catalog.streams.get(stream.stream_id)
    preparation = _Preparation(stream, record, lease, sinks, accept_undone, accept_loss)
    if rewrite is None:
        match plan:
            case Resume() if record.live_directory is not None:
                return preparation.resume(LiveDirectory(record.live_directory))
            case FinishRestore() if not preparation.is_fenced:
                return preparation.finish(record)
    claim_live_folder(stream)
    building = Building(stream.new_live_directory(record.live_generation, lease.record.token), rewrite, watch)
    return replace(preparation.build(plan, building), rewritten=building.rewritten)


@dataclass(frozen=True)
class _Preparation:
    stream: StreamHandle
    record: StreamRecord
    lease: LeaseKeeper
    sinks: Survey
    accept_undone: str
    accept_loss: bool

    @property
    def is_fenced(self) -> bool:
        live = self.record.live_directory
        return live is not None and LiveDirectory(live).fenced_at() is not None

    def build(self, plan: RecoveryPlan, building: Building) -> PreparedStart:
        current = self.record.live_directory
        match plan:
            case FinishRestore():
                return self.finish(self._moved(building))
            case Restore():
                return self._restore(plan, building)
            case Rewind() | RestoreAndReplay() if plan.directory or current:
                return self._rewind(plan, plan.directory or current or "", building)
            case Resume() | Clone() if current is not None:
                return self._continue(plan, current, building)
            case _:
                return self._start_empty(building.live)

    def resume(self, live: LiveDirectory) -> PreparedStart:
        live.note_in_use()
        if isinstance(self.record.pending_restore, SinkRollBack):
            # A query has run since: the catalog is older than the directory.
            self.stream.catalog.streams.restore_finished(self.lease.record)
        self._begin_logs()
        return PreparedStart(live, _places_of(self._settle_batch_in_flight(live)))

    def finish(self, record: StreamRecord) -> PreparedStart:
        pending = record.pending_restore
        if record.live_directory is None:
            location = pending.location if isinstance(pending, ToSnapshot) else None
            raise RestoreError(
                f"Stream {self.stream.stream_id!r} has an unfinished restore but no live directory. Start it with "
                f"start_from naming the snapshot ({location}) to restore it again."
            )
        live = LiveDirectory(record.live_directory)
        is_fork = isinstance(pending, Forked)
        if not is_fork:
            # Before sinks are rolled back: until then, a rebuild of the catalog must take the former directory.
            live.note_in_use()
        rolled_back, may_repeat = self._roll_back(pending)
        self._begin_logs()
        if is_fork:
            # The fork may have been killed in its first batch.
            self._settle_batch_in_flight(live)
        else:
            self.stream.catalog.streams.restore_finished(self.lease.record)
        return PreparedStart(live, rolled_back, may_repeat)

    def _continue(self, plan: Resume | Clone, current: str, building: Building) -> PreparedStart:
        started_ms, live = monotonic_ms(), building.live
        if isinstance(plan, Resume):
            # Read in place, as its last writer has ended.
            building.rewrite(LiveDirectory(current))
        else:
            self._clone(current, building)
        building.check_in_flight(self.sinks.to_settle, roll_back_tables=self.stream.options.roll_back_tables)
        self.stream.catalog.streams.switch_live_directory(
            self.lease.record,
            live.url,
            origin=building.origin(StateOrigin.of_directory(current, live.positions().commit, self.record.origin)),
            plan=building.plan,
            duration_ms=monotonic_ms() - started_ms,
        )
        return self.resume(live)

    def _clone(self, current: str, building: Building) -> None:
        # A sink that already has the batch in flight skips it: carry its state.
        carry = not building.rewrites
        building.fill(
            lambda new: clone(LiveDirectory(current), new, carry_state=carry, marked=True, watch=building.watch)
        )

    @span("restore")
    def _restore(self, plan: Restore, building: Building) -> PreparedStart:
        stream, snapshot, live = self.stream, plan.snapshot, building.live
        location, started_ms = snapshot_location(snapshot), monotonic_ms()
        pending = ToSnapshot(
            location=location,
            batch_id=snapshot.batch_id,
            query_id=snapshot.query_id,
            query_ids=tuple(query_ids_of(stream)),
            may_repeat=plan.new_query_id,
            accepts_loss=self.accept_loss,
        )
        is_new = plan.new_query_id or self._is_skipped_under(snapshot.query_id, snapshot.batch_id)
        query_id = str(uuid.uuid4()) if is_new else None

        def fill(new: LiveDirectory) -> None:
            watch = building.watch
            restore_into(stream, location, new, new_query_id=query_id, donor=plan.donor, marked=True, watch=watch)

        building.fill(fill)
        _change_sources(live, plan)
        origin = StateOrigin(
            OriginKind.SNAPSHOT,
            batch_id=snapshot.batch_id,
            snapshot_id=snapshot.snapshot_id,
            location=location,
            snapshot_kind=snapshot.kind,
            snapshot_number=snapshot.number,
            query_id=snapshot.query_id,
            directory=self.record.live_directory,
            sinks=sinks_of_snapshot(stream, snapshot),
        )
        record = stream.catalog.streams.switch_live_directory(
            self.lease.record,
            live.url,
            origin=building.origin(_with_sources(origin, plan)),
            restored_snapshot_id=snapshot.snapshot_id,
            pending_restore=pending,
            claims=plan.claims,
            plan=snapshot.plan if building.plan is None else building.plan,
            state_edits=state_edits(live),
            duration_ms=monotonic_ms() - started_ms,
            accept_undone=self.accept_undone,
        )
        return self.finish(record)

    @span("rewind")
    def _rewind(self, plan: Rewind | RestoreAndReplay, directory: str, building: Building) -> PreparedStart:
        stream, live = self.stream, building.live
        old, batch_id = LiveDirectory(directory), plan.to_batch
        wrote_to = sinks_written(stream)
        # After a replay, the sinks have no batch to undo.
        if not wrote_to and isinstance(plan, Rewind):
            raise SinkRollbackError(
                f"The catalog does not know yet which sinks stream {stream.stream_id!r} writes to, so they cannot be "
                f"rolled back to batch {batch_id}. Start it once with start_from=latest, or go back to a snapshot, "
                "which names them."
            )
        query_id = live_query_id(old)
        is_fork = isinstance(plan, Rewind) and plan.new_query_id
        moves = isinstance(plan, Rewind) and (plan.source_offsets is not None or plan.sources is not None)
        pending = ToBatch(
            batch_id=batch_id,
            sinks=self._to_undo(wrote_to),
            query_id=query_id,
            query_ids=tuple(query_ids_of(stream)),
            may_repeat=is_fork,
            accepts_loss=self.accept_loss,
        )
        # Fail before anything is changed.
        for sink in self._allowed(sinks_of(pending.sinks)):
            sink.check_roll_back(self._point(batch_id, pending))
        started_ms = monotonic_ms()
        others = [sink.name for sink in sinks_of(wrote_to) if not sink.rolls_back]
        # Such a sink may already have the next batch.
        carry = bool(others) and not moves and not building.rewrites
        building.fill(
            lambda new: clone(old, new, at_batch=batch_id, carry_state=carry, marked=True, watch=building.watch)
        )
        if isinstance(plan, Rewind):
            _change_sources(live, plan)
        if is_fork or self._is_skipped_under(query_id, batch_id):
            give_query_id(live, str(uuid.uuid4()))
        building.check_in_flight(others, roll_back_tables=stream.options.roll_back_tables)
        # The new timeline inherits the old one's snapshots up to this batch.
        restorable = stream.catalog.snapshots.restorable(stream.stream_id)
        past = [snapshot for snapshot in restorable if (snapshot.batch_id or 0) <= batch_id]
        record = stream.catalog.streams.switch_live_directory(
            self.lease.record,
            live.url,
            origin=building.origin(_with_sources(self._origin_of_rewound(directory, batch_id), plan)),
            restored_snapshot_id=past[0].snapshot_id if past else None,
            pending_restore=pending,
            plan=self.record.plan_in(plan.directory) if building.plan is None else building.plan,
            duration_ms=monotonic_ms() - started_ms,
            accept_undone=self.accept_undone,
        )
        return self.finish(record)

    def _origin_of_rewound(self, old: str, batch_id: int) -> StateOrigin:
        # If it is created from `old` again, the origin records what `old` came from.
        known = self.record.origin
        is_made_again = known is not None and known.directory == old
        return StateOrigin.of_directory(old, batch_id, known.earlier if known is not None and is_made_again else known)

    def _moved(self, building: Building) -> StreamRecord:
        """Switch an unfinished restore, which is fenced or rewritten, to a new directory."""
        record, live = self.record, building.live
        if record.live_directory is None:
            return record
        old, origin = LiveDirectory(record.live_directory), record.origin
        if old.positions().commit is not None:
            if building.rewrites and not self.is_fenced:
                building.rewrite(old)
            else:
                self._clone(record.live_directory, building)
            if isinstance(record.pending_restore, Forked):
                # It may have been killed in its first batch. A restore rolls its sinks back anyway.
                building.check_in_flight(self.sinks.to_settle, roll_back_tables=self.stream.options.roll_back_tables)
            origin = StateOrigin.of_directory(record.live_directory, live.positions().commit, record.origin)
        return self.stream.catalog.streams.switch_live_directory(
            self.lease.record,
            live.url,
            origin=origin,
            restored_snapshot_id=record.restored_snapshot_id,
            pending_restore=record.pending_restore,
            accept_undone=self._accepted(record),
        )

    def _accepted(self, record: StreamRecord) -> str:
        """Return the reason in `accept_undone` of the unfinished rewind."""
        branches = self.stream.catalog.history.branches(record.stream_id)
        return next((each.accepted or "" for each in branches if each.timeline == record.timeline), "")

    def _start_empty(self, live: LiveDirectory) -> PreparedStart:
        stream = self.stream
        # A successor can fence only what exists, and the query may start late.
        live.folder.make()
        record = stream.catalog.streams.switch_live_directory(
            self.lease.record,
            live.url,
            origin=StateOrigin.empty(self.record.live_directory),
            # Hide what earlier executions wrote, too: a file sink skips batch numbers that it knows.
            pending_restore=Emptied(
                sinks=self._to_undo(sinks_written(stream)),
                query_ids=tuple(query_ids_of(stream)),
                accepts_loss=self.accept_loss,
            ),
            plan={},
            state_edits=(),
            accept_undone=self.accept_undone,
        )
        return self.finish(record)

    def _point(
        self, batch_id: int, pending: SinkRollBack | None, entries: Sequence[SinkEntry] | None = None
    ) -> RollBack:
        undone = pending or SinkRollBack()
        return RollBack(
            batch_id,
            entries,
            undone.query_id,
            undone.query_ids,
            may_repeat=undone.may_repeat,
            accepts_loss=undone.accepts_loss or self.accept_loss,
            roll_back_tables=self.stream.options.roll_back_tables,
        )

    def _is_skipped_under(self, query_id: str | None, batch_id: int | None) -> bool:
        after = BEFORE_THE_FIRST_BATCH if batch_id is None else batch_id
        remembering = [sink for sink in self.sinks.of(Verdict.ROLL_BACK) if sink.remembers_undone]
        newest = (newest_batch(sink, query_id) for sink in remembering)
        return any(batch is not None and batch > after for batch in newest)

    def _to_undo(self, wrote_to: Sequence[str]) -> tuple[str, ...]:
        """Add sinks that the catalog does not list as written last, such as a table under another name."""
        return tuple(sink.name for sink in self._with_rolled_back(sinks_of(wrote_to)))

    def _with_rolled_back(self, sinks: Sequence[Sink]) -> list[Sink]:
        return [*sinks, *(sink for sink in self.sinks.of(Verdict.ROLL_BACK) if not sink.is_among(sinks))]

    def _allowed(self, sinks: Sequence[Sink]) -> list[Sink]:
        return [sink for sink in sinks if sink.rolls_back and self.sinks.allows(sink)]

    def _begin_logs(self) -> None:
        for sink in self.sinks.of(Verdict.BEGIN):
            if isinstance(sink, FileSink):
                begin_log(sink.folder, self.sinks.aim.batch_id, still_mine=self.lease.step)

    def _settle_batch_in_flight(self, live: LiveDirectory) -> list[Sink]:
        return settle_in_flight(
            live,
            self.sinks.to_settle,
            still_mine=self.lease.step,
            roll_back_tables=self.stream.options.roll_back_tables,
            query_ids=query_ids_of(self.stream),
            # A table keeps the number of an undone batch: a replay would take its rows for written.
            before_roll_back=partial(self.stream.catalog.journal.forget_after, self.lease.record),
        )

    @span("roll_back_sinks")
    def _roll_back(self, pending: PendingRestore | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Roll back sinks; return their places, and the names of those that cannot be."""
        stream = self.stream
        logs: Mapping[str, Sequence[SinkEntry]] = {}
        batch_id, sinks = BEFORE_THE_FIRST_BATCH, list[Sink]()
        match pending:
            case ToSnapshot(location=location):
                header = stream.store.manifest(location).header
                if captured_sinks(header.properties) is None:
                    raise SnapshotCorruptError(
                        f"{location} does not record which sinks its query wrote to. Restore another snapshot."
                    )
                ours = self.sinks.of(Verdict.ROLL_BACK)
                logs = with_moved_logs(logs_in_snapshot(stream.store, location), ours)
                batch_id, sinks = header.batch_id, self._with_rolled_back(sinks_in(header.properties))
            case ToBatch(batch_id=batch_id, sinks=names):
                sinks = self._with_rolled_back(sinks_of(names))
            case Emptied(sinks=names):
                sinks = self._with_rolled_back(sinks_of(names))
        undone = pending if isinstance(pending, SinkRollBack) else None
        allowed = self._allowed(sinks)
        for sink in allowed:
            entries = logs.get(sink.place) if sink.place is not None else None
            roll_back(sink, self._point(batch_id, undone, entries), self.lease.step)
        return _places_of(allowed), tuple(sink.name for sink in sinks if not sink.rolls_back)


def _change_sources(live: LiveDirectory, plan: Restore | Rewind) -> None:
    if plan.sources is not None:
        mapping = plan.sources.mapping
        new = {source: plan.sources.position(source) for source in mapping.new}
        give_positions(live, mapping.continued, new)
    if plan.source_offsets is not None:
        move_sources(live, plan.source_offsets)


def _with_sources(origin: StateOrigin, plan: RecoveryPlan) -> StateOrigin:
    """Record changed sources, to compare with until an execution has recorded what it reads."""
    sources = plan.sources if isinstance(plan, Restore | Rewind) else None
    if sources is None:
        return origin
    identities = tuple(each.as_record() for each in sources.identities or ())
    return replace(origin, map_sources=str(sources.mapping), source_identities=identities)


def _places_of(sinks: Iterable[Sink]) -> tuple[str, ...]:
    return tuple(sink.place or sink.name for sink in sinks)
