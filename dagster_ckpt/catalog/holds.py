"""Holds protect snapshots from deletion while they are in use.

A hold and a deletion both lock the snapshot's row: a reader with a hold never loses a byte, a late one gets an error
before it reads.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, exists, or_, select

from dagster_ckpt.catalog.database import Records, lock_snapshot, optional_dict
from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.history import read_snapshot
from dagster_ckpt.catalog.pending_restore import refers_to
from dagster_ckpt.catalog.records import UNANSWERED, HoldKind, HoldRecord, LeaseRecord, SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.savepoint_sets import set_in
from dagster_ckpt.catalog.tables import desired_states, holds, requests, snapshots, streams
from dagster_ckpt.errors import SnapshotNotFoundError
from dagster_ckpt.values.modes import SnapshotKind

_THERE = (SnapshotStatus.COMPLETED.value, SnapshotStatus.IN_PROGRESS.value)
_UPGRADE_IS_OVER = frozenset(phase.value for phase in UpgradePhase if phase.is_over)


class HoldRecords(Records):
    def use(self, wanted: Sequence[SnapshotRecord], *, holder: str, ttl_ms: int) -> list[HoldRecord]:
        """Hold snapshots until `ttl_ms` pass without a renewal; unregistered ones are skipped."""
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            run_out = (holds.c.kind == HoldKind.USE.value) & (holds.c.expires_at_ms <= now_ms)
            connection.execute(holds.delete().where(run_out))
            made = []
            for snapshot in wanted:
                row = lock_snapshot(connection, snapshot.snapshot_id)
                if row is not None and (row.location is None or row.location == snapshot.location):
                    _refuse_if_gone(connection, row)
                    expires_at_ms = now_ms + ttl_ms
                    made.append(_insert(connection, row, HoldKind.USE, holder, now_ms, expires_at_ms=expires_at_ms))
            return made

    def renew(self, hold_ids: Sequence[str], ttl_ms: int) -> bool:
        """Extend holds; False if one had expired and was removed."""
        with self._database.writing() as connection:
            expires_at_ms = self._database.now_ms(connection) + ttl_ms
            renewed = holds.update().where(holds.c.hold_id.in_(hold_ids)).values(expires_at_ms=expires_at_ms)
            return connection.execute(renewed).rowcount == len(hold_ids)

    def release(self, hold_ids: Sequence[str]) -> None:
        with self._database.writing() as connection:
            connection.execute(holds.delete().where(holds.c.hold_id.in_(hold_ids)))

    def tag(self, snapshot_id: str, *, label: str | None, holder: str, lease: LeaseRecord | None = None) -> HoldRecord:
        with self._database.writing_as(lease) as connection:
            row = lock_snapshot(connection, snapshot_id)
            if row is None or row.status != SnapshotStatus.COMPLETED.value:
                raise SnapshotNotFoundError(
                    deleted_message(connection, row.stream_id, snapshot_id) if row else _unknown(snapshot_id)
                )
            connection.execute(holds.delete().where(_tags(snapshot_id)))
            if label is not None:
                connection.execute(snapshots.update().where(snapshots.c.snapshot_id == snapshot_id).values(label=label))
            return _insert(connection, row, HoldKind.TAG, holder, self._database.now_ms(connection))

    def release_tag(self, snapshot_id: str) -> bool:
        with self._database.writing() as connection:
            lock_snapshot(connection, snapshot_id)
            if not connection.execute(holds.delete().where(_tags(snapshot_id))).rowcount:
                return False
            checkpoint = (snapshots.c.snapshot_id == snapshot_id) & (snapshots.c.kind == SnapshotKind.CHECKPOINT.value)
            connection.execute(snapshots.update().where(checkpoint).values(label=None))
            return True

    def tagged(self, stream_id: str) -> frozenset[str]:
        query = select(holds.c.snapshot_id).where(holds.c.stream_id == stream_id, holds.c.kind == HoldKind.TAG.value)
        return frozenset(row.snapshot_id for row in self._database.rows(query))

    def on(self, snapshot_id: str) -> list[HoldRecord]:
        with self._database.reading() as connection:
            row = connection.execute(select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)).one_or_none()
            return list(standing(connection, row, self._database.now_ms(connection))) if row is not None else []


def refer(connection: Connection, snapshot_id: str, *, request_id: str, now_ms: int) -> None:
    """Hold a snapshot until a request is answered, in the transaction that creates the request."""
    row = lock_snapshot(connection, snapshot_id)
    if row is not None:
        _refuse_if_gone(connection, row)
        _insert(connection, row, HoldKind.REFERENCE, f"request {request_id}", now_ms, request_id=request_id)


def standing(connection: Connection, snapshot: Row[Any], now_ms: int) -> Iterator[HoldRecord]:
    """The holds of a snapshot, and references to it in other tables."""
    is_open = exists().where(requests.c.request_id == holds.c.request_id, requests.c.status.in_(UNANSWERED))
    stands = or_(
        holds.c.kind == HoldKind.TAG.value,
        and_(holds.c.kind == HoldKind.USE.value, holds.c.expires_at_ms > now_ms),
        and_(holds.c.kind == HoldKind.REFERENCE.value, is_open),
    )
    for row in connection.execute(select(holds).where(holds.c.snapshot_id == snapshot.snapshot_id, stands)):
        yield HoldRecord(**{**row._mapping, "kind": HoldKind(row.kind)})
    for holder in _referring(connection, snapshot):
        yield HoldRecord("", snapshot.snapshot_id, snapshot.stream_id, HoldKind.REFERENCE, holder, None, None, now_ms)


def _referring(connection: Connection, snapshot: Row[Any]) -> Iterator[str]:
    pending = select(streams.c.stream_id, streams.c.pending_restore).where(streams.c.pending_restore.is_not(None))
    for row in connection.execute(pending):
        restore = optional_dict(row.pending_restore) or {}
        if refers_to(restore, snapshot_id=snapshot.snapshot_id, location=snapshot.location):
            yield f"an unfinished start of stream {row.stream_id}"
    held_by = set_in(snapshot)
    if held_by is not None:
        yield f"savepoint set {held_by['id']}"
    upgrades = select(desired_states.c.upgrade).where(desired_states.c.stream_id == snapshot.stream_id)
    upgrade = optional_dict(connection.execute(upgrades).scalar_one_or_none()) or {}
    if upgrade.get("snapshot_id") == snapshot.snapshot_id and upgrade.get("phase") not in _UPGRADE_IS_OVER:
        yield "an unfinished upgrade may be rolled back to it"


def describe_holds(held: Iterable[HoldRecord]) -> str:
    return "; ".join(f"{hold.kind.value.lower()} by {hold.holder}" for hold in held)


def deleted_message(connection: Connection, stream_id: str, snapshot_id: str) -> str:
    row = connection.execute(select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)).one()
    there = select(snapshots).where(
        snapshots.c.stream_id == stream_id, snapshots.c.status == SnapshotStatus.COMPLETED.value
    )
    newest = connection.execute(there.order_by(snapshots.c.number.desc()).limit(8))
    known = ", ".join(read_snapshot(each).reference for each in newest)
    return (
        f"{read_snapshot(row).name} of stream {stream_id!r} (snapshot {snapshot_id}) is {row.status}: since it was "
        "listed, newer snapshots subsumed it or a user deleted it. The stream now has: "
        f"{known or 'no snapshot'}. Choose one of these, or tag a checkpoint to keep it."
    )


def _refuse_if_gone(connection: Connection, row: Row[Any]) -> None:
    if row.status not in _THERE:
        raise SnapshotNotFoundError(deleted_message(connection, row.stream_id, row.snapshot_id))


def _insert(
    connection: Connection,
    snapshot: Row[Any],
    kind: HoldKind,
    holder: str,
    now_ms: int,
    *,
    request_id: str | None = None,
    expires_at_ms: int | None = None,
) -> HoldRecord:
    hold = HoldRecord(
        str(uuid.uuid4()), snapshot.snapshot_id, snapshot.stream_id, kind, holder, request_id, expires_at_ms, now_ms
    )
    connection.execute(holds.insert().values(**{**vars(hold), "kind": kind.value}))
    return hold


def _tags(snapshot_id: str) -> Any:
    return (holds.c.snapshot_id == snapshot_id) & (holds.c.kind == HoldKind.TAG.value)


def _unknown(snapshot_id: str) -> str:
    return f"The catalog has no snapshot {snapshot_id!r}. Choose one from the list of the stream's snapshots."
