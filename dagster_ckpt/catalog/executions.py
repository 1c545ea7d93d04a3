"""Executions of streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Row, Select, func, select

from dagster_ckpt.catalog.database import Records, as_dict, as_text, cells, read_dict, read_enum, was_renewed
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    UNENDED,
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    LeaseRecord,
    RunFailure,
    StartCause,
)
from dagster_ckpt.catalog.requests import complete_request
from dagster_ckpt.catalog.tables import events, executions, leases, streams
from dagster_ckpt.errors import CatalogError

_ENDED = [status.value for status in ExecutionStatus if status.name not in ("STARTING", "RUNNING", "BROKEN")]
_RECOVERY_FIELDS = ("kind", "point", "to_batch", "rewound_batches", "rewound_ms")


class ExecutionRecords(Records):
    """Executions, of a stream or run newest first. An unreadable row is BROKEN; a run's writes require its lease."""

    def of_run(self, run_id: str) -> list[ExecutionRecord]:
        of_run = select(executions).where(executions.c.run_id == run_id)
        return self._all(of_run.order_by(executions.c.started_at_ms.desc(), executions.c.ordinal.desc()))

    def get(self, execution_id: str) -> ExecutionRecord:
        found = self._all(select(executions).where(executions.c.execution_id == execution_id))
        if not found:
            raise CatalogError(
                f"The catalog {self._database.shown_url} has no execution {execution_id!r}. Choose an id from the "
                "list of the stream's executions."
            )
        return found[0]

    def of_stream(self, stream_id: str, *, limit: int | None = None) -> list[ExecutionRecord]:
        return self._all(newest_first(stream_id).limit(limit))

    def latest(self, stream_id: str) -> ExecutionRecord | None:
        return next(iter(self.of_stream(stream_id, limit=1)), None)

    def latest_of(self, stream_ids: Sequence[str]) -> dict[str, ExecutionRecord]:
        return {
            row.stream_id: _record(row)
            for row in self._database.rows(newest_of().where(streams.c.stream_id.in_(stream_ids)))
        }

    def lively_run_ids(self, since_ms: int) -> frozenset[str]:
        lively = executions.c.settled.is_(False) & (executions.c.heartbeat_at_ms > since_ms)
        return frozenset(row.run_id for row in self._database.rows(select(executions.c.run_id).where(lively)))

    def unsettled_runs(self) -> dict[str, str]:
        query = select(executions.c.stream_id, executions.c.run_id).where(executions.c.settled.is_(False))
        return {row.stream_id: row.run_id for row in self._database.rows(query.order_by(executions.c.ordinal))}

    def quiet(self, since_ms: int) -> list[ExecutionRecord]:
        query = select(executions).where(executions.c.settled.is_(False), executions.c.heartbeat_at_ms < since_ms)
        return self._all(query.order_by(executions.c.stream_id, executions.c.ordinal))

    def unsettled(self, run_ids: Collection[str] | None = None) -> list[ExecutionRecord]:
        """Unsettled executions, which include running ones, oldest first; None: of all runs."""
        if run_ids is not None and not run_ids:
            return []
        query = select(executions).where(executions.c.settled.is_(False))
        if run_ids is not None:
            query = query.where(executions.c.run_id.in_(run_ids))
        return self._all(query.order_by(executions.c.stream_id, executions.c.ordinal))

    def failures_since_manual_start(self, stream_id: str) -> list[int]:
        """Return when executions failed, in ms and oldest first."""
        query = newest_first(stream_id).with_only_columns(
            executions.c.status, executions.c.cause, executions.c.ended_at_ms
        )
        failed: list[int] = []
        for row in self._database.rows(query):
            if row.status == ExecutionStatus.FAILED.value and row.ended_at_ms is not None:
                failed.append(row.ended_at_ms)
            if row.cause == StartCause.MANUAL.value:
                break
        return failed[::-1]

    def failed_since(self, stream_ids: Sequence[str], since_ms: int) -> dict[str, list[RunFailure]]:
        query = (
            select(executions.c.stream_id, executions.c.ended_at_ms, executions.c.reason)
            .where(executions.c.stream_id.in_(stream_ids), executions.c.ended_at_ms > since_ms)
            .where(executions.c.status == ExecutionStatus.FAILED.value)
            .order_by(executions.c.ended_at_ms, executions.c.ordinal)
        )
        failed: dict[str, list[RunFailure]] = {}
        for row in self._database.rows(query):
            failure = RunFailure(row.ended_at_ms, row.reason or "no reason recorded")
            failed.setdefault(row.stream_id, []).append(failure)
        return failed

    def last_batch(self, stream_id: str, live_directory: str | None) -> int | None:
        there = (each for each in self.of_stream(stream_id) if each.live_directory == live_directory)
        return next((each.newest_batch for each in there if each.newest_batch is not None), None)

    def last_sources(self, stream_id: str, live_directory: str | None) -> Any | None:
        query = newest_first(stream_id).where(executions.c.live_directory == live_directory, _has_sources(executions))
        found = self._all(query.limit(1))
        return (found[0].recovery or {}).get(SOURCE_IDENTITIES) if found else None

    def last_sources_of_all(self) -> dict[str, Any]:
        """`last_sources` of the live directory of each stream, in one query."""
        others = executions.alias("others")
        is_in_use = others.c.live_directory.is_not_distinct_from(streams.c.live_directory)
        found = self._all(_newest_of(others, is_in_use, _has_sources(others)))
        return {each.stream_id: (each.recovery or {}).get(SOURCE_IDENTITIES) for each in found}

    def last_recovery(self, stream_id: str) -> dict[str, Any] | None:
        """The recovery of the newest execution whose query was started."""
        newest = self._all(newest_first(stream_id).where(executions.c.recovery.is_not(None)).limit(1))
        return newest[0].recovery if newest else None

    def is_read(self, stream_id: str) -> bool:
        """Whether another stream has started that reads its output."""
        reads = executions.c.recovery.contains(f'"upstream":"{stream_id}"', autoescape=True)
        found = select(executions.c.stream_id).where(reads, executions.c.stream_id != stream_id).limit(1)
        return bool(self._database.rows(found))

    def of_other_streams(self, stream_id: str) -> list[ExecutionRecord]:
        held = select(leases.c.stream_id).where(leases.c.execution_id.is_not(None), leases.c.stream_id != stream_id)
        return self._all(select(executions).where(executions.c.settled.is_(False), executions.c.stream_id.in_(held)))

    def last_sinks(self, stream_id: str) -> list[str]:
        return next((list(each.sinks) for each in self.of_stream(stream_id) if each.sinks), [])

    def sinks_of_others(self, stream_id: str) -> list[str]:
        return [sink for sinks in self.sinks_by_other(stream_id).values() for sink in sinks]

    def sinks_by_other(self, stream_id: str) -> dict[str, list[str]]:
        return {stream: list(each.sinks) for stream, each in self.newest_by_other(stream_id).items()}

    def newest_by_other(self, stream_id: str) -> dict[str, ExecutionRecord]:
        """The newest execution of each other stream that has reported its sinks."""
        others = executions.alias("others")
        newest = (
            select(others.c.stream_id, func.max(others.c.ordinal).label("ordinal"))
            .where(others.c.stream_id != stream_id, others.c.progress.contains('"sinks":["', autoescape=True))
            .group_by(others.c.stream_id)
            .subquery()
        )
        is_newest = (executions.c.stream_id == newest.c.stream_id) & (executions.c.ordinal == newest.c.ordinal)
        query = select(executions).join(newest, is_newest)
        return {each.stream_id: each for each in self._all(query)}

    def start(
        self,
        lease: LeaseRecord,
        execution_id: str,
        *,
        run_id: str,
        cause: StartCause,
        holder: Holder,
        code_version: str | None = None,
        suspended: str | None = None,
    ) -> ExecutionRecord:
        """Record a new execution; the stream's earlier ones are ended and settled.

        Args:
            suspended: Why this process suspended the query of the execution before; None: its process has ended.
        """
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            now_ms = self._database.now_ms(connection)
            of_stream = executions.c.stream_id == stream_id
            ordinal = connection.execute(select(func.max(executions.c.ordinal)).where(of_stream)).scalar() or 0
            status, reason = ExecutionStatus.FAILED, f"its process had ended when execution {execution_id} started"
            if suspended is not None:
                status, reason = ExecutionStatus.SUSPENDED, suspended
            unended = select(executions.c.execution_id).where(of_stream, executions.c.status.not_in(_ENDED))
            for each in connection.execute(unended.order_by(executions.c.ordinal)).scalars().all():
                this = executions.c.execution_id == each
                self._record_end(connection, this, status, reason, settled=True)
            connection.execute(executions.update().where(of_stream).values(settled=True))
            connection.execute(
                executions.insert().values(
                    execution_id=execution_id,
                    stream_id=stream_id,
                    ordinal=ordinal + 1,
                    run_id=run_id,
                    cause=cause.value,
                    status=ExecutionStatus.STARTING.value,
                    settled=False,
                    host=holder.host,
                    pid=holder.pid,
                    boot_id=holder.boot_id,
                    process_start_ticks=holder.process_start_ticks,
                    started_at_ms=now_ms,
                    heartbeat_at_ms=now_ms,
                    code_version=code_version,
                )
            )
            self._database.record_event(
                connection,
                stream_id,
                EventType.EXECUTION_STARTED,
                execution_id=execution_id,
                payload={"run_id": run_id, "cause": cause.value},
            )
        return self.get(execution_id)

    def running(
        self,
        lease: LeaseRecord,
        execution_id: str,
        *,
        live_directory: str,
        recovery: dict[str, Any],
        application: dict[str, Any] | None = None,
    ) -> None:
        with self._database.writing_under(lease) as connection:
            stream_id = connection.execute(
                executions.update()
                .where(_of_writer(lease, execution_id))
                .values(
                    status=ExecutionStatus.RUNNING.value,
                    live_directory=live_directory,
                    recovery=as_text(recovery),
                    application=as_text(application) if application is not None else None,
                    heartbeat_at_ms=self._database.now_ms(connection),
                )
                .returning(executions.c.stream_id)
            ).scalar_one_or_none()
            if stream_id is not None:
                recovered = {name: recovery[name] for name in _RECOVERY_FIELDS if recovery.get(name) is not None}
                recovered |= self._recovery_time(connection, stream_id, execution_id)
                self._database.record_event(
                    connection, stream_id, EventType.EXECUTION_RUNNING, execution_id=execution_id, payload=recovered
                )

    def _recovery_time(self, connection: Connection, stream_id: str, execution_id: str) -> dict[str, int]:
        query = newest_first(stream_id).with_only_columns(
            executions.c.execution_id, executions.c.cause, executions.c.heartbeat_at_ms
        )
        rows = connection.execute(query.limit(2)).all()
        if len(rows) < 2 or rows[0].execution_id != execution_id or rows[0].cause == StartCause.MANUAL.value:
            return {}
        return {"recovery_ms": max(0, self._database.now_ms(connection) - rows[1].heartbeat_at_ms)}

    def note(self, execution_id: str, noted: dict[str, Any]) -> None:
        this = executions.c.execution_id == execution_id
        with self._database.writing() as connection:
            row = connection.execute(select(executions.c.recovery).where(this).with_for_update()).one()
            recovery = {**as_dict(row.recovery), **noted}
            connection.execute(executions.update().where(this).values(recovery=as_text(recovery)))

    def handed_over(self, lease: LeaseRecord, execution_id: str, *, batch_id: int, gap_ms: int | None) -> None:
        """Record the first batch after a hand-over, `gap_ms` after the last one before it."""
        with self._database.writing_under(lease) as connection:
            new = connection.execute(select(executions).where(executions.c.execution_id == execution_id)).one()
            # Not the execution before: a run of the new code may have died in between.
            stopped = newest_first(lease.stream_id).where(executions.c.status == ExecutionStatus.SUSPENDED.value)
            old = connection.execute(stopped).first()
            is_running = (events.c.stream_id == lease.stream_id) & (events.c.execution_id == execution_id)
            is_running &= events.c.type == EventType.EXECUTION_RUNNING.value
            running_at_ms = connection.execute(select(events.c.at_ms).where(is_running)).scalar()
            ended_at_ms = old.ended_at_ms if old is not None else None
            stopped_ms = None
            if ended_at_ms is not None and running_at_ms is not None:
                stopped_ms = max(0, running_at_ms - ended_at_ms)
            payload = {
                "from_version": old.code_version if old is not None else None,
                "to_version": new.code_version,
                "batch_id": batch_id,
                "gap_ms": gap_ms,
                "stopped_ms": stopped_ms,
            }
            self._database.record_event(
                connection, lease.stream_id, EventType.HANDED_OVER, execution_id=execution_id, payload=payload
            )

    def heartbeat(self, lease: LeaseRecord, execution_id: str, progress: dict[str, Any]) -> None:
        with self._database.writing_under(lease) as connection:
            connection.execute(
                executions.update()
                .where(_of_writer(lease, execution_id))
                .values(progress=as_text(progress), heartbeat_at_ms=self._database.now_ms(connection))
            )

    def end(
        self,
        lease: LeaseRecord,
        execution_id: str,
        status: ExecutionStatus,
        reason: str,
        *,
        settled: bool = False,
        request_id: str | None = None,
        snapshot_id: str | None = None,
    ) -> bool:
        """End an execution, unless it has ended.

        With `request_id`, the request for this end is completed too, with the snapshot of a stop; returns False, and
        changes nothing, if it was withdrawn.
        """
        with self._database.writing_under(lease) as connection:
            if request_id is not None and not complete_request(
                self._database, connection, request_id, snapshot_id=snapshot_id
            ):
                return False
            self._record_end(connection, _unended(execution_id), status, reason, settled=settled)
            return True

    def stopped(
        self,
        lease: LeaseRecord,
        execution_id: str,
        status: ExecutionStatus,
        reason: str,
        *,
        settled: bool,
        request_id: str | None = None,
    ) -> bool:
        """End an execution that failed or died, instead of restarting it.

        Returns False if it was settled or had ended normally, or if the request (as for `end`) was withdrawn.
        """
        to_be_restarted = (*UNENDED, ExecutionStatus.FAILED.value)
        open_ = _of_writer(lease, execution_id) & executions.c.settled.is_(False)
        with self._database.writing_under(lease) as connection:
            if request_id is not None and not complete_request(self._database, connection, request_id):
                return False
            which = open_ & executions.c.status.in_(to_be_restarted)
            found = self._record_end(connection, which, status, reason, settled=settled)
            return found or request_id is not None

    def end_unheld(
        self,
        execution_id: str,
        status: ExecutionStatus,
        reason: str,
        *,
        settled: bool = False,
        seen: LeaseRecord | None = None,
    ) -> None:
        """End an execution, unless it has ended, by a process that does not hold its lease.

        Nothing is recorded if the lease was renewed since it was `seen`.
        """
        with self._database.writing() as connection:
            if seen is None or not was_renewed(connection, seen):
                self._record_end(connection, _unended(execution_id), status, reason, settled=settled)

    def _record_end(
        self, connection: Connection, which: ColumnElement[bool], status: ExecutionStatus, reason: str, *, settled: bool
    ) -> bool:
        ended_at_ms = self._database.now_ms(connection)
        values = {"status": status.value, "ended_at_ms": ended_at_ms, "reason": reason, "settled": settled}
        row = connection.execute(executions.update().where(which).values(**values).returning(executions)).one_or_none()
        if row is None:
            return False
        payload = {"status": status.value, "reason": reason, "duration_ms": max(0, ended_at_ms - row.started_at_ms)}
        self._database.record_event(
            connection, row.stream_id, EventType.EXECUTION_ENDED, execution_id=row.execution_id, payload=payload
        )
        return True

    def record_terminal_failure(self, execution_id: str, reason: str) -> None:
        """Record an event that no restart follows.

        It is not repeated for later executions that ran no query.
        """
        stream_id = self.get(execution_id).stream_id
        recorded = (events.c.stream_id == stream_id) & (events.c.type == EventType.TERMINALLY_FAILED.value)
        with self._database.writing() as connection:
            # Of two processes that settle the execution, the second waits and finds the event.
            connection.execute(select(streams.c.stream_id).where(streams.c.stream_id == stream_id).with_for_update())
            alike = _since_last_query(connection, stream_id, execution_id)
            if connection.execute(select(events.c.sequence).where(recorded, events.c.execution_id.in_(alike))).first():
                return
            self._database.record_event(
                connection,
                stream_id,
                EventType.TERMINALLY_FAILED,
                execution_id=execution_id,
                payload={"reason": reason},
            )

    def settle(self, execution_id: str, status: ExecutionStatus) -> None:
        """Settle an execution; one that has not ended gets `status`."""
        with self._database.writing() as connection:
            reason = f"settled as {status.value}"
            self._record_end(connection, _unended(execution_id), status, reason, settled=True)
            this = executions.c.execution_id == execution_id
            connection.execute(executions.update().where(this).values(settled=True))

    def _all(self, query: Select[Any]) -> list[ExecutionRecord]:
        return [_record(row) for row in self._database.rows(query)]


