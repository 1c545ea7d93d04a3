"""Streams, their live directories and timelines, and their registration after the catalog was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, Row, select

from dagster_ckpt.catalog.database import Records, as_text, cells, read_dict
from dagster_ckpt.catalog.journal import forget_after
from dagster_ckpt.catalog.pending_restore import Forked, PendingRestore, read_pending, stored_pending
from dagster_ckpt.catalog.records import (
    EventType,
    LeaseRecord,
    OriginKind,
    SnapshotRecord,
    StateOrigin,
    StreamRecord,
    records_behind_in,
)
from dagster_ckpt.catalog.tables import leases, snapshots, streams, timelines
from dagster_ckpt.errors import CatalogError, StreamNotFoundError
from dagster_ckpt.values.safe_parsing import from_json


class _StreamRows(Records):
    def _change(self, connection: Connection, stream_id: str, **values: Any) -> None:
        now_ms = self._database.now_ms(connection)
        connection.execute(
            streams.update().where(streams.c.stream_id == stream_id).values(**values, updated_at_ms=now_ms)
        )

    def _change_under(self, lease: LeaseRecord, **values: Any) -> None:
        with self._database.writing_under(lease) as connection:
            self._change(connection, lease.stream_id, **values)


class StreamRecords(_StreamRows):
    def ensure(self, stream_id: str, *, name: str, asset_key: str, options: dict[str, Any]) -> StreamRecord:
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            described = {"name": name, "asset_key": asset_key, "options": as_text(options), "updated_at_ms": now_ms}
            new = {"live_generation": 0, "timeline": 0, "next_number": 1, "created_at_ms": now_ms}
            if not self._database.insert_if_absent(connection, streams, stream_id=stream_id, **new, **described):
                connection.execute(streams.update().where(streams.c.stream_id == stream_id).values(**described))
            return _get(connection, stream_id)

    def get(self, stream_id: str) -> StreamRecord:
        with self._database.reading() as connection:
            return _get(connection, stream_id)

    def named(self, name: str) -> StreamRecord:
        """The stream with this id, or the only one that writes the asset with this key."""
        try:
            return self.get(name)
        except StreamNotFoundError:
            writers = [each for each in self.all() if name in each.asset_key.split(", ")]
            if len(writers) != 1:
                raise
            return self.get(writers[0].stream_id)

    def all(self) -> list[StreamRecord]:
        return [_record(row) for row in self._database.rows(select(streams).order_by(streams.c.stream_id))]

    def restore_finished(self, lease: LeaseRecord) -> None:
        self._change_under(lease, pending_restore=None)

    def forget_live_directory(self, lease: LeaseRecord) -> None:
        self._change_under(lease, live_directory=None, pending_restore=None)

    def note_pending(self, lease: LeaseRecord, pending: PendingRestore | None) -> None:
        self._change_under(lease, pending_restore=_as_stored(pending))

    def forget_adoption(self, lease: LeaseRecord) -> None:
        """Record that the stream has no state, because no start has taken over its adopted directory.

        Its next timeline has no past, so no recovery goes back to a snapshot of that directory.
        """
        self._change_under(
            lease,
            live_directory=None,
            live_generation=0,
            timeline=streams.c.timeline + 1,
            restored_snapshot_id=None,
            pending_restore=None,
            plan=None,
            origin=None,
            state_edits=None,
        )

    def count_from(self, lease: LeaseRecord, number: int) -> None:
        with self._database.writing_under(lease) as connection:
            raise_counter(connection, lease.stream_id, number)

    def prefer_savepoint(self, stream_id: str, snapshot_id: str) -> None:
        with self._database.writing() as connection:
            self._change(connection, stream_id, preferred_savepoint_id=snapshot_id)

    def accept_plan(self, stream_id: str, fingerprint: str, *, lease: LeaseRecord | None = None) -> None:
        """Let the next start change to a plan whose differences a user accepted."""
        with self._database.writing_as(lease) as connection:
            _get(connection, stream_id)
            self._change(connection, stream_id, accepted_plan=fingerprint)

    def note_plan(self, lease: LeaseRecord, plan: Mapping[str, Any] | None) -> None:
        self._change_under(lease, plan=as_text(dict(plan or {})), accepted_plan=None)

    def allocate_number(self, stream_id: str, *, lease: LeaseRecord | None = None) -> int:
        """Take a number for a snapshot outside of a coordinator."""
        with self._database.writing_as(lease) as connection:
            _get(connection, stream_id)
            counted = (
                streams.update().where(streams.c.stream_id == stream_id).values(next_number=streams.c.next_number + 1)
            )
            return int(connection.execute(counted.returning(streams.c.next_number)).scalar_one()) - 1

    def switch_live_directory(
        self,
        lease: LeaseRecord,
        live_directory: str,
        *,
        origin: StateOrigin | None = None,
        restored_snapshot_id: str | None = None,
        pending_restore: PendingRestore | None = None,
        claims: bool = False,
        plan: Mapping[str, Any] | None = None,
        state_edits: Sequence[str] | None = None,
        duration_ms: int | None = None,
        accept_undone: str = "",
    ) -> StreamRecord:
        """Switch to another live directory, which increases the generation.

        Refused while an unfenced previous holder may write: its directory would be forgotten.

        Args:
            restored_snapshot_id: The snapshot that it was made from; a new timeline begins with it.
            pending_restore: What remains before the query may start; without a snapshot, a new timeline begins with
                empty state.
            claims: The stream takes ownership of that snapshot.
            plan: The plan of the state, empty if unknown; None as before.
            accept_undone: Why streams downstream may keep what they have read of the rows that this undoes.
        """
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            unfenced = select(leases.c.predecessor_unproven).where(leases.c.stream_id == stream_id)
            if connection.execute(unfenced).scalar_one():
                raise CatalogError(
                    f"Stream {stream_id!r} cannot leave its live directory "
                    f"{_get(connection, stream_id).live_directory}: a previous holder of its lease may still write "
                    "there. Fence that holder first."
                )
            new_timeline = restored_snapshot_id is not None or pending_restore is not None
            if new_timeline:
                forget_after(connection, stream_id, origin.batch_id if origin is not None else None)
            if new_timeline and origin is not None:
                _note_past(connection, stream_id, origin, accept_undone)
            self._change(
                connection,
                stream_id,
                live_directory=live_directory,
                live_generation=streams.c.live_generation + 1,
                timeline=streams.c.timeline + int(new_timeline),
                restored_snapshot_id=restored_snapshot_id if new_timeline else streams.c.restored_snapshot_id,
                pending_restore=_as_stored(pending_restore),
                plan=as_text(dict(plan)) if plan is not None else streams.c.plan,
                origin=as_text(origin.as_record()) if origin is not None else None,
                state_edits=streams.c.state_edits if state_edits is None else _edits_as_text(state_edits),
            )
            if claims and restored_snapshot_id is not None:
                claimed = (snapshots.c.snapshot_id == restored_snapshot_id) & (snapshots.c.stream_id == stream_id)
                connection.execute(snapshots.update().where(claimed).values(claimed=True))
            stream = _get(connection, stream_id)
            self._database.record_event(
                connection,
                stream_id,
                EventType.RESTORED,
                snapshot_id=restored_snapshot_id,
                payload={
                    "live_directory": live_directory,
                    "new_timeline": new_timeline,
                    "duration_ms": duration_ms,
                    **({"accepted": accept_undone} if accept_undone else {}),
                    **(_source(connection, origin, pending_restore) if origin is not None else {}),
                },
            )
            return stream


def raise_counter(connection: Connection, stream_id: str, number: int) -> None:
    behind = (streams.c.stream_id == stream_id) & (streams.c.next_number < number)
    connection.execute(streams.update().where(behind).values(next_number=number))


def _note_past(connection: Connection, stream_id: str, origin: StateOrigin, accept_undone: str) -> None:
    now = connection.execute(select(streams.c.timeline).where(streams.c.stream_id == stream_id)).scalar_one()
    parent = now
    if origin.kind in (OriginKind.SNAPSHOT, OriginKind.ADOPTED):
        of_snapshot = (snapshots.c.snapshot_id == origin.snapshot_id) & (snapshots.c.stream_id == stream_id)
        parent = connection.execute(select(snapshots.c.timeline).where(of_snapshot)).scalar_one_or_none()
    has_past = origin.kind in (OriginKind.SNAPSHOT, OriginKind.DIRECTORY, OriginKind.ADOPTED)
    to_batch = origin.batch_id
    if not has_past or parent is None or to_batch is None:
        if not accept_undone:
            return
        parent, to_batch = now, -1
    begun = {"timeline": now + 1, "parent": parent, "to_batch": to_batch, "accepted": accept_undone or None}
    connection.execute(timelines.insert().values(stream_id=stream_id, **begun))


def _source(connection: Connection, origin: StateOrigin, pending_restore: PendingRestore | None) -> dict[str, Any]:
    full_bytes = select(snapshots.c.full_bytes).where(snapshots.c.snapshot_id == origin.snapshot_id)
    return {
        "origin": origin.kind.value,
        "batch_id": origin.batch_id,
        "kind": origin.snapshot_kind,
        "number": origin.snapshot_number,
        "source": pending_restore.of_stream_id if isinstance(pending_restore, Forked) else None,
        "full_bytes": connection.execute(full_bytes).scalar_one_or_none(),
    }


def _get(connection: Connection, stream_id: str) -> StreamRecord:
    row = connection.execute(select(streams).where(streams.c.stream_id == stream_id)).one_or_none()
    if row is None:
        # SQLite also stores values that are no text.
        listed = connection.execute(select(streams.c.stream_id).order_by(streams.c.stream_id)).scalars()
        known = ", ".join(map(str, listed)) or "none yet"
        raise StreamNotFoundError(
            f"The catalog has no stream {stream_id!r}: the stream was never started, or this is the wrong catalog. "
            f"Streams in it: {known}."
        )
    unreadable: list[str] = []
    cells(row, streams, unreadable)
    read_state_edits(row.state_edits, unreadable)
    if unreadable:
        # Without its directory, a stream would look as if it had never run; without its edits, a recovery could undo
        # them.
        raise CatalogError(
            f"The row of stream {stream_id!r} in the catalog cannot be read: {'; '.join(unreadable)}. Restore the "
            "catalog from a backup, or correct that row of the table streams."
        )
    stream = _record(row)
    if stream.pending_restore is None and row.pending_restore is not None:
        # A query would start on sinks that are not rolled back.
        raise CatalogError(
            f"Stream {stream_id!r} has an unfinished restore whose row in the catalog cannot be read: "
            f"{stream.broken}. Restore the catalog from a backup; or roll back its sinks by hand, then set "
            "streams.pending_restore to NULL."
        )
    return stream


def _record(row: Row[Any]) -> StreamRecord:
    troubles: list[str] = []
    values = cells(row, streams, troubles)
    values["options"] = read_dict(values["options"], "options", troubles) or {}
    values["pending_restore"] = _pending(values["pending_restore"], troubles)
    values["plan"] = read_dict(values["plan"], "plan", troubles)
    values["origin"] = _origin(values["origin"], troubles)
    values["state_edits"] = read_state_edits(values["state_edits"], troubles)
    return StreamRecord(**values, broken="; ".join(troubles) or None)


def _origin(value: str | None, troubles: list[str]) -> StateOrigin | None:
    record = read_dict(value, "origin", troubles)
    try:
        return StateOrigin.of_record(record) if record is not None else None
    except ValueError as error:
        troubles.append(f"origin cannot be read: {error}")
        return None


def _pending(value: str | None, troubles: list[str]) -> PendingRestore | None:
    row = read_dict(value, "pending_restore", troubles)
    try:
        return read_pending(row) if row is not None else None
    except ValueError as error:
        troubles.append(f"pending_restore cannot be read: {error}")
        return None


def _as_stored(pending: PendingRestore | None) -> str | None:
    return as_text(stored_pending(pending)) if pending is not None else None


def _edits_as_text(edits: Sequence[str]) -> str | None:
    return as_text(list(edits)) if edits else None


def read_state_edits(value: str | None, troubles: list[str]) -> tuple[str, ...]:
    try:
        edits = from_json(value) if value is not None else []
    except ValueError:
        edits = None
    if not isinstance(edits, list) or not all(isinstance(edit, str) for edit in edits):
        troubles.append(f"state_edits is {value!r:.80}")
        return ()
    return tuple(edits)


@dataclass(frozen=True)
class RebuiltStream:
    """What to register for an unknown stream; `begins` is each timeline's parent and the batch of its branch."""

    snapshots: Sequence[SnapshotRecord]
    next_number: int
    live_directory: str | None
    live_generation: int
    timeline: int
    restored_snapshot_id: str | None = None
    begins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    state_edits: Sequence[str] = ()


