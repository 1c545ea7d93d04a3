"""A savepoint of a stream whose query is not running: a cut of its unchanging live directory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import LeaseRecord, SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.errors import CatalogError, CkptError, NothingCommittedError
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.ownership import ADOPTED_FROM, adopted_directory
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.snapshotting import (
    BatchFigures,
    NotRecorded,
    SnapshotOrder,
    provenance,
    record_snapshot,
    sharing_base,
    take_snapshot,
    trigger_properties,
)
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind


@dataclass(frozen=True)
class DirectoryToAdopt:
    """A checkpoint directory that plain Spark wrote, and the sinks of its query."""

    url: str
    sinks: Sequence[str] = ()


def savepoint_of_stopped_stream(
    stream: StreamHandle,
    *,
    label: str | None = None,
    target_directory: str | None = None,
    schedule: str | None = None,
    trigger: SnapshotTrigger = SnapshotTrigger.MANUAL,
    lease: LeaseRecord | None = None,
    adopting: DirectoryToAdopt | None = None,
    progress: Progress = lambda _done, _total: None,
) -> SnapshotRecord:
    """Take a savepoint of the current state of a stream that is not running.

    Operators need no lease: reading at a commit is safe alongside any writer, and the number comes from the catalog. A
    run that is about to start its query passes its own. `adopting` is cut instead of the live directory. `trigger`
    counts if no schedule requests it; `progress` gets the numbers of written and of all files.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    directory = record.live_directory if adopting is None else adopting.url
    if directory is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or its state was deleted when it was "
            "canceled. Start it first."
        )
    snapshot_id = str(uuid.uuid4())
    why = trigger if schedule is None else SnapshotTrigger.PERIODIC
    number = stream.catalog.streams.allocate_number(stream.stream_id, lease=lease)
    began_ms = wall_clock_ms()
    sinks = tuple(sinks_written(stream) if adopting is None else adopting.sinks)
    base = sharing_base(stream)
    adopted = adopted_directory(record)
    is_anothers = adopting is not None or (adopted is not None and adopted.is_pending)
    of_adoption = {ADOPTED_FROM: directory} if is_anothers else {}
    order = SnapshotOrder(
        SnapshotKind.SAVEPOINT,
        number,
        snapshot_id,
        base=base.location if base is not None else None,
        target_directory=target_directory,
        sinks=sinks,
        label=label,
        properties=provenance(stream, sinks) | trigger_properties(why, schedule) | of_adoption,
    )
    snapshots = stream.catalog.snapshots
    begun = snapshots.start(
        lease,
        snapshot_id=snapshot_id,
        stream_id=stream.stream_id,
        execution_id=lease.execution_id if lease is not None else None,
        number=number,
        trigger=why,
        timeline=record.timeline,
        label=label,
        schedule=schedule,
    )
    try:
        # The hold on the attempt itself shows that its process is alive.
        with holding(stream.catalog, [begun, base], f"savepoint {snapshot_id}"):
            taken = take_snapshot(stream, LiveDirectory(directory), order, now_ms=began_ms, progress=progress)
    except BaseException as error:
        # An interrupted attempt is no longer in progress either.
        snapshots.fail(lease, snapshot_id, str(error) or type(error).__name__)
        raise
    duration_ms = wall_clock_ms() - began_ms
    try:
        recorded = record_snapshot(stream.catalog, taken, BatchFigures(), duration_ms=duration_ms, lease=lease)
    except BaseException as error:
        if not isinstance(error, CkptError) and lease is None:
            # A signal. With a lease, its next holder settles the attempt.
            snapshots.fail(None, snapshot_id, str(error) or type(error).__name__)
            if snapshots.get(snapshot_id).status is not SnapshotStatus.COMPLETED:
                stream.store.discard(taken.stored.location)
        raise
    if isinstance(recorded, NotRecorded):
        if recorded.is_certain:
            stream.store.discard(taken.stored.location)
        raise CatalogError(recorded.why)
    return recorded
