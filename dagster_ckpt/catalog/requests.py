"""Requests to streams, answered by the stream's own process, and drivers launched to answer START requests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from dagster_ckpt.catalog.database import (
    Database,
    Records,
    as_dict,
    as_text,
    cells,
    lease_row,
    read_dict,
    read_enum,
)
from dagster_ckpt.catalog.holds import refer
from dagster_ckpt.catalog.records import (
    FOR_START,
    TAKEN_UNDER,
    UNANSWERED,
    EventType,
    LaunchRecord,
    LeaseRecord,
    RequestKind,
    RequestRecord,
    RequestStatus,
)
from dagster_ckpt.catalog.tables import executions, launches, requests
from dagster_ckpt.errors import CatalogError

# How long a sender waits for the answer.
REQUEST_TIMEOUT_S = 600.0


class RequestRecords(Records):
    """The queue of requests. An unreadable one is UNKNOWN, and never carried out.

    Methods return False if another process has answered or withdrawn the request.
    """

    def submit(
        self,
        stream_id: str,
        kind: RequestKind,
        *,
        arguments: Mapping[str, Any] | None = None,
        origin: str,
        request_id: str | None = None,
        holding: str | None = None,
    ) -> RequestRecord:
        """Submit a request; an existing one with this id is returned unchanged.

        Args:
            holding: A snapshot that must not be deleted before the answer.
        """
        request_id = request_id or str(uuid.uuid4())
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            is_new = self._database.insert_if_absent(
                connection,
                requests,
                request_id=request_id,
                stream_id=stream_id,
                kind=kind.value,
                status=RequestStatus.PENDING.value,
                arguments=as_text(dict(arguments or {})),
                origin=origin,
                created_at_ms=now_ms,
            )
            if is_new and holding is not None:
                refer(connection, holding, request_id=request_id, now_ms=now_ms)
        return self.get(request_id)

    def get(self, request_id: str) -> RequestRecord:
        found = self.find(request_id)
        if found is None:
            raise CatalogError(
                f"The catalog {self._database.shown_url} has no request {request_id!r}. "
                "`dagster-ckpt requests` lists its requests."
            )
        return found

    def find(self, request_id: str | None) -> RequestRecord | None:
        found = self._all(requests.c.request_id == request_id)
        return found[0] if found else None

    def pending(self, stream_id: str) -> list[RequestRecord]:
        pending = (requests.c.stream_id == stream_id) & (requests.c.status == RequestStatus.PENDING.value)
        return self._all(pending)

    def unanswered(self, stream_id: str | None = None) -> list[RequestRecord]:
        unanswered = requests.c.status.in_(UNANSWERED)
        return self._all(unanswered if stream_id is None else unanswered & (requests.c.stream_id == stream_id))

    def starts_to_launch(self) -> list[RequestRecord]:
        waiting = (requests.c.status == RequestStatus.PENDING.value) & (requests.c.kind == RequestKind.START.value)
        # With unreadable arguments, a request no longer says where to start from.
        return [request for request in self._all(waiting) if request.kind is RequestKind.START]

    def accept(self, lease: LeaseRecord, request_id: str) -> bool:
        pending = (requests.c.stream_id == lease.stream_id) & (requests.c.status == RequestStatus.PENDING.value)
        with self._database.writing_under(lease) as connection:
            return _move(connection, request_id, pending, status=RequestStatus.ACCEPTED.value)

    def withdraw(self, request_id: str, *, only_pending: bool = False) -> bool:
        allowed = requests.c.status.in_((RequestStatus.PENDING.value,) if only_pending else UNANSWERED)
        with self._database.writing() as connection:
            return _answer(self._database, connection, request_id, allowed, RequestStatus.WITHDRAWN)

    def resolve(
        self,
        lease: LeaseRecord,
        request_id: str,
        status: RequestStatus,
        *,
        snapshot_id: str | None = None,
        error: str | None = None,
    ) -> bool:
        answerable = (requests.c.stream_id == lease.stream_id) & requests.c.status.in_(UNANSWERED)
        with self._database.writing_under(lease) as connection:
            return _answer(
                self._database, connection, request_id, answerable, status, snapshot_id=snapshot_id, error=error
            )

    def take_start(self, lease: LeaseRecord, request_id: str) -> bool:
        """Note that the holder of a lease carries out a start: until it loses the lease, no other process fails it."""
        open_ = (requests.c.request_id == request_id) & requests.c.status.in_(UNANSWERED)
        with self._database.writing_under(lease) as connection:
            row = connection.execute(select(requests.c.arguments).where(open_).with_for_update()).one_or_none()
            if row is None:
                return False
            arguments = as_text({**as_dict(row.arguments), TAKEN_UNDER: lease.token})
            connection.execute(requests.update().where(open_).values(arguments=arguments))
            return True

    def is_taken(self, request_id: str) -> bool:
        """Whether the holder of the stream's lease carries out a start."""
        with self._database.reading() as connection:
            return self._is_taken(connection, request_id)

    def _is_taken(self, connection: Connection, request_id: str) -> bool:
        this = select(requests.c.stream_id, requests.c.arguments).where(requests.c.request_id == request_id)
        row = connection.execute(this).one_or_none()
        token = as_dict(row.arguments).get(TAKEN_UNDER) if row is not None else None
        lease = lease_row(connection, row.stream_id) if row is not None and token is not None else None
        if lease is None or lease.execution_id is None or lease.token != token:
            return False
        return bool(lease.expires_at_ms > self._database.now_ms(connection))

    def fail_start(self, request_id: str, error: str) -> bool:
        """Fail a start that no process has taken."""
        with self._database.writing() as connection:
            return self._fail_start(connection, request_id, error)

    def give_up_start(self, request_id: str, error: str) -> bool:
        """Fail a start whose run has ended; False, and it stays open, if the query was stopped for it."""
        this = select(requests.c.request_id).where(requests.c.request_id == request_id)
        with self._database.writing() as connection:
            connection.execute(this.with_for_update())
            # From here on the query no longer stops for this start.
            _drop_suspensions(self._database, connection, request_id)
            return not _is_stopped_for(connection, request_id) and self._fail_start(connection, request_id, error)

    def _fail_start(self, connection: Connection, request_id: str, error: str) -> bool:
        unanswered = (requests.c.kind == RequestKind.START.value) & requests.c.status.in_(UNANSWERED)
        # In this order: a process that takes it waits for the row.
        connection.execute(select(requests.c.request_id).where(requests.c.request_id == request_id).with_for_update())
        if self._is_taken(connection, request_id):
            return False
        return _answer(self._database, connection, request_id, unanswered, RequestStatus.FAILED, error=error)

    def suspend_for(self, start_id: str) -> RequestRecord | None:
        """Ask the running query to stop for a start that hands over; None if that start is no longer open.

        The request is withdrawn with the start, so that a query never stops for a start that has failed.
        """
        request_id = str(uuid.uuid4())
        open_ = (requests.c.request_id == start_id) & requests.c.status.in_(UNANSWERED)
        with self._database.writing() as connection:
            start = connection.execute(select(requests).where(open_).with_for_update()).one_or_none()
            if start is None:
                return None
            connection.execute(
                requests.insert().values(
                    request_id=request_id,
                    stream_id=start.stream_id,
                    kind=RequestKind.SUSPEND.value,
                    status=RequestStatus.PENDING.value,
                    arguments=as_text({FOR_START: start_id}),
                    origin=start.origin,
                    created_at_ms=self._database.now_ms(connection),
                )
            )
        return self.get(request_id)

    def stopped_for(self, start_id: str) -> bool:
        """Whether the query has stopped for a start that hands over, and nothing was started since."""
        with self._database.reading() as connection:
            return _is_stopped_for(connection, start_id)

    def _all(self, which: ColumnElement[bool]) -> list[RequestRecord]:
        rows = self._database.rows(select(requests).where(which).order_by(requests.c.created_at_ms))
        return [_record(row) for row in rows]


