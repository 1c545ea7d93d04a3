"""How long a call to the catalog may take: less than the life of a lease, so that no holder outlives it in a call.

A holder counts itself out after most of its lease's life; what is left is the limit of a call. A call that begins right
before that moment has ended, one way or the other, when the lease runs out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Engine

# Life of a lease without a renewal.
DEFAULT_TTL_MS = 30_000
# Share of it after which a holder that could not renew counts itself out.
GIVE_UP_AFTER = 0.8
# Tables are made while no lease is held, and by one process at a time: the others wait for it.
MIGRATION_S = 60.0
# Less would fail on any busy machine. Leases so short are for tests.
_SHORTEST_S = 0.5
# What libpq takes less than this for.
_SHORTEST_CONNECT_S = 2

_deadline: ContextVar[float | None] = ContextVar("deadline of the catalog call", default=None)


def call_limit_s(ttl_ms: int) -> float:
    """How long a call may take, in seconds, connecting included, where leases live for so long."""
    return max(ttl_ms / 1000 * (1 - GIVE_UP_AFTER), _SHORTEST_S)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let what is done with connections here end after so many seconds, by an error of the driver."""
    before = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(before)


def limit_transaction(connection: Connection, seconds: float) -> None:
    """Let the server, too, wait for so long in this transaction, where that is longer than usual."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(_settings(seconds, is_local=True)))


def limit_connections(engine: Engine) -> None:
    """Make an engine's connections keep the limit that `limited` sets.

    On the client's side: a server, a proxy or a network that answers nothing at all ends the call. On the server's: a
    statement that nobody waits for any more ends as well, and so does a transaction whose client was frozen, which
    holds the rows that every other writer needs.
    """
    if engine.dialect.name == "sqlite":
        event.listen(engine, "do_connect", _connect_to_sqlite)
        return
    if engine.dialect.driver == "psycopg":
        event.listen(engine, "do_connect", _connect_to_postgresql(_limited_connection()))
    else:
        event.listen(engine, "do_connect", _connect_to_postgresql(None))

    @event.listens_for(engine, "connect")
    def limit_the_server(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_settings(call_limit_s(DEFAULT_TTL_MS), is_local=False))
        connection.commit()


def _remaining_s() -> float:
    deadline = _deadline.get()
    return call_limit_s(DEFAULT_TTL_MS) if deadline is None else max(0.0, deadline - time.monotonic())


def _connect_to_sqlite(_dialect: object, _record: object, _args: object, options: dict[str, Any]) -> None:
    options["timeout"] = _remaining_s()


def _connect_to_postgresql(connection_class: Any | None) -> Callable[..., Any]:
    def connect(_dialect: object, _record: object, args: list[Any], options: dict[str, Any]) -> Any:
        limit_s = _remaining_s()
        if limit_s <= 0 and connection_class is not None:
            # The connection that was used before took all the time there was.
            raise connection_class.overdue()
        options["connect_timeout"] = max(_SHORTEST_CONNECT_S, int(limit_s))
        # For drivers that have no limit on this side: a network that takes nothing any more ends the call.
        options.update(keepalives=1, keepalives_idle=2, keepalives_interval=1, keepalives_count=3)
        options["tcp_user_timeout"] = round(limit_s * 1000)
        return None if connection_class is None else connection_class.connect(*args, **options)

    return connect


def _limited_connection() -> Any:
    import psycopg  # noqa: PLC0415 - there only where the catalog is in PostgreSQL

    class LimitedConnection(psycopg.Connection[Any]):
        """A connection each of whose waits ends at the deadline. It is of no use after that, and closed."""

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
    # Psycopg looks up ten times a second: then it sends 0, for nothing is ready.
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
