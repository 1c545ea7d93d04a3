"""Carrying out a recovery plan: at the end a live directory stands ready for Spark.

Order makes a crash harmless. The new directory is built aside and renamed; one catalog transaction
makes it the stream's directory and notes that sinks are still to be rolled back; then the sinks are rolled
back, which may be done twice; then the note is cleared. What is cut off is finished by the next start.

A start that has lost its lease changes nothing of its successor's: it builds under a name that carries its token, the
catalog refuses its writes, and each file of a sink's log is changed while the catalog holds its lease.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.catalog.recovery_records import OriginKind, StateOrigin
from dagster_ckpt.errors import RestoreError, SinkRollbackError, SnapshotCorruptError
from dagster_ckpt.recovery.plan import RecoveryKind, RecoveryPlan
from dagster_ckpt.recovery.sink_survey import BEFORE_THE_FIRST_BATCH, Survey, sink_logs_of_snapshot, survey_sinks
from dagster_ckpt.sinks.guard import Verdict
from dagster_ckpt.sinks.in_flight import settle_in_flight
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.donors import Donor
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import StillMine, roll_back
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Filler, Watch, clone, materialize, unwatched
from dagster_ckpt.spark.checkpoint_dir.rewind import give_query_id, own_past, roll_back_to_own_past
from dagster_ckpt.spark.query.output import NamedOutput, begin_log, empty_log
from dagster_ckpt.spark.query.sinks import file_sink_path
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.sinks_written import sinks_of_snapshot, sinks_written
from dagster_ckpt.stream.snapshot_names import describe_snapshot


@dataclass(frozen=True)
class PreparedStart:
    """What Spark is started on.

    Attributes:
        live: The live directory.
        rolled_back: Paths of the file sinks that were brought back to the restored batch.
        may_repeat: Descriptions of sinks that cannot be rolled back from here.
    """

    live: LiveDirectory
    rolled_back: tuple[str, ...] = ()
    may_repeat: tuple[str, ...] = ()


def prepare(
    stream: StreamHandle,
    plan: RecoveryPlan,
    lease: LeaseKeeper,
    output: NamedOutput | None = None,
    *,
    watch: Watch = unwatched,
) -> PreparedStart:
    """Make the live directory that the plan asks for.

    Args:
        stream: The stream.
        plan: What to do.
        lease: The lease of the stream.
        output: Where the query about to start writes; no other sink is changed. None where that cannot be seen: then
            it is taken to be what the stream is known to write to.
        watch: Called while files are laid, and before anything is switched to; what it raises ends the start, and
            nothing has changed.

    Raises:
        LeaseLostError: Another execution is the writer now; what is its own was left as it is.
        SnapshotCorruptError: The snapshot misses data or was altered; the live directory is as it was.
        LiveDirectoryError: The live directory is not whole at the batch to go back to.
        SharedSinkError: The query would write where another does, or where its own log does not stand where it stands.
        RowsAtRiskError: A sink has a batch that the query has not, and it cannot be brought back.
        RestoreError: The snapshot makes no directory that Spark could start in.
        SinkRollbackError: A file sink could not be rolled back; the next start tries again.
        StorageAccessError: Something could not be read or written; the next start tries again.
    """
    sinks = survey_sinks(stream, plan, output)
    sinks.refuse(stream.stream_id)
    record = stream.catalog.streams.get(stream.stream_id)
    if plan.kind is RecoveryKind.RESUME and record.live_directory is not None:
        return _go_on(LiveDirectory(record.live_directory), sinks, lease)
    if plan.kind is RecoveryKind.FINISH_RESTORE:
        return _finish_restore(stream, _out_of_the_fence(stream, record, lease), sinks, lease)
    live = stream.new_live_directory(record.live_generation, lease.record.token)
    if plan.kind is RecoveryKind.RESTORE and plan.snapshot is not None:
        return _restore(stream, plan, plan.snapshot, live, sinks=sinks, lease=lease, watch=watch)
    rewound = plan.directory or record.live_directory
    if plan.kind is RecoveryKind.REWIND and rewound is not None and plan.to_batch is not None:
        origin = _origin_of_rewound(record, rewound, plan.to_batch)
        return _rewind(stream, origin, live, sinks=sinks, lease=lease, fork=plan.new_query_id, watch=watch)
    if plan.kind is RecoveryKind.ADOPT and record.live_directory is not None:
        # A sink that has the batch in flight passes over it: its state has to come along.
        made = clone(LiveDirectory(record.live_directory), live, carry_state=True, watch=watch)
        origin = StateOrigin.of_directory(record.live_directory, made.batch_id, record.origin)
        stream.catalog.streams.switch_live_directory(lease.record, live.url, origin=origin)
        return _go_on(live, sinks, lease)
    return _start_empty(stream, record, live, sinks=sinks, lease=lease)


def restore_into(
    stream: StreamHandle,
    location: str,
    live: LiveDirectory,
    *,
    new_query_id: str | None = None,
    donor: Donor | None = None,
    is_scratch: bool = False,
    watch: Watch = unwatched,
) -> None:
    """Make a live directory of a snapshot, without making it the stream's own.

    Every byte is compared with the digest that the snapshot has of it, whichever place it comes from.

    Args:
        stream: The stream whose storage holds the snapshot.
        location: Where the snapshot is.
        live: Where the directory is to be; nothing may be there.
        new_query_id: An id of the query's own, so that it can run beside the original; None keeps that of the snapshot.
        donor: A good live directory whose files are linked where they are as the snapshot has them. None: all is read
            from the snapshot.
        is_scratch: It is deleted after a look, so it need not outlive a loss of power.
        watch: See `materialize`.

    Raises:
        SnapshotNotFoundError: No snapshot is there.
        SnapshotCorruptError: It misses data or was altered.
        RestoreError: It makes no directory that Spark could start in.
    """

    def fill(filler: Filler) -> None:
        def missing(entries: Iterable[FileEntry]) -> Iterable[FileEntry]:
            return filler.link_unchanged(entries, donor)

        stream.store.extract(location, lambda entry, chunks: filler(entry.path, chunks), missing=missing)

    materialize(live, fill, new_query_id=new_query_id, is_whole=True, is_scratch=is_scratch, watch=watch)


def _go_on(live: LiveDirectory, sinks: Survey, lease: LeaseKeeper) -> PreparedStart:
    """Start where the query stopped, or would have: only a batch that sinks have and the query has not is undone."""
    _begin_logs(sinks, lease.step)
    return PreparedStart(live, tuple(settle_in_flight(live, sinks.to_settle, still_mine=lease.step)))


def _begin_logs(sinks: Survey, still_mine: StillMine) -> None:
    batch_id = sinks.aim.batch_id
    for path in sinks.of(Verdict.BEGIN):
        begin_log(path, batch_id, empty_log(batch_id, sinks.log_names), still_mine=still_mine)


def _restore(
    stream: StreamHandle,
    plan: RecoveryPlan,
    snapshot: SnapshotRecord,
    live: LiveDirectory,
    *,
    sinks: Survey,
    lease: LeaseKeeper,
    watch: Watch,
) -> PreparedStart:
    location = snapshot_location(snapshot)
    before = stream.catalog.streams.get(stream.stream_id)
    query_id = str(uuid.uuid4()) if plan.new_query_id else None
    restore_into(stream, location, live, new_query_id=query_id, donor=plan.donor, watch=watch)
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
        pending_restore={"location": location, "batch_id": snapshot.batch_id},
        claims=plan.claims,
        plan=snapshot.plan,
    )
    return _finish_restore(stream, record, sinks, lease)


def _rewind(
    stream: StreamHandle,
    origin: StateOrigin,
    live: LiveDirectory,
    *,
    sinks: Survey,
    lease: LeaseKeeper,
    fork: bool,
    watch: Watch,
) -> PreparedStart:
    old, batch_id = LiveDirectory(origin.directory or ""), origin.batch_id or 0
    wrote_to = sinks_written(stream)
    if not wrote_to:
        raise SinkRollbackError(
            f"The catalog does not know yet which sinks stream {stream.stream_id!r} writes to, so they cannot be "
            "brought back "
            f"to batch {batch_id}. Start it once with start_from=latest, or go back to a snapshot, which names them."
        )
    # Refuses before anything is changed where a sink cannot follow.
    own_past(_allowed(wrote_to, sinks), batch_id)
    # For a table that has just the next batch and cannot be brought back.
    has_tables = any(file_sink_path(sink) is None for sink in wrote_to)
    clone(old, live, at_batch=batch_id, carry_state=has_tables, watch=watch)
    if fork:
        give_query_id(live, str(uuid.uuid4()))
    # What was the past of the old timeline up to here is the past of the new one.
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
        pending_restore={"batch_id": batch_id, "sinks": wrote_to},
    )
    return _finish_restore(stream, record, sinks, lease)


def _allowed(sinks: Sequence[str], survey: Survey) -> list[str]:
    """Of the sinks that a stream wrote to, the file sinks whose log may be brought back."""
    return [sink for sink in sinks if (path := file_sink_path(sink)) is not None and survey.allows(path)]


def _finish_restore(stream: StreamHandle, record: StreamRecord, sinks: Survey, lease: LeaseKeeper) -> PreparedStart:
    pending = record.pending_restore or {}
    if record.live_directory is None:
        raise RestoreError(
            f"Stream {stream.stream_id!r} has an unfinished restore but no live directory. Start it with start_from "
            "naming "
            f"the snapshot ({pending.get('location')}) to restore it anew."
        )
    rolled_back, may_repeat = _roll_back_pending(stream, pending, sinks, lease.step)
    _begin_logs(sinks, lease.step)
    if "fork_of" not in pending:
        # A fork is finished once its query was started: where it writes is seen only then.
        stream.catalog.streams.restore_finished(lease.record)
    else:
        # It may have been killed in its first batch.
        settle_in_flight(LiveDirectory(record.live_directory), sinks.to_settle, still_mine=lease.step)
    return PreparedStart(LiveDirectory(record.live_directory), rolled_back, may_repeat)


def _origin_of_rewound(before: StreamRecord, old: str, batch_id: int) -> StateOrigin:
    # A directory that was made from `old`, and is made again from it, has what `old` came from in its own origin.
    known = before.origin
    is_made_again = known is not None and known.directory == old
    return StateOrigin.of_directory(old, batch_id, known.earlier if known is not None and is_made_again else known)


def _out_of_the_fence(stream: StreamHandle, record: StreamRecord, lease: LeaseKeeper) -> StreamRecord:
    """The stream in a directory that a query may start in: what was restored may be fenced for whoever restored it."""
    if record.live_directory is None or LiveDirectory(record.live_directory).fenced_at() is None:
        return record
    fenced = LiveDirectory(record.live_directory)
    live = stream.new_live_directory(record.live_generation, lease.record.token)
    origin = record.origin
    if fenced.positions().commit is not None:
        made = clone(fenced, live, carry_state=True)
        origin = StateOrigin.of_directory(record.live_directory, made.batch_id, record.origin)
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
    # What earlier executions wrote has to go out of sight too: a file sink passes over batch numbers it knows.
    wrote_to = sinks_written(stream)
    record = stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=StateOrigin.nothing(before.live_directory),
        pending_restore={"sinks": wrote_to},
        plan={},
    )
    return _finish_restore(stream, record, sinks, lease)


def _roll_back_pending(
    stream: StreamHandle, pending: Mapping[str, Any], survey: Survey, still_mine: StillMine
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if "location" in pending:
        return _roll_back_to_snapshot(stream, str(pending["location"]), survey, still_mine)
    sinks = [str(sink) for sink in pending.get("sinks", ())]
    others = tuple(sink for sink in sinks if file_sink_path(sink) is None)
    allowed = _allowed(sinks, survey)
    if "batch_id" in pending:
        return tuple(roll_back_to_own_past(allowed, int(pending["batch_id"]), still_mine=still_mine)), others
    paths = tuple(path for path in map(file_sink_path, allowed) if path is not None)
    for path in paths:
        roll_back(path, BEFORE_THE_FIRST_BATCH, (), still_mine=still_mine)
    return paths, others


def _roll_back_to_snapshot(
    stream: StreamHandle, location: str, survey: Survey, still_mine: StillMine
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    header = stream.store.manifest(location).header
    if not isinstance(header.properties.get("sinks"), list):
        raise SnapshotCorruptError(f"{location} does not say which sinks its query wrote to. Restore another snapshot.")
    rolled_back = []
    for path, entries in sink_logs_of_snapshot(stream, location).items():
        if survey.allows(path):
            roll_back(path, header.batch_id, entries, still_mine=still_mine)
            rolled_back.append(path)
    others = header.properties.get("other_sinks")
    return tuple(rolled_back), tuple(str(sink) for sink in others) if isinstance(others, list) else ()


def snapshot_location(snapshot: SnapshotRecord) -> str:
    """Where a snapshot is.

    Raises:
        SnapshotCorruptError: The catalog does not say.
    """
    if snapshot.location is None:
        raise SnapshotCorruptError(
            f"The catalog does not say where {describe_snapshot(snapshot)} is. Start from its location instead, or "
            "from "
            "another snapshot."
        )
    return snapshot.location