def complete_request(
    database: Database, connection: Connection, request_id: str, *, snapshot_id: str | None = None
) -> bool:
    """Complete a request in the transaction that carries it out; False if it was withdrawn.

    True again if already completed, because a caller whose answer was lost may repeat the call.
    """
    is_open = requests.c.status.in_(UNANSWERED)
    if _answer(database, connection, request_id, is_open, RequestStatus.COMPLETED, snapshot_id=snapshot_id):
        return True
    status = select(requests.c.status).where(requests.c.request_id == request_id)
    return connection.execute(status).scalar_one_or_none() == RequestStatus.COMPLETED.value


def _answer(
    database: Database,
    connection: Connection,
    request_id: str,
    allowed: ColumnElement[bool],
    status: RequestStatus,
    *,
    snapshot_id: str | None = None,
    error: str | None = None,
) -> bool:
    now_ms = database.now_ms(connection)
    values = {"status": status.value, "snapshot_id": snapshot_id, "error": error, "resolved_at_ms": now_ms}
    if not _move(connection, request_id, allowed, **values):
        return False
    if status in (RequestStatus.FAILED, RequestStatus.WITHDRAWN):
        _drop_suspensions(database, connection, request_id)
    stream_id = connection.execute(select(requests.c.stream_id).where(requests.c.request_id == request_id)).scalar_one()
    payload = {"request_id": request_id, "status": status.value}
    database.record_event(connection, stream_id, EventType.REQUEST_RESOLVED, snapshot_id=snapshot_id, payload=payload)
    return True


