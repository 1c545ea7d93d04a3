"""Retention of a stream's checkpoints, while it runs and when it has ended, and attempts that a dead process left.

A deletion marks the snapshot in the catalog, deletes its bytes, then its row. If it fails, the next pass repeats it.

An attempt whose process died stays IN_PROGRESS until the next start, or housekeeping of a stopped stream. These
register its snapshot if complete in storage, or record a failure. A snapshot completed after that is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

from dagster_ckpt.catalog.holds import describe_holds
from dagster_ckpt.catalog.leases import lease_held_message
from dagster_ckpt.catalog.records import (
    TARGET_DIRECTORY,
    CompletedSnapshot,
    ExecutionStatus,
    HoldKind,
    LeaseRecord,
    SnapshotRecord,
    SnapshotStatus,
)
from dagster_ckpt.errors import (
    CatalogError,
    CkptError,
    LeaseHeldError,
    LeaseLostError,
    SnapshotHeldError,
    StorageAccessError,
)
from dagster_ckpt.policies.retention import (
    KeepAtEnd,
    KeptBecause,
    RetainedSnapshot,
    RetentionContext,
    RetentionDecision,
    RetentionPolicy,
    decide_retention,
    deletes_live_directory,
    needed_for_recovery,
    needs_objects,
)
from dagster_ckpt.recovery.examination import Examiner
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import (
    delete_forgotten_live_directories,
    delete_live_directories,
    left_to_another,
    may_be_anothers,
)
from dagster_ckpt.recovery.plan import Clone, RecoveryPlan, Resume
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.undone_reads import newest_without_undone, with_undone_reads
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.snapshot.manifest import Manifest, object_name
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire_for
from dagster_ckpt.stream.liveness import Liveness, holder_liveness, is_held
from dagster_ckpt.stream.ownership import lies_elsewhere
from dagster_ckpt.stream.predecessor import predecessor
from dagster_ckpt.stream.snapshots import (
    HOLD_TTL_MS,
    describe_snapshot,
    is_owned_by_stream,
    readable_manifest,
    retained,
)
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind, TerminalState

# Far above the default timeout of an attempt.
ORPHAN_AGE_MS = 6 * 3_600_000


@dataclass(frozen=True)
class RetentionReport:
    """What a retention pass did.

    Attributes:
        held: Snapshots in use, left to a later pass like `failed` deletions.
        settled: Attempts whose process had died, with the outcome.
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
        lists = ("deleted", "kept", "failed", "held", "swept", "settled")
        return RetentionReport(
            **{name: (*getattr(self, name), *getattr(later, name)) for name in lists},
            live_directory_deleted=later.live_directory_deleted or self.live_directory_deleted,
            dry_run=self.dry_run or later.dry_run,
        )

    def messages(self, *, unlogged: bool = False) -> list[str]:
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
    """Return the checkpoints that the retention policy does not keep, oldest first.

    The policy sees them by batch, never by a clock, and savepoints only with `count_savepoints`. Always kept: what a
    recovery would use first, the newest proven one, tagged ones, those at `protected` locations, those that a rollback
    of an upgrade or to the previous driver restores, and the one that the next start restores because a stream upstream
    went back.
    """
    snapshots = retained_by_policy(stream)
    context = RetentionContext(stream.catalog.now_ms())
    decision = subsumption(stream, snapshots, stream.options.retention_policy, context, protected=protected)
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    return [snapshot for each in decision.dropped if is_owned_by_stream(snapshot := by_id[each.snapshot_id])]


def retained_by_policy(stream: StreamHandle) -> list[SnapshotRecord]:
    """Return what a policy decides on, oldest first: tagged checkpoints do not count."""
    tagged = stream.catalog.holds.tagged(stream.stream_id)
    snapshots = [
        snapshot
        for snapshot in _of_status(stream, SnapshotStatus.COMPLETED)
        if snapshot.snapshot_id not in tagged and (stream.options.count_savepoints or is_owned_by_stream(snapshot))
    ]
    return sorted(snapshots, key=attrgetter("place"))


