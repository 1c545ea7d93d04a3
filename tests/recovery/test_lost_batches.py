"""Which lost batches a start can replay, and what it knows of the sinks that have them. No Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.recovery import replay
from dagster_ckpt.recovery.plan import Restore, UndoneReads
from dagster_ckpt.recovery.replay import LostBatches, lost_batches
from dagster_ckpt.sinks.sink import OnRepeat, Sink
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import query_metadata
from dagster_ckpt.spark.checkpoint_dir.planned_batches import plan_again, planned_by, read_planned
from dagster_ckpt.stream.start_from import StartPoint

OFFSETS = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n{"topic":{"0":%d}}'


class Remembers(Sink):
    """A table that keeps the batches of each query, also those that were undone."""

    on_repeat = OnRepeat.SKIPS
    rolls_back = True
    batches: ClassVar[dict[str, int]] = {}

    def last_batch(self, query_id: str | None) -> int | None:
        return self.batches.get(str(query_id))


class AddsTheRest(Remembers):
    """A topic with several writers."""

    on_repeat = OnRepeat.RUNS
    rolls_back = False


class HasParts(Remembers):
    """A table that a function writes to more than once in a batch."""

    has_parts = True


def planned(*batches: int, query_id: str = "second") -> list[PlannedBatch]:
    files = {"metadata": query_metadata(query_id)}
    return [PlannedBatch(batch, "", {**files, f"offsets/{batch}": b""}) for batch in batches]


Lost = Callable[..., LostBatches | None]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Lost:
    """The batches lost after batch 2, of which a snapshot was taken under the id `first`."""

    def found(journal: list[PlannedBatch], sink: type[Remembers], **batches: int) -> LostBatches | None:
        monkeypatch.setattr(sink, "batches", batches)
        monkeypatch.setattr(replay, "sinks_of", lambda _: [sink("out")])
        monkeypatch.setattr(replay, "sinks_written", lambda _: [])
        monkeypatch.setattr(replay, "sinks_of_snapshot", lambda *_: [])
        stream: Any = Mock()
        stream.options.max_replayed_batches = 100
        stream.catalog.journal.after.return_value = journal
        facts: Any = Mock(live_batch=None, damaged_logs=(), undone=UndoneReads())
        facts.start_from.point = StartPoint.LATEST
        snapshot: Any = Mock(batch_id=2, query_id="first")
        return lost_batches(stream, facts, Restore(reason="lost", snapshot=snapshot))

    return found


def test_batches_that_a_table_has_undone_are_not_those_of_the_same_numbers(lost: Lost) -> None:
    """The stream went back to the snapshot before: the table still knows batches 3 to 5 of the query of then."""
    found = lost(planned(3, 4), Remembers, first=5, second=3)

    assert found is not None
    assert ([each.batch_id for each in found.batches], found.query_id) == ([3], "second")
    assert found.in_flight is not None
    assert found.in_flight.batch_id == 4


@pytest.mark.parametrize(
    ("journal", "newest", "without_output", "first_run"),
    [
        (planned(3, 4), 4, [3], 4),
        (planned(3, 4), 3, [3], 4),
        (planned(3), 3, [], 3),
        # Its plan was not recorded: the preview must not say that exactly these rows come again.
        (planned(3), 4, [3], None),
    ],
    ids=["the newest batch may be there in part", "it is not there", "it is the only one", "the journal is behind"],
)
@pytest.mark.parametrize("sink", [AddsTheRest, HasParts])
def test_a_batch_of_which_a_part_may_be_missing_is_run_again(
    lost: Lost,
    journal: list[PlannedBatch],
    newest: int,
    without_output: list[int],
    first_run: int | None,
    sink: type[Remembers],
) -> None:
    found = lost(journal, sink, second=newest)

    assert found is not None
    plan = found.plan()
    assert [each.batch_id for each in found.batches] == without_output
    last = without_output[-1] if without_output else 2
    assert (plan.to_batch, plan.in_flight, plan.query_id) == (last, first_run, "second")


def test_a_batch_that_no_sink_has_is_planned_anew(lost: Lost) -> None:
    assert lost(planned(3), AddsTheRest, second=2) is None
    assert lost(planned(3), AddsTheRest) is None


def test_a_journal_that_does_not_name_the_query_is_not_replayed(lost: Lost) -> None:
    assert lost([PlannedBatch(3, "", {"offsets/3": b""})], Remembers, first=3) is None


def test_a_batch_is_planned_again_under_its_query_id(tmp_path: Path) -> None:
    ran, restored = (LiveDirectory(str(tmp_path / name)) for name in ("ran", "restored"))
    for live, query_id, rewrite in ((ran, "second", "rewrite of then"), (restored, "first", None)):
        live.folder.write("metadata", [query_metadata(query_id, rewrite)])
        live.folder.write("offsets/2", [(OFFSETS % 2).encode()])
    ran.folder.write("offsets/3", [(OFFSETS % 3).encode()])

    (batch,) = read_planned(ran, [3])
    plan_again(restored, batch)

    assert (planned_by(batch), live_query_id(restored)) == ("second", "second")
    assert b"rewrite of then" not in restored.folder.read("metadata")
    assert restored.folder.read("offsets/3") == ran.folder.read("offsets/3")
