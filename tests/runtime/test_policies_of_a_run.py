"""A running stream takes and subsumes checkpoints as its policies say; the query is played, all else is real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotTrigger
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.policies.retention import Latest
from dagster_ckpt.policies.trigger import EveryBatches, EveryRows
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.query.query import QueryProgress
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM, Shelf

ROWS = 10


class Batches(PlayedQuery):
    """Commits a batch of ten rows each time it is asked for its progress, until the test holds it."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.shelf = shelf
        self.reported = 0
        self.is_held: Callable[[], bool] = lambda: False

    def recent_progress(self) -> list[QueryProgress]:
        if self.is_held():
            return []
        self.reported += 1
        self.shelf.commit_batch(self.reported)
        return [QueryProgress(0, "run", "2026-01-01T00:00:00Z", ROWS, 0, None, ("noop",), 1, True)]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    as_writer(shelf.stream.catalog, STREAM).executions.heartbeat("first", {"sinks": ["noop"]})
    yield shelf
    shelf.stream.catalog.close()


def run(shelf: Shelf, query: Batches, *, until: Callable[[Sequence[int]], bool], **options: Any) -> list[int]:
    """Run the stream until enough checkpoints are completed; how many batches each of them waited for."""
    stream = replace(shelf.stream, options=CheckpointConfig(**options).options)
    at_batch: dict[int, int] = {}
    deadline = time.monotonic() + 60

    def interrupted() -> bool:
        for snapshot in stream.catalog.snapshots.completed(STREAM):
            assert snapshot.trigger is SnapshotTrigger.PERIODIC
            at_batch.setdefault(snapshot.number or 0, query.reported)
        return until(list(at_batch)) or time.monotonic() > deadline

    execute_stream(stream, RunRequest("run", lambda _live: query, interrupted=interrupted))  # type: ignore[arg-type, return-value]
    return [at_batch[number] for number in sorted(at_batch)]


def test_a_checkpoint_waits_for_its_number_of_batches(shelf: Shelf) -> None:
    query = Batches(shelf)
    first, second = run(shelf, query, until=lambda taken: len(taken) >= 2, trigger=EveryBatches(4))[:2]
    assert first >= 4
    assert second >= first + 1


def test_no_checkpoint_is_taken_before_its_rows_are_read(shelf: Shelf) -> None:
    query = Batches(shelf)
    query.is_held = lambda: query.reported >= 3
    looks: list[int] = []

    def long_enough(taken: Sequence[int]) -> bool:
        looks.append(len(taken))
        return len(looks) > 40

    assert run(shelf, query, until=long_enough, trigger=EveryRows(3 * ROWS + 1)) == []


class Odd:
    """Keeps checkpoints with an odd number."""

    def keep(self, snapshots: Any, context: Any) -> Any:
        return [snapshot for snapshot in snapshots if snapshot.number % 2]


def test_a_running_stream_keeps_what_its_policy_keeps(shelf: Shelf) -> None:
    run(
        shelf, Batches(shelf), until=lambda taken: len(taken) >= 5, trigger=EveryBatches(1), retention=Odd() | Latest(1)
    )
    numbers = sorted(snapshot.number or 0 for snapshot in shelf.stream.catalog.snapshots.completed(STREAM))
    assert {1, 3} <= set(numbers)
    assert 2 not in numbers