def subsumption(
    stream: StreamHandle,
    snapshots: Sequence[SnapshotRecord],
    policy: RetentionPolicy,
    context: RetentionContext,
    *,
    protected: Iterable[str] = (),
) -> RetentionDecision:
    queue = to_retain(stream, snapshots, policy)
    needed = needed_for_recovery(queue)
    decision = decide_retention(policy, queue, context, needed=needed)
    if not decision.dropped:
        return decision
    restorable = stream.catalog.snapshots.restorable(stream.stream_id)
    for each in (restorable, _not_broken(restorable)):
        needed |= needed_for_recovery([retained(snapshot) for snapshot in reversed(each)])
    needed |= dict.fromkeys(newest_proven(restorable), KeptBecause.PROVEN)
    in_use, to_start = set(protected), {_rollback_snapshot(stream), _snapshot_of_previous_driver(stream)}
    to_start.add(newest_without_undone(stream.catalog, stream.stream_id, restorable))
    needed |= {
        snapshot.snapshot_id: KeptBecause.IN_USE
        for snapshot in snapshots
        if snapshot.location in in_use or snapshot.snapshot_id in to_start
    }
    also = {each.snapshot_id: needed[each.snapshot_id] for each in decision.dropped if each.snapshot_id in needed}
    dropped = tuple(each for each in decision.dropped if each.snapshot_id not in also)
    return replace(decision, kept={**decision.kept, **also}, dropped=dropped)


def to_retain(
    stream: StreamHandle, snapshots: Sequence[SnapshotRecord], policy: RetentionPolicy
) -> list[RetainedSnapshot]:
    queue = [retained(snapshot) for snapshot in snapshots]
    if not needs_objects(policy):
        return queue
    return [
        replace(each, objects=objects_of(stream.store, snapshot.location))
        if snapshot.location is not None and snapshot.status is SnapshotStatus.COMPLETED
        else each
        for each, snapshot in zip(queue, snapshots, strict=True)
    ]


# Snapshots never change, and this is asked after each checkpoint.
@lru_cache(maxsize=1_000)
def _objects_at(store: SnapshotStore, location: str) -> Mapping[str, int]:
    manifest, folder = store.manifest(location), location.rstrip("/")
    objects = {
        f"{folder.rpartition('/')[0]}/{object_name(folder.rpartition('/')[2], name)}": use.length
        for name, use in manifest.uses.items()
    }
    return {**objects, folder: manifest.inline_length}


def objects_of(store: SnapshotStore, location: str) -> Mapping[str, int]:
    """Return how many bytes a snapshot has in each data object and its metadata; empty if it cannot be read."""
    try:
        return _objects_at(store, location)  # type: ignore[arg-type]
    except CkptError:
        return {}


def interrupted_deletions(stream: StreamHandle) -> list[SnapshotRecord]:
    return [snapshot for snapshot in _of_status(stream, SnapshotStatus.DELETING) if is_owned_by_stream(snapshot)]


def _not_broken(restorable: Sequence[SnapshotRecord]) -> list[SnapshotRecord]:
    return [snapshot for snapshot in restorable if snapshot.verified_problem is None]


