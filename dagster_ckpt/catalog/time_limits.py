"""Time limits of catalog calls, so short that a lease cannot expire during a call.

A holder that cannot renew its lease treats it as lost after most of its life. The rest limits a call, so that one begun
right before has ended when the lease expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Engine

DEFAULT_TTL_MS = 30_000
# A share of the lease's life.
GIVE_UP_AFTER = 0.8
# Migrations run without a lease, one process at a time.
MIGRATION_S = 60.0
# For tests; a shorter limit fails on a busy machine.
_SHORTEST_S = 0.5
# libpq's minimum.
_SHORTEST_CONNECT_S = 2

_deadline: ContextVar[float | None] = ContextVar("deadline of the catalog call", default=None)


def call_limit_s(ttl_ms: int) -> float:
    """The limit of a call, with its connecting, for leases with this time to live."""
    return max(ttl_ms / 1000 * (1 - GIVE_UP_AFTER), _SHORTEST_S)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End database calls in this context after that time, with an error of the driver."""
    before = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(before)


def limit_transaction(connection: Connection, seconds: float) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(_settings(seconds, is_local=True)))


def limit_connections(engine: Engine) -> None:
    """Make connections obey `limited`.

    The client ends a call if server, proxy or network do not respond. The server ends statements that no client waits
    for, and transactions whose client froze while holding rows.
    """
    if engine.dialect.name == "sqlite":
        event.listen(engine, "do_connect", _connect_to_sqlite)
        return
    connection_class = _limited_connection() if engine.dialect.driver == "psycopg" else None
    event.listen(engine, "do_connect", _connect_to_postgresql(connection_class))

    @event.listens_for(engine, "connect")
    def limit_the_server(connection: Any, _record: object) -> None:
        # In a transaction, psycopg would send begin and commit separately.
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(_settings(call_limit_s(DEFAULT_TTL_MS), is_local=False))
        connection.autocommit = False


def _remaining_s() -> float:
    deadline = _deadline.get()
    return call_limit_s(DEFAULT_TTL_MS) if deadline is None else max(0.0, deadline - time.monotonic())


def _connect_to_sqlite(_dialect: object, _record: object, _args: object, options: dict[str, Any]) -> None:
    options["timeout"] = _remaining_s()


def _connect_to_postgresql(connection_class: Any | None) -> Callable[..., Any]:
    def connect(_dialect: object, _record: object, args: list[Any], options: dict[str, Any]) -> Any:
        limit_s = _remaining_s()
        if limit_s <= 0 and connection_class is not None:
            raise connection_class.overdue()
        options["connect_timeout"] = max(_SHORTEST_CONNECT_S, int(limit_s))
        # For drivers without a limit of their own.
        options.update(keepalives=1, keepalives_idle=2, keepalives_interval=1, keepalives_count=3)
        options["tcp_user_timeout"] = round(limit_s * 1000)
        return None if connection_class is None else connection_class.connect(*args, **options)

    return connect


def _limited_connection() -> Any:
    import psycopg  # noqa: PLC0415

    class LimitedConnection(psycopg.Connection[Any]):
        @staticmethod
        def overdue() -> Exception:
            return psycopg.OperationalError("the database did not answer in time")

        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().wait(_until(gen, time.monotonic() + _remaining_s()), *args, **kwargs)
            except _OverdueError as error:
                self.pgconn.finish()
                raise self.overdue() from error

    return LimitedConnection


class _OverdueError(Exception):
    pass


def _until(waiting: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    # Psycopg sends 0 ten times a second while nothing is ready.
    try:
        wants = next(waiting)
        while True:
            ready = yield wants
            if not ready and time.monotonic() >= deadline:
                raise _OverdueError
            wants = waiting.send(ready)
    except StopIteration as done:
        return done.value


def _settings(seconds: float, *, is_local: bool) -> str:
    limit_ms = round(seconds * 1000)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    return "SELECT " + ", ".join(f"set_config('{name}', '{limit_ms}', {str(is_local).lower()})" for name in names)
