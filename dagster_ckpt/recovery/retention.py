"""Retention of a stream's checkpoints, while it runs and when it has ended.

Deletion always follows one order: mark in the catalog, delete the bytes, forget the row. A failed
deletion stays visible as DELETING, and the next pass retries it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, SnapshotRecord, SnapshotStatus, StreamRecord
from dagster_ckpt.config.modes import TerminalState
from dagster_ckpt.errors import CkptError, LeaseHeldError, LeaseLostError, SnapshotHeldError, StreamNotFoundError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.policies.guard import KeptBecause, decide_retention, needed_for_recovery
from dagster_ckpt.policies.retention import KeepAtEnd, RetentionContext, deletes_live_directory
from dagster_ckpt.recovery.dead_attempts import attempts_under_way, settle_while_stopped
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.adopted import adopted_directory
from dagster_ckpt.stream.fencing import put_up_fence
from dagster_ckpt.stream.handle import BuiltDirectory, StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import disown_live_folder, lies_elsewhere
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream, retained

# Far longer than an attempt may take by default (10 minutes).
ORPHAN_AGE_MS = 6 * 3_600_000
# Number of the stream's former live directories whose location is checked.
_MADE = 100


@dataclass(frozen=True)
class RetentionReport:
    """What a retention pass did.

    Attributes:
        deleted: Snapshots whose bytes were deleted.
        kept: Snapshots that stay, each with the reason.
        held: Snapshots still in use; a later pass deletes them.
        failed: Snapshots whose deletion failed; the next pass retries them.
        live_directory_deleted: The live directory that was deleted, or None.
        swept: Objects that nothing needed any more and that were removed, each with the reason.
        settled: Attempts whose process had died, each with the outcome.
        dry_run: Nothing was done: the report says what would be done.
    """

    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    live_directory_deleted: str | None = None
    swept: tuple[Garbage, ...] = ()
    settled: tuple[str, ...] = ()
    dry_run: bool = False

    def and_then(self, later: RetentionReport) -> RetentionReport:
        """Combine this report with that of a later pass."""
        return RetentionReport(
            deleted=(*self.deleted, *later.deleted),
            kept=(*self.kept, *later.kept),
            failed=(*self.failed, *later.failed),
            held=(*self.held, *later.held),
            live_directory_deleted=later.live_directory_deleted or self.live_directory_deleted,
            swept=(*self.swept, *later.swept),
            settled=(*self.settled, *later.settled),
            dry_run=self.dry_run or later.dry_run,
        )

    def messages(self, *, unlogged: bool = False) -> list[str]:
        """The report as messages.

        Args:
            unlogged: Leave out what the catalog has already logged as an event.
        """
        would = "would have " if self.dry_run else ""
        logged = [f"{would}deleted {name}" for name in self.deleted]
        lines = [] if unlogged and not self.dry_run else logged
        lines += [f"kept {name}" for name in self.kept]
        lines += [f"left for later: {name}" for name in self.held]
        lines += () if unlogged else self.settled
        lines += [f"could not delete {name}; it is tried again" for name in self.failed]
        if self.live_directory_deleted is not None:
            lines.append(f"deleted the live directories {self.live_directory_deleted}")
        for reason, count in Counter(garbage.reason for garbage in self.swept).items():
            lines.append(f"{would}removed {count} objects: {reason}")
        return lines or ([] if unlogged and (self.deleted or self.settled) else ["nothing to delete"])


def subsume(stream: StreamHandle, *, protected: Iterable[str] = ()) -> list[SnapshotRecord]:
    """The checkpoints that the stream's retention policy does not keep, oldest first.

    The policy sees them ordered by number, never by a clock. Savepoints are shown to it only with
    `count_savepoints`, and are never deleted here. Regardless of the policy, the snapshots stay that
    a recovery would use first, tagged ones, those that pending attempts build on, and the one that
    an upgrade would be rolled back to.

    Args:
        stream: The stream.
        protected: Locations that pending attempts build on; they are left for a later pass.
    """
    tagged = stream.catalog.holds.tagged(stream.stream_id)
    # Tagged checkpoints do not count towards the limit.
    snapshots = [
        snapshot
        for snapshot in _completed(stream)
        if snapshot.snapshot_id not in tagged and (stream.options.count_savepoints or is_owned_by_stream(snapshot))
    ]
    snapshots.sort(key=lambda snapshot: (snapshot.timeline, snapshot.number or 0))
    queue = [retained(snapshot) for snapshot in snapshots]
    needed = needed_for_recovery(queue)
    policy, context = stream.options.retention_policy, RetentionContext(stream.catalog.now_ms())
    decision = decide_retention(policy, queue, context, needed=needed)
    if decision.dropped:
        # These take further queries, and most of the time there is nothing to delete.
        restorable = stream.catalog.snapshots.restorable(stream.stream_id)
        needed |= needed_for_recovery([retained(snapshot) for snapshot in reversed(restorable)])
        in_use, rollback = set(protected), _rollback_snapshot(stream)
        needed |= {
            snapshot.snapshot_id: KeptBecause.IN_USE
            for snapshot in snapshots
            if snapshot.location in in_use or snapshot.snapshot_id == rollback
        }
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    dropped = [by_id[each.snapshot_id] for each in decision.dropped if each.snapshot_id not in needed]
    return [snapshot for snapshot in dropped if is_owned_by_stream(snapshot)]


def discard(
    stream: StreamHandle,
    snapshots: Sequence[SnapshotRecord],
    *,
    reason: str,
    lease: LeaseKeeper | None,
    protected: Iterable[str] = (),
) -> RetentionReport:
    """Delete snapshots: mark, delete the bytes, forget.

    Nothing builds on a marked snapshot any more, so a deletion that continues after its lease was
    lost takes nothing from a successor. It ends at the next snapshot anyway.

    Args:
        stream: The stream.
        snapshots: The snapshots to delete.
        reason: The reason recorded in the catalog's event.
        lease: The lease under which they are deleted; None if an operator deletes them, alongside any
            writer.
        protected: Further locations whose bytes must be kept, besides every snapshot the store lists.

    Raises:
        LeaseLostError: Another execution is the writer now; the rest is left to it.
    """
    record = lease.record if lease is not None else None
    deleted: list[str] = []
    kept: list[str] = []
    held: list[str] = []
    failed: list[str] = []
    for snapshot in snapshots:
        try:
            stream.catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=record)
            left = ""
            if snapshot.location is not None and _is_anothers(stream, snapshot, snapshot.location):
                left = f", but not its bytes: {snapshot.location} is outside of the stream's storage"
            elif snapshot.location is not None:
                if lease is not None:
                    lease.check()
                stream.store.discard(snapshot.location, protected=protected)
            stream.catalog.snapshots.deleted(snapshot.snapshot_id, reason + left, lease=record)
            deleted.append(describe_snapshot(snapshot) + left)
        except LeaseLostError:
            raise
        except SnapshotHeldError as error:
            (held if error.passes else kept).append(f"{describe_snapshot(snapshot)}: {error}")
        except (CkptError, OSError) as error:
            # If one snapshot cannot be deleted, continue with the others.
            failed.append(f"{describe_snapshot(snapshot)}: {error}")
    return RetentionReport(deleted=tuple(deleted), kept=tuple(kept), held=tuple(held), failed=tuple(failed))


def _is_anothers(stream: StreamHandle, snapshot: SnapshotRecord, location: str) -> bool:
    # A copied catalog names the checkpoints of the original one. Savepoints may be anywhere.
    return snapshot.kind == SnapshotKind.CHECKPOINT.value and not stream.store.is_own(location)


def apply_terminal_retention(stream: StreamHandle, execution_id: str, state: TerminalState) -> RetentionReport:
    """Keep or delete checkpoints according to the clean-up option for the state in which the stream ended.

    Savepoints are never deleted unless a start has claimed them. If the live directory is
    incomplete, the newest snapshot is kept even if the policy would delete it, because the stream
    may need it. Only canceling under DELETE_ON_CANCELLATION deletes everything, as requested.

    Args:
        stream: The stream.
        execution_id: The execution that ended; it is settled afterwards.
        state: How it ended.

    Returns:
        What was deleted and kept, with reasons. Nothing is deleted if a newer execution of the stream
        has begun or is about to: it holds the lease, and the execution remains unsettled.
    """
    run_id = stream.catalog.executions.get(execution_id).run_id
    try:
        # A start that comes in the meantime must not use what is being deleted. The lease shows it
        # whose end it waits for.
        acquired = acquire(stream.catalog, stream.stream_id, this_holder(f"retention-{uuid.uuid4()}", run_id, None))
    except LeaseHeldError as error:
        return RetentionReport(kept=(f"everything: {error}",))
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            return _apply_terminal_retention(stream, execution_id, state, acquired, lease)
        except LeaseLostError as error:
            return RetentionReport(kept=(f"the rest: {error}",))


def _apply_terminal_retention(
    stream: StreamHandle, execution_id: str, state: TerminalState, acquired: AcquiredLease, lease: LeaseKeeper
) -> RetentionReport:
    newest = stream.catalog.executions.latest(stream.stream_id)
    if newest is not None and newest.execution_id != execution_id:
        stream.catalog.executions.settle(execution_id, ExecutionStatus(state.value))
        return RetentionReport(kept=(f"everything: execution {newest.execution_id} of the stream began meanwhile",))
    cleanup = stream.options.cleanup
    checkpoints = [snapshot for snapshot in _completed(stream) if is_owned_by_stream(snapshot)]
    deleting = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.DELETING)
    interrupted = [snapshot for snapshot in deleting if is_owned_by_stream(snapshot)]
    drop_live = deletes_live_directory(state, cleanup)
    queue = [retained(snapshot) for snapshot in checkpoints]
    policy, context = KeepAtEnd(cleanup), RetentionContext(stream.catalog.now_ms(), ended_as=state)
    decision = decide_retention(policy, queue, context, needed={})
    if decision.dropped and not drop_live:
        decision = decide_retention(policy, queue, context, needed=_still_needed(stream))
    because = {
        KeptBecause.POLICY: f"{cleanup.name} at {state.value}",
        KeptBecause.NEWEST: "the live directory is not whole: a start may need it",
        KeptBecause.IN_USE: "an upgrade is not over: a start may need it",
    }
    kept = tuple(
        f"{describe_snapshot(snapshot)}: {because[decision.kept[snapshot.snapshot_id]]}"
        for snapshot in checkpoints
        if snapshot.snapshot_id in decision.kept
    )
    doomed = [snapshot for snapshot in checkpoints if snapshot.snapshot_id not in decision.kept]
    report = discard(stream, interrupted, reason="deletion that was cut off", lease=lease)
    report = report.and_then(discard(stream, doomed, reason=f"{cleanup.name} at {state.value}", lease=lease))
    report = report.and_then(RetentionReport(kept=kept))
    # If something remains, the execution stays unsettled, so that the next pass looks at it again.
    is_over = not report.failed and not report.held
    if drop_live and _may_be_anothers(stream, stream.catalog.streams.get(stream.stream_id)):
        report = report.and_then(RetentionReport(kept=(_left_elsewhere(stream),)))
    gone = delete_live_directories(stream, acquired, lease) if drop_live and is_over else None
    if is_over:
        stream.catalog.executions.settle(execution_id, ExecutionStatus(state.value))
    return report.and_then(RetentionReport(live_directory_deleted=gone))


def housekeeping(stream: StreamHandle, *, older_than_ms: int | None = None, dry_run: bool = False) -> RetentionReport:
    """Settle attempts and finish deletions that were interrupted, and remove bytes left by crashed attempts.

    Args:
        stream: The stream.
        older_than_ms: Bytes younger than this by the storage's clock stay, as do those of pending
            attempts. Default: six hours, or twice the checkpoint timeout if that is longer.
        dry_run: Report what would be done without doing it.
    """
    if older_than_ms is None:
        older_than_ms = max(ORPHAN_AGE_MS, 2 * stream.options.timeout_ms)
    interrupted = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.DELETING)
    if dry_run:
        under_way = attempts_under_way(stream)
        would = stream.store.sweep(older_than_ms=older_than_ms, under_way=under_way, dry_run=True)
        names = tuple(describe_snapshot(snapshot) for snapshot in interrupted)
        return RetentionReport(deleted=names, swept=tuple(would), dry_run=True)
    settled = tuple(settle_while_stopped(stream))
    report = discard(stream, interrupted, reason="deletion that was cut off", lease=None)
    gone = _forgotten_live_directories(stream)
    swept = tuple(stream.store.sweep(older_than_ms=older_than_ms, under_way=attempts_under_way(stream)))
    return report.and_then(RetentionReport(live_directory_deleted=gone, swept=swept, settled=settled))


def _forgotten_live_directories(stream: StreamHandle) -> str | None:
    """Delete what a JVM's last uploads wrote into live directories after their deletion."""
    try:
        record = stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        # The housekeeping schedule also covers streams that were never started.
        return None
    if record.live_directory is not None or stream.catalog.leases.current(stream.stream_id) is not None:
        return None
    if not _own_live_directories(stream, record):
        return None
    try:
        # A start that comes in the meantime waits for this, or has a higher token and its own
        # directories.
        acquired = acquire(
            stream.catalog, stream.stream_id, this_holder(f"housekeeping-{uuid.uuid4()}", "housekeeping", None)
        )
    except LeaseHeldError:
        return None
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            return _delete_live_directories(stream, record, lease) if acquired.predecessor_ended else None
        except LeaseLostError:
            return None


