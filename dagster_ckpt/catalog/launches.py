"""Launched drivers: durable handles of driver processes, which outlive the process that launched them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, Select, select

from dagster_ckpt.catalog.database import Database, cells
from dagster_ckpt.catalog.records import LaunchRecord
from dagster_ckpt.catalog.tables import launches


class LaunchRecords:
    """Launched drivers. Each answers one START request."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self,
        request_id: str,
        *,
        stream_id: str,
        run_id: str,
        host: str,
        boot_id: str,
        pid: int,
        process_start_ticks: int | None,
        command: str,
        log: str,
    ) -> LaunchRecord:
        """Record the handle of a driver; it replaces one that was launched earlier for the same request."""
        with self._database.writing() as connection:
            connection.execute(launches.delete().where(launches.c.request_id == request_id))
            connection.execute(
                launches.insert().values(
                    request_id=request_id,
                    stream_id=stream_id,
                    run_id=run_id,
                    host=host,
                    boot_id=boot_id,
                    pid=pid,
                    process_start_ticks=process_start_ticks,
                    command=command,
                    log=log,
                    launched_at_ms=self._database.now_ms(connection),
                )
            )
            row = connection.execute(select(launches).where(launches.c.request_id == request_id)).one()
        return _record(row)

    def get(self, request_id: str) -> LaunchRecord | None:
        """The launch that answers a START request, or None."""
        return self._first(select(launches).where(launches.c.request_id == request_id))

    def latest(self, stream_id: str) -> LaunchRecord | None:
        """The newest launch of a stream, or None."""
        return self._first(
            select(launches)
            .where(launches.c.stream_id == stream_id)
            .order_by(launches.c.launched_at_ms.desc())
            .limit(1)
        )

    def _first(self, query: Select[Any]) -> LaunchRecord | None:
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return _record(row) if row is not None else None


def _record(row: Row[Any]) -> LaunchRecord:
    return LaunchRecord(**cells(row, launches, []))
