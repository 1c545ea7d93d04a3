"""Snapshots: checkpoints and savepoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, select

from dagster_ckpt.catalog.database import Records, as_text, lock_snapshot, read_dict
from dagster_ckpt.catalog.event_log import log_renewed, log_triggered, note_changes
from dagster_ckpt.catalog.history import of_stream, past_of, read_snapshot
from dagster_ckpt.catalog.holds import describe_holds, standing
from dagster_ckpt.catalog.records import (
    BROKEN_SINCE_MS,
    PROBLEM_IN_STATE,
    PROVEN_AT_MS,
    RENEWED_AT_MS,
    TARGET_DIRECTORY,
    CompletedSnapshot,
    EventType,
    HoldKind,
    HoldRecord,
    LeaseRecord,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    records_behind_in,
)
from dagster_ckpt.catalog.streams import raise_counter, read_state_edits
from dagster_ckpt.catalog.tables import recovery_failures, snapshots, streams, timelines
from dagster_ckpt.errors import CatalogError, SnapshotHeldError, SnapshotNotFoundError
from dagster_ckpt.values.metrics import LAST_TIME
from dagster_ckpt.values.modes import SnapshotKind

# Savepoints of stopped streams, which an operator takes without an execution.
_OF_STOPPED = snapshots.c.execution_id.is_(None) & (snapshots.c.kind == SnapshotKind.SAVEPOINT.value)


class SnapshotRecords(Records):
    """Snapshots, newest first. An unreadable row is BROKEN, never omitted."""

    def start(
        self,
        lease: LeaseRecord | None,
        *,
        snapshot_id: str,
        stream_id: str | None = None,
        execution_id: str | None = None,
        kind: SnapshotKind = SnapshotKind.SAVEPOINT,
        number: int,
        trigger: SnapshotTrigger,
        timeline: int,
        label: str | None = None,
        request_id: str | None = None,
        schedule: str | None = None,
        target_directory: str | None = None,
    ) -> SnapshotRecord:
        """Record an attempt of an execution, which consumes the number; without a lease, one of a stopped stream."""
        with self._database.writing_as(lease) as connection:
            if lease is not None:
                raise_counter(connection, lease.stream_id, number + 1)
            connection.execute(
                snapshots.insert().values(
                    snapshot_id=snapshot_id,
                    stream_id=lease.stream_id if lease is not None else stream_id,
                    execution_id=execution_id,
                    kind=kind.value,
                    number=number,
                    trigger=trigger.value,
                    timeline=timeline,
                    label=label,
                    request_id=request_id,
                    schedule=schedule,
                    status=SnapshotStatus.IN_PROGRESS.value,
                    properties=as_text({TARGET_DIRECTORY: target_directory} if target_directory is not None else {}),
                    created_at_ms=self._database.now_ms(connection),
                )
            )
            started = _get(connection, snapshot_id)
        log_triggered(started)
        return started

    def complete(
        self,
        lease: LeaseRecord | None,
        snapshot_id: str,
        facts: CompletedSnapshot,
        *,
        after_batch: bool = True,
        alignment_ms: int | None = None,
    ) -> SnapshotRecord:
        """Complete an attempt; without a lease, one of a stopped stream.

        Args:
            after_batch: The execution has committed a batch, so earlier failures of recoveries no longer count.
            alignment_ms: How long the attempt waited for its batch boundary.
        """
        with self._database.writing_as(lease) as connection:
            pending = _is(snapshot_id) & _of(lease) & (snapshots.c.status == SnapshotStatus.IN_PROGRESS.value)
            values = {field.name: getattr(facts, field.name) for field in fields(facts)}
            completed = connection.execute(
                snapshots.update()
                .where(pending)
                .values(
                    **values | {"properties": as_text(dict(facts.properties))},
                    records_behind=records_behind_in(facts.properties),
                    status=SnapshotStatus.COMPLETED.value,
                    completed_at_ms=self._database.now_ms(connection),
                )
            )
            snapshot = _get(connection, snapshot_id)
            if not completed.rowcount:
                raise CatalogError(
                    f"Snapshot {snapshot_id} of stream {snapshot.stream_id!r} cannot be completed: its status in the "
                    f"catalog is {snapshot.status.value}. Take another snapshot."
                )
            figures = ("batch_id", "location", "full_bytes", "incremental_bytes", "duration_ms", "label")
            payload = {name: getattr(snapshot, name) for name in figures} | {"alignment_ms": alignment_ms}
            self._record_event(connection, snapshot, "COMPLETED", payload)
            if after_batch and snapshot.kind is SnapshotKind.CHECKPOINT:
                of_stream = recovery_failures.c.stream_id == snapshot.stream_id
                connection.execute(recovery_failures.update().where(of_stream).values(is_over=True))
            return snapshot

    def renew(self, lease: LeaseRecord, snapshot_id: str, *, attempt_id: str) -> SnapshotRecord:
        """Renew an existing checkpoint, whose position an attempt has found unchanged.

        The checkpoint counts as completed now, and the attempt is forgotten, without an event.
        """
        with self._database.writing_under(lease) as connection:
            existing = (
                _is(snapshot_id)
                & (snapshots.c.stream_id == lease.stream_id)
                & (snapshots.c.status == SnapshotStatus.COMPLETED.value)
            )
            now_ms = self._database.now_ms(connection)
            row = lock_snapshot(connection, snapshot_id)
            values = {"completed_at_ms": now_ms, "properties": _with_property(row, RENEWED_AT_MS, now_ms)}
            if not connection.execute(snapshots.update().where(existing).values(**values)).rowcount:
                raise CatalogError(
                    f"Checkpoint {snapshot_id} of stream {lease.stream_id!r} cannot be renewed: it no longer exists. "
                    "The next attempt takes another one."
                )
            attempt = (snapshots.c.snapshot_id == attempt_id) & (snapshots.c.status == SnapshotStatus.IN_PROGRESS.value)
            connection.execute(snapshots.delete().where(attempt))
            renewed = _get(connection, snapshot_id)
            note_changes(connection, lease.stream_id, [(LAST_TIME, renewed.kind.lower(), now_ms)])
        log_renewed(renewed)
        return renewed

    def proven(self, lease: LeaseRecord, snapshot_id: str) -> None:
        """Record that a query whose state was restored from the snapshot's own bytes has committed a batch."""
        with self._database.writing_under(lease) as connection:
            row = lock_snapshot(connection, snapshot_id)
            # A fork restores a snapshot of another stream, whose retention it must not affect.
            if row is not None and row.stream_id == lease.stream_id:
                proven = _with_property(row, PROVEN_AT_MS, self._database.now_ms(connection))
                connection.execute(snapshots.update().where(_is(snapshot_id)).values(properties=proven))

    def damage_found_ms(self, stream_id: str) -> int | None:
        """When a verification last found an intact snapshot broken, even if it was deleted since."""
        broken = select(snapshots.c.properties, snapshots.c.verified_at_ms).where(
            snapshots.c.stream_id == stream_id, snapshots.c.verified_problem.is_not(None)
        )
        with self._database.reading() as connection:
            rows = connection.execute(broken).all()
        since = ((read_dict(row.properties, "properties", []) or {}).get(BROKEN_SINCE_MS) for row in rows)
        found = [at if isinstance(at, int) else row.verified_at_ms for at, row in zip(since, rows, strict=True)]
        return max(found, default=None)

    def fail(
        self, lease: LeaseRecord | None, snapshot_id: str, reason: str, *, streak: tuple[int, int] | None = None
    ) -> None:
        """Fail an attempt; a completed snapshot stays as it is. Without a lease: as for `complete`.

        Args:
            streak: Consecutive failures including this one, and how many are tolerated; for the log.
        """
        counted = dict(zip(("failures", "tolerable"), streak, strict=True)) if streak is not None else {}
        with self._database.writing_as(lease) as connection:
            pending = _is(snapshot_id) & _of(lease) & (snapshots.c.status == SnapshotStatus.IN_PROGRESS.value)
            failed = snapshots.update().where(pending).values(status=SnapshotStatus.FAILED.value, failure_reason=reason)
            if connection.execute(failed).rowcount:
                snapshot = _get(connection, snapshot_id)
                took_ms = self._database.now_ms(connection) - snapshot.created_at_ms
                payload = {"reason": reason, "duration_ms": took_ms, **counted}
                self._record_event(connection, snapshot, "FAILED", payload)

    def verified(self, snapshot_id: str, problem: str | None, *, state_was_read: bool = False) -> str | None:
        """Record the result of a verification; return the problem recorded now. Unknown snapshots are ignored.

        A problem in the state, or of a check whose depth is unknown, is cleared only if the state was read.

        Args:
            state_was_read: Spark read the state from a copy, or could not.
        """
        with self._database.writing() as connection:
            row = lock_snapshot(connection, snapshot_id)
            if row is None:
                return problem
            known = read_dict(row.properties, "properties", []) or {}
            of_bytes = row.verified_problem is None or known.get(PROBLEM_IN_STATE) is False
            if problem is None and not of_bytes and not state_was_read:
                return str(row.verified_problem)
            now_ms = self._database.now_ms(connection)
            properties: dict[str, object] = {}
            if problem is None and state_was_read:
                properties[PROVEN_AT_MS] = now_ms
            elif problem is not None and row.verified_problem is None:
                properties = {BROKEN_SINCE_MS: now_ms, PROBLEM_IN_STATE: state_was_read}
            elif problem is not None and state_was_read:
                properties[PROBLEM_IN_STATE] = True
            changed = {"verified_at_ms": now_ms, "verified_problem": problem}
            if properties:
                changed["properties"] = as_text(known | properties)
            connection.execute(snapshots.update().where(_is(snapshot_id)).values(**changed))
            return problem

    def give_to_stream(self, snapshot_id: str) -> None:
        """Let the stream own a savepoint, which it deletes like a checkpoint."""
        with self._database.writing() as connection:
            _get(connection, snapshot_id)
            connection.execute(snapshots.update().where(_is(snapshot_id)).values(claimed=True))

    def mark_deleting(self, snapshot_id: str, *, lease: LeaseRecord | None) -> None:
        """Mark a snapshot before its bytes are deleted: no recovery uses it from now on. Operators have no lease.

        Raises:
            SnapshotHeldError: A hold protects it, and its deletion has not begun.
        """
        with self._database.writing_as(lease) as connection:
            row = lock_snapshot(connection, snapshot_id)
            if row is not None and row.status != SnapshotStatus.DELETING.value:
                _refuse_held(row, list(standing(connection, row, self._database.now_ms(connection))))
            _get(connection, snapshot_id)
            connection.execute(snapshots.update().where(_is(snapshot_id)).values(status=SnapshotStatus.DELETING.value))

    def deleted(
        self, snapshot_id: str, reason: str, *, lease: LeaseRecord | None, freed_bytes: int | None = None
    ) -> None:
        with self._database.writing_as(lease) as connection:
            present = _is(snapshot_id) & (snapshots.c.status != SnapshotStatus.DELETED.value)
            gone = connection.execute(
                snapshots.update().where(present).values(status=SnapshotStatus.DELETED.value)
            ).rowcount
            snapshot = _get(connection, snapshot_id)
            if not gone:
                return
            payload = {
                "kind": snapshot.kind,
                "number": snapshot.number,
                "batch_id": snapshot.batch_id,
                "full_bytes": snapshot.full_bytes,
                "freed_bytes": freed_bytes,
                "reason": reason,
                "location": snapshot.location,
            }
            self._database.record_event(
                connection, snapshot.stream_id, EventType.SNAPSHOT_DELETED, snapshot_id=snapshot_id, payload=payload
            )

    def get(self, snapshot_id: str) -> SnapshotRecord:
        with self._database.reading() as connection:
            return _get(connection, snapshot_id)

    def of_stream(
        self, stream_id: str, *, kind: SnapshotKind | None = None, status: SnapshotStatus | None = None
    ) -> list[SnapshotRecord]:
        found = self._all(of_stream(stream_id, kind, status))
        # A row may have turned out to be BROKEN.
        return [snapshot for snapshot in found if status is None or snapshot.status is status]

    def of_request(self, stream_id: str, request_id: str) -> list[SnapshotRecord]:
        of_request = (snapshots.c.stream_id == stream_id) & (snapshots.c.request_id == request_id)
        return self._all(select(snapshots).where(of_request))

    def at_location(self, stream_id: str, location: str) -> SnapshotRecord | None:
        at_place = (snapshots.c.stream_id == stream_id) & (snapshots.c.location == location)
        return next(iter(self._all(select(snapshots).where(at_place))), None)

    def completed(self, stream_id: str) -> list[SnapshotRecord]:
        return self.of_stream(stream_id, status=SnapshotStatus.COMPLETED)

    def newest_checkpoint(self, stream_id: str) -> SnapshotRecord | None:
        return next(
            iter(self.of_stream(stream_id, kind=SnapshotKind.CHECKPOINT, status=SnapshotStatus.COMPLETED)), None
        )

    def by_id(self, snapshot_ids: Sequence[str]) -> dict[str, SnapshotRecord]:
        found = self._all(select(snapshots).where(snapshots.c.snapshot_id.in_(snapshot_ids)))
        return {snapshot.snapshot_id: snapshot for snapshot in found}

    def restorable(self, stream_id: str) -> list[SnapshotRecord]:
        """Snapshots that an automatic recovery may use, newest state first.

        These are the one that the current timeline began with, and those of the timeline and its ancestors up to the
        branch that contain exactly the edits of the stream's state.
        """
        with self._database.reading() as connection:
            stream = connection.execute(
                select(streams.c.timeline, streams.c.restored_snapshot_id, streams.c.state_edits).where(
                    streams.c.stream_id == stream_id
                )
            ).one_or_none()
            begins = connection.execute(select(timelines).where(timelines.c.stream_id == stream_id)).all()
        if stream is None:
            return []
        past = past_of(stream.timeline, {row.timeline: (row.parent, row.to_batch) for row in begins})
        edits = read_state_edits(stream.state_edits, [])
        found = [
            snapshot
            for snapshot in self.completed(stream_id)
            if snapshot.snapshot_id == stream.restored_snapshot_id
            or (snapshot.state_edits == edits and _is_past(snapshot, stream.timeline, past))
        ]
        # The sort is stable: of one batch, the newest first.
        return sorted(found, key=lambda snapshot: -1 if snapshot.batch_id is None else snapshot.batch_id, reverse=True)

    def _all(self, query: Select[Any]) -> list[SnapshotRecord]:
        ordered = query.order_by(snapshots.c.number.desc(), snapshots.c.created_at_ms.desc())
        return [read_snapshot(row) for row in self._database.rows(ordered)]

    def _record_event(
        self, connection: Connection, snapshot: SnapshotRecord, what: str, payload: dict[str, Any]
    ) -> None:
        self._database.record_event(
            connection,
            snapshot.stream_id,
            EventType[f"{snapshot.kind}_{what}"],
            snapshot_id=snapshot.snapshot_id,
            execution_id=snapshot.execution_id,
            payload={"kind": snapshot.kind, "number": snapshot.number, **payload},
        )


