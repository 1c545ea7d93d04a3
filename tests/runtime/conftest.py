"""What every test of a run has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.runtime import run_request
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import Shelf
from tests.support.streams import stream_at


@pytest.fixture(autouse=True)
def a_start_that_polls_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a request submitted before the start to the supervisor, however long a busy machine takes to start.

    A test about a start that is stopped sets its own interval.
    """
    monkeypatch.setattr(run_request, "REQUEST_POLL_MS", 3_600_000)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")

    def make(*queries: PlayedQuery | Exception, restart: Any = None) -> Stage:
        return Stage(stream_at(tmp_path, catalog=catalog, restart=restart), list(queries))

    yield make
    catalog.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """A stream that has run before, so that it may be asked for snapshots at once."""
    shelf = Shelf.at(tmp_path)
    as_writer(shelf.stream.catalog).executions.heartbeat("first", {"batch_id": 0, "sinks": ["ConsoleSink"]})
    yield shelf
    shelf.stream.catalog.close()
