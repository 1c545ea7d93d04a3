"""One suite over both databases: SQLite in a file, and a PostgreSQL server of the tests' own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import Holder
from tests.support.manual_clock import ManualClock


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.db'}"
    server = make_url(request.getfixturevalue("postgres"))
    name = f"catalog_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def catalog(url: str, clock: ManualClock) -> Iterator[Catalog]:
    catalog = Catalog(url, clock=clock)
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={"num_retained": 1})
    yield catalog
    catalog.close()


def holder(name: str = "a") -> Holder:
    return Holder(
        execution_id=f"execution-{name}",
        run_id=f"run-{name}",
        host=f"host-{name}",
        pid=1,
        process_start_ticks=1,
        boot_id="boot",
    )
