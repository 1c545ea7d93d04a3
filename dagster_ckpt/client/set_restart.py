"""Restarts streams from a savepoint set: they are suspended and restored downstream first, and started upstream first.

So at every step no stream has read rows that its upstream lacks: a reader that is further back reads them again. If the
process dies, the same command finishes; the set that was taken before leads back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.client.reconciliation import restore_snapshot
from dagster_ckpt.client.requests import is_running
from dagster_ckpt.errors import CkptError, RequestFailedError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.recovery.rewind_preview import RewindPreview, refuse_loss
from dagster_ckpt.sinks.table import NoSessionError
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import check_places, fence_predecessor
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle

Report = Callable[[str], None]


def preview_set(found: SavepointSet, opened: dict[str, StreamHandle]) -> dict[str, RewindPreview]:
    """By stream. Raises SnapshotNotFoundError if a savepoint is gone."""
    gone = [stream for stream in found.streams if stream not in found.savepoints]
    if gone:
        raise SnapshotNotFoundError(
            f"Savepoint set {found.set_id} has lost the savepoint of {', '.join(gone)}. Nothing was changed. "
            "Restart the streams one by one, as far as dagster-ckpt line shows snapshots that belong together."
        )
    return {
        stream: start_preview(opened[stream], StartFrom(found.savepoints[stream].snapshot_id))
        for stream in found.streams
    }


def refuse_set(found: SavepointSet, opened: dict[str, StreamHandle], previews: dict[str, RewindPreview]) -> None:
    """Refuse a restart from a set that could lose rows, or that leaves a reader behind."""
    others = [
        reader.message()
        for preview in previews.values()
        for reader in preview.readers
        if reader.stream_id not in found.streams and reader.has_read_undone is not False
    ]
    if others:
        raise RequestFailedError(
            f"Streams {', '.join(found.streams)} are not restarted, nothing was changed: the set lacks streams that "
            f"read them. {' '.join(dict.fromkeys(others))}. Cancel these streams first, or accept the loss."
        )
    for stream, preview in previews.items():
        refuse_loss(opened[stream], preview, accept_loss=False)


def suspend_set(found: SavepointSet, opened: dict[str, StreamHandle], suspend: Callable[[str], object]) -> list[str]:
    """Those that run or wait for a restart, downstream first; returns them."""
    suspended = []
    for stream in reversed(found.streams):
        last = opened[stream].catalog.executions.latest(stream)
        if is_running(opened[stream]) or (last is not None and not last.settled):
            suspend(stream)
            suspended.append(stream)
    return suspended


def restore_set(found: SavepointSet, opened: dict[str, StreamHandle], *, origin: str, report: Report) -> None:
    """With their sinks, downstream first. Repeatable.

    Where a table needs a Spark session that this process lacks, the next start of its stream rolls it back.
    """
    for stream in reversed(found.streams):
        _restore(opened[stream], found.savepoints[stream].snapshot_id, origin, report)
        report(f"restored {stream} to batch {found.savepoints[stream].batch_id}")


def _restore(stream: StreamHandle, snapshot_id: str, origin: str, report: Report) -> None:
    acquired = acquire(stream.catalog, stream.stream_id, this_holder(f"restore-{uuid.uuid4()}", origin, None))
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        fence_predecessor(stream, acquired, still_mine=lease.check)
        try:
            restore_snapshot(stream, snapshot_id, lease, report)
        except StorageAccessError as error:
            if not isinstance(error.__cause__, NoSessionError):
                raise
            # Streams that read the table do not start before.
            report(f"{stream.stream_id}: {error}")


def set_before(
    found: SavepointSet, opened: dict[str, StreamHandle], sets: Sequence[SavepointSet]
) -> SavepointSet | None:
    """The set that an interrupted restart from `found` took first: no stream has run since.

    Another one would be of streams that are restored in part, and would hide the way back.
    """
    for each in sets:
        if each.label == label_before(found) and set(each.savepoints) == set(found.streams):
            latest = [opened[stream].catalog.executions.latest(stream) for stream in found.streams]
            began = [last.started_at_ms for last in latest if last is not None]
            return each if max(began, default=0) < each.created_at_ms else None
    return None


def label_before(found: SavepointSet) -> str:
    """Of the set that a restart from `found` takes first."""
    return f"before-{found.set_id[:8]}"


def save_before(take: Callable[[], SavepointSet], report: Report) -> None:
    """A stream may be too broken for a savepoint, which the restart mends."""
    try:
        before = take()
    except CkptError as error:
        report(f"no set of the streams as they are could be taken, so none leads back: {error}")
    else:
        report(f"to undo this, restart from savepoint set {before.label or before.set_id}")
