"""The database behind the catalog: engine, transactions, its clock, and what can go wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from dagster_ckpt.catalog.records import EventType
from dagster_ckpt.catalog.tables import event_counter, events
from dagster_ckpt.errors import CatalogError

BUSY_TIMEOUT_S = 60
_NOW = {
    "sqlite": "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
}

Clock = Callable[[], int]


class Database:
    """A SQL database that several processes and threads use at once.

    Args:
        url: SQLAlchemy URL of SQLite or PostgreSQL.
        clock: Gives the time in ms since the epoch; None asks the database, so that leases do not
            depend on the clocks of the machines that hold them.

    Raises:
        CatalogError: The URL is not one of a supported database.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url = _parsed(url)
        self._clock = clock
        self.engine = _engine(self.url)

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for reading."""
        with self._told(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction: all of it is done, or nothing. On SQLite writers take turns from its begin."""
        with (
            self._told(),
            self.engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            yield connection

    def now_ms(self, connection: Connection) -> int:
        """The time, by the injected clock or the database's own."""
        if self._clock is not None:
            return self._clock()
        return int(connection.execute(text(_NOW[self.url.get_backend_name()])).scalar_one())

    def tell(
        self,
        connection: Connection,
        job_id: str,
        what: EventType,
        *,
        image_id: str | None = None,
        execution_id: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> None:
        """Write an event in the transaction of the change it tells of."""
        counted = event_counter.update().values(last_sequence=event_counter.c.last_sequence + 1)
        sequence = connection.execute(counted.returning(event_counter.c.last_sequence)).scalar_one()
        connection.execute(
            events.insert().values(
                sequence=sequence,
                job_id=job_id,
                type=what.value,
                image_id=image_id,
                execution_id=execution_id,
                payload=as_text(payload or {}),
                at_ms=self.now_ms(connection),
            )
        )

    def dispose(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise CatalogError(
                f"The checkpoint catalog {self.shown_url} cannot be used: {cause}. Check that the database "
                "runs, that the path or host is right, and that this user may write to it. Nothing was changed."
            ) from error


def as_text(value: object) -> str:
    """A value as the catalog stores it."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str)


def as_dict(value: str | None) -> dict[str, Any]:
    """A stored JSON object; an empty one where there is none or it cannot be read."""
    return optional_dict(value) or {}


def optional_dict(value: str | None) -> dict[str, Any] | None:
    """A stored JSON object, or None where there is none or it cannot be read."""
    if value is None:
        return None
    try:
        read = json.loads(value)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise CatalogError(
            f"{url!r} is not a database URL. Give sqlite:////absolute/path/catalog.db or "
            "postgresql+psycopg://user:password@host/database."
        ) from error
    if parsed.get_backend_name() not in _NOW:
        raise CatalogError(
            f"The catalog cannot live in {parsed.get_backend_name()} ({parsed.render_as_string(hide_password=True)}). "
            "Use SQLite or PostgreSQL."
        )
    return parsed


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_S})
    except (NoSuchModuleError, ImportError) as error:
        raise CatalogError(
            f"The driver for {url.render_as_string(hide_password=True)} is not installed ({error}). "
            "For PostgreSQL: pip install 'dagster-ckpt[postgres]' and postgresql+psycopg://..."
        ) from error

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # Transactions are begun by us, explicitly: Python's driver would begin them too late.
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
