"""Where the database of a catalog is, so that a copy of it is not mistaken for the catalog itself.

A copy has separate leases for its streams: with the same streams, two processes would be "the only
writer", and each would delete what the other needs. The catalog therefore records where its database
is, and a copy is refused when it is opened. A catalog that was moved, or restored in its place, is not.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import select, text

from dagster_ckpt.catalog.database import Database, as_text, optional_dict
from dagster_ckpt.catalog.tables import deployment
from dagster_ckpt.errors import CatalogError

_OF_THIS_DATABASE = text(
    "SELECT (SELECT system_identifier FROM pg_control_system()) AS cluster, "
    "(SELECT oid FROM pg_database WHERE datname = current_database()) AS oid"
)
_OTHER_DATABASE = text("SELECT 1 FROM pg_database WHERE oid = :oid")


@dataclass(frozen=True)
class CatalogHome:
    """Where the database of a catalog is.

    Attributes:
        identity: What stays if it is moved or reached by another name, and differs for a copy: the inode of a file,
            the PostgreSQL cluster and the oid of the database.
        place: Its name: host and path of a file, host and database name of PostgreSQL.
        host: The machine or cluster on which another identity can be looked up.
    """

    identity: str
    place: str
    host: str


def check_home(database: Database) -> None:
    """Record where a catalog is, or refuse it if it is a copy of one that may still be used.

    Raises:
        CatalogError: It is a copy.
    """
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
    """Record that a catalog is where its database is now."""
    here = _home_of(database)
    with database.writing() as connection:
        connection.execute(deployment.update().values(home=as_text(asdict(here)) if here is not None else None))


def _parsed(recorded: object) -> CatalogHome | None:
    said = optional_dict(recorded) if isinstance(recorded, str) else None
    values = [(said or {}).get(name) for name in ("identity", "place", "host")]
    return CatalogHome(*map(str, values)) if all(isinstance(value, str) for value in values) else None


def _home_of(database: Database) -> CatalogHome | None:
    """None if this cannot be determined: the database is not a plain file, or hides its cluster from this user."""
    if database.url.get_backend_name() == "sqlite":
        path = database.url.database or ""
        if path.startswith("file:"):
            return None
        found = Path(path).resolve()
        host = socket.gethostname()
        try:
            return CatalogHome(str(found.stat().st_ino), f"{host}:{found}", host)
        except OSError:
            # Deleted or moved this moment: the next call to the database says so.
            return None
    with database.reading() as connection:
        if not connection.execute(text("SELECT has_function_privilege('pg_control_system()', 'execute')")).scalar():
            return None
        row = connection.execute(_OF_THIS_DATABASE).one()
    url = database.url
    return CatalogHome(f"{row.cluster}/{row.oid}", f"{url.host}:{url.port or 5432}/{url.database}", str(row.cluster))


def _is_gone(database: Database, known: CatalogHome, here: CatalogHome) -> bool:
    """Whether the database that was recorded no longer exists, so that this one was moved and not copied."""
    if known.host != here.host:
        return False
    if database.url.get_backend_name() == "sqlite":
        return not os.path.lexists(known.place.removeprefix(f"{known.host}:"))
    with database.reading() as connection:
        oid = known.identity.rpartition("/")[2]
        return connection.execute(_OTHER_DATABASE, {"oid": int(oid)}).first() is None