def newest_first(stream_id: str) -> Select[Any]:
    return select(executions).where(executions.c.stream_id == stream_id).order_by(executions.c.ordinal.desc())


def newest_of() -> Select[Any]:
    return _newest_of(executions.alias("others"))


def _newest_of(others: FromClause, *conditions: ColumnElement[bool]) -> Select[Any]:
    """The newest execution of each stream for which the conditions on `others`, an alias of all executions, hold."""
    # Driven by the streams: one index lookup for each.
    of_stream = others.c.stream_id == streams.c.stream_id
    newest = select(func.max(others.c.ordinal)).where(of_stream, *conditions).correlate(streams)
    is_newest = (executions.c.stream_id == streams.c.stream_id) & (executions.c.ordinal == newest.scalar_subquery())
    return select(executions).select_from(streams.join(executions, is_newest))


def _has_sources(table: FromClause) -> ColumnElement[bool]:
    return table.c.recovery.contains(f'"{SOURCE_IDENTITIES}":[', autoescape=True)


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


def _since_last_query(connection: Connection, stream_id: str, execution_id: str) -> list[str]:
    columns = (executions.c.execution_id, executions.c.cause, executions.c.recovery)
    alike: list[str] = []
    for row in connection.execute(newest_first(stream_id).with_only_columns(*columns)):
        if alike or row.execution_id == execution_id:
            alike.append(row.execution_id)
        if alike and (row.recovery is not None or row.cause == StartCause.MANUAL.value):
            break
    return alike


def _unended(execution_id: str) -> ColumnElement[bool]:
    return (executions.c.execution_id == execution_id) & executions.c.status.not_in(_ENDED)


def _of_writer(lease: LeaseRecord, execution_id: str) -> ColumnElement[bool]:
    return (executions.c.execution_id == execution_id) & (executions.c.stream_id == lease.stream_id)
