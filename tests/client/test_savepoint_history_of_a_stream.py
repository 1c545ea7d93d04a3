"""A schedule's history deletes what the schedule took, and nothing else; a real catalog, real bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.policies.retention import SavepointHistory
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport, housekeeping
from tests.support.as_writer import as_writer, set_stream
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.verbs import apply_savepoint_history

NIGHTLY, HOURLY = "orders_nightly", "orders_hourly"


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def by(shelf: Shelf, schedule: str, *labels: str) -> list[SnapshotRecord]:
    return [shelf.savepoint(label, SnapshotTrigger.PERIODIC, schedule=schedule) for label in labels]


def apply(shelf: Shelf, **limits: Any) -> RetentionReport:
    history = SavepointHistory(**{"max_count": None, **limits})
    return apply_savepoint_history(shelf.stream, NIGHTLY, history)


def test_the_oldest_are_deleted_bytes_and_all(shelf: Shelf) -> None:
    oldest, older, newest = by(shelf, NIGHTLY, "a", "b", "c")

    report = apply(shelf, max_count=1)

    assert [name.split()[1] for name in report.deleted] == ["a", "b"]
    assert shelf.listed() == {newest.snapshot_id}
    assert shelf.deletions() == [oldest.snapshot_id, older.snapshot_id]
    assert shelf.is_whole(newest)
    assert not Path((oldest.location or "").removeprefix("file://")).exists()


def test_savepoints_of_persons_and_of_other_schedules_and_checkpoints_stay(shelf: Shelf) -> None:
    manual = shelf.savepoint("by hand")
    stop = shelf.savepoint("at the stop", SnapshotTrigger.STOP)
    hourly = by(shelf, HOURLY, "hour")
    checkpoint = shelf.checkpoint()
    _, newest = by(shelf, NIGHTLY, "a", "b")

    apply(shelf, max_count=1, max_age_ms=1)

    kept = [manual, stop, *hourly, checkpoint, newest]
    assert shelf.listed() == {snapshot.snapshot_id for snapshot in kept}
    assert all(shelf.is_whole(snapshot) for snapshot in kept)


@pytest.mark.parametrize(
    ("column", "reason"),
    [("preferred_savepoint_id", "it is the preferred savepoint"), ("restored_snapshot_id", "timeline began with it")],
)
def test_a_savepoint_that_a_start_may_need_stays_and_is_told_with_the_reason(
    shelf: Shelf, column: str, reason: str
) -> None:
    needed, newest = by(shelf, NIGHTLY, "needed", "newest")
    set_stream(shelf.stream.catalog, STREAM, **{column: needed.snapshot_id})

    report = apply(shelf, max_count=1)

    assert shelf.listed() == {needed.snapshot_id, newest.snapshot_id}
    assert reason in report.kept[0]


def test_the_newest_savepoint_without_known_damage_stays_and_is_told(shelf: Shelf) -> None:
    _, intact, newest = by(shelf, NIGHTLY, "a", "b", "c")
    shelf.stream.catalog.snapshots.verified(newest.snapshot_id, "an object is truncated")

    report = apply(shelf, max_count=1)

    assert shelf.listed() == {intact.snapshot_id, newest.snapshot_id}
    assert report.kept == ("savepoint b at batch 2: the newer ones are known to be broken",)


def test_a_claimed_savepoint_is_the_streams_and_no_part_of_the_history(shelf: Shelf) -> None:
    claimed, newest = by(shelf, NIGHTLY, "claimed", "newest")
    as_writer(shelf.stream.catalog, STREAM).streams.switch_live_directory(
        shelf.stream.live_directory(2, 0).url, restored_snapshot_id=claimed.snapshot_id, claims=True
    )
    set_stream(shelf.stream.catalog, STREAM, restored_snapshot_id=None)

    assert apply(shelf, max_count=1).deleted == ()
    assert shelf.listed() == {claimed.snapshot_id, newest.snapshot_id}


def test_a_deletion_that_is_cut_off_is_finished_by_housekeeping(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, newest = by(shelf, NIGHTLY, "a", "b")

    def cut_off(*_: Any, **__: Any) -> None:
        raise StorageAccessError("the storage is away")

    with monkeypatch.context() as patch:
        patch.setattr(type(shelf.stream.store), "discard", cut_off)
        assert len(apply(shelf, max_count=1).failed) == 1
    assert shelf.listed(SnapshotStatus.DELETING) == {oldest.snapshot_id}

    shelf.stream = replace(shelf.stream, store=shelf.reopened_store())
    housekeeping(shelf.stream)

    assert shelf.listed() == {newest.snapshot_id}
    assert shelf.deletions() == [oldest.snapshot_id]
    assert shelf.is_whole(newest)
