"""Deletes old rows of a stream's history, which nothing refers to and no decision needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, func, or_, select

from dagster_ckpt.catalog.database import Records
from dagster_ckpt.catalog.records import UNANSWERED, ExecutionStatus, SnapshotStatus
from dagster_ckpt.catalog.tables import (
    events,
    executions,
    holds,
    launches,
    recovery_failures,
    requests,
    snapshots,
    streams,
)

# Restart strategies and people look back.
KEPT_EXECUTIONS = 20
# Rows per transaction: SQLite has one writer.
_CHUNK = 2_000


@dataclass(frozen=True)
class PrunedHistory:
    stream_id: str
    snapshots: int
    executions: int
    events: int
    requests: int
    recovery_failures: int

    @property
    def total(self) -> int:
        return self.snapshots + self.executions + self.events + self.requests + self.recovery_failures


class PruningRecords(Records):
    def prune(self, stream_id: str, *, before_ms: int, dry_run: bool = False) -> PrunedHistory:
        """The stream may be running.

        These stay: snapshots that exist or are held, the one verified last, the one that the timeline began with, the
        last executions, those of the current live directory, the last that reported sinks, and open requests.
        """
        rows = {
            "snapshots": (snapshots.c.snapshot_id, _old_snapshots(stream_id, before_ms)),
            "executions": (executions.c.execution_id, _old_executions(stream_id, before_ms)),
            "events": (events.c.sequence, and_(events.c.stream_id == stream_id, events.c.at_ms < before_ms)),
            "requests": (requests.c.request_id, _old_requests(stream_id, before_ms)),
            "recovery_failures": (
                recovery_failures.c.ordinal,
                and_(
                    recovery_failures.c.stream_id == stream_id,
                    recovery_failures.c.is_over.is_(True),
                    recovery_failures.c.at_ms < before_ms,
                ),
            ),
        }
        counted = {name: self._delete(key, old, dry_run=dry_run) for name, (key, old) in rows.items()}
        return PrunedHistory(stream_id, **counted)

    def _delete(self, key: Any, old: ColumnElement[bool], *, dry_run: bool) -> int:
        table: Table = key.table
        if dry_run:
            with self._database.reading() as connection:
                return int(connection.execute(select(func.count()).select_from(table).where(old)).scalar_one())
        deleted = 0
        while True:
            with self._database.writing() as connection:
                count = _delete_chunk(connection, table, select(key).where(old).limit(_CHUNK), old)
            deleted += count
            if count < _CHUNK:
                return deleted


def _delete_chunk(connection: Connection, table: Table, some: Select[Any], old: ColumnElement[bool]) -> int:
    keys = connection.execute(some).scalars().all()
    column = some.selected_columns[0]
    # The key of a failed recovery is unique within its stream only.
    return connection.execute(table.delete().where(column.in_(keys), old)).rowcount if keys else 0


def _old_snapshots(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    newest_verified = (
        select(snapshots.c.snapshot_id)
        .where(snapshots.c.stream_id == stream_id, snapshots.c.verified_at_ms.is_not(None))
        .order_by(snapshots.c.verified_at_ms.desc())
        .limit(1)
    )
    named = [
        select(column).where(streams.c.stream_id == stream_id, column.is_not(None))
        for column in (streams.c.restored_snapshot_id, streams.c.preferred_savepoint_id)
    ]
    held = select(holds.c.snapshot_id).where(holds.c.stream_id == stream_id)
    return and_(
        snapshots.c.stream_id == stream_id,
        snapshots.c.status.in_((SnapshotStatus.DELETED.value, SnapshotStatus.FAILED.value)),
        snapshots.c.created_at_ms < before_ms,
        *(snapshots.c.snapshot_id.not_in(each.scalar_subquery()) for each in (*named, newest_verified, held)),
    )


def _old_executions(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    of_stream = executions.c.stream_id == stream_id
    others = executions.alias("others")
    last = select(func.max(others.c.ordinal)).where(others.c.stream_id == stream_id)
    with_sinks = last.where(others.c.progress.contains('"sinks":["', autoescape=True))
    live = select(streams.c.live_directory).where(streams.c.stream_id == stream_id).scalar_subquery()
    return and_(
        of_stream,
        executions.c.settled.is_(True),
        executions.c.status.not_in((ExecutionStatus.STARTING.value, ExecutionStatus.RUNNING.value)),
        executions.c.ended_at_ms < before_ms,
        executions.c.ordinal <= last.scalar_subquery() - KEPT_EXECUTIONS,
        executions.c.ordinal != func.coalesce(with_sinks.scalar_subquery(), 0),
        or_(executions.c.live_directory.is_(None), live.is_(None), executions.c.live_directory != live),
    )


def _old_requests(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    referring = (holds.c.request_id, launches.c.request_id)
    return and_(
        requests.c.stream_id == stream_id,
        requests.c.status.not_in(UNANSWERED),
        requests.c.resolved_at_ms < before_ms,
        *(
            requests.c.request_id.not_in(
                select(column).where(column.table.c.stream_id == stream_id, column.is_not(None)).scalar_subquery()
            )
            for column in referring
        ),
    )