def delete_live_directories(stream: StreamHandle, acquired: AcquiredLease, lease: LeaseKeeper) -> str | None:
    """Delete every live directory of a stream and forget it. Returns the folder, or None if there was none.

    A directory outside the stream's folder is forgotten and stays: it was adopted or, if the catalog is
    a copy, it is the original's, whose query is not even fenced.

    If a previous holder may still be alive, its query is fenced first, and fenced directories stay:
    once a directory is forgotten nothing else can fence its query, which would keep writing without
    the fence.

    Raises:
        LeaseLostError: Another execution is the writer now; its directories are not touched.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    if not acquired.predecessor_ended and not _may_be_anothers(stream, record):
        put_up_fence(stream, acquired, still_mine=lease.check, is_followed=False)
    stream.catalog.streams.forget_live_directory(lease.record)
    _delete_live_directories(stream, record, lease, spares_fenced=not acquired.predecessor_ended)
    return None if record.live_directory is None or lies_elsewhere(stream, record) else stream.live_folder


def _may_be_anothers(stream: StreamHandle, record: StreamRecord) -> bool:
    """Whether the live directory is outside the stream's folder, and was not adopted from there."""
    return adopted_directory(record) is None and lies_elsewhere(stream, record)


def _left_elsewhere(stream: StreamHandle) -> str:
    record = stream.catalog.streams.get(stream.stream_id)
    return (
        f"the live directory {record.live_directory}: it is not below {stream.live_folder}, and belongs to another "
        "environment if this catalog is a copy. Otherwise delete it yourself"
    )


