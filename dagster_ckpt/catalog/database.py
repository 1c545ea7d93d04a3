"""The database behind the catalog."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, Table, TextClause, create_engine, event, select, text
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from dagster_ckpt.catalog.event_log import changes_of, log_event, note_changes
from dagster_ckpt.catalog.records import EventType, LeaseRecord
from dagster_ckpt.catalog.tables import event_counter, events, leases, snapshots
from dagster_ckpt.catalog.time_limits import DEFAULT_TTL_MS, call_limit_s, limit_connections, limit_transaction, limited
from dagster_ckpt.errors import CatalogError, LeaseLostError
from dagster_ckpt.values.durations import Clock
from dagster_ckpt.values.redaction import cause_to_show, names_a_secret, without_secrets
from dagster_ckpt.values.safe_parsing import from_json

_RECORDED = "dagster_ckpt_recorded"


# Free text in events may contain secrets.
_FREE_TEXT = {"alert", "error", "reason"}


_NOW = {
    "sqlite": "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
}


_Recorded = tuple[str, EventType, dict[str, Any]]


E = TypeVar("E", bound=Enum)


@dataclass
class _Effect:
    is_known: bool = True


# The server may have closed a connection that was idle for longer.
_IDLE_S = 1.0
_USED_AT = "dagster_ckpt_used_at"


class Database:
    """A SQL database that several processes and threads use.

    Times are its own unless a `clock` is given (ms since the epoch): leases do not depend on their holders' clocks.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url = _parsed(url)
        _make_file(self.url)
        self._clock = clock
        self._call_limit_s = call_limit_s(DEFAULT_TTL_MS)
        self.engine = _engine(self.url, os.getpid())
        # On PostgreSQL, a transaction would not change what a statement sees, but add two round trips.
        self._to_read = {} if self.engine.dialect.name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}

    @property
    def shown_url(self) -> str:
        return _shown(self.url)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with (
            self._errors_translated(),
            limited(self._call_limit_s),
            self.engine.connect().execution_options(**self._to_read) as connection,
        ):
            yield connection

    def rows(self, query: Select[Any] | TextClause) -> Sequence[Any]:
        with self.reading() as connection:
            return connection.execute(query).all()

    @contextmanager
    def writing(self, *, within_s: float | None = None) -> Iterator[Connection]:
        """Open a write transaction; on SQLite it locks out other writers at once."""
        recorded: list[_Recorded] = []
        effect = _Effect()
        with (
            self._errors_translated(effect),
            limited(within_s or self._call_limit_s),
            self.engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            connection.info[_RECORDED] = recorded
            if within_s is not None:
                limit_transaction(connection, within_s)
            yield connection
            effect.is_known = False
        for stream_id, what, payload in recorded:
            log_event(stream_id, what, payload)

    def limit_calls(self, ttl_ms: int) -> None:
        self._call_limit_s = min(self._call_limit_s, call_limit_s(ttl_ms))

    @contextmanager
    def writing_under(self, lease: LeaseRecord) -> Iterator[Connection]:
        """Open a write transaction that commits only if the stream's lease is still held.

        Every write of a run uses it: after an earlier check the process may be paused, and its lease taken over.
        """
        with self.writing() as connection:
            require_lease(connection, lease)
            yield connection

    @contextmanager
    def writing_as(self, lease: LeaseRecord | None) -> Iterator[Connection]:
        with self.writing() if lease is None else self.writing_under(lease) as connection:
            yield connection

    def now_ms(self, connection: Connection) -> int:
        if self._clock is not None:
            return self._clock()
        return int(connection.execute(text(_NOW[self.url.get_backend_name()])).scalar_one())

    def insert_if_absent(self, connection: Connection, table: Table, **values: Any) -> bool:
        """Insert a row; False if its key exists. On PostgreSQL the later of two concurrent writers waits here."""
        insert: Any = sqlite_insert
        if self.url.get_backend_name() == "postgresql":
            from sqlalchemy.dialects.postgresql import insert  # noqa: PLC0415
        made = insert(table).values(**values).on_conflict_do_nothing().returning(*table.primary_key.columns)
        # PostgreSQL's driver reports no row count for an insert.
        return connection.execute(made).first() is not None

    def record_event(
        self,
        connection: Connection,
        stream_id: str,
        what: EventType,
        *,
        snapshot_id: str | None = None,
        execution_id: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> None:
        """Record an event and its metrics in the transaction of its change; it is logged after the commit."""
        kept = {name: _to_keep(name, value) for name, value in (payload or {}).items()}
        connection.info[_RECORDED].append((stream_id, what, kept))
        counted = event_counter.update().values(last_sequence=event_counter.c.last_sequence + 1)
        sequence = connection.execute(counted.returning(event_counter.c.last_sequence)).scalar_one()
        at_ms = self.now_ms(connection)
        note_changes(connection, stream_id, changes_of(what, kept, at_ms))
        connection.execute(
            events.insert().values(
                sequence=sequence,
                stream_id=stream_id,
                type=what.value,
                snapshot_id=snapshot_id,
                execution_id=execution_id,
                payload=as_text(kept),
                at_ms=at_ms,
            )
        )

    def dispose(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _errors_translated(self, effect: _Effect | None = None) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = without_secrets(str(error.orig if isinstance(error, DBAPIError) else error), _secrets(self.url))
            is_known = effect is None or effect.is_known
            done = "Nothing was changed." if is_known else "It is not known whether the last change was made."
            raise CatalogError(
                f"The checkpoint catalog {self.shown_url} cannot be used: {cause}. Check that the database "
                f"runs, that the path or host is right, and that this user may write to it. {done}"
            ) from cause_to_show(error)


class Records:
    def __init__(self, database: Database) -> None:
        self._database = database


def _to_keep(name: str, value: object) -> object:
    return without_secrets(value) if name in _FREE_TEXT and isinstance(value, str) else value


def as_text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str)


def as_dict(value: str | None) -> dict[str, Any]:
    return optional_dict(value) or {}


def read_enum(value: str, known: type[E], unreadable: E, column: str, troubles: list[str]) -> E:
    try:
        return known(value)
    except ValueError:
        troubles.append(f"unknown {column} {value!r:.80}")
        return unreadable


def read_dict(value: str | None, column: str, troubles: list[str]) -> dict[str, Any] | None:
    read = optional_dict(value)
    if value is not None and read is None:
        troubles.append(f"{column} are not a JSON object: {value!r:.80}")
    return read


def optional_dict(value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        read = from_json(value)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def cells(row: Row[Any], table: Table, troubles: list[str]) -> dict[str, Any]:
    """The cells of a row; one that is not of its column's type is emptied and named in `troubles`.

    SQLite accepts any type in any column, and a database may be damaged.
    """
    values = dict(row._mapping)
    for column in table.c:
        if column.name not in values:
            continue
        value, wanted = values[column.name], column.type.python_type
        if isinstance(value, wanted) or (value is None and column.nullable):
            continue
        troubles.append(f"{column.name} is {value!r:.80}")
        values[column.name] = None if column.nullable else wanted()
    return values


def _shown(url: URL) -> str:
    return without_secrets(url.render_as_string(hide_password=True))


def _secrets(url: URL) -> list[str]:
    in_query = [value for name, value in url.query.items() if isinstance(value, str) and names_a_secret(name)]
    return [secret for secret in (url.password, *in_query) if secret]


def _make_file(url: URL) -> None:
    path = url.database or ""
    if url.get_backend_name() != "sqlite" or path.startswith("file:") or Path(path).exists():
        return
    try:
        Path(path).absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise CatalogError(
            f"The catalog file {path} cannot be created: {error}. Create its folder, or choose one that this user can "
            "write to."
        ) from error


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    # ValueError: a port that is not a number.
    except (ArgumentError, ValueError) as error:
        # Not chained: SQLAlchemy's message contains the password.
        raise CatalogError(
            f"{without_secrets(url)!r} is not a database URL ({type(error).__name__}). Give "
            "sqlite:////absolute/path/catalog.db or postgresql+psycopg://user@host/database."
        ) from None
    if "@" in (parsed.host or ""):
        raise CatalogError(
            f"The catalog's URL {without_secrets(url)!r} has an '@' in its user name or password: write it as %40, so "
            "that the password does not become part of the host."
        )
    if parsed.get_backend_name() not in _NOW:
        raise CatalogError(
            f"The catalog cannot be stored in {parsed.get_backend_name()} ({_shown(parsed)}). Use SQLite or PostgreSQL."
        )
    if parsed.get_backend_name() == "sqlite" and parsed.host:
        raise CatalogError(
            f"The catalog's URL {without_secrets(url)!r} names a host, {parsed.host}. A path begins after the third "
            "slash: sqlite:////absolute/path/catalog.db."
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise CatalogError(
            f"The catalog cannot be stored in memory ({parsed}): other processes cannot see it, and it is lost when "
            "this process ends. Use a file: sqlite:////absolute/path/catalog.db."
        )
    return parsed


# Cached because a sensor opens the catalog at each tick; by process because a fork must not share connections.
@lru_cache(maxsize=16)
def _engine(url: URL, process: int) -> Engine:  # noqa: ARG001 - part of the key
    try:
        if url.get_backend_name() != "sqlite":
            # The dialect would look for hstore on each new connection.
            options = {"use_native_hstore": False} if url.get_dialect().driver == "psycopg" else {}
            engine = create_engine(url, pool_timeout=call_limit_s(DEFAULT_TTL_MS), **options)
            limit_connections(engine)
            _test_idle_connections(engine)
            return engine
        engine = create_engine(url, poolclass=NullPool)
        limit_connections(engine)
    except (NoSuchModuleError, ImportError) as error:
        raise CatalogError(
            f"The driver for {_shown(url)} is not installed ({error}). "
            "For PostgreSQL: pip install 'dagster-ckpt[postgres]' and postgresql+psycopg://..."
        ) from error

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # Python's driver begins transactions too late, so `begin` does it.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")

    return engine


def _test_idle_connections(engine: Engine) -> None:
    """Test a connection only if it was idle: with `pool_pre_ping`, each read would need a second round trip."""

    @event.listens_for(engine, "checkin")
    def note(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info[_USED_AT] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def test(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        used_at = record.info.get(_USED_AT)
        if used_at is None or time.monotonic() - used_at < _IDLE_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error


def lease_row(connection: Connection, stream_id: str) -> Row[Any] | None:
    return connection.execute(select(leases).where(leases.c.stream_id == stream_id)).one_or_none()


def is_lease(row: Row[Any] | None, lease: LeaseRecord) -> bool:
    """Whether a row is a lease that is still held.

    The token alone does not say so: a database that has lost its last transactions, as after a failover to a replica,
    issues it again.
    """
    return row is not None and (row.token, row.execution_id) == (lease.token, lease.execution_id)


def require_lease(connection: Connection, lease: LeaseRecord) -> None:
    """Raise LeaseLostError unless the lease is still held, and lock it until this transaction ends.

    On PostgreSQL a take-over waits for the row; SQLite excludes other writers anyway.
    """
    query = select(leases).where(leases.c.stream_id == lease.stream_id).with_for_update(read=True)
    row = connection.execute(query).one_or_none()
    if not is_lease(row, lease):
        raise LeaseLostError(lease_lost_message(lease.stream_id, row))


def was_renewed(connection: Connection, seen: LeaseRecord) -> bool:
    """Whether a lease was renewed since it was seen; locks its row."""
    query = select(leases).where(leases.c.stream_id == seen.stream_id).with_for_update()
    row = connection.execute(query).one_or_none()
    return row is not None and is_lease(row, seen) and row.renewed_at_ms != seen.renewed_at_ms


def lease_lost_message(stream_id: str, row: Row[Any] | None) -> str:
    if row is None:
        return (
            f"The catalog does not know the lease of stream {stream_id!r} any more: it was deleted, or replaced by "
            "another one, while the stream ran. Put it back, or register the stream's snapshots in the new one "
            "(dagster-ckpt rebuild); then start the stream again."
        )
    if row.execution_id is None:
        return (
            f"The lease of stream {stream_id!r} was released, so this execution no longer holds it. Start the stream "
            "again."
        )
    return (
        f"The lease of stream {stream_id!r} is held by run {row.run_id} (process {row.pid} on {row.host}). This "
        "execution did not renew it in time and stops its query, so that the stream has one writer."
    )


def lock_snapshot(connection: Connection, snapshot_id: str) -> Row[Any] | None:
    return connection.execute(
        select(snapshots).where(snapshots.c.snapshot_id == snapshot_id).with_for_update()
    ).one_or_none()
