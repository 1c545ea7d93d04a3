"""Retention of a stream's checkpoints, while it runs and when it has ended.

A deletion marks in the catalog, deletes the bytes, and forgets the row. A failed one stays visible as DELETING, and the
next pass retries it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.holds import describe_holds
from dagster_ckpt.catalog.leases import lease_held_message
from dagster_ckpt.catalog.records import (
    ExecutionStatus,
    HoldKind,
    SnapshotRecord,
    SnapshotStatus,
)
from dagster_ckpt.errors import CkptError, LeaseHeldError, LeaseLostError, SnapshotHeldError
from dagster_ckpt.policies.guard import KeptBecause, decide_retention, needed_for_recovery
from dagster_ckpt.policies.retention import KeepAtEnd, RetentionContext, deletes_live_directory
from dagster_ckpt.recovery.dead_attempts import attempts_under_way, settle_while_stopped
from dagster_ckpt.recovery.live_directories import (
    delete_forgotten_live_directories,
    delete_live_directories,
    left_to_another,
    may_be_anothers,
)
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire_for
from dagster_ckpt.stream.liveness import is_held
from dagster_ckpt.stream.ownership import lies_elsewhere
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream, retained
from dagster_ckpt.values.modes import SnapshotKind, TerminalState

# Far longer than an attempt may take by default (10 minutes).
ORPHAN_AGE_MS = 6 * 3_600_000


@dataclass(frozen=True)
class RetentionReport:
    """What a retention pass did.

    Attributes:
        held: Snapshots in use, for a later pass.
        failed: Failed deletions, for the next pass.
        swept: Objects that nothing needed any more.
        settled: Attempts whose process had died, each with the outcome.
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
        """`unlogged`: without what the catalog has logged as events."""
        would = "would have " if self.dry_run else ""
        logged = [f"{would}deleted {name}" for name in self.deleted]
        lines = [] if unlogged and not self.dry_run else logged
        lines += [f"kept {name}" for name in self.kept]
        lines += [f"kept for now: {name}" for name in self.held]
        lines += () if unlogged else self.settled
        lines += [f"could not delete {name}; it is tried again" for name in self.failed]
        if self.live_directory_deleted is not None:
            lines.append(f"{would}deleted the live directories {self.live_directory_deleted}")
        for reason, count in Counter(garbage.reason for garbage in self.swept).items():
            lines.append(f"{would}removed {count} objects: {reason}")
        return lines or ([] if unlogged and (self.deleted or self.settled) else ["nothing to delete"])


def subsume(stream: StreamHandle, *, protected: Iterable[str] = ()) -> list[SnapshotRecord]:
    """The checkpoints that the retention policy does not keep, oldest first.

    The policy sees them by number, never by a clock; savepoints, which are never deleted here, only with
    `count_savepoints`. Regardless of the policy these stay: what a recovery would use first, the newest proven one,
    tagged ones, those at `protected` locations, which pending attempts build on, and the one that an upgrade would be
    rolled back to.
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
        # These take further queries, and usually there is nothing to delete.
        restorable = stream.catalog.snapshots.restorable(stream.stream_id)
        needed |= needed_for_recovery([retained(snapshot) for snapshot in reversed(restorable)])
        needed |= dict.fromkeys(newest_proven(restorable), KeptBecause.PROVEN)
        in_use, rollback = set(protected), _rollback_snapshot(stream)
        needed |= {
            snapshot.snapshot_id: KeptBecause.IN_USE
            for snapshot in snapshots
            if snapshot.location in in_use or snapshot.snapshot_id == rollback
        }
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    dropped = [by_id[each.snapshot_id] for each in decision.dropped if each.snapshot_id not in needed]
    return [snapshot for snapshot in dropped if is_owned_by_stream(snapshot)]


def interrupted_deletions(stream: StreamHandle) -> list[SnapshotRecord]:
    deleting = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.DELETING)
    return [snapshot for snapshot in deleting if is_owned_by_stream(snapshot)]


def newest_proven(restorable: Sequence[SnapshotRecord]) -> list[str]:
    """Id of the restorable snapshot with the newest proven batch, in a list.

    No policy deletes it: state that no query has loaded may turn out to be damaged.
    """
    proven = [snapshot for snapshot in restorable if snapshot.is_proven]
    newest = max(proven, key=lambda snapshot: (snapshot.batch_id or 0, snapshot.number or 0), default=None)
    return [newest.snapshot_id] if newest is not None else []


def discard(
    stream: StreamHandle,
    snapshots: Sequence[SnapshotRecord],
    *,
    reason: str,
    lease: LeaseKeeper | None,
    protected: Iterable[str] = (),
) -> RetentionReport:
    """Delete snapshots. Bytes that the store lists or that are `protected` stay.

    Nothing builds on a marked snapshot, so a deletion that outlives its lease takes nothing from a successor. An
    operator has no lease and deletes alongside any writer.
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
            failed.append(f"{describe_snapshot(snapshot)}: {error}")
    return RetentionReport(deleted=tuple(deleted), kept=tuple(kept), held=tuple(held), failed=tuple(failed))


