"""`Catalog`, its schema and its home.

With a copy of a catalog, each stream would have two leases and so two writers. The catalog therefore records where its
database is: a copy is refused, a moved or restored catalog is not.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect, select, text

from dagster_ckpt.catalog.database import Database, as_dict, as_text
from dagster_ckpt.catalog.desired_states import DesiredStateRecords
from dagster_ckpt.catalog.executions import ExecutionRecords
from dagster_ckpt.catalog.history import EventRecords, HistoryRecords, PruningRecords
from dagster_ckpt.catalog.holds import HoldRecords
from dagster_ckpt.catalog.journal import JournalRecords, RecoveryRecords
from dagster_ckpt.catalog.leases import LeaseRecords
from dagster_ckpt.catalog.metrics import MetricRecords
from dagster_ckpt.catalog.requests import LaunchRecords, RequestRecords
from dagster_ckpt.catalog.savepoint_sets import SavepointSetRecords
from dagster_ckpt.catalog.snapshots import SnapshotRecords
from dagster_ckpt.catalog.streams import RebuildRecords, StreamRecords
from dagster_ckpt.catalog.tables import deployment, event_counter, metadata, snapshots, streams
from dagster_ckpt.catalog.time_limits import MIGRATION_S
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.values.durations import Clock

if TYPE_CHECKING:
    from alembic.config import Config


class Catalog:
    """The record of streams, with a store for each kind of record.

    Opening it creates or migrates its tables. Threads and processes may share it; it pickles as its URL.

    Args:
        url: SQLAlchemy URL: `sqlite:////var/lib/catalog.db` or `postgresql+psycopg://user@host/database`.
        clock: Returns the time in ms since the epoch; None uses the database's clock.

    Raises:
        CatalogError: The database cannot be used, is newer, or is a copy of another catalog.

    Example:
        >>> catalog = Catalog("sqlite:////var/lib/catalog.db")
        >>> [stream.stream_id for stream in catalog.streams.all()]
        ['orders']
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._url = url
        self._clock = clock
        self.database = Database(url, clock)
        upgrade(self.database)
        check_home(self.database)
        self.streams = StreamRecords(self.database)
        self.executions = ExecutionRecords(self.database)
        self.leases = LeaseRecords(self.database)
        self.snapshots = SnapshotRecords(self.database)
        self.history = HistoryRecords(self.database)
        self.metrics = MetricRecords(self.database)
        self.holds = HoldRecords(self.database)
        self.savepoint_sets = SavepointSetRecords(self.database)
        self.pruning = PruningRecords(self.database)
        self.rebuilding = RebuildRecords(self.database)
        self.requests = RequestRecords(self.database)
        self.launches = LaunchRecords(self.database)
        self.events = EventRecords(self.database)
        self.desired_states = DesiredStateRecords(self.database)
        self.recoveries = RecoveryRecords(self.database)
        self.journal = JournalRecords(self.database)

    @staticmethod
    def accept(url: str) -> None:
        """Let a copy of a catalog replace its original, which nothing may use any more."""
        database = Database(url)
        upgrade(database)
        accept_home(database)
        database.dispose()

    @property
    def deployment_id(self) -> str:
        # `take_over_deployment` in another process may change it.
        with self.database.reading() as connection:
            return str(connection.execute(select(deployment.c.deployment_id)).scalar_one())

    def take_over_deployment(self, deployment_id: str, *, only_if_unused: bool = False) -> None:
        """Replace the lost catalog of a deployment, so that its snapshots belong to this one.

        Refused if a snapshot was completed here or, with `only_if_unused`, a stream was started.
        """
        with self.database.writing() as connection:
            before = str(connection.execute(select(deployment.c.deployment_id)).scalar_one())
            completed = snapshots.c.location.is_not(None)
            if before != deployment_id and connection.execute(select(snapshots.c.snapshot_id).where(completed)).first():
                raise CatalogError(
                    f"This catalog belongs to deployment {before} and lists its snapshots, so it cannot be assigned "
                    f"to deployment {deployment_id}. Use an empty catalog."
                )
            started = (
                connection.execute(select(streams.c.stream_id).where(streams.c.live_generation > 0)).scalars().all()
            )
            if before != deployment_id and only_if_unused and started:
                raise CatalogError(
                    f"This catalog belongs to deployment {before}, in which {', '.join(started)} was started, but the "
                    f"state to register belongs to deployment {deployment_id}. Nothing was changed. Rebuild into a "
                    "new, empty catalog. If these streams belong to that deployment too, run this first: "
                    f"Catalog(url).take_over_deployment({deployment_id!r})."
                )
            connection.execute(deployment.update().values(deployment_id=deployment_id))

    def now_ms(self) -> int:
        with self.database.reading() as connection:
            return self.database.now_ms(connection)

    def close(self) -> None:
        self.database.dispose()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._url, self._clock)


