"""The journal of a running query: what it records, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.runtime.batch_progress import BatchLog, Journal, PositionWatch
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode
from dagster_ckpt.spark.query.query import QueryProgress

ENTRY = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n{"topic":{"0":%d}}'


class Noted:
    """A live directory, and what the journal has recorded of it."""

    def __init__(self, folder: Path, *, max_replayed_batches: int = 100, snapshot: int | None = None) -> None:
        self.folder = folder
        self.stream: Any = Mock()
        self.stream.options.max_replayed_batches = max_replayed_batches
        self.stream.catalog.snapshots.restorable.return_value = [Mock(batch_id=snapshot)]
        live = LiveDirectory(str(folder))
        self.log = BatchLog()
        self.journal = Journal(self.stream, live, Mock(), PositionWatch(live, self.log), self.log)

    def plan(self, *batches: int, committed: bool = True) -> None:
        for log in ("offsets", *(["commits"] if committed else [])):
            (self.folder / log).mkdir(parents=True, exist_ok=True)
            for batch in batches:
                (self.folder / log / str(batch)).write_text(ENTRY % batch)
        (self.folder / "metadata").write_text('{"id":"first"}')

    def report(self, batch: int, rows: int, sink: str = "FileSink[/out]") -> None:
        report = {"batchId": batch, "runId": "r", "timestamp": "t", "numInputRows": rows, "durationMs": {"addBatch": 1}}
        self.log.note([QueryProgress.of({**report, "sink": {"description": sink}})])

    @property
    def rows(self) -> list[dict[int, int]]:
        return [call.args[1] for call in self.stream.catalog.journal.note_rows.call_args_list]

    @property
    def calls(self) -> list[list[tuple[int, bool]]]:
        noted = self.stream.catalog.journal.note.call_args_list
        return [[(batch.batch_id, batch.is_committed) for batch in call.args[1]] for call in noted]


def test_each_batch_is_recorded_once_and_an_idle_query_costs_no_query_of_the_catalog(tmp_path: Path) -> None:
    noted = Noted(tmp_path, snapshot=1)
    noted.plan(0, 1, 2, 3)

    for _ in range(3):
        noted.journal.note(ExecutionMode.MICRO_BATCH)
    noted.plan(4)
    for _ in range(3):
        noted.journal.note(ExecutionMode.MICRO_BATCH)

    assert noted.calls == [[(2, False), (3, False)], [(4, False)]]
    assert noted.stream.catalog.snapshots.restorable.call_count == 1


def test_an_idle_query_whose_newest_batch_is_in_a_snapshot_asks_for_snapshots_once(tmp_path: Path) -> None:
    noted = Noted(tmp_path, snapshot=1)
    noted.plan(0, 1)

    for _ in range(3):
        noted.journal.note(ExecutionMode.MICRO_BATCH)

    assert noted.calls == []
    assert noted.stream.catalog.snapshots.restorable.call_count == 1


def test_the_rows_of_each_committed_batch_are_recorded_once(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.plan(0, 1)
    noted.report(0, 5)
    for _ in range(2):
        noted.journal.note(ExecutionMode.MICRO_BATCH)
    noted.report(1, 6)
    # It is not in the journal yet.
    noted.report(2, 7)
    for _ in range(2):
        noted.journal.note(ExecutionMode.MICRO_BATCH)
    noted.plan(2)
    noted.journal.note(ExecutionMode.MICRO_BATCH)

    assert noted.rows == [{0: 5}, {1: 6}, {2: 7}]


def test_they_are_recorded_again_with_the_end_of_the_newest_batch(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.plan(0, 1)
    noted.report(0, 5)
    noted.report(1, 6)
    noted.journal.note(ExecutionMode.MICRO_BATCH)

    noted.journal.note(ExecutionMode.MICRO_BATCH, has_ended=True)

    assert noted.calls[1:] == [[(1, True)]]
    assert noted.rows == [{0: 5, 1: 6}, {1: 6}]


def test_a_function_may_read_a_batch_twice_so_its_rows_prove_nothing(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.plan(0)
    noted.report(0, 10, sink="ForeachBatchSink")

    noted.journal.note(ExecutionMode.MICRO_BATCH)

    assert noted.rows == []


@pytest.mark.parametrize("is_committed", [True, False])
def test_at_the_end_it_is_recorded_whether_the_newest_batch_is_committed(tmp_path: Path, is_committed: bool) -> None:
    noted = Noted(tmp_path)
    noted.plan(0)
    noted.plan(1, committed=False)
    noted.journal.note(ExecutionMode.MICRO_BATCH)
    noted.plan(1, committed=is_committed)

    noted.journal.note(ExecutionMode.MICRO_BATCH, has_ended=True)

    assert noted.calls == [[(0, False), (1, False)], [(1, is_committed)]]


@pytest.mark.parametrize("mode", [mode for mode in ExecutionMode if mode is not ExecutionMode.MICRO_BATCH] + [None])
def test_another_mode_is_not_recorded(tmp_path: Path, mode: ExecutionMode | None) -> None:
    noted = Noted(tmp_path)
    noted.plan(0)

    noted.journal.note(mode)

    assert noted.calls == []


def test_batches_that_may_not_be_replayed_are_recorded_for_their_input(tmp_path: Path) -> None:
    noted = Noted(tmp_path, max_replayed_batches=0)
    noted.plan(0)

    noted.journal.note(ExecutionMode.MICRO_BATCH)

    assert noted.calls == [[(0, False)]]
