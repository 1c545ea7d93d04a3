"""A copy of a catalog is refused: it would give each stream a second lease, and so a second writer."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import CatalogError


def opened(url: str) -> str:
    catalog = Catalog(url)
    try:
        return catalog.deployment_id
    finally:
        catalog.close()


def copied(url: str) -> str:
    """The URL of a copy of a catalog that nothing has open."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return f"sqlite:///{shutil.copy(str(parsed.database), f'{parsed.database}_copy')}"
    server = create_engine(parsed.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {parsed.database}_copy TEMPLATE {parsed.database}"))
    server.dispose()
    return parsed.set(database=f"{parsed.database}_copy").render_as_string(hide_password=False)


def dropped(url: str) -> None:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        Path(str(parsed.database)).unlink()
        return
    server = create_engine(parsed.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {parsed.database}"))
    server.dispose()


def test_a_copy_is_refused_as_long_as_the_original_exists(url: str) -> None:
    """A copy was taken for the catalog: its cancel with DELETE_ON_CANCELLATION deleted what the original ran in."""
    original = opened(url)
    copy = copied(url)

    with pytest.raises(CatalogError, match=r"is a copy of the one at .*dagster-ckpt accept-catalog"):
        Catalog(copy)

    assert opened(url) == original
    Catalog.accept(copy)
    assert opened(copy) == original


def test_a_copy_whose_original_is_gone_was_moved(url: str) -> None:
    original = opened(url)
    copy = copied(url)
    dropped(url)

    assert opened(copy) == original
    # And that is where it is now.
    with pytest.raises(CatalogError, match="is a copy of the one at"):
        Catalog(copied(copy))


def by_rename(path: Path) -> Path:
    return path.rename(path.with_name("renamed.db"))


def by_a_link(path: Path) -> Path:
    link = path.with_name("link.db")
    link.symlink_to(path)
    return link


def by_a_second_mount(path: Path) -> Path:
    link = path.with_name("mounted.db")
    link.hardlink_to(path)
    return link


def by_a_backup(path: Path) -> Path:
    backup = path.with_name("backup.db")
    shutil.copy(path, backup)
    path.unlink()
    return backup.rename(path)


@pytest.mark.parametrize("moved", [by_rename, by_a_link, by_a_second_mount, by_a_backup])
def test_a_file_that_is_reached_by_another_path_or_was_restored_in_its_place_is_no_copy(
    tmp_path: Path, moved: Callable[[Path], Path]
) -> None:
    original = opened(f"sqlite:///{tmp_path / 'catalog.db'}")

    assert opened(f"sqlite:///{moved(tmp_path / 'catalog.db')}") == original


@pytest.mark.parametrize("same_path", [True, False])
def test_a_copy_on_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_path: bool) -> None:
    """A developer's copy of production's catalog, to look into a problem there."""
    path = tmp_path / "catalog.db"
    opened(f"sqlite:///{path}")
    there = Path(shutil.copy(path, tmp_path / "there.db"))
    path.unlink()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")

    with pytest.raises(CatalogError, match="is a copy"):
        Catalog(f"sqlite:///{there.rename(path) if same_path else there}")


def test_a_host_that_was_renamed_makes_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = opened(f"sqlite:///{tmp_path / 'catalog.db'}")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")

    assert opened(f"sqlite:///{tmp_path / 'catalog.db'}") == original


@pytest.mark.parametrize("home", ["{", "[]", '{"identity": 1}'])
def test_a_damaged_record_of_the_place_is_made_again(tmp_path: Path, home: str) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    original = opened(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE deployment SET home = :home"), {"home": home})
    engine.dispose()

    assert opened(url) == original
