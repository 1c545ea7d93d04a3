"""Numbers of snapshots rise above all that is stored, also where the catalog has forgotten it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import advance_checkpoint_id
from tests.support.as_writer import holding, set_stream
from tests.support.retention_shelf import STREAM, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def forgotten(shelf: Shelf) -> Shelf:
    """The same storage and live directory, and a catalog that knows of neither snapshot."""
    return Shelf.at(shelf.root, catalog_url=f"sqlite:///{shelf.root / 'another.db'}")


def counted(stream: StreamHandle, restored: SnapshotRecord | None) -> int:
    with holding(stream.catalog, STREAM) as lease:
        return advance_checkpoint_id(stream, restored, lease)


def next_number(shelf: Shelf) -> int:
    return shelf.stream.catalog.streams.get(STREAM).next_number


def test_a_new_stream_counts_from_one(shelf: Shelf) -> None:
    assert counted(shelf.stream, None) == 1


def test_a_catalog_that_was_lost_counts_on_from_what_is_stored(shelf: Shelf) -> None:
    for _ in range(11):
        shelf.checkpoint()
    after = forgotten(shelf)

    assert counted(after.stream, None) == 12
    assert next_number(after) == 12
    after.stream.catalog.close()


def test_a_restored_savepoint_counts_too(shelf: Shelf) -> None:
    shelf.numbers = 40
    savepoint = shelf.savepoint("mine")
    set_stream(shelf.stream.catalog, STREAM, next_number=7)

    assert counted(shelf.stream, None) == 7
    assert counted(shelf.stream, savepoint) == 42
    assert next_number(shelf) == 42


def test_a_counter_that_is_further_on_stays(shelf: Shelf) -> None:
    set_stream(shelf.stream.catalog, STREAM, next_number=100)

    assert counted(shelf.stream, shelf.checkpoint()) == 100
    assert next_number(shelf) == 100


def test_a_start_counts_on_before_its_query_runs(shelf: Shelf) -> None:
    shelf.checkpoint()
    after = forgotten(shelf)
    seen: list[int] = []

    def start(_live: LiveDirectory) -> Any:
        seen.append(next_number(after))
        raise RuntimeError("that is enough")

    with pytest.raises(RuntimeError, match="that is enough"):
        execute_stream(after.stream, RunRequest("run", start))

    assert seen == [2]
    after.stream.catalog.close()