def _delete_live_directories(
    stream: StreamHandle, record: StreamRecord, lease: LeaseKeeper, *, spares_fenced: bool = False
) -> str | None:
    built = [each.live for each in _own_live_directories(stream, record) if each.token <= lease.record.token]
    if spares_fenced:
        built = [live for live in built if live.fenced_at() is None]
    for live in built:
        lease.check()
        live.delete()
    if not stream.live_directories():
        disown_live_folder(stream)
    LiveDirectory(stream.live_folder).folder.delete_if_empty()
    return stream.live_folder if built else None


def _own_live_directories(stream: StreamHandle, record: StreamRecord) -> list[BuiltDirectory]:
    """The live directories in the stream's folder, if the catalog knows that the stream has run there.

    Otherwise they belong to another deployment, or to this one before its catalog was lost, and
    must not be deleted.
    """
    known = {record.live_directory} | {
        each.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    }
    events = stream.catalog.events
    made = events.last_of([stream.stream_id], [EventType.RESTORED], up_to=events.latest_sequence(), each=_MADE)
    known |= {event.payload.get("live_directory") for event in made.get(stream.stream_id, ())}
    is_own = any(isinstance(url, str) and _is_in(stream.live_folder, url) for url in known)
    return stream.live_directories() if is_own else []