def newest_proven(restorable: Sequence[SnapshotRecord]) -> list[str]:
    """Return the id of the newest proven snapshot, if any, in a list.

    No policy deletes it: state that no query has loaded may be damaged.
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
    """Delete snapshots, except bytes of other stored or `protected` ones.

    Nothing builds on a marked snapshot, so a deletion may outlive its lease. An operator has no lease and deletes
    alongside any writer.
    """
    record = lease.record if lease is not None else None
    deleted: list[str] = []
    kept: list[str] = []
    held: list[str] = []
    failed: list[str] = []
    for snapshot in snapshots:
        try:
            stream.catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=record)
            left, freed = "", None
            if snapshot.location is not None and is_outside(stream, snapshot, snapshot.location):
                left = f", but not its bytes: {snapshot.location} is outside of the stream's storage"
            elif snapshot.location is not None:
                if lease is not None:
                    lease.check()
                freed = stream.store.discard(snapshot.location, protected=protected)
            stream.catalog.snapshots.deleted(snapshot.snapshot_id, reason + left, lease=record, freed_bytes=freed)
            deleted.append(describe_snapshot(snapshot) + left)
        except LeaseLostError:
            raise
        except SnapshotHeldError as error:
            (held if error.passes else kept).append(f"{describe_snapshot(snapshot)}: {error}")
        except (CkptError, OSError) as error:
            failed.append(f"{describe_snapshot(snapshot)}: {error}")
    return RetentionReport(deleted=tuple(deleted), kept=tuple(kept), held=tuple(held), failed=tuple(failed))


def is_outside(stream: StreamHandle, snapshot: SnapshotRecord, location: str) -> bool:
    # Of a copied catalog's original, or of a storage that the stream used before. Savepoints may be anywhere.
    return snapshot.kind is SnapshotKind.CHECKPOINT and not stream.store.is_own(location)


@dataclass(frozen=True)
class _AtEnd:
    doomed: tuple[SnapshotRecord, ...]
    kept: tuple[str, ...]
    drops_live: bool
    reason: str
    held: tuple[str, ...] = ()


def apply_terminal_retention(
    stream: StreamHandle, execution_id: str, state: TerminalState, *, dry_run: bool = False
) -> RetentionReport:
    """Keep or delete checkpoints by the clean-up option for the state in which the stream ended.

    Only claimed savepoints are deleted. If a start would not resume in the live directory, the newest snapshot and the
    one that it would restore stay, except on canceling under DELETE_ON_CANCELLATION. If the lease is held or the live
    directory cannot be examined, nothing is deleted and the execution stays unsettled.
    """
    if dry_run:
        return _preview_at_end(stream, execution_id, state)
    run_id = stream.catalog.executions.get(execution_id).run_id
    try:
        # A concurrent start must not use what is being deleted.
        acquired = acquire_for(stream.catalog, stream.stream_id, "retention", run_id)
    except LeaseHeldError as error:
        return RetentionReport(held=(f"everything: {error}",))
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            return _apply_terminal_retention(stream, execution_id, state, acquired, lease)
        except LeaseLostError as error:
            return RetentionReport(held=(f"the rest: {error}",))


def _apply_terminal_retention(
    stream: StreamHandle, execution_id: str, state: TerminalState, acquired: AcquiredLease, lease: LeaseKeeper
) -> RetentionReport:
    superseded = _superseded(stream, execution_id)
    if superseded is not None:
        stream.catalog.executions.settle(execution_id, ExecutionStatus(state.value))
        return superseded
    at_end = _decide_at_end(stream, state)
    report = discard(stream, interrupted_deletions(stream), reason="interrupted deletion", lease=lease)
    report = report.and_then(discard(stream, at_end.doomed, reason=at_end.reason, lease=lease))
    report = report.and_then(RetentionReport(kept=at_end.kept, held=at_end.held))
    # Otherwise the next pass looks at the execution again.
    is_over = not report.failed and not report.held
    gone = delete_live_directories(stream, acquired, lease) if at_end.drops_live and is_over else None
    if is_over:
        stream.catalog.executions.settle(execution_id, ExecutionStatus(state.value))
    return report.and_then(RetentionReport(live_directory_deleted=gone))


def _superseded(stream: StreamHandle, execution_id: str) -> RetentionReport | None:
    newest = stream.catalog.executions.latest(stream.stream_id)
    if newest is None or newest.execution_id == execution_id:
        return None
    return RetentionReport(kept=(f"everything: execution {newest.execution_id} of the stream started in the meantime",))


def _preview_at_end(stream: StreamHandle, execution_id: str, state: TerminalState) -> RetentionReport:
    superseded = _superseded(stream, execution_id)
    if superseded is not None:
        return replace(superseded, dry_run=True)
    lease = stream.catalog.leases.current(stream.stream_id)
    if lease is not None and is_held(lease):
        message = lease_held_message(lease, stream.catalog.now_ms())
        return RetentionReport(kept=(f"everything: {message}",), dry_run=True)
    at_end = _decide_at_end(stream, state)
    deleted: list[str] = []
    kept, held = [*at_end.kept], [*at_end.held]
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
    completed = _of_status(stream, SnapshotStatus.COMPLETED)
    checkpoints = [snapshot for snapshot in completed if is_owned_by_stream(snapshot)]
    drops_live = deletes_live_directory(state, cleanup)
    queue = [retained(snapshot) for snapshot in checkpoints]
    policy, context = KeepAtEnd(cleanup), RetentionContext(stream.catalog.now_ms(), ended_as=state)
    decision = decide_retention(policy, queue, context, needed={})
    reason = f"{cleanup.name} at {state.value}"
    if decision.dropped and not drops_live:
        try:
            needed = _still_needed(stream)
        except StorageAccessError as error:
            return _AtEnd((), (), False, reason, held=(f"everything: the live directory cannot be examined: {error}",))
        decision = decide_retention(policy, queue, context, needed=needed)
    because = {
        KeptBecause.POLICY: reason,
        KeptBecause.NEWEST: "a start would not resume in the live directory, and may need it",
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

    Bytes younger than `older_than_ms` stay; its default is that of `Client.sweep`.
    """
    if older_than_ms is None:
        older_than_ms = max(ORPHAN_AGE_MS, 2 * stream.options.timeout)
    interrupted = _of_status(stream, SnapshotStatus.DELETING)
    if dry_run:
        under_way = attempts_under_way(stream)
        would = stream.store.sweep(
            older_than_ms=older_than_ms,
            under_way=under_way,
            dry_run=True,
            savepoint_folders=_folders_of_failed_savepoints(stream),
        )
        names = tuple(describe_snapshot(snapshot) for snapshot in interrupted)
        return RetentionReport(deleted=names, swept=tuple(would), dry_run=True)
    settled = tuple(settle_while_stopped(stream))
    report = discard(stream, interrupted, reason="interrupted deletion", lease=None)
    gone = delete_forgotten_live_directories(stream)
    under_way, folders = attempts_under_way(stream), _folders_of_failed_savepoints(stream)
    swept = tuple(stream.store.sweep(older_than_ms=older_than_ms, under_way=under_way, savepoint_folders=folders))
    return report.and_then(RetentionReport(live_directory_deleted=gone, swept=swept, settled=settled))