def _is_anothers(stream: StreamHandle, snapshot: SnapshotRecord, location: str) -> bool:
    # A copied catalog names the checkpoints of the original one. Savepoints may be anywhere.
    return snapshot.kind is SnapshotKind.CHECKPOINT and not stream.store.is_own(location)


@dataclass(frozen=True)
class _AtEnd:
    doomed: tuple[SnapshotRecord, ...]
    kept: tuple[str, ...]
    drops_live: bool
    reason: str


def apply_terminal_retention(
    stream: StreamHandle, execution_id: str, state: TerminalState, *, dry_run: bool = False
) -> RetentionReport:
    """Keep or delete checkpoints according to the clean-up option for the state in which the stream ended.

    Savepoints are deleted only if claimed. While the live directory is incomplete, the newest snapshot stays, except on
    canceling under DELETE_ON_CANCELLATION. If a newer execution holds the lease, nothing is deleted and the execution
    stays unsettled.
    """
    if dry_run:
        return _preview_at_end(stream, execution_id, state)
    run_id = stream.catalog.executions.get(execution_id).run_id
    try:
        # A start meanwhile must not use what is being deleted; the lease tells it what it waits for.
        acquired = acquire_for(stream.catalog, stream.stream_id, "retention", run_id)
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
        return RetentionReport(kept=(_superseded(newest.execution_id),))
    at_end = _decide_at_end(stream, state)
    report = discard(stream, interrupted_deletions(stream), reason="interrupted deletion", lease=lease)
    report = report.and_then(discard(stream, at_end.doomed, reason=at_end.reason, lease=lease))
    report = report.and_then(RetentionReport(kept=at_end.kept))
    # Otherwise the next pass looks at the execution again.
    is_over = not report.failed and not report.held
    gone = delete_live_directories(stream, acquired, lease) if at_end.drops_live and is_over else None
    if is_over:
        stream.catalog.executions.settle(execution_id, ExecutionStatus(state.value))
    return report.and_then(RetentionReport(live_directory_deleted=gone))


def _superseded(execution_id: str) -> str:
    return f"everything: execution {execution_id} of the stream started in the meantime"


def _preview_at_end(stream: StreamHandle, execution_id: str, state: TerminalState) -> RetentionReport:
    """Takes no lease."""
    newest = stream.catalog.executions.latest(stream.stream_id)
    if newest is not None and newest.execution_id != execution_id:
        return RetentionReport(kept=(_superseded(newest.execution_id),), dry_run=True)
    lease = stream.catalog.leases.current(stream.stream_id)
    if lease is not None and is_held(lease):
        message = lease_held_message(lease, stream.catalog.now_ms())
        return RetentionReport(kept=(f"everything: {message}",), dry_run=True)
    at_end = _decide_at_end(stream, state)
    deleted: list[str] = []
    kept, held = [*at_end.kept], list[str]()
    for snapshot in at_end.doomed:
        holds = stream.catalog.holds.on(snapshot.snapshot_id)
        if holds:
            passes = all(hold.kind is HoldKind.USE for hold in holds)
            (held if passes else kept).append(f"{describe_snapshot(snapshot)}: held ({describe_holds(holds)})")
        else:
            deleted.append(describe_snapshot(snapshot))
    record = stream.catalog.streams.get(stream.stream_id)
    is_kept = lies_elsewhere(stream, record) or may_be_anothers(stream, record)
    drops_live = at_end.drops_live and record.live_directory is not None and not is_kept
    return RetentionReport(
        deleted=tuple(deleted),
        kept=tuple(kept),
        held=tuple(held),
        live_directory_deleted=stream.live_folder if drops_live and not held else None,
        dry_run=True,
    )