def _is_in(folder: str, url: str) -> bool:
    return same_folder(folder, url.rstrip("/").rpartition("/")[0])


def delete_older_live_directories(stream: StreamHandle, current: LiveDirectory, lease: LeaseKeeper) -> None:
    """Delete the live directories that earlier starts left behind, finished or not.

    The previous one is kept if it is fenced: without its fence, a query that still runs there would
    plan further batches.

    Args:
        stream: The stream.
        current: The directory in use.
        lease: The lease of the stream. Directories with a higher token belong to a successor and stay.

    Raises:
        LeaseLostError: Another execution is the writer now.
    """
    built = _own_live_directories(stream, stream.catalog.streams.get(stream.stream_id))
    names = {each.live.url.rpartition("/")[2]: each for each in built}
    mine = names.get(current.url.rstrip("/").rpartition("/")[2])
    token = lease.record.token
    for each in built:
        of_this_run = each.token == token and mine is not None and each.generation < mine.generation
        is_before = mine is not None and each.generation == mine.generation - 1
        if each != mine and (each.token < token or of_this_run):
            if is_before and each.live.fenced_at() is not None:
                continue
            lease.check()
            each.live.delete()


def _completed(stream: StreamHandle) -> list[SnapshotRecord]:
    return list(stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.COMPLETED))


def _still_needed(stream: StreamHandle) -> dict[str, KeptBecause]:
    """The snapshots that a start may need although the stream has ended."""
    needed: dict[str, KeptBecause] = {}
    live = stream.catalog.streams.get(stream.stream_id).live_directory
    is_whole = live is None or inspect_live_directory(LiveDirectory(live)).status in (LiveStatus.GOOD, LiveStatus.EMPTY)
    restorable = [] if is_whole else stream.catalog.snapshots.restorable(stream.stream_id)
    if restorable:
        needed[restorable[0].snapshot_id] = KeptBecause.NEWEST
    rollback = _rollback_snapshot(stream)
    if rollback is not None:
        needed[rollback] = KeptBecause.IN_USE
    return needed


def _rollback_snapshot(stream: StreamHandle) -> str | None:
    """The snapshot that an upgrade in progress would be rolled back to."""
    row = stream.catalog.desired_states.find(stream.stream_id)
    is_over = row is None or row.upgrade is None or row.upgrade.phase.is_over
    return row.upgrade.snapshot_id if row is not None and row.upgrade is not None and not is_over else None