def _folders_of_failed_savepoints(stream: StreamHandle) -> list[str]:
    failed = stream.catalog.snapshots.of_stream(
        stream.stream_id, kind=SnapshotKind.SAVEPOINT, status=SnapshotStatus.FAILED
    )
    return sorted({str(each.properties[TARGET_DIRECTORY]) for each in failed if TARGET_DIRECTORY in each.properties})


def _of_status(stream: StreamHandle, status: SnapshotStatus) -> list[SnapshotRecord]:
    return stream.catalog.snapshots.of_stream(stream.stream_id, status=status)


def _still_needed(stream: StreamHandle) -> dict[str, KeptBecause]:
    needed: dict[str, KeptBecause] = {}
    restorable = stream.catalog.snapshots.restorable(stream.stream_id)
    if restorable and not isinstance(plan := _next_start(stream), Resume | Clone):
        # A start that is refused may be repaired with any of them.
        chosen = restorable if plan is None else (*restorable[:1], *_not_broken(restorable)[:1])
        needed = {snapshot.snapshot_id: KeptBecause.NEWEST for snapshot in chosen}
        if plan is not None and plan.snapshot is not None:
            needed[plan.snapshot.snapshot_id] = KeptBecause.NEWEST
        needed |= dict.fromkeys(newest_proven(restorable), KeptBecause.PROVEN)
    rollback = _rollback_snapshot(stream)
    if rollback is not None:
        needed[rollback] = KeptBecause.IN_USE
    return needed


def _next_start(stream: StreamHandle) -> RecoveryPlan | None:
    """Plan an automatic start of the last code, which examines the live directory; None if it would be refused.

    Reads the logs of the live directory and of file sinks, and metadata of snapshots. After a failure, it also reads
    the state, which takes as long as Spark needs to load it. Only asked if checkpoints would be deleted.
    """
    latest = stream.catalog.executions.latest(stream.stream_id)
    of_last_code = replace(stream, code_version=latest.code_version if latest is not None else None)
    try:
        facts = recovery_facts(
            of_last_code, StartFrom(), predecessor_ended=True, is_automatic=True, examiner=Examiner(stream)
        )
        return plan_recovery(with_undone_reads(stream.catalog, facts))
    except (CatalogError, StorageAccessError):
        raise
    except CkptError:
        return None


def _rollback_snapshot(stream: StreamHandle) -> str | None:
    row = stream.catalog.desired_states.find(stream.stream_id)
    is_over = row is None or row.upgrade is None or row.upgrade.phase.is_over
    return row.upgrade.snapshot_id if row is not None and row.upgrade is not None and not is_over else None


def _snapshot_of_previous_driver(stream: StreamHandle) -> str | None:
    latest = stream.catalog.executions.latest(stream.stream_id)
    before = predecessor(stream.catalog, stream.stream_id) if latest is not None and latest.is_launched else None
    if before is None or before.cannot is not None or before.snapshot is None:
        return None
    return before.snapshot.snapshot_id


