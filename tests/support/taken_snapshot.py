"""A snapshot of a stream, taken and recorded as an attempt does."""

from __future__ import annotations

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotTrigger
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.snapshotting import SnapshotOrder, sharing_base, take_snapshot
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf


def taken(shelf: Shelf, kind: SnapshotKind, *, label: str | None = None) -> SnapshotRecord:
    """A snapshot of the stream's live directory as it is, as an attempt takes and records it."""
    stream = shelf.stream
    snapshots = as_writer(stream.catalog, STREAM).snapshots
    record = stream.catalog.streams.get(STREAM)
    base = sharing_base(stream)
    sinks = tuple(stream.catalog.executions.last_sinks(STREAM))
    number = stream.catalog.streams.allocate_number(STREAM)
    order = SnapshotOrder(kind, number, base=base.location if base else None, sinks=sinks)
    snapshots.start(
        snapshot_id=order.snapshot_id,
        execution_id="first",
        kind=kind,
        number=order.number,
        trigger=SnapshotTrigger.MANUAL,
        timeline=record.timeline,
        label=label,
    )
    taken = take_snapshot(stream, LiveDirectory(record.live_directory or ""), order, now_ms=1)
    return as_writer(stream.catalog, STREAM).complete(
        order.snapshot_id,
        location=taken.stored.location,
        batch_id=taken.batch_id,
        query_id=taken.query_id,
        properties=dict(taken.properties),
    )
