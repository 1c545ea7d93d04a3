"""What a retention pass says that it did."""

from __future__ import annotations

from pathlib import Path

from dagster_ckpt.recovery.checkpoint_retention import RetentionReport, discard
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.values.metrics import FREED
from tests.support.retention_shelf import Shelf

FIRST = RetentionReport(
    deleted=("chk-1",),
    kept=("chk-2: why",),
    failed=("chk-3: away",),
    held=("chk-7: in use",),
    live_directory_deleted="/live/a",
    settled=("registered chk-9",),
    swept=(Garbage("/x", "no snapshot refers to it", 9),),
)
LATER = RetentionReport(
    deleted=("chk-4",),
    kept=("chk-5: why",),
    failed=("chk-6: away",),
    held=("chk-8: in use",),
    live_directory_deleted="/live/b",
    settled=("aborted chk-10",),
    swept=(Garbage("/y", "no snapshot refers to it", 9), Garbage("/z", "cut off", 9)),
)


def test_two_passes_are_one_report() -> None:
    assert FIRST.and_then(LATER) == RetentionReport(
        deleted=("chk-1", "chk-4"),
        kept=("chk-2: why", "chk-5: why"),
        failed=("chk-3: away", "chk-6: away"),
        held=("chk-7: in use", "chk-8: in use"),
        live_directory_deleted="/live/b",
        settled=("registered chk-9", "aborted chk-10"),
        swept=(*FIRST.swept, *LATER.swept),
    )
    nothing = RetentionReport()
    assert FIRST.and_then(nothing) == FIRST
    assert nothing.and_then(RetentionReport(dry_run=True)).dry_run
    assert RetentionReport(dry_run=True).and_then(nothing).dry_run


def test_each_thing_done_is_a_sentence() -> None:
    assert FIRST.and_then(LATER).messages() == [
        "deleted chk-1",
        "deleted chk-4",
        "kept chk-2: why",
        "kept chk-5: why",
        "kept for now: chk-7: in use",
        "kept for now: chk-8: in use",
        "registered chk-9",
        "aborted chk-10",
        "could not delete chk-3: away; it is tried again",
        "could not delete chk-6: away; it is tried again",
        "deleted the live directories /live/b",
        "removed 2 objects: no snapshot refers to it",
        "removed 1 objects: cut off",
    ]
    assert RetentionReport().messages() == ["nothing to delete"]


def test_a_dry_run_says_would() -> None:
    would = RetentionReport(deleted=("chk-1",), swept=FIRST.swept, dry_run=True)
    assert would.messages() == ["would have deleted chk-1", "would have removed 1 objects: no snapshot refers to it"]


def test_what_the_catalog_has_logged_is_left_out_where_only_the_rest_is_asked_for() -> None:
    done = RetentionReport(
        deleted=("chk-1",),
        kept=("chk-2: why",),
        held=("chk-3: held",),
        failed=("chk-4: away",),
        settled=("chk-5 was aborted",),
        live_directory_deleted="/live/a",
    )
    rest = [
        "kept chk-2: why",
        "kept for now: chk-3: held",
        "could not delete chk-4: away; it is tried again",
        "deleted the live directories /live/a",
    ]

    assert done.messages(unlogged=True) == rest
    assert done.messages() == ["deleted chk-1", *rest[:2], "chk-5 was aborted", *rest[2:]]


def test_a_dry_run_has_logged_no_deletion() -> None:
    would = RetentionReport(deleted=("chk-1",), dry_run=True)
    assert would.messages(unlogged=True) == ["would have deleted chk-1"]


def test_where_everything_was_logged_nothing_is_left_to_tell() -> None:
    assert RetentionReport(deleted=("chk-1",)).messages(unlogged=True) == []
    assert RetentionReport(settled=("chk-1 was aborted",)).messages(unlogged=True) == []
    assert RetentionReport().messages(unlogged=True) == ["nothing to delete"]


def test_the_bytes_that_deletions_freed_are_those_that_the_disk_has_more(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)

    def used() -> int:
        return sum((shelf.root / "snapshots" / name).stat().st_size for name in shelf.data_files())

    first = shelf.checkpoint()
    second = shelf.checkpoint(base=first)
    before = used()
    for snapshot in (first, second):
        assert discard(shelf.stream, [snapshot], reason="a test", lease=None).failed == ()
        freed = {each.value for each in shelf.stream.catalog.metrics.read() if each.metric is FREED}
        assert freed == {before - used()}
    assert used() == 0
    shelf.stream.catalog.close()
