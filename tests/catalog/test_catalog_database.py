from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import NEWEST_REVISION, Catalog, alembic_config
from dagster_ckpt.catalog.tables import metadata
from dagster_ckpt.errors import CatalogError


def open_and_register(url: str, name: str) -> list[str]:
    """In a process of its own: the first to open makes the tables."""
    catalog = Catalog(url)
    catalog.streams.ensure(name, name=name, asset_key=name, options={})
    return [stream.stream_id for stream in catalog.streams.all()]


def test_migrations_make_the_tables_that_the_code_uses(catalog: Catalog, url: str) -> None:
    config = alembic_config()
    with catalog.database.writing() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    with Catalog(url).database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


@pytest.mark.thorough(but="postgresql")
def test_processes_that_open_a_new_catalog_at_once_all_succeed(url: str) -> None:
    names = [f"stream-{number}" for number in range(4)]
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(open_and_register, [(url, name) for name in names])
    assert [stream.stream_id for stream in Catalog(url).streams.all()] == names


def test_the_newest_revision_is_that_of_the_migrations() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == NEWEST_REVISION


def test_a_catalog_of_a_newer_version_is_refused(url: str) -> None:
    catalog = Catalog(url)
    with catalog.database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CatalogError, match=r"a newer dagster-ckpt has migrated it. Upgrade"):
        Catalog(url)


def test_a_catalog_pickles_as_its_url(url: str) -> None:
    catalog = Catalog(url)
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
    again: Catalog = pickle.loads(pickle.dumps(catalog))
    assert again.streams.get("orders").stream_id == "orders"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "is not a database URL"),
        ("postgresql+psycopg//user:p@secret@localhost/x", "is not a database URL"),
        ("postgresql+psycopg://user:secret@localhost:port/x", "is not a database URL"),
        ("sqlite://", "cannot be stored in memory"),
        ("sqlite://data/catalog.db", "path begins after the third slash"),
        ("sqlite:///:memory:", "cannot be stored in memory"),
        ("mysql://root@localhost/x", "cannot be stored in mysql"),
        ("sqlite:////dev/null/folder/catalog.db", "cannot be created"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/x", "cannot be used"),
        ("postgresql+nodriver://localhost/x", "is not installed"),
    ],
)
def test_a_database_that_cannot_be_used_is_our_own_error(url: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as raised:
        Catalog(url)
    assert "secret" not in str(raised.value)


def test_a_file_that_is_no_database_is_our_own_error(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(CatalogError, match="file is not a database"):
        Catalog(f"sqlite:///{path}")


def test_whether_a_commit_without_an_answer_was_made_is_not_claimed_to_be_known(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = catalog.database.engine.dialect
    commit = dialect.do_commit

    def lose_the_answer(connection: Any) -> None:
        commit(connection)
        raise dialect.loaded_dbapi.OperationalError("the connection is lost")  # type: ignore[attr-defined]

    monkeypatch.setattr(dialect, "do_commit", lose_the_answer)
    with pytest.raises(CatalogError, match="It is not known whether the last change was made"):
        catalog.streams.allocate_number("orders")
    monkeypatch.undo()

    assert catalog.streams.allocate_number("orders") == 2
    with pytest.raises(CatalogError, match="Nothing was changed"), catalog.database.writing() as connection:
        connection.execute(text("INSERT INTO nothing_of_the_kind VALUES (1)"))
