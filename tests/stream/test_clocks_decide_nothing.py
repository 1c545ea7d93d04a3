"""No destructive act goes by the clock of the machine that does it: that clock may be days or years off."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.client.outputs import clean_sinks
from dagster_ckpt.errors import LeaseHeldError
from dagster_ckpt.policies.retention import SavepointHistory
from dagster_ckpt.recovery.checkpoint_retention import discard, housekeeping, subsume
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER, remove_leftovers
from dagster_ckpt.stream.lease import acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer, keeping
from tests.support.retention_shelf import STREAM, Shelf, storage_clock_ahead
from tests.support.rewind_history import History
from tests.support.verbs import apply_savepoint_history

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEARS_MS = 3650 * DAY_MS
OFF = [-YEARS_MS, -DAY_MS, DAY_MS, YEARS_MS]


@contextmanager
def host_clock(monkeypatch: pytest.MonkeyPatch, off_ms: int) -> Iterator[None]:
    """This process sees another time of day than the database and the storage."""
    real_ns = time.time_ns
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: real_ns() + off_ms * 1_000_000)
        clock.setattr(time, "time", lambda: (real_ns() + off_ms * 1_000_000) / 1e9)
        yield


@pytest.fixture(params=OFF, ids=["ten years behind", "a day behind", "a day ahead", "ten years ahead"])
def off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    return lambda: host_clock(monkeypatch, request.param)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


def left_by(number: int, shelf: Shelf) -> Path:
    """A data object of a checkpoint that is not whole."""
    path = shelf.root / "snapshots" / STREAM / "shared" / f"{number}-{uuid.uuid4().hex}.pack"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"data")
    return path


def test_making_room_goes_by_numbers(tmp_path: Path, off: Callable[[], Any]) -> None:
    shelf = Shelf.at(tmp_path, num_retained=2)
    shelf.checkpoint()
    shelf.checkpoint()
    with off():
        newest = [shelf.checkpoint(), shelf.checkpoint()]
        discard(shelf.stream, subsume(shelf.stream), reason="subsumed", lease=None)

    assert shelf.listed() == {snapshot.snapshot_id for snapshot in newest}


def test_the_history_of_a_schedule_loses_nothing_young(shelf: Shelf, off: Callable[[], Any]) -> None:
    taken = [shelf.savepoint(label, SnapshotTrigger.PERIODIC, schedule="nightly") for label in "abc"]
    with off():
        taken.append(shelf.savepoint("d", SnapshotTrigger.PERIODIC, schedule="nightly"))
        report = apply_savepoint_history(shelf.stream, "nightly", SavepointHistory(None, max_age_ms=HOUR_MS))

    assert report.deleted == ()
    assert all(shelf.is_whole(snapshot) for snapshot in taken)


def test_the_history_of_a_schedule_does_lose_what_is_old(shelf: Shelf, off: Callable[[], Any]) -> None:
    old, newest = [shelf.savepoint(label, SnapshotTrigger.PERIODIC, schedule="nightly") for label in "ab"]
    shelf.completed_at(old, shelf.stream.catalog.now_ms() - 2 * HOUR_MS)
    with off():
        apply_savepoint_history(shelf.stream, "nightly", SavepointHistory(None, max_age_ms=HOUR_MS))

    assert shelf.listed() == {newest.snapshot_id}


def test_housekeeping_sweeps_nothing_that_was_just_written(shelf: Shelf, off: Callable[[], Any]) -> None:
    snapshot = shelf.checkpoint()
    young = left_by(9, shelf)
    with off():
        housekeeping(shelf.stream)

    assert young.exists()
    assert shelf.is_whole(snapshot)


def begun(shelf: Shelf, number: int) -> SnapshotRecord:
    record: SnapshotRecord = as_writer(shelf.stream.catalog, STREAM).snapshots.start(
        snapshot_id=f"snapshot-{number}", execution_id="first", kind=SnapshotKind.CHECKPOINT, number=number,
        trigger=SnapshotTrigger.PERIODIC, timeline=0,
    )  # fmt: skip
    return record


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_an_attempt_under_way_has_written_is_swept_by_no_clock(shelf: Shelf, dry_run: bool) -> None:
    """An upload may outlast every age: also one by the storage's own clock."""
    with keeping(shelf.stream.catalog, STREAM):
        begun(shelf, 7)
        mine, crashed = left_by(7, shelf), left_by(3, shelf)
        with storage_clock_ahead(YEARS_MS):
            swept = housekeeping(shelf.stream, dry_run=dry_run).swept

    assert [garbage.location.rpartition("/")[2] for garbage in swept] == [crashed.name]
    assert (mine.exists(), crashed.exists()) == (True, dry_run)


