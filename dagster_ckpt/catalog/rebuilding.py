"""Rebuild a lost catalog: register a stream and its snapshots again in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dagster_ckpt.catalog.database import Database, as_text
from dagster_ckpt.catalog.records import LeaseRecord, SnapshotRecord
from dagster_ckpt.catalog.streams import raise_counter
from dagster_ckpt.catalog.tables import leases, snapshots, streams, timelines


@dataclass(frozen=True)
class RebuiltStream:
    """What to register for a stream that the catalog does not know.

    Attributes:
        snapshots: Its snapshots.
        next_number: A number greater than all that are in use.
        live_directory: The live directory of its query, or None.
        live_generation: The highest number of a live directory there.
        timeline: Its current timeline.
        restored_snapshot_id: The snapshot that this timeline began with, if known.
        begins: For each timeline, its parent timeline and the batch at which it branched off.
        plan: The plan that its state belongs to, if known.
    """

    snapshots: Sequence[SnapshotRecord]
    next_number: int
    live_directory: str | None
    live_generation: int
    timeline: int
    restored_snapshot_id: str | None = None
    begins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None


class RebuildRecords:
    """Writes of a rebuild."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_snapshots(self, lease: LeaseRecord, added: Sequence[SnapshotRecord], *, next_number: int) -> None:
        """Register snapshots of a stream that the catalog knows.

        Raises:
            LeaseLostError: The lease is no longer held; nothing was changed.
        """
        with self._database.writing_under(lease) as connection:
            for snapshot in added:
                connection.execute(snapshots.insert().values(**_columns(snapshot)))
            raise_counter(connection, lease.stream_id, next_number)

    def register(self, lease: LeaseRecord, rebuilt: RebuiltStream) -> None:
        """Register a stream's snapshots, live directory and timelines.

        The previous holder of the stream's lease is unknown, so its query is fenced before the next
        start.

        Raises:
            LeaseLostError: The lease is no longer held; nothing was changed.
        """
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            for snapshot in rebuilt.snapshots:
                connection.execute(snapshots.insert().values(**_columns(snapshot)))
            for timeline, (parent, to_batch) in rebuilt.begins.items():
                begin = {"stream_id": stream_id, "timeline": timeline, "parent": parent, "to_batch": to_batch}
                self._database.insert_if_absent(connection, timelines, **begin)
            connection.execute(
                streams.update()
                .where(streams.c.stream_id == stream_id)
                .values(
                    live_directory=rebuilt.live_directory,
                    live_generation=rebuilt.live_generation,
                    timeline=rebuilt.timeline,
                    restored_snapshot_id=rebuilt.restored_snapshot_id,
                    plan=as_text(dict(rebuilt.plan)) if rebuilt.plan is not None else None,
                    updated_at_ms=self._database.now_ms(connection),
                )
            )
            raise_counter(connection, stream_id, rebuilt.next_number)
            of_stream = leases.c.stream_id == stream_id
            connection.execute(leases.update().where(of_stream).values(predecessor_unproven=True))


def _columns(snapshot: SnapshotRecord) -> dict[str, Any]:
    known = {column.name for column in snapshots.columns}
    values = {each.name: getattr(snapshot, each.name) for each in fields(snapshot) if each.name in known}
    return values | {
        "status": snapshot.status.value,
        "trigger": snapshot.trigger.value,
        "properties": as_text(dict(snapshot.properties)),
    }