class RebuildRecords(_StreamRows):
    def add_snapshots(self, lease: LeaseRecord, added: Sequence[SnapshotRecord], *, next_number: int) -> None:
        with self._database.writing_under(lease) as connection:
            _insert(connection, added)
            raise_counter(connection, lease.stream_id, next_number)

    def register(self, lease: LeaseRecord, rebuilt: RebuiltStream) -> None:
        """Register a stream of a lost catalog; its next start fences the unknown previous holder of the lease."""
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            _insert(connection, rebuilt.snapshots)
            for timeline, (parent, to_batch) in rebuilt.begins.items():
                begin = {"stream_id": stream_id, "timeline": timeline, "parent": parent, "to_batch": to_batch}
                self._database.insert_if_absent(connection, timelines, **begin)
            self._change(
                connection,
                stream_id,
                live_directory=rebuilt.live_directory,
                live_generation=rebuilt.live_generation,
                timeline=rebuilt.timeline,
                restored_snapshot_id=rebuilt.restored_snapshot_id,
                plan=as_text(dict(rebuilt.plan)) if rebuilt.plan is not None else None,
                state_edits=_edits_as_text(rebuilt.state_edits),
            )
            raise_counter(connection, stream_id, rebuilt.next_number)
            of_stream = leases.c.stream_id == stream_id
            connection.execute(leases.update().where(of_stream).values(predecessor_unproven=True))


def _insert(connection: Connection, added: Sequence[SnapshotRecord]) -> None:
    for snapshot in added:
        connection.execute(snapshots.insert().values(**_columns(snapshot)))


def _columns(snapshot: SnapshotRecord) -> dict[str, Any]:
    known = {column.name for column in snapshots.columns}
    values = {each.name: getattr(snapshot, each.name) for each in fields(snapshot) if each.name in known}
    return values | {
        "kind": snapshot.kind.value,
        "status": snapshot.status.value,
        "trigger": snapshot.trigger.value,
        "properties": as_text(dict(snapshot.properties)),
        "records_behind": records_behind_in(snapshot.properties),
    }