def _decide_at_end(stream: StreamHandle, state: TerminalState) -> _AtEnd:
    cleanup = stream.options.cleanup
    checkpoints = [snapshot for snapshot in _completed(stream) if is_owned_by_stream(snapshot)]
    drops_live = deletes_live_directory(state, cleanup)
    queue = [retained(snapshot) for snapshot in checkpoints]
    policy, context = KeepAtEnd(cleanup), RetentionContext(stream.catalog.now_ms(), ended_as=state)
    decision = decide_retention(policy, queue, context, needed={})
    if decision.dropped and not drops_live:
        decision = decide_retention(policy, queue, context, needed=_still_needed(stream))
    reason = f"{cleanup.name} at {state.value}"
    because = {
        KeptBecause.POLICY: reason,
        KeptBecause.NEWEST: "the live directory is not intact: a start may need it",
        KeptBecause.IN_USE: "an upgrade is in progress: a start may need it",
    }
    kept = tuple(
        f"{describe_snapshot(snapshot)}: {because[decision.kept[snapshot.snapshot_id]]}"
        for snapshot in checkpoints
        if snapshot.snapshot_id in decision.kept
    )
    doomed = tuple(snapshot for snapshot in checkpoints if snapshot.snapshot_id not in decision.kept)
    if drops_live and may_be_anothers(stream, stream.catalog.streams.get(stream.stream_id)):
        kept += (left_to_another(stream),)
    return _AtEnd(doomed, kept, drops_live, reason)


def housekeeping(stream: StreamHandle, *, older_than_ms: int | None = None, dry_run: bool = False) -> RetentionReport:
    """Settle attempts, finish interrupted deletions, and remove bytes left by crashed attempts.

    Bytes younger than `older_than_ms` by the storage's clock stay. Default: six hours, or twice the checkpoint timeout
    if that is longer.
    """
    if older_than_ms is None:
        older_than_ms = max(ORPHAN_AGE_MS, 2 * stream.options.timeout)
    interrupted = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.DELETING)
    if dry_run:
        under_way = attempts_under_way(stream)
        would = stream.store.sweep(older_than_ms=older_than_ms, under_way=under_way, dry_run=True)
        names = tuple(describe_snapshot(snapshot) for snapshot in interrupted)
        return RetentionReport(deleted=names, swept=tuple(would), dry_run=True)
    settled = tuple(settle_while_stopped(stream))
    report = discard(stream, interrupted, reason="interrupted deletion", lease=None)
    gone = delete_forgotten_live_directories(stream)
    swept = tuple(stream.store.sweep(older_than_ms=older_than_ms, under_way=attempts_under_way(stream)))
    return report.and_then(RetentionReport(live_directory_deleted=gone, swept=swept, settled=settled))


def _completed(stream: StreamHandle) -> list[SnapshotRecord]:
    return list(stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.COMPLETED))


def _still_needed(stream: StreamHandle) -> dict[str, KeptBecause]:
    """Snapshots that a start may need although the stream has ended."""
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
    row = stream.catalog.desired_states.find(stream.stream_id)
    is_over = row is None or row.upgrade is None or row.upgrade.phase.is_over
    return row.upgrade.snapshot_id if row is not None and row.upgrade is not None and not is_over else None
