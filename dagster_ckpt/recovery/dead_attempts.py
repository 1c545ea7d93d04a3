"""Attempts whose process died before the catalog recorded how they ended: their rows stay IN_PROGRESS.

The next start, or housekeeping of a stopped stream, registers a snapshot that is complete in storage; any other attempt
has failed. A snapshot completed after its attempt was recorded as failed is deleted.
"""

from __future__ import annotations

from dagster_ckpt.catalog.records import CompletedSnapshot, LeaseRecord, SnapshotRecord, SnapshotStatus
from dagster_ckpt.errors import LeaseHeldError, LeaseLostError
from dagster_ckpt.snapshot.manifest import Manifest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.liveness import Liveness, holder_liveness
from dagster_ckpt.stream.snapshots import HOLD_TTL_MS, describe_snapshot, readable_manifest
from dagster_ckpt.values.modes import SnapshotKind


def settle_dead_attempts(stream: StreamHandle, lease: LeaseRecord) -> list[str]:
    """Settle attempts of earlier executions and abandoned savepoints, before new ones begin. Returns messages."""
    done = []
    for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.IN_PROGRESS):
        if snapshot.execution_id is None and _is_held(stream, snapshot):
            continue
        found = _found(stream, snapshot)
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
    """Numbers of the attempts whose process may be alive: it owns everything that it wrote, however old.

    An execution's attempt counts until its lease holder is proven to have ended; a stopped stream's while it is held.
    """
    begun = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.IN_PROGRESS)
    lease = stream.catalog.leases.current(stream.stream_id) if begun else None
    has_writer = lease is not None and holder_liveness(lease) is not Liveness.ENDED
    return frozenset(
        snapshot.number
        for snapshot in begun
        if snapshot.number is not None
        and (has_writer if snapshot.execution_id is not None else _is_held(stream, snapshot))
    )


def _is_held(stream: StreamHandle, snapshot: SnapshotRecord) -> bool:
    """A live process that could not hold its savepoint in time finds it settled, and reports that."""
    is_young = stream.catalog.now_ms() - snapshot.created_at_ms <= HOLD_TTL_MS
    return is_young or bool(stream.catalog.holds.on(snapshot.snapshot_id))


def settle_while_stopped(stream: StreamHandle) -> list[str]:
    """Settle dead attempts of a stopped stream, and delete those completed after they had failed."""
    if not _has_something_to_settle(stream):
        return []
    try:
        acquired = acquire_for(stream.catalog, stream.stream_id, "housekeeping", "housekeeping")
    except LeaseHeldError:
        return []
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            done = settle_dead_attempts(stream, lease.record)
            # A holder that may still be alive could be publishing it right now.
            return done + (_delete_failed(stream, lease) if acquired.predecessor_ended else [])
        except LeaseLostError:
            return []


def _has_something_to_settle(stream: StreamHandle) -> bool:
    begun = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.IN_PROGRESS)
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
        snapshot.number: snapshot
        for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.FAILED)
    }
    whole = []
    for location in stream.store.checkpoints():
        number = location.rstrip("/").rpartition("/chk-")[2]
        snapshot = failed.get(int(number)) if number.isdecimal() else None
        if (
            snapshot is not None
            and snapshot.kind == SnapshotKind.CHECKPOINT
            and _is_at(stream, snapshot, location) is not None
        ):
            whole.append((location, snapshot))
    return whole


def _found(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[str, Manifest] | None:
    if snapshot.kind == SnapshotKind.CHECKPOINT:
        places = [each for each in stream.store.checkpoints() if each.rstrip("/").endswith(f"/chk-{snapshot.number}")]
    else:
        places = stream.store.savepoints()
    for location in places:
        manifest = _is_at(stream, snapshot, location)
        if manifest is not None and not stream.store.verify(location, deep=False):
            return location, manifest
    return None


def _is_at(stream: StreamHandle, snapshot: SnapshotRecord, location: str) -> Manifest | None:
    # A damaged file or an unknown format must not block a start. An unknown outcome does: a later call settles the
    # attempt.
    manifest = readable_manifest(stream, location)
    return manifest if manifest is not None and manifest.header.snapshot_id == snapshot.snapshot_id else None