def _open(url: str, clock: Clock | None) -> Catalog:
    return Catalog(url, clock=clock)


# Arbitrary, to differ from other locks on the server.
_ADVISORY_LOCK = 7_246_019_381


def alembic_config() -> Config:
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "dagster_ckpt.catalog:migrations")
    return config


# A constant that a test compares with the migrations, because alembic is slow to import.
NEWEST_REVISION = "0003"
# The table as alembic creates it.
_ALEMBIC_VERSION = text(
    "CREATE TABLE alembic_version "
    "(version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)


def upgrade(database: Database) -> None:
    with database.reading() as connection:
        if _current_revision(connection) == NEWEST_REVISION:
            return
    with database.writing(within_s=MIGRATION_S) as connection:
        if database.url.get_backend_name() == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        revision = _current_revision(connection)
        if revision is None:
            _create(connection)
        elif revision != NEWEST_REVISION:
            _migrate(database, connection)


def _current_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _create(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)
    connection.execute(event_counter.insert().values(id=1, last_sequence=0))
    connection.execute(deployment.insert().values(deployment_id=str(uuid.uuid4())))
    connection.execute(_ALEMBIC_VERSION)
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": NEWEST_REVISION})


def _migrate(database: Database, connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415
    from alembic.util.exc import CommandError  # noqa: PLC0415

    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise CatalogError(
            f"The catalog {database.shown_url} has a schema version that this package does not know ({error}): a "
            "newer dagster-ckpt has migrated it. Upgrade this installation. Nothing was changed."
        ) from error


_OF_THIS_DATABASE = text(
    "SELECT (SELECT system_identifier FROM pg_control_system()) AS cluster, "
    "(SELECT oid FROM pg_database WHERE datname = current_database()) AS oid"
)
_OTHER_DATABASE = text("SELECT 1 FROM pg_database WHERE oid = :oid")


@dataclass(frozen=True)
class CatalogHome:
    """Where the database of a catalog is.

    Attributes:
        identity: Inode of the file, or cluster and oid in PostgreSQL: survives a move, differs for a copy.
        host: The machine or cluster on which another identity can be looked up.
    """

    identity: str
    place: str
    host: str


def check_home(database: Database) -> None:
    """Record where a catalog is; refuse a copy whose original may still be used."""
    here = _home_of(database)
    if here is None:
        return
    with database.reading() as connection:
        recorded = connection.execute(select(deployment.c.home)).scalar_one_or_none()
    known = _parsed(recorded)
    if known is not None and known.identity == here.identity:
        return
    if known is not None and known.place != here.place and not _is_gone(database, known, here):
        raise CatalogError(
            f"The catalog {database.shown_url} is a copy of the one at {known.place}. With two catalogs, each stream "
            "would have two leases and thus two writers, which delete each other's data. Nothing was changed. Use the "
            "original. If this one replaces it, and nothing uses the original any more: dagster-ckpt accept-catalog. "
            "For another environment, start with a new catalog and import a savepoint."
        )
    accept_home(database)


def accept_home(database: Database) -> None:
    here = _home_of(database)
    with database.writing() as connection:
        connection.execute(deployment.update().values(home=as_text(asdict(here)) if here is not None else None))


def _parsed(recorded: object) -> CatalogHome | None:
    stored = as_dict(recorded if isinstance(recorded, str) else None)
    values = [stored.get(name) for name in ("identity", "place", "host")]
    return CatalogHome(*map(str, values)) if all(isinstance(value, str) for value in values) else None


def _home_of(database: Database) -> CatalogHome | None:
    if database.url.get_backend_name() == "sqlite":
        path = database.url.database or ""
        if path.startswith("file:"):
            return None
        found = Path(path).resolve()
        host = socket.gethostname()
        try:
            return CatalogHome(str(found.stat().st_ino), f"{host}:{found}", host)
        except OSError:
            # Deleted or moved: the next call to the database reports it.
            return None
    with database.reading() as connection:
        if not connection.execute(text("SELECT has_function_privilege('pg_control_system()', 'execute')")).scalar():
            return None
        row = connection.execute(_OF_THIS_DATABASE).one()
    url = database.url
    return CatalogHome(f"{row.cluster}/{row.oid}", f"{url.host}:{url.port or 5432}/{url.database}", str(row.cluster))


def _is_gone(database: Database, known: CatalogHome, here: CatalogHome) -> bool:
    if known.host != here.host:
        return False
    if database.url.get_backend_name() == "sqlite":
        return not os.path.lexists(known.place.removeprefix(f"{known.host}:"))
    with database.reading() as connection:
        oid = known.identity.rpartition("/")[2]
        return connection.execute(_OTHER_DATABASE, {"oid": int(oid)}).first() is None