def _suspensions(start_id: str) -> ColumnElement[bool]:
    starts = requests.alias()
    of_stream = select(starts.c.stream_id).where(starts.c.request_id == start_id).scalar_subquery()
    named = requests.c.arguments.contains(as_text({FOR_START: start_id}), autoescape=True)
    return (requests.c.stream_id == of_stream) & (requests.c.kind == RequestKind.SUSPEND.value) & named


def _drop_suspensions(database: Database, connection: Connection, start_id: str) -> None:
    open_ = _suspensions(start_id) & requests.c.status.in_(UNANSWERED)
    values = {"status": RequestStatus.WITHDRAWN.value, "resolved_at_ms": database.now_ms(connection)}
    connection.execute(requests.update().where(open_).values(**values))


def _is_stopped_for(connection: Connection, start_id: str) -> bool:
    done = _suspensions(start_id) & (requests.c.status == RequestStatus.COMPLETED.value)
    row = connection.execute(select(requests.c.stream_id, requests.c.resolved_at_ms).where(done)).first()
    if row is None:
        return False
    began = select(func.max(executions.c.started_at_ms)).where(executions.c.stream_id == row.stream_id)
    newest: int | None = connection.execute(began).scalar()
    return newest is None or newest < int(row.resolved_at_ms)


def _move(connection: Connection, request_id: str, allowed: ColumnElement[bool], **values: str | int | None) -> bool:
    movable = (requests.c.request_id == request_id) & allowed
    return connection.execute(requests.update().where(movable).values(**values)).rowcount == 1


def _record(row: Row[Any]) -> RequestRecord:
    troubles: list[str] = []
    values = cells(row, requests, troubles)
    values["kind"] = read_enum(values["kind"], RequestKind, RequestKind.UNKNOWN, "kind", troubles)
    values["status"] = read_enum(values["status"], RequestStatus, RequestStatus.BROKEN, "status", troubles)
    arguments = read_dict(values["arguments"], "arguments", troubles)
    if arguments is None:
        # Without its arguments it is another request.
        values["kind"] = RequestKind.UNKNOWN
    values["arguments"] = arguments or {}
    return RequestRecord(**values, broken="; ".join(troubles) or None)


class LaunchRecords(Records):
    def record(self, launch: LaunchRecord) -> LaunchRecord:
        with self._database.writing() as connection:
            of_request = launches.c.request_id == launch.request_id
            connection.execute(launches.delete().where(of_request))
            launched = {**vars(launch), "launched_at_ms": self._database.now_ms(connection)}
            connection.execute(launches.insert().values(**launched))
            return _launch(connection.execute(select(launches).where(of_request)).one())

    def get(self, request_id: str) -> LaunchRecord | None:
        return self._first(select(launches).where(launches.c.request_id == request_id))

    def latest(self, stream_id: str) -> LaunchRecord | None:
        return self._first(
            select(launches)
            .where(launches.c.stream_id == stream_id)
            .order_by(launches.c.launched_at_ms.desc())
            .limit(1)
        )

    def _first(self, query: Select[Any]) -> LaunchRecord | None:
        return next(map(_launch, self._database.rows(query)), None)


def _launch(row: Row[Any]) -> LaunchRecord:
    return LaunchRecord(**cells(row, launches, []))