def settle_dead_attempts(stream: StreamHandle, lease: LeaseRecord) -> list[str]:
    """Settle attempts of earlier executions and abandoned savepoints, before new ones begin; return messages."""
    done = []
    for snapshot in _of_status(stream, SnapshotStatus.IN_PROGRESS):
        if snapshot.execution_id is None and _is_held(stream, snapshot):
            continue
        try:
            found = _stored_snapshot(stream, snapshot)
        except StorageAccessError:
            if TARGET_DIRECTORY not in snapshot.properties:
                raise
            # Left to a later call: the stream must start even if this folder is unreachable.
            continue
        if found is None:
            stream.catalog.snapshots.fail(lease, snapshot.snapshot_id, "its process died before all of it was stored")
            done.append(f"{snapshot.name} was not completed: its process died")
            continue
        location, manifest = found
        facts = CompletedSnapshot(
            location=location,
            batch_id=manifest.header.batch_id,
            query_id=manifest.header.query_id,
            full_bytes=manifest.full_bytes,
            file_count=manifest.file_count,
            properties=dict(manifest.header.properties),
        )
        registered = stream.catalog.snapshots.complete(lease, snapshot.snapshot_id, facts, after_batch=False)
        done.append(
            f"registered {describe_snapshot(registered)}: it was complete, but its process died before recording it"
        )
    return done


def attempts_under_way(stream: StreamHandle) -> frozenset[int]:
    """Return the numbers of attempts whose process may be alive, and owns all that it wrote.

    An execution's attempt counts until its lease holder has provably ended, one of a stopped stream while held.
    """
    begun = _of_status(stream, SnapshotStatus.IN_PROGRESS)
    lease = stream.catalog.leases.current(stream.stream_id) if begun else None
    has_writer = lease is not None and holder_liveness(lease) is not Liveness.ENDED
    return frozenset(
        snapshot.number
        for snapshot in begun
        if snapshot.number is not None
        and (has_writer if snapshot.execution_id is not None else _is_held(stream, snapshot))
    )


def _is_held(stream: StreamHandle, snapshot: SnapshotRecord) -> bool:
    """Whether an attempt is held or still young; a process that holds it later reports that it was settled."""
    is_young = stream.catalog.now_ms() - snapshot.created_at_ms <= HOLD_TTL_MS
    return is_young or bool(stream.catalog.holds.on(snapshot.snapshot_id))


def settle_while_stopped(stream: StreamHandle) -> list[str]:
    if not _has_something_to_settle(stream):
        return []
    try:
        acquired = acquire_for(stream.catalog, stream.stream_id, "housekeeping", "housekeeping")
    except LeaseHeldError:
        return []
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            done = settle_dead_attempts(stream, lease.record)
            # A holder that may be alive could be publishing it now.
            return done + (_delete_failed(stream, lease) if acquired.predecessor_ended else [])
        except LeaseLostError:
            return []


def _has_something_to_settle(stream: StreamHandle) -> bool:
    begun = _of_status(stream, SnapshotStatus.IN_PROGRESS)
    is_dead = (snapshot.execution_id is not None or not _is_held(stream, snapshot) for snapshot in begun)
    return any(is_dead) or bool(_failed_but_whole(stream))


def _delete_failed(stream: StreamHandle, lease: LeaseKeeper) -> list[str]:
    done = []
    for location, snapshot in _failed_but_whole(stream):
        lease.check()
        stream.store.discard(location)
        done.append(f"deleted {snapshot.name} at {location}: its attempt failed before it was complete")
    return done


def _failed_but_whole(stream: StreamHandle) -> list[tuple[str, SnapshotRecord]]:
    failed = {
        f"chk-{each.number}": each
        for each in _of_status(stream, SnapshotStatus.FAILED)
        if each.kind is SnapshotKind.CHECKPOINT
    }
    stored = [
        (location, failed.get(location.rstrip("/").rpartition("/")[2])) for location in stream.store.checkpoints()
    ]
    return [
        (location, snapshot)
        for location, snapshot in stored
        if snapshot is not None and _manifest_at(stream, snapshot, location) is not None
    ]


def _stored_snapshot(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[str, Manifest] | None:
    if snapshot.kind == SnapshotKind.CHECKPOINT:
        places = [each for each in stream.store.checkpoints() if each.rstrip("/").endswith(f"/chk-{snapshot.number}")]
    else:
        places = stream.store.savepoints(snapshot.properties.get(TARGET_DIRECTORY))
    for location in places:
        manifest = _manifest_at(stream, snapshot, location)
        if manifest is not None and not stream.store.verify(location, deep=False):
            return location, manifest
    return None


def _manifest_at(stream: StreamHandle, snapshot: SnapshotRecord, location: str) -> Manifest | None:
    # A damaged file or unknown format must not block a start; unreachable storage does.
    manifest = readable_manifest(stream, location)
    return manifest if manifest is not None and manifest.header.snapshot_id == snapshot.snapshot_id else None
