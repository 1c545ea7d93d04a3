"""New SQLite catalogs take the schema that the migrations made once in this process.

The migrations would be a third of what a small test does. What they do to older catalogs is tried on those.
"""

from __future__ import annotations

import sqlite3
import tempfile
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import cache

from sqlalchemy import Connection, inspect

from dagster_ckpt.catalog import catalog
from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.tables import deployment

Upgrade = Callable[[Database, Connection], None]


def use_migrated_schema() -> None:
    """Have every catalog that this process makes in an empty SQLite file take it."""
    migrate = catalog._upgrade_locked

    def upgrade(database: Database, connection: Connection) -> None:
        if database.url.get_backend_name() != "sqlite" or inspect(connection).get_table_names():
            migrate(database, connection)
            return
        for statement in _schema(migrate):
            connection.exec_driver_sql(statement)
        connection.execute(deployment.update().values(deployment_id=str(uuid.uuid4())))

    catalog._upgrade_locked = upgrade


@cache
def _schema(migrate: Upgrade) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/catalog.db"
        database = Database(f"sqlite:///{path}")
        with database.writing() as connection:
            migrate(database, connection)
        database.dispose()
        with closing(sqlite3.connect(path)) as made:
            return [line for line in made.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;")]
