"""What a process that died left between storage and catalog is settled: registered, failed or deleted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.catalog.snapshots import SnapshotRecords
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.client import Client
from dagster_ckpt.errors import LeaseLostError, StorageAccessError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.recovery.checkpoint_retention import ORPHAN_AGE_MS, housekeeping, settle_dead_attempts
from dagster_ckpt.stream.snapshots import HOLD_TTL_MS
from dagster_ckpt.stream.snapshots import holding as holding_snapshots
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer, holding
from tests.support.executioner import Killed
from tests.support.retention_shelf import STREAM, Shelf, storage_clock_ahead
from tests.support.rewind_history import History


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf.at(tmp_path)


def status(shelf: Shelf, snapshot: SnapshotRecord) -> SnapshotStatus:
    return shelf.stream.catalog.snapshots.get(snapshot.snapshot_id).status


def forget(shelf: Shelf, snapshot: SnapshotRecord, as_status: SnapshotStatus = SnapshotStatus.IN_PROGRESS) -> None:
    """The catalog, as it is where the process died before it recorded the snapshot."""
    with shelf.stream.catalog.database.writing() as connection:
        this = snapshots.c.snapshot_id == snapshot.snapshot_id
        values = {"location": None, "batch_id": None, "completed_at_ms": None, "properties": "{}"}
        connection.execute(snapshots.update().where(this).values(status=as_status.value, **values))


def begun(shelf: Shelf, number: int) -> SnapshotRecord:
    record: SnapshotRecord = as_writer(shelf.stream.catalog, STREAM).snapshots.start(
        snapshot_id=f"dead-{number}", execution_id="first", kind=SnapshotKind.CHECKPOINT, number=number,
        trigger=SnapshotTrigger.PERIODIC, timeline=0,
    )  # fmt: skip
    return record


@pytest.mark.parametrize("by", ["start", "housekeeping"])
def test_a_snapshot_that_is_whole_in_storage_is_registered(shelf: Shelf, by: str) -> None:
    """f28 and known defect 14: a whole checkpoint stayed IN_PROGRESS, and nothing listed or removed it."""
    shelf.checkpoint()
    newest = shelf.checkpoint()
    mine = shelf.savepoint("mine")
    forget(shelf, newest)
    forget(shelf, mine)

    if by == "start":
        with holding(shelf.stream.catalog, STREAM) as lease:
            done = settle_dead_attempts(shelf.stream, lease)
    else:
        done = housekeeping(shelf.stream).messages()

    assert [message.split(":")[0] for message in done] == [
        "registered savepoint mine at batch 3",
        "registered chk-2 at batch 2",
    ]
    registered = shelf.stream.catalog.snapshots.get(newest.snapshot_id)
    assert (registered.status, registered.location) == (SnapshotStatus.COMPLETED, newest.location)
    assert registered.snapshot_id in {each.snapshot_id for each in shelf.stream.catalog.snapshots.restorable(STREAM)}
    assert status(shelf, mine) is SnapshotStatus.COMPLETED


@pytest.mark.parametrize("damage", ["no metadata", "truncated object"])
def test_an_attempt_that_is_not_whole_has_failed(shelf: Shelf, damage: str) -> None:
    snapshot = shelf.checkpoint()
    folder = Path((snapshot.location or "").removeprefix("file://"))
    if damage == "no metadata":
        (folder / "_metadata").unlink()
    else:
        objects = [path for path in folder.parent.rglob("*") if path.is_file() and path.name != "_metadata"]
        objects[0].write_bytes(b"")
    forget(shelf, snapshot)

    with holding(shelf.stream.catalog, STREAM) as lease:
        assert settle_dead_attempts(shelf.stream, lease) == ["chk-1 was not completed: its process died"]

    assert status(shelf, snapshot) is SnapshotStatus.FAILED


def test_what_has_the_number_of_another_attempt_is_not_taken_for_it(shelf: Shelf) -> None:
    shelf.checkpoint()
    dead = begun(shelf, 1)

    with holding(shelf.stream.catalog, STREAM) as lease:
        settle_dead_attempts(shelf.stream, lease)

    assert status(shelf, dead) is SnapshotStatus.FAILED


def test_who_has_lost_the_lease_settles_nothing(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()
    forget(shelf, snapshot)
    with holding(shelf.stream.catalog, STREAM) as lease:
        pass

    with pytest.raises(LeaseLostError):
        settle_dead_attempts(shelf.stream, lease)

    assert status(shelf, snapshot) is SnapshotStatus.IN_PROGRESS


def test_while_the_stream_runs_housekeeping_leaves_attempts_under_way_alone(shelf: Shelf) -> None:
    written = shelf.root / "snapshots" / STREAM / "shared" / "7-0f-1.pack"
    written.parent.mkdir(parents=True)
    written.write_bytes(b"data")
    with holding(shelf.stream.catalog, STREAM), storage_clock_ahead(2 * ORPHAN_AGE_MS):
        under_way = begun(shelf, 7)

        assert housekeeping(shelf.stream, dry_run=True).swept == ()
        done = housekeeping(shelf.stream)

    assert (done.settled, done.swept) == ((), ())
    assert written.exists()
    assert status(shelf, under_way) is SnapshotStatus.IN_PROGRESS


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("state", ["young", "held", "killed"])
def test_a_savepoint_of_a_stopped_stream_whose_process_was_killed_is_settled(
    shelf: Shelf, state: str, is_whole: bool
) -> None:
    taken = shelf.savepoint("by hand")
    forget(shelf, taken)
    with shelf.stream.catalog.database.writing() as connection:
        began_ms = taken.created_at_ms - (0 if state == "young" else 2 * HOLD_TTL_MS)
        this = snapshots.c.snapshot_id == taken.snapshot_id
        connection.execute(snapshots.update().where(this).values(execution_id=None, created_at_ms=began_ms))
    if not is_whole:
        (Path((taken.location or "").removeprefix("file://")) / "_metadata").unlink()

    with ExitStack() as process:
        if state == "held":
            attempt = shelf.stream.catalog.snapshots.get(taken.snapshot_id)
            process.enter_context(holding_snapshots(shelf.stream.catalog, [attempt], "savepoint"))
        housekeeping(shelf.stream)

    settled = SnapshotStatus.COMPLETED if is_whole else SnapshotStatus.FAILED
    assert status(shelf, taken) is (settled if state == "killed" else SnapshotStatus.IN_PROGRESS)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_savepoint_that_went_to_a_folder_of_its_own_is_settled_there(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    elsewhere, write = shelf.root / "elsewhere", LocalFileIO.write

    def killed(*_arguments: Any, **_options: Any) -> None:
        raise Killed

    def writes(self: LocalFileIO, path: str, *arguments: Any, **options: Any) -> None:
        if path.endswith("_metadata"):
            raise Killed
        write(self, path, *arguments, **options)

    history = History(shelf.root / "history")
    stream, taken_by = history.shelf.stream, history.shelf
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotRecords, "complete", killed)
        patch.setattr(SnapshotRecords, "fail", killed)
        if not is_whole:
            patch.setattr(LocalFileIO, "write", writes)
            patch.setattr(LocalFileIO, "delete", killed)
        with pytest.raises(Killed):
            Client.of_stream(stream, origin="a test").trigger_savepoint(
                STREAM, label="mine", target_directory=str(elsewhere)
            )
    [attempt] = stream.catalog.snapshots.of_stream(STREAM)
    with stream.catalog.database.writing() as connection:
        this = snapshots.c.snapshot_id == attempt.snapshot_id
        began_ms = attempt.created_at_ms - 2 * HOLD_TTL_MS
        connection.execute(snapshots.update().where(this).values(created_at_ms=began_ms))

    with storage_clock_ahead(2 * ORPHAN_AGE_MS):
        done = housekeeping(stream)

    assert status(taken_by, attempt) is (SnapshotStatus.COMPLETED if is_whole else SnapshotStatus.FAILED)
    assert bool(done.swept) is not is_whole
    left = sorted(path.suffix for path in elsewhere.rglob("*") if path.is_file())
    assert left == (["", ".pack"] if is_whole else [])
    history.close()


def test_a_folder_that_is_out_of_reach_holds_up_no_start(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = as_writer(shelf.stream.catalog, STREAM).snapshots
    attempt = writer.start(
        snapshot_id="far", execution_id="first", number=9, trigger=SnapshotTrigger.MANUAL, timeline=0,
        target_directory="nowhere://gone/savepoints",
    )  # fmt: skip

    def refused(folder: str | None = None) -> list[str]:
        raise StorageAccessError(f"{folder} is out of reach")

    monkeypatch.setattr(shelf.stream.store, "savepoints", refused)
    with holding(shelf.stream.catalog, STREAM) as lease:
        assert settle_dead_attempts(shelf.stream, lease) == []
    assert status(shelf, attempt) is SnapshotStatus.IN_PROGRESS
    monkeypatch.undo()
    with holding(shelf.stream.catalog, STREAM) as lease:
        as_writer(shelf.stream.catalog, STREAM).snapshots.fail(attempt.snapshot_id, "a test")
    # Nor housekeeping.
    assert housekeeping(shelf.stream).swept == ()


def test_what_became_whole_after_its_attempt_had_failed_is_deleted_and_nothing_else(shelf: Shelf) -> None:
    kept = shelf.checkpoint()
    late = shelf.checkpoint(base=kept)
    forget(shelf, late, as_status=SnapshotStatus.FAILED)
    unknown = shelf.checkpoint()
    with shelf.stream.catalog.database.writing() as connection:
        connection.execute(snapshots.delete().where(snapshots.c.snapshot_id == unknown.snapshot_id))

    done = housekeeping(shelf.stream).settled

    assert len(done) == 1
    assert done[0].startswith("deleted chk-2 at ")
    assert shelf.stream.store.checkpoints() == [kept.location, unknown.location]
    assert shelf.stream.store.verify(kept.location or "") == []
