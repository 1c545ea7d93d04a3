"""Which snapshot to go back to, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.recovery.recovery_points import SnapshotChoice, choose_snapshot
from dagster_ckpt.values.modes import SnapshotKind


def snapshot(batch: int | None, number: int | None = None) -> SnapshotRecord:
    number = batch if number is None else number
    return SnapshotRecord(
        snapshot_id=f"snapshot-{number}",
        stream_id="orders",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
        location=f"/snapshots/chk-{number}",
        batch_id=batch,
    )


def chosen(snapshots: Sequence[SnapshotRecord], newest: int | None, broken: Sequence[str] = ()) -> SnapshotChoice:
    def problems(candidate: SnapshotRecord) -> list[str]:
        return ["it is torn", "and more"] if candidate.snapshot_id in broken else []

    return choose_snapshot(snapshots, newest_batch=newest, problems=problems)


@pytest.mark.parametrize(
    ("batches", "newest", "broken", "takes"),
    [
        # What is taken: the batch, how many are replayed, and the batches of newer snapshots that are passed over.
        ([3, 9, 6], 10, [], (9, 1, [])),
        ([3, 9, 6], 9, [], (9, 0, [])),
        ([3, 9, 6], 10, ["snapshot-9"], (6, 4, [9])),
        ([3, 9, 6], 7, [], (6, 1, [9])),
        ([3, 9, 6], 7, ["snapshot-6"], (3, 4, [9, 6])),
        ([3, 9, 6], None, [], (9, None, [])),
        ([3, 9], 10, ["snapshot-3", "snapshot-9"], (None, None, [9, 3])),
        ([0, 1], 1, ["snapshot-1"], (0, 1, [1])),
        ([], 10, [], (None, None, [])),
    ],
)
def test_the_newest_snapshot_that_passes_is_chosen(
    batches: list[int], newest: int | None, broken: list[str], takes: tuple[int | None, int | None, list[int]]
) -> None:
    choice = chosen([snapshot(batch) for batch in batches], newest, broken)

    skipped = [item.snapshot.batch_id for item in choice.skipped]
    assert (choice.snapshot and choice.snapshot.batch_id, choice.replayed_batches, skipped) == takes


def test_of_two_snapshots_of_one_batch_the_later_is_taken() -> None:
    assert chosen([snapshot(4, 1), snapshot(4, 2)], 9).snapshot == snapshot(4, 2)


def test_a_snapshot_that_does_not_tell_its_batch_or_number_comes_last() -> None:
    unknown = snapshot(None, 8)
    nameless = SnapshotRecord(**{**vars(snapshot(0, 1)), "snapshot_id": "nameless", "number": None})

    assert chosen([unknown, nameless, snapshot(0, 0)], 9).snapshot == snapshot(0, 0)
    assert chosen([unknown, nameless], 9).snapshot == nameless
    only = chosen([unknown], 9)
    assert (only.snapshot, only.replayed_batches) == (unknown, None)


def test_the_choice_is_told_in_words_and_as_plain_data() -> None:
    found = chosen([snapshot(9), snapshot(6), snapshot(5)], 8, ["snapshot-6"])
    words = "Use chk-5 at batch 5 (start_from=snapshot-5); 3 batches would be processed again."
    assert found.message == words
    record: dict[str, Any] = {
        "snapshot_id": "snapshot-5",
        "location": "/snapshots/chk-5",
        "batch_id": 5,
        "replayed_batches": 3,
        "message": words,
        "skipped": [
            {"snapshot_id": "snapshot-9", "why": "its batch is later than 8, the newest known batch"},
            {"snapshot_id": "snapshot-6", "why": "it is torn"},
        ],
    }
    assert found.as_record() == record


def test_where_the_newest_batch_is_not_known_nothing_is_said_of_repetition() -> None:
    assert chosen([snapshot(9)], None).message == "Use chk-9 at batch 9 (start_from=snapshot-9)."


def test_where_no_snapshot_can_be_restored_it_says_how_many_were_tried() -> None:
    none = {"snapshot_id": None, "location": None, "batch_id": None, "replayed_batches": None}
    nothing = "There is no snapshot of this stream that can be restored."
    assert chosen([], 9).as_record() == {**none, "message": nothing, "skipped": []}
    tried = chosen([snapshot(3)], 9, ["snapshot-3"])
    assert tried.message == "There is no snapshot of this stream that can be restored (1 were tried)."
