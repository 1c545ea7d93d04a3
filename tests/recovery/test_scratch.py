"""Temporary copies of a stream: deleted by their user, or, if that was killed, by the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.recovery import live_directories
from dagster_ckpt.recovery.live_directories import LEFT_AFTER_MS, SCRATCH_FOLDER, remove_leftovers, scratch_directory
from tests.support.retention_shelf import STREAM, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def test_a_directory_and_what_was_being_built_for_it_are_deleted_whatever_happens(shelf: Shelf) -> None:
    folder = Path(shelf.stream.live_root) / SCRATCH_FOLDER / STREAM

    def fail() -> None:
        with scratch_directory(shelf.stream) as made:
            assert made.local_path is not None
            (made.local_path / "state").mkdir(parents=True)
            made.local_path.with_name(f"{made.local_path.name}.partial").mkdir()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert list(folder.iterdir()) == []


def test_a_copy_in_use_is_kept_however_old_it_is(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shelf.stream.live_root) / SCRATCH_FOLDER / STREAM
    now_ms = 10 * LEFT_AFTER_MS
    monkeypatch.setattr(shelf.stream.catalog, "now_ms", lambda: now_ms)
    reported = {"1-used": str(now_ms - LEFT_AFTER_MS), "2-left": str(now_ms - LEFT_AFTER_MS - 1), "3-odd": "never"}
    for name, at in reported.items():
        (folder / name).mkdir(parents=True)
        (folder / f"{name}.in-use").write_text(at)
    (folder / "4-left.partial").mkdir()
    remove_leftovers(shelf.stream)
    assert {path.name for path in folder.iterdir()} == {"1-used", "1-used.in-use"}


def test_its_user_reports_as_long_as_it_is_in_use(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_directories, "_REPORT_EVERY_S", 0.01)
    with scratch_directory(shelf.stream) as made:
        assert made.local_path is not None
        report = made.local_path.with_name(f"{made.local_path.name}.in-use")
        while not report.exists():
            pass
        assert int(report.read_text()) <= shelf.stream.catalog.now_ms()
    assert not report.exists()
