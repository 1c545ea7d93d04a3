"""Executions: run attempts of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from dagster_ckpt.catalog.database import as_text, was_renewed
from dagster_ckpt.catalog.execution_queries import ExecutionQueries, newest_first
from dagster_ckpt.catalog.records import (
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    LeaseRecord,
    StartCause,
)
from dagster_ckpt.catalog.requests import complete_request
from dagster_ckpt.catalog.tables import events, executions, streams

_ENDED = [status.value for status in ExecutionStatus if status.name not in ("STARTING", "RUNNING", "BROKEN")]


# The fields of a recovery that an event reports: what it started from and what that costs.
_RECOVERY_FIELDS = ("kind", "point", "to_batch", "rewound_batches", "rewound_ms")


_STARTING, _RUNNING = ExecutionStatus.STARTING, ExecutionStatus.RUNNING


class ExecutionRecords(ExecutionQueries):
    """Executions: each start, heartbeat and end, written under the lease of the stream."""

    def start(
        self,
        lease: LeaseRecord,
        execution_id: str,
        *,
        run_id: str,
        cause: StartCause,
        holder: Holder,
        code_version: str | None = None,
    ) -> ExecutionRecord:
        """Record the start of an execution of the stream whose lease this is.

        This also settles earlier executions that were not settled, because this one continues from
        what they left.

        Raises:
            LeaseLostError: The lease is no longer held.
        """
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            now_ms = self._database.now_ms(connection)
            of_stream = executions.c.stream_id == stream_id
            ordinal = connection.execute(select(func.max(executions.c.ordinal)).where(of_stream)).scalar() or 0
            reason = f"its process had ended when execution {execution_id} started"
            died = {"status": ExecutionStatus.FAILED.value, "ended_at_ms": now_ms, "reason": reason}
            unended = select(executions.c.execution_id).where(of_stream, executions.c.status.not_in(_ENDED))
            for each in connection.execute(unended.order_by(executions.c.ordinal)).scalars().all():
                self._change_end(connection, executions.c.execution_id == each, died)
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
        """Record that the query was started, what it started from, and the Spark application in which it runs.

        Raises:
            LeaseLostError: The lease is no longer held.
        """
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
                self._database.record_event(
                    connection, stream_id, EventType.EXECUTION_RUNNING, execution_id=execution_id, payload=recovered
                )

    def heartbeat(self, lease: LeaseRecord, execution_id: str, progress: dict[str, Any]) -> None:
        """Record the newest progress of the query.

        Raises:
            LeaseLostError: The lease is no longer held.
        """
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
    ) -> bool:
        """Record the end of an execution, as the stream's writer; an execution that has already ended is unchanged.

        Args:
            lease: The lease of the stream.
            execution_id: The execution.
            status: How it ended.
            reason: Why, as text for people.
            settled: Whether it needs no further work.
            request_id: The request that asked for this end; it is completed in the same transaction.

        Returns:
            False if the request was withdrawn: nothing was changed.

        Raises:
            LeaseLostError: The lease is no longer held.
        """
        with self._database.writing_under(lease) as connection:
            if request_id is not None and not complete_request(self._database, connection, request_id):
                return False
            self._end(connection, execution_id, status, reason, settled=settled)
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
        """Record that an execution that failed, or whose process died, was stopped before its restart.

        Args:
            lease: The lease of the stream.
            execution_id: The execution.
            status: How it ends now.
            reason: Why, as text for people.
            settled: Whether it needs no further work.
            request_id: As for `end`.

        Returns:
            False if there was nothing to stop (it was settled already, or had ended normally), or if the
            request was withdrawn.

        Raises:
            LeaseLostError: The lease is no longer held.
        """
        to_be_restarted = [each.value for each in (_STARTING, _RUNNING, ExecutionStatus.FAILED)]
        open_ = _of_writer(lease, execution_id) & executions.c.settled.is_(False)
        with self._database.writing_under(lease) as connection:
            if request_id is not None and not complete_request(self._database, connection, request_id):
                return False
            ended_at_ms = self._database.now_ms(connection)
            values = {"status": status.value, "reason": reason, "settled": settled, "ended_at_ms": ended_at_ms}
            found = self._change_end(connection, open_ & executions.c.status.in_(to_be_restarted), values)
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
        """Record the end of an execution whose process does not (or no longer) hold the lease.

        For observers that find it ended, and for a run that has lost its lease. This cannot
        contradict a successor: when an execution begins, all earlier ones are ended, and an ended
        execution is unchanged.

        Args:
            execution_id: The execution.
            status: How it ended.
            reason: Why, as text for people.
            settled: Whether it needs no further work.
            seen: The lease that it held when it was found dead. If it has renewed that lease since, it lives, and
                nothing is recorded.
        """
        with self._database.writing() as connection:
            if seen is None or not was_renewed(connection, seen):
                self._end(connection, execution_id, status, reason, settled=settled)

    def _end(
        self, connection: Connection, execution_id: str, status: ExecutionStatus, reason: str, *, settled: bool
    ) -> None:
        alive = (executions.c.execution_id == execution_id) & executions.c.status.not_in(_ENDED)
        now_ms = self._database.now_ms(connection)
        values = {"status": status.value, "ended_at_ms": now_ms, "reason": reason, "settled": settled}
        self._change_end(connection, alive, values)

    def _change_end(self, connection: Connection, which: ColumnElement[bool], values: Mapping[str, Any]) -> bool:
        """Set the end of an execution, with its event; returns False if it has ended already."""
        row = connection.execute(executions.update().where(which).values(**values).returning(executions)).one_or_none()
        if row is None:
            return False
        payload = {
            "status": values["status"],
            "reason": values["reason"],
            "duration_ms": max(0, values["ended_at_ms"] - row.started_at_ms),
        }
        self._database.record_event(
            connection, row.stream_id, EventType.EXECUTION_ENDED, execution_id=row.execution_id, payload=payload
        )
        return True

    def record_terminal_failure(self, execution_id: str, reason: str) -> None:
        """Record once, as an event, that the stream is not restarted any more after this execution.

        If an earlier execution already failed terminally, and each one since was a restart whose query never
        started, no event is written.
        """
        stream_id = self.get(execution_id).stream_id
        recorded = (events.c.stream_id == stream_id) & (events.c.type == EventType.TERMINALLY_FAILED.value)
        with self._database.writing() as connection:
            # Two processes may settle it at once: the second one waits here, and then finds the event.
            connection.execute(select(streams.c.stream_id).where(streams.c.stream_id == stream_id).with_for_update())
            alike = _refused_alike(connection, stream_id, execution_id)
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
        """Record that an execution needs no further work; it ends with `status` if it has not ended yet."""
        with self._database.writing() as connection:
            self._end(connection, execution_id, status, f"settled as {status.value}", settled=True)
            this = executions.c.execution_id == execution_id
            connection.execute(executions.update().where(this).values(settled=True))


def _refused_alike(connection: Connection, stream_id: str, execution_id: str) -> list[str]:
    """An execution and its direct predecessors, up to the last one that ran or that a user started."""
    columns = (executions.c.execution_id, executions.c.cause, executions.c.recovery)
    alike: list[str] = []
    for row in connection.execute(newest_first(stream_id).with_only_columns(*columns)):
        if alike or row.execution_id == execution_id:
            alike.append(row.execution_id)
        if alike and (row.recovery is not None or row.cause == StartCause.MANUAL.value):
            break
    return alike


def _of_writer(lease: LeaseRecord, execution_id: str) -> ColumnElement[bool]:
    return (executions.c.execution_id == execution_id) & (executions.c.stream_id == lease.stream_id)
