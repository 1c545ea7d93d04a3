"""Queries about executions: of one run, of one stream, and of many streams in one query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, Select, func, select

from dagster_ckpt.catalog.database import Database, cells, read_dict, read_enum
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    ExecutionRecord,
    ExecutionStatus,
    RunFailure,
    StartCause,
)
from dagster_ckpt.catalog.tables import executions, leases, streams
from dagster_ckpt.errors import CatalogError


class ExecutionQueries:
    """Executions, as read from the catalog. A row that cannot be read is listed as BROKEN, never omitted."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_run(self, run_id: str) -> list[ExecutionRecord]:
        """Executions of one run, newest first."""
        of_run = select(executions).where(executions.c.run_id == run_id)
        return self._all(of_run.order_by(executions.c.started_at_ms.desc(), executions.c.ordinal.desc()))

    def get(self, execution_id: str) -> ExecutionRecord:
        """One execution.

        Raises:
            CatalogError: No execution has this id.
        """
        found = self._all(select(executions).where(executions.c.execution_id == execution_id))
        if not found:
            raise CatalogError(
                f"The catalog {self._database.shown_url} has no execution {execution_id!r}. Choose an id from the "
                "list of the stream's executions."
            )
        return found[0]

    def of_stream(self, stream_id: str, *, limit: int | None = None) -> list[ExecutionRecord]:
        """Executions of a stream, newest first."""
        return self._all(newest_first(stream_id).limit(limit))

    def latest(self, stream_id: str) -> ExecutionRecord | None:
        """The newest execution of a stream."""
        return next(iter(self.of_stream(stream_id, limit=1)), None)

    def latest_of(self, stream_ids: Sequence[str]) -> dict[str, ExecutionRecord]:
        """The newest execution of each of these streams that has one, in one query."""
        with self._database.reading() as connection:
            return {row.stream_id: _record(row) for row in connection.execute(_newest_of(stream_ids))}

    def lively_run_ids(self, since_ms: int) -> frozenset[str]:
        """Runs with unsettled executions that have sent a heartbeat since a time, ms since the epoch."""
        lively = executions.c.settled.is_(False) & (executions.c.heartbeat_at_ms > since_ms)
        with self._database.reading() as connection:
            return frozenset(connection.execute(select(executions.c.run_id).where(lively)).scalars())

    def unsettled_runs(self) -> dict[str, str]:
        """Runs with an unsettled or running execution, and the stream of each."""
        query = select(executions.c.run_id, executions.c.stream_id).where(executions.c.settled.is_(False))
        with self._database.reading() as connection:
            return {row.run_id: row.stream_id for row in connection.execute(query)}

    def unsettled(self, run_ids: Collection[str] | None = None) -> list[ExecutionRecord]:
        """Unsettled or running executions, oldest first.

        Args:
            run_ids: Only those of these runs; None for all.
        """
        if run_ids is not None and not run_ids:
            return []
        query = select(executions).where(executions.c.settled.is_(False))
        if run_ids is not None:
            query = query.where(executions.c.run_id.in_(run_ids))
        return self._all(query.order_by(executions.c.stream_id, executions.c.ordinal))

    def failures_since_manual_start(self, stream_id: str) -> list[int]:
        """Times of the failures since a user last started the stream, in ms since the epoch, oldest first."""
        query = newest_first(stream_id).with_only_columns(
            executions.c.status, executions.c.cause, executions.c.ended_at_ms
        )
        failed: list[int] = []
        with self._database.reading() as connection:
            for row in connection.execute(query):
                if row.status == ExecutionStatus.FAILED.value and row.ended_at_ms is not None:
                    failed.append(row.ended_at_ms)
                if row.cause == StartCause.MANUAL.value:
                    break
        return failed[::-1]

    def failed_since(self, stream_ids: Sequence[str], since_ms: int) -> dict[str, list[RunFailure]]:
        """The executions of these streams that failed after a moment, oldest first, in one query.

        Args:
            stream_ids: The streams; those without a failure are omitted.
            since_ms: That moment, ms since the epoch.
        """
        query = (
            select(executions.c.stream_id, executions.c.ended_at_ms, executions.c.reason)
            .where(executions.c.stream_id.in_(stream_ids), executions.c.ended_at_ms > since_ms)
            .where(executions.c.status == ExecutionStatus.FAILED.value)
            .order_by(executions.c.ended_at_ms, executions.c.ordinal)
        )
        failed: dict[str, list[RunFailure]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query):
                failed.setdefault(row.stream_id, []).append(
                    RunFailure(row.ended_at_ms, row.reason or "no reason recorded")
                )
        return failed

    def first_started(self, stream_ids: Sequence[str]) -> dict[str, int]:
        """When each of these streams was started for the first time, in ms since the epoch, in one query."""
        query = (
            select(executions.c.stream_id, func.min(executions.c.started_at_ms))
            .where(executions.c.stream_id.in_(stream_ids))
            .group_by(executions.c.stream_id)
        )
        with self._database.reading() as connection:
            return {stream_id: int(first_ms) for stream_id, first_ms in connection.execute(query)}

    def last_batch(self, stream_id: str, live_directory: str | None) -> int | None:
        """The newest batch in a live directory that an execution reported as committed, or None."""
        for execution in self.of_stream(stream_id):
            if execution.live_directory != live_directory:
                continue
            batch_id = (execution.progress or {}).get("batch_id")
            if isinstance(batch_id, int):
                return batch_id
        return None

    def last_sources(self, stream_id: str, live_directory: str | None) -> Any | None:
        """The recorded sources of the newest execution in a live directory that recorded them, or None."""
        query = newest_first(stream_id).where(
            executions.c.live_directory == live_directory,
            executions.c.recovery.contains(f'"{SOURCE_IDENTITIES}":[', autoescape=True),
        )
        found = self._all(query.limit(1))
        return (found[0].recovery or {}).get(SOURCE_IDENTITIES) if found else None

    def of_other_streams(self, stream_id: str) -> list[ExecutionRecord]:
        """Unsettled or running executions of other streams whose lease is held.

        Args:
            stream_id: The stream whose executions are left out.
        """
        held = select(leases.c.stream_id).where(leases.c.execution_id.is_not(None), leases.c.stream_id != stream_id)
        return self._all(select(executions).where(executions.c.settled.is_(False), executions.c.stream_id.in_(held)))

    def last_sinks(self, stream_id: str) -> list[str]:
        """The sinks, as Spark names them, of the newest execution that reported any."""
        for execution in self.of_stream(stream_id):
            sinks = (execution.progress or {}).get("sinks")
            if isinstance(sinks, list) and sinks:
                return [str(sink) for sink in sinks]
        return []

    def sinks_of_others(self, stream_id: str) -> list[str]:
        """The last known sinks of every other stream, as Spark names them."""
        return [sink for sinks in self.sinks_by_other(stream_id).values() for sink in sinks]

    def sinks_by_other(self, stream_id: str) -> dict[str, list[str]]:
        """The last known sinks of every other stream, as Spark names them, by its id."""
        others = executions.alias("others")
        newest = (
            select(others.c.stream_id, func.max(others.c.ordinal).label("ordinal"))
            .where(others.c.stream_id != stream_id, others.c.progress.contains('"sinks":["', autoescape=True))
            .group_by(others.c.stream_id)
            .subquery()
        )
        is_newest = (executions.c.stream_id == newest.c.stream_id) & (executions.c.ordinal == newest.c.ordinal)
        query = select(executions).join(newest, is_newest)
        return {
            each.stream_id: [str(sink) for sink in (each.progress or {}).get("sinks", ())] for each in self._all(query)
        }

    def _all(self, query: Select[Any]) -> list[ExecutionRecord]:
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]


