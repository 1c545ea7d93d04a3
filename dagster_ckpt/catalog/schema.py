"""Create or migrate the catalog's tables with Alembic, safely when many processes start concurrently."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.time_limits import MIGRATION_S
from dagster_ckpt.errors import CatalogError

if TYPE_CHECKING:
    from alembic.config import Config

# An arbitrary number that other users of the PostgreSQL server are unlikely to lock.
_ADVISORY_LOCK = 7_246_019_381


def alembic_config() -> Config:
    """Alembic's configuration, without a file: the migrations are part of the package."""
    # Alembic is slow to import, and only a process that opens a catalog needs it.
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "dagster_ckpt.catalog:migrations")
    return config


@cache
def newest_revision() -> str | None:
    """The schema revision of this version. Cached, because sensors open a catalog every few seconds."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    return ScriptDirectory.from_config(alembic_config()).get_current_head()


def upgrade(database: Database) -> None:
    """Migrate a database to the newest schema; a current database is unchanged.

    Raises:
        CatalogError: It was created by a newer version of this package, or cannot be used.
    """
    from alembic.migration import MigrationContext  # noqa: PLC0415

    with database.reading() as connection:
        if MigrationContext.configure(connection).get_current_revision() == newest_revision():
            return
    with database.writing(within_s=MIGRATION_S) as connection:
        if database.url.get_backend_name() == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        _upgrade(database, connection)


def _upgrade(database: Database, connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415
    from alembic.util.exc import CommandError  # noqa: PLC0415

    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise CatalogError(
            f"The catalog {database.shown_url} has tables of a version that this package does not know ({error}). "
            "It was used by a newer dagster-ckpt: upgrade this one. Nothing was changed."
        ) from error
