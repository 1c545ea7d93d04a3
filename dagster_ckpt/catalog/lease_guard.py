"""Fencing of catalog writes: check within a transaction that a lease is still held."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.errors import LeaseLostError


def lease_row(connection: Connection, stream_id: str) -> Row[Any] | None:
    """The lease of a stream as stored, or None if it was never held."""
    return connection.execute(select(leases).where(leases.c.stream_id == stream_id)).one_or_none()


def require_lease(connection: Connection, stream_id: str, token: int) -> None:
    """Require that a stream's lease has this token, and keep it unchanged until this transaction ends.

    On PostgreSQL the row is locked: a take-over waits for this transaction, and a transaction that
    begins after a take-over finds the new token. On SQLite a write transaction excludes all others
    from its begin.

    Raises:
        LeaseLostError: Another execution holds the lease, or it is not held.
    """
    query = select(leases).where(leases.c.stream_id == stream_id).with_for_update(read=True)
    row = connection.execute(query).one_or_none()
    if row is None or row.token != token or row.execution_id is None:
        raise LeaseLostError(lost(stream_id, row))


def lost(stream_id: str, row: Row[Any] | None) -> str:
    """The message for a former holder of the lease."""
    if row is None or row.execution_id is None:
        return f"The lease of stream {stream_id!r} was released: this execution holds it no longer. Start it again."
    return (
        f"The lease of stream {stream_id!r} is held by run {row.run_id} (process {row.pid} on {row.host}) now. This "
        "execution had not renewed it in time, and stops its query so that there is one writer."
    )