def newest_first(stream_id: str) -> Select[Any]:
    """Executions of a stream, the newest first."""
    return select(executions).where(executions.c.stream_id == stream_id).order_by(executions.c.ordinal.desc())


def _newest_of(stream_ids: Sequence[str]) -> Select[Any]:
    others = executions.alias("others")
    # Driven by the streams: one index lookup for each, however many restarts it has.
    newest = select(func.max(others.c.ordinal)).where(others.c.stream_id == streams.c.stream_id).correlate(streams)
    is_newest = (executions.c.stream_id == streams.c.stream_id) & (executions.c.ordinal == newest.scalar_subquery())
    return (
        select(executions).select_from(streams.join(executions, is_newest)).where(streams.c.stream_id.in_(stream_ids))
    )


def _record(row: Row[Any]) -> ExecutionRecord:
    troubles: list[str] = []
    values = cells(row, executions, troubles)
    del values["ordinal"]
    values["cause"] = read_enum(values["cause"], StartCause, StartCause.UNKNOWN, "cause", troubles)
    values["recovery"] = read_dict(values["recovery"], "recovery", troubles)
    values["progress"] = read_dict(values["progress"], "progress", troubles)
    values["application"] = read_dict(values["application"], "application", troubles)
    values["status"] = read_enum(values["status"], ExecutionStatus, ExecutionStatus.BROKEN, "status", troubles)
    return ExecutionRecord(**values, broken="; ".join(troubles) or None)