def _is(snapshot_id: str) -> ColumnElement[bool]:
    return snapshots.c.snapshot_id == snapshot_id


def _with_property(row: Row[Any] | None, name: str, value: object) -> str:
    properties = read_dict(row.properties, "properties", []) if row is not None else None
    return as_text({**(properties or {}), name: value})


def _is_past(snapshot: SnapshotRecord, timeline: int, past: Mapping[int, int]) -> bool:
    if snapshot.timeline == timeline:
        return True
    return snapshot.batch_id is not None and snapshot.batch_id <= past.get(snapshot.timeline, -1)


def _refuse_held(snapshot: Row[Any], found: Sequence[HoldRecord]) -> None:
    if found:
        raise SnapshotHeldError(
            f"snapshot {snapshot.snapshot_id} of stream {snapshot.stream_id!r} is held ({describe_holds(found)})",
            passes=all(hold.kind is HoldKind.USE for hold in found),
        )


def _of(lease: LeaseRecord | None) -> ColumnElement[bool]:
    return _OF_STOPPED if lease is None else snapshots.c.stream_id == lease.stream_id


def _get(connection: Connection, snapshot_id: str) -> SnapshotRecord:
    row = connection.execute(select(snapshots).where(_is(snapshot_id))).one_or_none()
    if row is None:
        raise SnapshotNotFoundError(
            f"The catalog has no snapshot {snapshot_id!r}. Choose one from the list of the stream's snapshots, or "
            "give a location."
        )
    return read_snapshot(row)
