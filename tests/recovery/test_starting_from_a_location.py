"""A start may name a snapshot by where it is, also one that the catalog does not list."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import Shelf
from tests.support.verbs import prefer_savepoint


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def folder(snapshot: SnapshotRecord) -> Path:
    return Path((snapshot.location or "").removeprefix("file://"))


SPELLINGS: list[Callable[[Path], str]] = [
    str,
    lambda path: f"file://{path}",
    lambda path: f"{path}/",
    lambda path: f"file://{path}/_metadata",
]


@pytest.mark.parametrize("spelled", SPELLINGS, ids=["path", "url", "slash", "metadata"])
def test_a_savepoint_that_was_moved_is_started_from_where_it_is_now(
    shelf: Shelf, tmp_path: Path, spelled: Callable[[Path], str]
) -> None:
    savepoint = shelf.savepoint("mine")
    moved = tmp_path / "archive" / "of 2013"
    moved.parent.mkdir()
    shutil.move(folder(savepoint), moved)

    plan = planned_start(shelf.stream, StartFrom(spelled(moved)))

    assert plan.kind is RecoveryKind.RESTORE
    assert plan.snapshot is not None
    assert (plan.snapshot.snapshot_id, plan.to_batch) == (savepoint.snapshot_id, savepoint.batch_id)
    assert shelf.stream.store.verify(plan.snapshot.location or "") == []


def test_a_savepoint_that_was_moved_cannot_be_preferred(shelf: Shelf, tmp_path: Path) -> None:
    moved = tmp_path / "archive"
    shutil.move(folder(shelf.savepoint("mine")), moved)

    with pytest.raises(SnapshotNotFoundError, match="does not list a savepoint at"):
        prefer_savepoint(shelf.stream, str(moved))

    assert shelf.stream.catalog.streams.get("orders").preferred_savepoint_id is None


def test_a_snapshot_whose_recording_was_cut_off_is_started_from_by_its_location(shelf: Shelf) -> None:
    checkpoint = shelf.checkpoint()
    as_writer(shelf.stream.catalog).mark_deleting(checkpoint.snapshot_id)

    plan = planned_start(shelf.stream, StartFrom(checkpoint.location or ""))

    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == checkpoint.snapshot_id


def test_the_snapshot_of_another_stream_is_refused_since_its_sinks_are_not_ours(shelf: Shelf) -> None:
    savepoint = shelf.savepoint("mine")
    other = replace(shelf.stream, stream_id="refunds")
    other.register()

    with pytest.raises(SnapshotNotFoundError, match=r"snapshot of stream 'orders', not of 'refunds'"):
        planned_start(other, StartFrom(savepoint.location or ""))


def test_a_location_where_no_snapshot_is_is_refused_with_those_there_are(shelf: Shelf, tmp_path: Path) -> None:
    shelf.checkpoint()

    with pytest.raises(SnapshotNotFoundError, match=r"nowhere.*chk-1 at batch 1"):
        planned_start(shelf.stream, StartFrom(f"{tmp_path}/nowhere"))


def test_a_moved_savepoint_that_was_cut_short_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(folder(shelf.savepoint("mine")), moved)
    (moved / "_metadata").write_bytes((moved / "_metadata").read_bytes()[:-9])

    with pytest.raises(SnapshotCorruptError, match="_metadata"):
        planned_start(shelf.stream, StartFrom(str(moved)))


def test_a_label_with_a_slash_is_a_label(shelf: Shelf) -> None:
    savepoint = shelf.savepoint("before 7/4")

    assert planned_start(shelf.stream, StartFrom("before 7/4")).snapshot == savepoint
    with pytest.raises(SnapshotNotFoundError, match="before 7/5"):
        planned_start(shelf.stream, StartFrom("before 7/5"))
