"""A query that has processed all its input ends with a checkpoint of its end; the query is played, all else is real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, SnapshotTrigger
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.execution_end import settle_run
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM, Shelf


def run(shelf: Shelf, batch: int | None, **options: Any) -> EndKind:
    """A run that commits up to one batch and ends by itself, long before its interval; None commits nothing."""
    config = CheckpointConfig(
        **{"interval": 3_600_000, "cleanup": ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION, **options}
    )
    stream = replace(shelf.stream, options=config.options, restart=RestartStrategies.no_restart())

    def start(_live: object) -> Any:
        if batch is not None:
            shelf.commit_batch(batch)
        return PlayedQuery(ends=True)

    outcome = execute_stream(stream, RunRequest("run", start))
    settle_run(stream, outcome)
    return outcome.end.kind


def taken(shelf: Shelf) -> list[tuple[int | None, SnapshotTrigger]]:
    completed = shelf.stream.catalog.snapshots.completed(STREAM)
    return [(each.batch_id, each.trigger) for each in reversed(completed)]


def test_a_run_shorter_than_the_interval_ends_with_a_checkpoint_that_stays(shelf: Shelf) -> None:
    assert run(shelf, 1) is EndKind.ENDED_BY_ITSELF

    assert taken(shelf) == [(1, SnapshotTrigger.INPUT_ENDED)]
    [last] = shelf.stream.catalog.executions.of_stream(STREAM)[:1]
    assert (last.status, last.settled) == (ExecutionStatus.SUSPENDED, True)


def test_later_runs_keep_the_newest_one(shelf: Shelf) -> None:
    for batch in (1, 2, 3):
        run(shelf, batch)

    assert taken(shelf) == [(3, SnapshotTrigger.INPUT_ENDED)]


def test_a_run_without_new_input_takes_no_checkpoint(shelf: Shelf) -> None:
    run(shelf, 1)
    before = shelf.stream.catalog.events.latest_sequence()
    assert run(shelf, None) is EndKind.ENDED_BY_ITSELF

    types = {each.type for each in shelf.stream.catalog.events.after(before)}
    assert EventType.CHECKPOINT_COMPLETED not in types
    assert taken(shelf) == [(1, SnapshotTrigger.INPUT_ENDED)]


def test_a_stream_without_checkpointing_ends_without_one(shelf: Shelf) -> None:
    assert run(shelf, 1, interval=None) is EndKind.ENDED_BY_ITSELF
    assert taken(shelf) == []


@pytest.mark.parametrize(("tolerable", "end"), [(0, EndKind.FAILED), (1, EndKind.ENDED_BY_ITSELF)])
def test_a_final_checkpoint_that_fails_counts_like_any_other(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tolerable: int, end: EndKind
) -> None:
    def fail(*_args: Any, **_how: Any) -> Any:
        raise StorageAccessError("the disk is full")

    monkeypatch.setattr(shelf.stream.store, "write_checkpoint", fail)

    assert run(shelf, 1, tolerable_failures=tolerable) is end
    assert taken(shelf) == []
