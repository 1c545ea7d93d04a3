"""The newest proven snapshot outlives every policy, and failures count against content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotTrigger
from dagster_ckpt.client import Client
from dagster_ckpt.client.examination import record_verification
from dagster_ckpt.recovery.checkpoint_retention import subsume
from dagster_ckpt.recovery.facts import with_equal_content
from dagster_ckpt.recovery.recovery_points import NOT_LOADABLE, failed_points, snapshot_point
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import GoldenStream
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import History
from tests.support.taken_snapshot import taken
from tests.support.verbs import apply_savepoint_history


class Nothing:
    def keep(self, snapshots: Any, context: Any) -> Any:
        return []


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, num_retained=1, retention=Nothing()))
    yield shelf
    shelf.stream.catalog.close()


def prove(shelf: Shelf, snapshot: SnapshotRecord) -> None:
    shelf.stream.catalog.snapshots.verified(snapshot.snapshot_id, None, state_was_read=True)


def dropped(shelf: Shelf) -> list[int | None]:
    return [snapshot.number for snapshot in subsume(shelf.stream)]


def test_a_policy_that_keeps_nothing_leaves_the_newest_proven_checkpoint(shelf: Shelf) -> None:
    taken = [shelf.checkpoint() for _ in range(4)]
    assert dropped(shelf) == [1, 2, 3]
    prove(shelf, taken[0])
    prove(shelf, taken[1])
    assert dropped(shelf) == [1, 3]


def test_a_verification_of_bytes_alone_proves_nothing_and_one_that_finds_damage_takes_the_proof_away(
    shelf: Shelf,
) -> None:
    first, second, _newest = (shelf.checkpoint() for _ in range(3))
    shelf.stream.catalog.snapshots.verified(second.snapshot_id, None)
    assert dropped(shelf) == [1, 2]
    prove(shelf, first)
    prove(shelf, second)
    shelf.stream.catalog.snapshots.verified(second.snapshot_id, "altered")
    assert dropped(shelf) == [2]


def test_damage_in_the_state_is_cleared_only_by_reading_the_state(tmp_path: Path) -> None:
    history = History(tmp_path)
    stream, client = history.shelf.stream, Client.of_stream(history.shelf.stream, origin="a test")
    snapshot = taken(history.shelf, SnapshotKind.CHECKPOINT)
    [intact] = client.verify(STREAM)
    assert intact.passed
    record_verification(stream, replace(intact, problems=("Spark cannot read the state",), state_was_read=True))

    [verified] = client.verify(STREAM)

    assert not verified.passed
    assert "Spark cannot read the state (every byte is as written; only verify_state_job" in verified.problems[0]
    assert stream.catalog.snapshots.get(snapshot.snapshot_id).verified_problem == "Spark cannot read the state"
    assert record_verification(stream, replace(intact, state=(), state_was_read=True)).passed
    assert stream.catalog.snapshots.get(snapshot.snapshot_id).is_proven
    assert client.verify(STREAM)[0].passed
    history.close()


@pytest.mark.parametrize(
    ("found", "is_cleared"),
    [
        ([("an object is truncated", False)], True),
        ([("Spark cannot read it", True)], False),
        ([("Spark cannot read it", True), ("an object is truncated", False)], False),
        ([("an object is truncated", False), ("Spark cannot read it", True)], False),
        ([("Spark cannot read it", True), (None, True), ("an object is truncated", False)], True),
    ],
)
def test_a_check_of_the_bytes_clears_damage_of_the_bytes_alone(
    shelf: Shelf, found: list[tuple[str | None, bool]], is_cleared: bool
) -> None:
    snapshots, snapshot_id = shelf.stream.catalog.snapshots, shelf.checkpoint().snapshot_id
    for problem, state_was_read in found:
        snapshots.verified(snapshot_id, problem, state_was_read=state_was_read)
    problem = None if is_cleared else found[-1][0]

    assert snapshots.verified(snapshot_id, None) == problem

    assert snapshots.get(snapshot_id).verified_problem == problem
    assert snapshots.verified(snapshot_id, None, state_was_read=True) is None


def test_damage_of_which_an_earlier_version_did_not_record_how_it_was_found_stays(shelf: Shelf) -> None:
    snapshots, snapshot_id = shelf.stream.catalog.snapshots, shelf.checkpoint().snapshot_id
    snapshots.verified(snapshot_id, "damaged")
    with shelf.stream.catalog.database.writing() as connection:
        connection.exec_driver_sql("UPDATE snapshots SET properties = '{}'")
    assert snapshots.verified(snapshot_id, "an object is truncated") == "an object is truncated"
    assert snapshots.verified(snapshot_id, None) == "an object is truncated"
    assert snapshots.verified(snapshot_id, None, state_was_read=True) is None


def test_the_history_of_a_schedule_keeps_the_newest_proven_savepoint(shelf: Shelf) -> None:
    taken = [shelf.savepoint(name, SnapshotTrigger.PERIODIC, schedule="nightly") for name in "abc"]
    prove(shelf, taken[0])
    report = apply_savepoint_history(shelf.stream, "nightly", Nothing())
    assert shelf.listed() == {taken[0].snapshot_id, taken[2].snapshot_id}
    assert any("loaded with success" in line for line in report.kept)


def failure(point: str) -> PointFailure:
    return PointFailure(1, "first", point, NOT_LOADABLE, "d", is_certain=True, batch_id=4, at_ms=0)


def test_a_failure_counts_against_every_snapshot_of_the_same_state(tmp_path: Path) -> None:
    golden = GoldenStream(tmp_path).make()
    golden.snapshot()
    golden.snapshot()
    golden.commit(5)
    golden.snapshot()
    newest, second, first = golden.stream.catalog.snapshots.completed("golden")
    points = [snapshot_point(each.snapshot_id) for each in (first, second, newest)]
    failures = [failure(points[0])]
    listed = [newest, second, first]
    assert set(failed_points(failures)) == {points[0]}
    assert set(failed_points(with_equal_content(golden.stream.store, failures, listed))) == {points[0], points[1]}
    # Of another batch, and alone: no other is affected.
    alone = with_equal_content(golden.stream.store, [failure(points[2])], listed)
    assert [each.point for each in alone] == [points[2]]
    golden.close()