def started_before(shelf: Shelf, attempt: SnapshotRecord, ms: int) -> None:
    with shelf.stream.catalog.database.writing() as connection:
        this = snapshots.c.snapshot_id == attempt.snapshot_id
        connection.execute(snapshots.update().where(this).values(created_at_ms=attempt.created_at_ms - ms))


def test_what_a_savepoint_of_a_stopped_stream_has_written_stays_as_long_as_its_process_holds_it(shelf: Shelf) -> None:
    attempt = shelf.stream.catalog.snapshots.start(
        None, stream_id=STREAM, snapshot_id="by hand", number=7, trigger=SnapshotTrigger.MANUAL, timeline=0
    )
    folder = shelf.root / "savepoints" / "savepoint-orders-by-hand"
    folder.mkdir(parents=True)
    (folder / "_incomplete").write_bytes(STREAM.encode())
    data = folder / f"7-{uuid.uuid4().hex}.pack"
    data.write_bytes(b"data")

    with storage_clock_ahead(YEARS_MS):
        with holding(shelf.stream.catalog, [attempt], "savepoint"):
            started_before(shelf, attempt, HOUR_MS)
            housekeeping(shelf.stream)
            assert data.exists()
        housekeeping(shelf.stream)

    assert not data.exists()
    assert shelf.stream.catalog.snapshots.get("by hand").status is SnapshotStatus.FAILED


def test_what_an_attempt_of_a_killed_process_has_written_is_swept(shelf: Shelf) -> None:
    attempt = begun(shelf, 7)
    crashed = left_by(7, shelf)
    with storage_clock_ahead(YEARS_MS):
        housekeeping(shelf.stream)

    assert not crashed.exists()
    assert shelf.stream.catalog.snapshots.get(attempt.snapshot_id).status is SnapshotStatus.FAILED


def test_a_preflight_takes_away_no_copy_that_another_uses(history: History, off: Callable[[], Any]) -> None:
    stream = history.shelf.stream
    copy = Path(stream.live_root) / SCRATCH_FOLDER / STREAM / f"{stream.catalog.now_ms()}-in-use"
    copy.mkdir(parents=True)
    with off():
        remove_leftovers(stream)

    assert copy.exists()


def part_of(history: History) -> Path:
    """A part file that no log names, written a moment ago."""
    part = history.sink / f"part-00000-{uuid.uuid4()}.c000.parquet"
    part.write_bytes(b"rows")
    return part


def test_cleaning_a_sink_deletes_no_young_file(history: History, off: Callable[[], Any]) -> None:
    part = part_of(history)
    with off():
        [orphan] = clean_sinks(history.shelf.stream, dry_run=False, grace_ms=HOUR_MS).orphans

    assert part.exists()
    assert orphan.age_ms is not None
    assert orphan.age_ms < HOUR_MS
    assert [path.name for path in history.sink.iterdir() if path.name.startswith(".")] == []


def test_cleaning_a_sink_does_delete_an_old_file(history: History, off: Callable[[], Any]) -> None:
    part = part_of(history)
    old_ns = part.stat().st_mtime_ns - 2 * HOUR_MS * 1_000_000
    os.utime(part, ns=(old_ns, old_ns))
    with off():
        clean_sinks(history.shelf.stream, dry_run=False, grace_ms=HOUR_MS)

    assert not part.exists()


def test_a_file_of_a_query_whose_lease_ran_out_may_still_be_named(history: History) -> None:
    """A holder that nobody has proof of the end of may be writing the entry that names the file."""
    stream = history.shelf.stream
    stream.catalog.leases.acquire(STREAM, this_holder("silent", "run", None), 1)
    threading.Event().wait(0.01)
    part = part_of(history)

    [orphan] = clean_sinks(stream, dry_run=False, grace_ms=0).orphans

    assert part.exists()
    assert orphan.kept_because == "the running query may be writing it"


def test_nobody_takes_a_lease_over(shelf: Shelf, off: Callable[[], Any]) -> None:
    held = shelf.stream.catalog.leases.acquire(STREAM, this_holder("first", "run", None), 60_000)
    with off(), pytest.raises(LeaseHeldError):
        acquire(shelf.stream.catalog, STREAM, this_holder("second", "another run", None))

    shelf.stream.catalog.leases.check(held)
