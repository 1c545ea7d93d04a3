"""An operator may put a link in place of a folder; what lies behind a link is used, and cleared away by nobody."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.recovery.checkpoint_retention import housekeeping
from dagster_ckpt.recovery.live_directories import delete_live_directories, delete_older_live_directories
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.lease import AcquiredLease
from tests.support.as_writer import keeping
from tests.support.golden_stream import STREAM, GoldenStream


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path / "stream").make()
    yield golden
    golden.close()


def moved(folder: Path, target: Path) -> Path:
    """Move a folder to another disk, and leave a link."""
    shutil.move(folder, target)
    folder.symlink_to(target)
    return target


@pytest.mark.parametrize("of", ["stream", "all streams"])
def test_live_directories_behind_a_link_are_snapshotted_restored_and_deleted(
    golden: GoldenStream, tmp_path: Path, of: str
) -> None:
    folder = golden.root / "live" if of == "all streams" else golden.root / "live" / STREAM
    disk = moved(folder, tmp_path / "disk")
    streams_own = disk / STREAM if of == "all streams" else disk
    (disk / "of somebody else").write_text("mine")

    snapshot = golden.snapshot()
    golden.start("chk-1")
    assert (golden.status, golden.unlike(snapshot)) == (LiveStatus.GOOD, [])
    with keeping(golden.stream.catalog, STREAM) as lease:
        delete_older_live_directories(golden.stream, LiveDirectory(str(golden.live)), lease)
        assert len(list(streams_own.glob("live-*"))) == 1
        delete_live_directories(golden.stream, AcquiredLease(lease.record), lease)

    assert list(streams_own.glob("live-*")) == []
    assert folder.is_symlink()
    assert (disk / "of somebody else").read_text() == "mine"


def test_a_live_directory_that_is_a_link_is_used_and_then_only_the_link_goes(
    golden: GoldenStream, tmp_path: Path
) -> None:
    name = golden.live
    disk = moved(name, tmp_path / "disk")
    before = sorted(disk.rglob("*"))

    snapshot = golden.snapshot()
    assert golden.stream.store.verify(snapshot.location or "") == []
    golden.start("chk-1")
    with keeping(golden.stream.catalog, STREAM) as lease:
        delete_older_live_directories(golden.stream, LiveDirectory(str(golden.live)), lease)

    assert not name.is_symlink()
    assert sorted(disk.rglob("*")) == before
    assert (golden.status, golden.unlike(snapshot)) == (LiveStatus.GOOD, [])


def test_housekeeping_clears_nothing_away_behind_a_link(golden: GoldenStream, tmp_path: Path) -> None:
    golden.snapshot()
    important = tmp_path / "important"
    important.mkdir()
    for name in ("my.pack", "x.tmp", "_deleting", "_incomplete"):
        (important / name).write_text("golden")
    snapshots = golden.root / "snapshots" / STREAM
    (snapshots / "chk-9").symlink_to(important)
    (golden.root / "savepoints").mkdir()
    (golden.root / "savepoints/savepoint-golden-000000000000").symlink_to(important)

    housekeeping(golden.stream, older_than_ms=0)

    assert sorted(path.name for path in important.iterdir()) == ["_deleting", "_incomplete", "my.pack", "x.tmp"]


def test_data_objects_behind_a_link_are_read_and_go_with_their_snapshot_only(
    golden: GoldenStream, tmp_path: Path
) -> None:
    first = golden.snapshot()
    disk = moved(golden.root / "snapshots" / STREAM / "shared", tmp_path / "disk")
    (disk / "not of a snapshot.pack").write_text("mine")
    golden.commit(5)
    second = golden.snapshot()

    housekeeping(golden.stream, older_than_ms=0)

    assert [golden.stream.store.verify(snapshot.location or "") for snapshot in (first, second)] == [[], []]
    assert (disk / "not of a snapshot.pack").read_text() == "mine"
