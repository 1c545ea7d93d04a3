"""Leases ensure that each stream has one writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Row, select

from dagster_ckpt.catalog.database import Records, cells, is_lease, lease_lost_message, lease_row
from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.catalog.records import EventType, Holder, LeaseRecord
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.errors import CatalogError, LeaseHeldError, LeaseLostError

_KEPT = ("stream_id", "token", "predecessor_unproven")
_EMPTY = {column.name: None for column in leases.columns if column.name not in _KEPT}

_NEEDED = ("run_id", "host", "pid", "expires_at_ms")


class LeaseRecords(Records):
    def acquire(
        self, stream_id: str, holder: Holder, ttl_ms: int, *, take_over: LeaseRecord | None = None, above: int = 0
    ) -> LeaseRecord:
        """Acquire a lease if it is free or expired, otherwise raise LeaseHeldError.

        Args:
            take_over: An unexpired lease whose holder is proven dead.
            above: A token that a lost catalog issued; the new one is greater.
        """
        with self._database.writing() as connection:
            self._database.insert_if_absent(connection, leases, stream_id=stream_id, token=0)
            row = connection.execute(select(leases).where(leases.c.stream_id == stream_id).with_for_update()).one()
            # Read only now, because PostgreSQL may have waited for the lock.
            now_ms = self._database.now_ms(connection)
            before = _record(row, now_ms) if row.execution_id is not None else None
            is_proven = take_over is not None and is_lease(row, take_over)
            if before is not None and not before.expired and not is_proven:
                raise LeaseHeldError(lease_held_message(before, now_ms))
            values = {
                **asdict(holder),
                "token": max(row.token, above) + 1,
                "acquired_at_ms": now_ms,
                "renewed_at_ms": now_ms,
                "expires_at_ms": now_ms + ttl_ms,
                "predecessor_unproven": row.predecessor_unproven or (before is not None and not is_proven),
            }
            take = leases.update().where(leases.c.stream_id == stream_id).values(**values).returning(leases)
            taken = _record(connection.execute(take).one(), now_ms)
            if before is not None:
                self._database.record_event(
                    connection,
                    stream_id,
                    EventType.LEASE_TAKEN_OVER,
                    execution_id=holder.execution_id,
                    payload={
                        "from_execution": before.execution_id,
                        "from_run": before.run_id,
                        "from_pid": before.pid,
                        "from_host": before.host,
                        "proven": is_proven,
                        "token": values["token"],
                    },
                )
        if before is None:
            log_transition(stream_id, f"Acquired the lease of stream {stream_id}: {_holder(taken)}")
        return taken

    def renew(self, lease: LeaseRecord, ttl_ms: int) -> LeaseRecord:
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            renewal = leases.update().where(_this(lease)).values(renewed_at_ms=now_ms, expires_at_ms=now_ms + ttl_ms)
            renewed = connection.execute(renewal.returning(leases)).one_or_none()
            if renewed is None:
                raise LeaseLostError(lease_lost_message(lease.stream_id, lease_row(connection, lease.stream_id)))
            return _record(renewed, now_ms)

    def release(self, lease: LeaseRecord) -> None:
        with self._database.writing() as connection:
            released = connection.execute(leases.update().where(_this(lease)).values(**_EMPTY)).rowcount
        if released:
            log_transition(lease.stream_id, f"Released the lease of stream {lease.stream_id}: token {lease.token}")

    def fenced(self, lease: LeaseRecord) -> None:
        """Record that the queries of all previous holders can plan no further batch."""
        with self._database.writing_under(lease) as connection:
            of_stream = leases.c.stream_id == lease.stream_id
            connection.execute(leases.update().where(of_stream).values(predecessor_unproven=False))

    def in_force_of_jvm(self, host: str, boot_id: str, jvm_pid: int) -> list[LeaseRecord]:
        of_jvm = (leases.c.host == host) & (leases.c.boot_id == boot_id) & (leases.c.jvm_pid == jvm_pid)
        with self._database.reading() as connection:
            now_ms = self._database.now_ms(connection)
            rows = connection.execute(select(leases).where(of_jvm & (leases.c.expires_at_ms > now_ms)))
            return [_record(row, now_ms) for row in rows]

    def current(self, stream_id: str) -> LeaseRecord | None:
        """Return the held lease, even if expired."""
        with self._database.reading() as connection:
            row = lease_row(connection, stream_id)
            if row is None or row.execution_id is None:
                return None
            return _record(row, self._database.now_ms(connection))

    def all_held(self) -> list[LeaseRecord]:
        with self._database.reading() as connection:
            now_ms = self._database.now_ms(connection)
            rows = connection.execute(select(leases).where(leases.c.execution_id.is_not(None)))
            return [_record(row, now_ms) for row in rows]

    @contextmanager
    def held(self, lease: LeaseRecord) -> Iterator[None]:
        """Prevent a take-over of the lease during one short step outside of the catalog.

        PostgreSQL ends a transaction that is idle for longer than a call may take.
        """
        with self._database.writing_under(lease):
            yield

    def check(self, lease: LeaseRecord) -> None:
        with self._database.reading() as connection:
            row = lease_row(connection, lease.stream_id)
            if not is_lease(row, lease):
                raise LeaseLostError(lease_lost_message(lease.stream_id, row))


def _this(lease: LeaseRecord) -> ColumnElement[bool]:
    """As `is_lease`."""
    of_holder = (leases.c.token == lease.token) & (leases.c.execution_id == lease.execution_id)
    return (leases.c.stream_id == lease.stream_id) & of_holder


def _record(row: Row[Any], now_ms: int) -> LeaseRecord:
    troubles: list[str] = []
    values = cells(row, leases, troubles)
    troubles += [
        f"{name} is missing" for name in _NEEDED if values["execution_id"] is not None and values[name] is None
    ]
    if troubles:
        # Treated as expired, it would let a second writer in.
        raise CatalogError(
            f"The lease of stream {row.stream_id!r} cannot be read: {'; '.join(troubles)}. Restore the catalog from a "
            "backup; or, once no run of the stream is active, set leases.execution_id to NULL."
        )
    return LeaseRecord(**values, expired=(values["expires_at_ms"] or 0) <= now_ms)


def _holder(lease: LeaseRecord) -> str:
    return f"token {lease.token}, run {lease.run_id} (process {lease.pid} on {lease.host})"


def lease_held_message(lease: LeaseRecord, now_ms: int) -> str:
    return (
        f"Stream {lease.stream_id!r} is being written by run {lease.run_id} (process {lease.pid} on {lease.host}), "
        f"whose lease expires in {(lease.expires_at_ms - now_ms) / 1000:.0f} s unless it is renewed. A stream has one "
        "writer: terminate that run, or wait until it ends."
    )
