"""Carries out a recovery plan, so that a live directory is ready for Spark.

The order of the steps makes a crash harmless. The new directory is built under a temporary name and
renamed; one catalog transaction makes it the stream's directory and records that sinks must still
be rolled back; then the sinks are rolled back, which can be repeated; then that record is cleared.
The next start finishes what was interrupted.

A start that has lost its lease changes nothing of its successor's: it builds under a name with its
own token, the catalog refuses its writes, and it changes the files of a sink's log only while the
catalog holds its lease.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StateOrigin, StreamRecord
from dagster_ckpt.errors import RestoreError, SinkRollbackError, SnapshotCorruptError
from dagster_ckpt.recovery.new_directory import Building, StateRewrite
from dagster_ckpt.recovery.plan import RecoveryKind, RecoveryPlan
from dagster_ckpt.recovery.sink_roll_backs import (
    allowed_sinks,
    begin_logs,
    is_skipped_under,
    places_of,
    roll_back_pending,
    roll_back_point,
    settle_batch_in_flight,
    undo_facts,
)
from dagster_ckpt.recovery.sink_survey import Survey, survey_sinks
from dagster_ckpt.recovery.source_positions import move_sources
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id, state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.checkpoint_dir.restore import (
    Donor,
    Filler,
    Progress,
    Watch,
    clone,
    give_query_id,
    materialize,
    unwatched,
)
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.state.rewriting import Rewritten
from dagster_ckpt.stream.handle import StreamHandle, monotonic_ms, sinks_of_snapshot, sinks_written
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.ownership import claim_live_folder
from dagster_ckpt.stream.snapshots import describe_snapshot


@dataclass(frozen=True)
class PreparedStart:
    """What Spark is started on.

    Attributes:
        live: The live directory.
        rolled_back: Places of the sinks that were rolled back to the restored batch.
        may_repeat: Names of sinks that this process cannot roll back.
        rewritten: The rewrite of the state, if there was one.
        began: Positions in the live directory just before the query started; None if unknown.
    """

    live: LiveDirectory
    rolled_back: tuple[str, ...] = ()
    may_repeat: tuple[str, ...] = ()
    rewritten: Rewritten | None = None
    began: Positions | None = None


def prepare(
    stream: StreamHandle,
    plan: RecoveryPlan,
    lease: LeaseKeeper,
    output: NamedOutput | None = None,
    *,
    rewrite: StateRewrite | None = None,
    watch: Watch = unwatched,
) -> PreparedStart:
    """Create the live directory that the plan requires.

    Args:
        stream: The stream.
        plan: The recovery to carry out.
        lease: The lease of the stream.
        output: Where the query to start will write; no other sink is changed. None if unknown: the
            stream's known sinks are assumed.
        rewrite: Rewrite the state: the query then always continues in a new directory.
        watch: Called while files are written and before the stream is switched to the new directory. If
            it raises, the start ends and nothing has changed.

    Raises:
        LeaseLostError: Another execution is the writer now; nothing of it was changed.
        SnapshotCorruptError: The snapshot lacks data or was altered; the live directory is unchanged.
        LiveDirectoryError: The live directory is incomplete at the batch to go back to, or the stream's folder of
            live directories belongs to another deployment.
        SharedSinkError: The query would write to another query's folder, or to one whose log does not
            match the query's state.
        RowsAtRiskError: A sink has a batch that the query does not have, and cannot be rolled back.
        RestoreError: The snapshot cannot be restored to a directory that Spark could start in.
        StateRewriteError: The state could not be rewritten; the live directory is unchanged.
        SinkRollbackError: A file sink could not be rolled back; the next start tries again.
        StorageAccessError: Something could not be read or written; the next start tries again.
    """
    sinks = survey_sinks(stream, plan, output)
    sinks.refuse(stream.stream_id)
    record = stream.catalog.streams.get(stream.stream_id)
    if plan.kind is RecoveryKind.RESUME and record.live_directory is not None and rewrite is None:
        return _resume(stream, LiveDirectory(record.live_directory), sinks, lease)
    if plan.kind is RecoveryKind.FINISH_RESTORE and rewrite is None and not _is_fenced(record):
        return _finish_restore(stream, record, sinks, lease)
    claim_live_folder(stream)
    building = Building(stream.new_live_directory(record.live_generation, lease.record.token), rewrite, watch)
    if plan.kind is RecoveryKind.FINISH_RESTORE:
        moved = _moved(stream, record, building, sinks=sinks, lease=lease)
        prepared = _finish_restore(stream, moved, sinks, lease)
    else:
        prepared = _prepare_new(stream, plan, record, building, sinks=sinks, lease=lease)
    return replace(prepared, rewritten=building.rewritten)


def _prepare_new(
    stream: StreamHandle,
    plan: RecoveryPlan,
    record: StreamRecord,
    building: Building,
    *,
    sinks: Survey,
    lease: LeaseKeeper,
) -> PreparedStart:
    """Prepare a start in a new live directory."""
    live = building.live
    if plan.kind is RecoveryKind.RESTORE and plan.snapshot is not None:
        return _restore(stream, plan, plan.snapshot, building, sinks=sinks, lease=lease)
    rewound = plan.directory or record.live_directory
    if plan.kind in (RecoveryKind.REWIND, RecoveryKind.REPLAY) and rewound is not None and plan.to_batch is not None:
        origin = _origin_of_rewound(record, rewound, plan.to_batch)
        return _rewind(stream, origin, building, plan=plan, sinks=sinks, lease=lease)
    if plan.kind in (RecoveryKind.CLONE, RecoveryKind.RESUME) and record.live_directory is not None:
        started_ms = monotonic_ms()
        old = LiveDirectory(record.live_directory)
        if plan.kind is RecoveryKind.RESUME:
            # Its last writer has ended, so it is read where it is.
            building.rewrite(old)
        else:
            # A sink that already has the batch in flight skips it, so the state of that batch must
            # be carried along.
            building.fill(lambda new: _clone(old, new, building.watch, carry_state=not building.rewrites))
        building.check_in_flight(sinks.to_settle, roll_back_tables=stream.options.roll_back_tables)
        origin = StateOrigin.of_directory(record.live_directory, live.positions().commit, record.origin)
        took_ms = monotonic_ms() - started_ms
        stream.catalog.streams.switch_live_directory(lease.record, live.url, origin=origin, duration_ms=took_ms)
        return _resume(stream, live, sinks, lease)
    return _start_empty(stream, record, live, sinks=sinks, lease=lease)


def _clone(
    old: LiveDirectory, new: LiveDirectory, watch: Watch, *, at_batch: int | None = None, carry_state: bool
) -> None:
    clone(old, new, at_batch=at_batch, carry_state=carry_state, marked=True, watch=watch)


def restore_into(
    stream: StreamHandle,
    location: str,
    live: LiveDirectory,
    *,
    new_query_id: str | None = None,
    donor: Donor | None = None,
    is_scratch: bool = False,
    marked: bool = False,
    watch: Watch = unwatched,
    progress: Progress | None = None,
) -> None:
    """Restore a snapshot to a live directory without making it the stream's own.

    Every byte is compared with its digest in the snapshot, wherever it comes from.

    Args:
        stream: The stream whose storage contains the snapshot.
        location: Location of the snapshot.
        live: The directory to create; it must not exist.
        new_query_id: A separate query id, so that the query can run alongside the original; None keeps
            that of the snapshot.
        donor: A good live directory whose files are linked if they match the snapshot. None: everything
            is read from the snapshot.
        is_scratch: The directory is temporary, so it need not survive a power loss.
        marked: See `materialize`.
        watch: See `materialize`.
        progress: Called after each file with the number of files that are placed and of all, from several threads.

    Raises:
        SnapshotNotFoundError: There is no snapshot.
        SnapshotCorruptError: It lacks data or was altered.
        RestoreError: It cannot be restored to a directory that Spark could start in.
    """
    placed = itertools.count(1)
    total = stream.store.manifest(location).file_count if progress is not None else 0

    def fill(filler: Filler) -> None:
        def missing(entries: Iterable[FileEntry]) -> Iterable[FileEntry]:
            return filler.link_unchanged(entries, donor)

        def place(entry: FileEntry, chunks: Iterable[bytes]) -> None:
            filler(entry.path, chunks)
            if progress is not None:
                progress(next(placed), total)

        stream.store.extract(location, place, missing=missing)

    materialize(live, fill, new_query_id=new_query_id, is_whole=True, is_scratch=is_scratch, marked=marked, watch=watch)


def _resume(stream: StreamHandle, live: LiveDirectory, sinks: Survey, lease: LeaseKeeper) -> PreparedStart:
    """Continue where the query stopped. Only a batch that sinks have and the query does not have is undone."""
    live.note_in_use()
    begin_logs(sinks, lease.step)
    return PreparedStart(live, places_of(settle_batch_in_flight(stream, live, sinks, lease)))


def _restore(
    stream: StreamHandle,
    plan: RecoveryPlan,
    snapshot: SnapshotRecord,
    building: Building,
    *,
    sinks: Survey,
    lease: LeaseKeeper,
) -> PreparedStart:
    live = building.live
    location, started_ms = snapshot_location(snapshot), monotonic_ms()
    before = stream.catalog.streams.get(stream.stream_id)
    undo = undo_facts(stream, snapshot.query_id, may_repeat=plan.new_query_id)
    is_new = plan.new_query_id or is_skipped_under(snapshot.query_id, snapshot.batch_id, sinks)
    query_id = str(uuid.uuid4()) if is_new else None

    def fill(new: LiveDirectory) -> None:
        watch = building.watch
        restore_into(stream, location, new, new_query_id=query_id, donor=plan.donor, marked=True, watch=watch)

    building.fill(fill)
    if plan.source_offsets is not None:
        move_sources(live, plan.source_offsets)
    record = stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=StateOrigin(
            OriginKind.SNAPSHOT,
            batch_id=snapshot.batch_id,
            snapshot_id=snapshot.snapshot_id,
            location=location,
            snapshot_kind=snapshot.kind,
            snapshot_number=snapshot.number,
            query_id=snapshot.query_id,
            directory=before.live_directory,
            sinks=sinks_of_snapshot(stream, snapshot),
        ),
        restored_snapshot_id=snapshot.snapshot_id,
        pending_restore={"location": location, "batch_id": snapshot.batch_id, **undo},
        claims=plan.claims,
        plan=snapshot.plan,
        state_edits=state_edits(live),
        duration_ms=monotonic_ms() - started_ms,
    )
    return _finish_restore(stream, record, sinks, lease)


def _rewind(
    stream: StreamHandle,
    origin: StateOrigin,
    building: Building,
    *,
    plan: RecoveryPlan,
    sinks: Survey,
    lease: LeaseKeeper,
) -> PreparedStart:
    live = building.live
    old, batch_id, fork = LiveDirectory(origin.directory or ""), origin.batch_id or 0, plan.new_query_id
    wrote_to = sinks_written(stream)
    # After a replay, the sinks have no batch to undo.
    if not wrote_to and plan.kind is RecoveryKind.REWIND:
        raise SinkRollbackError(
            f"The catalog does not know yet which sinks stream {stream.stream_id!r} writes to, so they cannot be "
            f"rolled back to batch {batch_id}. Start it once with start_from=latest, or go back to a snapshot, which "
            "names them."
        )
    query_id = live_query_id(old)
    undo = undo_facts(stream, query_id, may_repeat=fork)
    # Raises before anything is changed if a sink cannot be rolled back.
    for sink in allowed_sinks(sinks_of(wrote_to), sinks):
        sink.check_roll_back(roll_back_point(stream, batch_id, undo))
    started_ms = monotonic_ms()
    # For a sink that already has the next batch and cannot be rolled back.
    has_others = any(not sink.rolls_back for sink in sinks_of(wrote_to))
    carry_state = has_others and plan.source_offsets is None and not building.rewrites
    building.fill(lambda new: _clone(old, new, building.watch, at_batch=batch_id, carry_state=carry_state))
    if plan.source_offsets is not None:
        move_sources(live, plan.source_offsets)
    if fork or is_skipped_under(query_id, batch_id, sinks):
        give_query_id(live, str(uuid.uuid4()))
    others = [sink.name for sink in sinks_of(wrote_to) if not sink.rolls_back]
    building.check_in_flight(others, roll_back_tables=stream.options.roll_back_tables)
    # The new timeline inherits the old one's snapshots up to this batch.
    past = [
        snapshot
        for snapshot in stream.catalog.snapshots.restorable(stream.stream_id)
        if (snapshot.batch_id or 0) <= batch_id
    ]
    record = stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=origin,
        restored_snapshot_id=past[0].snapshot_id if past else None,
        pending_restore={"batch_id": batch_id, "sinks": wrote_to, **undo},
        duration_ms=monotonic_ms() - started_ms,
    )
    return _finish_restore(stream, record, sinks, lease)


def _finish_restore(stream: StreamHandle, record: StreamRecord, sinks: Survey, lease: LeaseKeeper) -> PreparedStart:
    pending = record.pending_restore or {}
    if record.live_directory is None:
        raise RestoreError(
            f"Stream {stream.stream_id!r} has an unfinished restore but no live directory. Start it with start_from "
            f"naming the snapshot ({pending.get('location')}) to restore it again."
        )
    if "fork_of" not in pending:
        # After the switch, and before the sinks follow. If the catalog is lost before this, a rebuild passes over this
        # directory, and the one before still fits the sinks.
        LiveDirectory(record.live_directory).note_in_use()
    rolled_back, may_repeat = roll_back_pending(stream, pending, sinks, lease.step)
    begin_logs(sinks, lease.step)
    if "fork_of" not in pending:
        # A fork is finished only when its query has started: before that, where it writes is
        # unknown.
        stream.catalog.streams.restore_finished(lease.record)
    else:
        # It may have been killed in its first batch.
        settle_batch_in_flight(stream, LiveDirectory(record.live_directory), sinks, lease)
    return PreparedStart(LiveDirectory(record.live_directory), rolled_back, may_repeat)


def _origin_of_rewound(before: StreamRecord, old: str, batch_id: int) -> StateOrigin:
    # If the directory was created from `old` and is created from it again, its own origin records
    # what `old` came from.
    known = before.origin
    is_made_again = known is not None and known.directory == old
    return StateOrigin.of_directory(old, batch_id, known.earlier if known is not None and is_made_again else known)


def _is_fenced(record: StreamRecord) -> bool:
    return record.live_directory is not None and LiveDirectory(record.live_directory).fenced_at() is not None


def _moved(
    stream: StreamHandle, record: StreamRecord, building: Building, *, sinks: Survey, lease: LeaseKeeper
) -> StreamRecord:
    """The stream with a directory that a query may start in: a restored one may be fenced, or its state be rewritten.

    What remains of the restore, the fork or the import stays to be done.
    """
    if record.live_directory is None:
        return record
    old, live, origin = LiveDirectory(record.live_directory), building.live, record.origin
    if old.positions().commit is not None:
        if building.rewrites and not _is_fenced(record):
            building.rewrite(old)
        else:
            building.fill(lambda new: _clone(old, new, building.watch, carry_state=not building.rewrites))
        if "fork_of" in (record.pending_restore or {}):
            # It may have been killed in its first batch. A restore rolls its sinks back anyway.
            building.check_in_flight(sinks.to_settle, roll_back_tables=stream.options.roll_back_tables)
        origin = StateOrigin.of_directory(record.live_directory, live.positions().commit, record.origin)
    return stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=origin,
        restored_snapshot_id=record.restored_snapshot_id,
        pending_restore=record.pending_restore,
    )


def _start_empty(
    stream: StreamHandle, before: StreamRecord, live: LiveDirectory, *, sinks: Survey, lease: LeaseKeeper
) -> PreparedStart:
    # Hide what earlier executions wrote as well: a file sink skips batch numbers that it knows.
    wrote_to = sinks_written(stream)
    record = stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=StateOrigin.empty(before.live_directory),
        pending_restore={"sinks": wrote_to, **undo_facts(stream, None)},
        plan={},
        state_edits=(),
    )
    return _finish_restore(stream, record, sinks, lease)


def snapshot_location(snapshot: SnapshotRecord) -> str:
    """The location of a snapshot.

    Raises:
        SnapshotCorruptError: The catalog has no location for it.
    """
    if snapshot.location is None:
        raise SnapshotCorruptError(
            f"The catalog does not record the location of {describe_snapshot(snapshot)}. Start from its location "
            "instead, or from another snapshot."
        )
    return snapshot.location
