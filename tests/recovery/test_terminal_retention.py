"""What is kept of a stream's checkpoints at its end, and while it runs: real catalog, real storage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.pending_restore import Emptied
from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import LeaseLostError, StorageAccessError
from dagster_ckpt.recovery.checkpoint_retention import (
    ORPHAN_AGE_MS,
    RetentionReport,
    apply_terminal_retention,
    discard,
    housekeeping,
    subsume,
)
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.ownership import OWNER
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TerminalState
from tests.support.as_writer import as_writer, keeping, set_stream
from tests.support.golden_stream import GoldenStream, alter, with_a_flipped_bit
from tests.support.retention_shelf import HOLDER, Shelf, storage_clock_ahead
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken

NONE = ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS
DELETE = ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION
RETAIN = ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION
FINISHED, CANCELED, FAILED, SUSPENDED = (
    TerminalState.FINISHED,
    TerminalState.CANCELED,
    TerminalState.FAILED,
    TerminalState.SUSPENDED,
)

# The table of docs/recovery.md.
MATRIX = {
    (NONE, FINISHED): "delete",
    (NONE, CANCELED): "delete",
    (NONE, FAILED): "delete",
    (NONE, SUSPENDED): "delete",
    (DELETE, FINISHED): "delete",
    (DELETE, CANCELED): "delete with live directory",
    (DELETE, FAILED): "keep",
    (DELETE, SUSPENDED): "delete",
    (RETAIN, FINISHED): "delete",
    (RETAIN, CANCELED): "keep",
    (RETAIN, FAILED): "keep",
    (RETAIN, SUSPENDED): "keep",
}
DELETES_SNAPSHOTS_ONLY = [case for case, what in MATRIX.items() if what == "delete"]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def ids(case: object) -> str:
    return case.name if isinstance(case, ExternalizedCheckpointCleanup | TerminalState) else str(case)


@pytest.mark.parametrize(("cleanup", "state", "what"), [(*case, what) for case, what in MATRIX.items()], ids=ids)
def test_the_clean_up_option_and_the_end_decide_about_checkpoints_and_never_about_savepoints(
    shelf: Shelf, cleanup: ExternalizedCheckpointCleanup, state: TerminalState, what: str
) -> None:
    first = shelf.checkpoint()
    second = shelf.checkpoint(base=first)
    savepoints = [shelf.savepoint("mine"), shelf.savepoint("at the stop", SnapshotTrigger.STOP)]

    report = apply_terminal_retention(shelf.cleaning_up(cleanup).stream, "first", state)

    kept = [first, second] if what == "keep" else []
    assert shelf.listed() == {snapshot.snapshot_id for snapshot in (*kept, *savepoints)}
    assert all(shelf.is_whole(snapshot) for snapshot in (*kept, *savepoints))
    assert (len(report.kept), len(report.deleted)) == ((2, 0) if kept else (0, 2))
    assert shelf.reasons() == [f"{cleanup.name} at {state.value}"] * len(report.deleted)
    assert bool(shelf.data_files()) is bool(kept)
    assert shelf.live.exists() is (what != "delete with live directory")
    assert (shelf.stream.catalog.streams.get("orders").live_directory is None) is (what == "delete with live directory")
    execution = shelf.stream.catalog.executions.get("first")
    assert (execution.status, execution.settled) == (ExecutionStatus(state.value), True)


@pytest.mark.parametrize(
    ("cleanup", "state", "damage"),
    [(DELETE, CANCELED, None), (NONE, FINISHED, None), (NONE, FINISHED, "missing"), (RETAIN, FAILED, None)],
    ids=ids,
)
def test_a_dry_run_reports_what_the_real_run_then_does_and_changes_nothing(
    shelf: Shelf, cleanup: ExternalizedCheckpointCleanup, state: TerminalState, damage: str | None
) -> None:
    first = shelf.checkpoint()
    tagged = shelf.checkpoint(base=first)
    shelf.savepoint("mine")
    shelf.stream.catalog.holds.tag(tagged.snapshot_id, label="end of june", holder="a person")
    if damage is not None:
        shelf.break_live_directory(damage)
    stream, before = shelf.cleaning_up(cleanup).stream, (shelf.listed(), shelf.data_files(), shelf.live.exists())

    would = apply_terminal_retention(stream, "first", state, dry_run=True)

    assert would.dry_run
    assert (shelf.listed(), shelf.data_files(), shelf.live.exists()) == before
    assert not stream.catalog.executions.get("first").settled
    done = apply_terminal_retention(stream, "first", state)
    assert (would.deleted, would.held, would.live_directory_deleted) == (
        done.deleted,
        done.held,
        done.live_directory_deleted,
    )
    assert [each.partition(":")[0] for each in would.kept] == [each.partition(":")[0] for each in done.kept]


def test_a_dry_run_of_a_running_stream_keeps_everything(shelf: Shelf) -> None:
    shelf.checkpoint()
    with keeping(shelf.stream.catalog):
        report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert (report.deleted, report.dry_run) == ((), True)
    assert report.kept[0].startswith("everything: Stream 'orders' is being written by run")


def test_a_dry_run_of_an_execution_that_a_newer_one_has_followed_keeps_everything(shelf: Shelf) -> None:
    shelf.checkpoint()
    shelf.execution("second")

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    kept = "everything: execution second of the stream started in the meantime"
    assert report == RetentionReport(kept=(kept,), dry_run=True)


def test_a_dry_run_after_a_holder_that_has_gone_reports_what_is_deleted(shelf: Shelf) -> None:
    shelf.checkpoint()
    shelf.stream.catalog.leases.acquire("orders", HOLDER, ttl_ms=-1)

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert report.deleted == ("chk-1 at batch 1",)


def test_a_dry_run_tells_what_is_in_use_and_that_the_live_directory_waits_for_it(shelf: Shelf) -> None:
    first, second, _ = shelf.checkpoint(), shelf.checkpoint(), shelf.checkpoint()
    holds = shelf.stream.catalog.holds
    holds.tag(first.snapshot_id, label="end of june", holder="a person")
    holds.use([first, second], holder="a copy", ttl_ms=60_000)

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert [each.partition(":")[0] for each in report.kept] == ["chk-1 at batch 1"]
    assert [each.partition(":")[0] for each in report.held] == ["chk-2 at batch 2"]
    assert report.deleted == ("chk-3 at batch 3",)
    assert report.live_directory_deleted is None


def test_a_dry_run_keeps_a_live_directory_outside_of_the_streams_folder(shelf: Shelf) -> None:
    shelf.checkpoint()
    set_stream(shelf.stream.catalog, "orders", live_directory="file:///elsewhere/live-1")

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert report.live_directory_deleted is None
    assert report.deleted == ("chk-1 at batch 1",)
    assert report.kept == (
        f"the live directory file:///elsewhere/live-1: it is not below {shelf.stream.live_folder}, and belongs to "
        "another environment if this catalog is a copy. Otherwise delete it yourself",
    )


def test_a_dry_run_tells_nothing_of_what_is_being_deleted_already(shelf: Shelf) -> None:
    first = shelf.checkpoint()
    shelf.checkpoint()
    as_writer(shelf.stream.catalog).mark_deleting(first.snapshot_id)

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert report.deleted == ("chk-2 at batch 2",)


def test_a_dry_run_keeps_a_live_directory_of_another_deployment(shelf: Shelf) -> None:
    shelf.checkpoint()
    (shelf.live.parent / OWNER).write_text("their-deployment")

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED, dry_run=True)

    assert report.live_directory_deleted is None
    assert report.kept == (
        f"the live directories in {shelf.stream.live_folder}: the folder belongs to deployment their-deployment now",
    )


def test_the_table_is_complete() -> None:
    assert set(MATRIX) == {(cleanup, state) for cleanup in ExternalizedCheckpointCleanup for state in TerminalState}


@pytest.mark.parametrize("damage", ["missing", "broken", "emptied", "without logs", "none since a rebuild"])
@pytest.mark.parametrize(("cleanup", "state"), DELETES_SNAPSHOTS_ONLY, ids=ids)
def test_the_snapshot_that_a_start_would_need_is_kept_whatever_the_option_says(
    shelf: Shelf, cleanup: ExternalizedCheckpointCleanup, state: TerminalState, damage: str
) -> None:
    first = shelf.checkpoint()
    second = shelf.checkpoint(base=first)
    if damage == "none since a rebuild":
        set_stream(shelf.stream.catalog, "orders", live_directory=None)
    else:
        shelf.break_live_directory(damage)

    report = apply_terminal_retention(shelf.cleaning_up(cleanup).stream, "first", state)

    assert shelf.listed() == {second.snapshot_id}
    assert shelf.is_whole(second)
    why = "a start would not resume in the live directory, and may need it"
    assert report.kept == (f"chk-2 at batch 2: {why}",)


def an_older_copy(history: History) -> None:
    live = history.shelf.live
    shutil.rmtree(live)
    live.with_name("backup").rename(live)


def a_damaged_source_log(history: History) -> None:
    (history.shelf.live / f"sources/0/{LAST}").write_text("")


@pytest.mark.parametrize("damage", [an_older_copy, a_damaged_source_log])
def test_what_only_the_examination_of_a_start_finds_keeps_the_snapshot_that_it_restores(
    tmp_path: Path, damage: Callable[[History], None]
) -> None:
    history = History(tmp_path)
    shelf = history.shelf.cleaning_up(NONE)
    shutil.copytree(shelf.live, shelf.live.with_name("backup"))
    history.commit(LAST + 1)
    newest = taken(shelf, SnapshotKind.CHECKPOINT)
    damage(history)
    assert inspect_live_directory(history.live).status is LiveStatus.GOOD

    apply_terminal_retention(shelf.stream, "first", FAILED)

    assert shelf.listed() == {newest.snapshot_id}
    plan = planned_start(shelf.stream, StartFrom())
    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == newest.snapshot_id
    history.close()


@pytest.mark.parametrize(("end", "is_kept"), [(ExecutionStatus.FAILED, True), (ExecutionStatus.SUSPENDED, False)])
def test_state_is_read_where_a_start_reads_it(tmp_path: Path, end: ExecutionStatus, *, is_kept: bool) -> None:
    golden = GoldenStream(tmp_path).make()
    golden.snapshot()
    golden.end(end)
    assert alter(golden.live.glob("state/0/*/*.zip"), with_a_flipped_bit)

    stream = replace(golden.stream, options=replace(golden.stream.options, cleanup=NONE))
    report = apply_terminal_retention(stream, "first", FAILED)

    assert (len(report.kept), len(report.deleted)) == ((1, 0) if is_kept else (0, 1))
    golden.close()


def test_nothing_is_deleted_while_the_live_directory_cannot_be_examined(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = shelf.checkpoint()
    stream = shelf.cleaning_up(NONE).stream

    def refuse(_live: LiveDirectory) -> None:
        raise StorageAccessError("the storage is unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(LiveDirectory, "positions", refuse)
        would = apply_terminal_retention(stream, "first", FINISHED, dry_run=True)
        report = apply_terminal_retention(stream, "first", FINISHED)

    kept = ("everything: the live directory cannot be examined: the storage is unavailable",)
    assert (report.held, would.held, report.deleted, would.deleted) == (kept, kept, (), ())
    assert shelf.listed() == {snapshot.snapshot_id}
    assert not stream.catalog.executions.get("first").settled

    assert len(apply_terminal_retention(stream, "first", FINISHED).deleted) == 1


def test_where_every_start_would_be_refused_everything_stays(shelf: Shelf) -> None:
    snapshots = [shelf.checkpoint(), shelf.checkpoint()]
    # Of a newer Spark.
    (shelf.live / "commits" / "0").write_text("v99\n{}")

    apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", FINISHED)

    assert shelf.listed() == {each.snapshot_id for each in snapshots}
    assert shelf.stream.catalog.executions.get("first").settled


@pytest.mark.parametrize("ended", [True, False])
def test_a_snapshot_that_is_known_to_be_broken_does_not_replace_the_last_good_one(shelf: Shelf, *, ended: bool) -> None:
    good = shelf.checkpoint()
    broken = shelf.checkpoint(base=good)
    shelf.stream.catalog.snapshots.verified(broken.snapshot_id, "an object is truncated")
    if not ended:
        assert subsume(shelf.stream) == []
        return
    shelf.break_live_directory("missing")
    apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", FAILED)
    assert shelf.listed() == {good.snapshot_id, broken.snapshot_id}


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_a_cancellation_that_is_to_leave_nothing_leaves_nothing_even_so(shelf: Shelf, damage: str) -> None:
    shelf.checkpoint()
    shelf.break_live_directory(damage)

    apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    assert shelf.listed() == set()
    assert not (shelf.root / "live" / "orders").exists()


def test_live_directories_that_a_cancellation_deletes_are_named_and_nothing_is_pending(
    shelf: Shelf,
) -> None:
    set_stream(shelf.stream.catalog, "orders", pending_restore='{"batch_id": 0}')

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    assert report.live_directory_deleted == shelf.stream.live_folder
    assert shelf.stream.catalog.streams.get("orders").pending_restore is None


def test_a_newer_savepoint_saves_a_lost_live_directory_as_well(shelf: Shelf) -> None:
    shelf.checkpoint()
    savepoint = shelf.savepoint("mine")
    shelf.break_live_directory("missing")

    apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", SUSPENDED)

    assert shelf.listed() == {savepoint.snapshot_id}


@pytest.mark.parametrize("state", TerminalState)
def test_nothing_is_deleted_once_a_newer_execution_has_begun(shelf: Shelf, state: TerminalState) -> None:
    snapshot = shelf.checkpoint()
    shelf.execution("second")

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", state)

    assert shelf.listed() == {snapshot.snapshot_id}
    assert shelf.is_whole(snapshot)
    assert shelf.live.exists()
    assert "second" in report.kept[0]
    assert not shelf.stream.catalog.executions.get("second").settled
    assert shelf.stream.catalog.executions.get("first").settled


def test_a_start_that_has_not_begun_its_execution_yet_keeps_everything(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()
    lease = shelf.stream.catalog.leases.acquire("orders", HOLDER, 60_000)

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    assert report.deleted == ()
    assert report.held[0].startswith("everything: ")
    assert shelf.live.exists()
    assert shelf.listed() == {snapshot.snapshot_id}
    # So that it is asked for again.
    assert not shelf.stream.catalog.executions.get("first").settled

    shelf.stream.catalog.leases.release(lease)
    apply_terminal_retention(shelf.stream, "first", CANCELED)

    assert not shelf.live.exists()
    assert shelf.listed() == set()


def test_while_it_deletes_nobody_can_start(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.checkpoint()
    holders: list[str] = []
    discard_snapshot = shelf.stream.store.discard

    def looking(location: str, *, protected: Iterable[str] = ()) -> None:
        lease = shelf.stream.catalog.leases.current("orders")
        assert lease is not None
        holders.append(lease.run_id)
        discard_snapshot(location, protected=protected)

    monkeypatch.setattr(shelf.stream.store, "discard", looking)
    apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    # A start waits for a holder whose run is over.
    assert holders == ["run-first"]
    assert shelf.stream.catalog.leases.current("orders") is None


@pytest.mark.parametrize("was_cut_off", [True, False])
def test_who_has_lost_the_lease_leaves_a_deletion_to_its_successor(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, *, was_cut_off: bool
) -> None:
    snapshot = shelf.checkpoint()
    if was_cut_off:
        as_writer(shelf.stream.catalog).mark_deleting(snapshot.snapshot_id)

    def lost(keeper: LeaseKeeper) -> None:
        raise LeaseLostError("another execution is the writer")

    monkeypatch.setattr(LeaseKeeper, "check", lost)
    before = shelf.data_files()

    report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    assert report == RetentionReport(held=("the rest: another execution is the writer",))
    assert shelf.data_files() == before


def test_retention_twice_does_no_harm(shelf: Shelf) -> None:
    shelf.checkpoint()
    stream = shelf.cleaning_up(DELETE).stream
    apply_terminal_retention(stream, "first", CANCELED)

    again = apply_terminal_retention(stream, "first", CANCELED)

    assert again.messages() == ["nothing to delete"]
    assert shelf.deletions() == ["snapshot-1"]


def refuse_to_delete(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    def refuse(location: str, **_: object) -> None:
        raise StorageAccessError(f"{location} cannot be deleted: the storage is unavailable")

    monkeypatch.setattr(shelf.stream.store, "discard", refuse)


def test_a_deletion_that_fails_stays_visible_and_the_stream_unsettled(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = shelf.checkpoint()
    with monkeypatch.context() as patch:
        refuse_to_delete(patch, shelf)
        report = apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)

    assert "the storage is unavailable" in report.failed[0]
    assert shelf.listed(SnapshotStatus.DELETING) == {snapshot.snapshot_id}
    assert shelf.listed() == set()
    assert shelf.live.exists()
    assert not shelf.stream.catalog.executions.get("first").settled

    apply_terminal_retention(shelf.stream, "first", CANCELED)

    assert shelf.listed(SnapshotStatus.DELETED) == {snapshot.snapshot_id}
    assert shelf.data_files() == []
    assert not shelf.live.exists()
    assert shelf.stream.catalog.executions.get("first").settled


def test_a_deletion_that_fails_leaves_the_stream_unsettled_also_where_the_others_are_kept(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = shelf.checkpoint(), shelf.checkpoint()
    as_writer(shelf.stream.catalog).mark_deleting(first.snapshot_id)
    with monkeypatch.context() as patch:
        refuse_to_delete(patch, shelf)
        report = apply_terminal_retention(shelf.cleaning_up(RETAIN).stream, "first", CANCELED)
        swept = housekeeping(shelf.stream)

    assert (len(report.failed), len(report.kept), len(swept.failed)) == (1, 1, 1)
    assert shelf.listed() == {second.snapshot_id}
    assert not shelf.stream.catalog.executions.get("first").settled


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_a_lost_live_directory_without_any_snapshot_that_could_replace_it_is_no_obstacle(
    shelf: Shelf, damage: str
) -> None:
    left_behind = shelf.checkpoint()
    as_writer(shelf.stream.catalog).streams.switch_live_directory(
        shelf.stream.live_directory(1, 0).url, pending_restore=Emptied()
    )
    shelf.break_live_directory(damage)

    report = apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", FINISHED)

    assert (len(report.deleted), report.kept) == (1, ())
    assert shelf.listed(SnapshotStatus.DELETED) == {left_behind.snapshot_id}


def test_housekeeping_leaves_what_an_attempt_that_may_take_days_has_written(shelf: Shelf) -> None:
    written = shelf.root / "snapshots" / "orders" / "shared" / "of-an-attempt-under-way"
    written.parent.mkdir(parents=True)
    written.write_bytes(b"data")
    day_ms = 24 * 3_600_000
    slow = replace(shelf.stream, options=replace(shelf.stream.options, timeout=2 * day_ms))

    with storage_clock_ahead(day_ms):
        assert housekeeping(slow).swept == ()
        assert len(housekeeping(shelf.stream).swept) == 1


def test_a_deletion_that_was_cut_off_is_finished_by_housekeeping(shelf: Shelf) -> None:
    first = shelf.checkpoint()
    second = shelf.checkpoint(base=first)
    as_writer(shelf.stream.catalog).mark_deleting(first.snapshot_id)

    assert housekeeping(shelf.stream, dry_run=True).deleted == ("chk-1 at batch 1",)
    assert shelf.listed(SnapshotStatus.DELETING) == {first.snapshot_id}
    report = housekeeping(shelf.stream)

    assert report.deleted == ("chk-1 at batch 1",)
    assert shelf.reasons() == ["interrupted deletion"]
    assert shelf.listed(SnapshotStatus.DELETED) == {first.snapshot_id}
    assert shelf.is_whole(second)
    assert shelf.deletions() == ["snapshot-1"]


def test_a_deletion_that_was_cut_off_is_finished_where_the_option_keeps_the_others(shelf: Shelf) -> None:
    first, second = shelf.checkpoint(), shelf.checkpoint()
    as_writer(shelf.stream.catalog).mark_deleting(first.snapshot_id)

    report = apply_terminal_retention(shelf.cleaning_up(RETAIN).stream, "first", CANCELED)

    assert len(report.deleted) == 1
    assert shelf.reasons() == ["interrupted deletion"]
    assert shelf.listed() == {second.snapshot_id}


def test_housekeeping_sweeps_what_a_crashed_attempt_wrote_once_it_is_old(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()
    lost = shelf.checkpoint()
    # A crash after the data and before the metadata.
    (shelf.root / "snapshots" / "orders" / f"chk-{lost.number}" / "_metadata").unlink()
    before = shelf.data_files()

    assert housekeeping(shelf.stream).swept == ()
    assert shelf.data_files() == before
    with storage_clock_ahead(ORPHAN_AGE_MS + 1_000):
        would = housekeeping(shelf.stream, dry_run=True)
        assert would.messages() == ["would have removed 1 objects: no snapshot refers to it"]
        assert housekeeping(shelf.stream).swept == would.swept
    assert shelf.is_whole(snapshot)


def test_bytes_stay_for_twice_the_time_that_an_attempt_may_take(shelf: Shelf) -> None:
    timeout_ms = ORPHAN_AGE_MS
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, timeout=timeout_ms))
    lost = shelf.checkpoint()
    (shelf.root / "snapshots" / "orders" / f"chk-{lost.number}" / "_metadata").unlink()

    # A minute around it: what was just written is as old as the clock of the disk says.
    with storage_clock_ahead(2 * timeout_ms - 60_000):
        assert housekeeping(shelf.stream).swept == ()
    with storage_clock_ahead(2 * timeout_ms + 60_000):
        assert len(housekeeping(shelf.stream).swept) == 1


def test_housekeeping_leaves_a_live_stream_alone(shelf: Shelf) -> None:
    snapshot, savepoint = shelf.checkpoint(), shelf.savepoint("mine")

    with storage_clock_ahead(ORPHAN_AGE_MS + 1_000):
        report = housekeeping(shelf.stream)

    assert report.messages() == ["nothing to delete"]
    assert shelf.listed() == {snapshot.snapshot_id, savepoint.snapshot_id}
    assert shelf.live.exists()


def test_housekeeping_removes_what_a_dying_jvm_wrote_after_a_cancellation(shelf: Shelf) -> None:
    apply_terminal_retention(shelf.cleaning_up(DELETE).stream, "first", CANCELED)
    (shelf.live / "state").mkdir(parents=True)

    report = housekeeping(shelf.stream)

    assert report.live_directory_deleted is not None
    assert not shelf.live.exists()


def test_housekeeping_leaves_the_live_directories_of_whoever_holds_the_lease(shelf: Shelf) -> None:
    set_stream(shelf.stream.catalog, "orders", live_directory=None)
    lease = shelf.stream.catalog.leases.acquire("orders", HOLDER, 60_000)

    assert housekeeping(shelf.stream).live_directory_deleted is None
    assert shelf.live.exists()

    shelf.stream.catalog.leases.release(lease)
    assert housekeeping(shelf.stream).live_directory_deleted == shelf.stream.live_folder
    assert housekeeping(shelf.stream).live_directory_deleted is None


def test_housekeeping_of_a_stream_that_nobody_has_started_does_nothing(shelf: Shelf) -> None:
    report = housekeeping(replace(shelf.stream, stream_id="never"))

    assert report.messages() == ["nothing to delete"]


@pytest.mark.parametrize(("num_retained", "kept"), [(1, [5]), (2, [4, 5]), (4, [2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_checkpoints_are_subsumed_oldest_first(tmp_path: Path, num_retained: int, kept: list[int]) -> None:
    shelf = Shelf.at(tmp_path, num_retained=num_retained)
    snapshot = None
    for _ in range(5):
        snapshot = shelf.checkpoint(base=snapshot)

    dropped = subsume(shelf.stream)
    report = discard(shelf.stream, dropped, reason="subsumed", lease=None)

    assert [snapshot.number for snapshot in dropped] == sorted(set(range(1, 6)) - set(kept))
    assert report.failed == ()
    assert shelf.deletions() == [snapshot.snapshot_id for snapshot in dropped]
    left = shelf.stream.catalog.snapshots.completed("orders")
    assert sorted(snapshot.number or 0 for snapshot in left) == kept
    assert all(shelf.is_whole(snapshot) for snapshot in left)


@pytest.mark.parametrize("completed_at_ms", [[3, 1, 2], [1, 1, 1], [3, 2, 1]])
def test_a_clock_that_goes_back_does_not_change_which_checkpoint_is_the_newest(
    tmp_path: Path, completed_at_ms: list[int]
) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    for at_ms in completed_at_ms:
        shelf.completed_at(shelf.checkpoint(), at_ms)

    assert [snapshot.number for snapshot in subsume(shelf.stream)] == [1, 2]


def test_only_live_directories_of_starts_before_are_deleted(shelf: Shelf) -> None:
    folder = shelf.root / "live" / "orders"
    with keeping(shelf.stream.catalog) as lease:
        mine = lease.record.token
        names = [
            *("live-0", f"live-2-{mine - 1}", f"live-3-{mine - 1}.partial", f"live-9-{mine - 1}", f"live-3-{mine}"),
            *(f"live-4-{mine}", f"live-5-{mine + 1}", "verify-1", "copy"),
        ]
        for name in names:
            (folder / name).mkdir()

        delete_older_live_directories(shelf.stream, shelf.stream.live_directory(4, mine), lease)

    assert {path.name for path in folder.iterdir()} == {f"live-4-{mine}", f"live-5-{mine + 1}", "verify-1", "copy"}


@pytest.mark.parametrize(("count_savepoints", "subsumed"), [(False, [1]), (True, [1, 2, 4])])
def test_savepoints_push_checkpoints_out_only_where_they_are_counted(
    tmp_path: Path, count_savepoints: bool, subsumed: list[int]
) -> None:
    shelf = Shelf.at(tmp_path, num_retained=3)
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, count_savepoints=count_savepoints))
    shelf.checkpoint()
    shelf.checkpoint()
    savepoints = [shelf.savepoint("a")]
    shelf.checkpoint()
    savepoints += [shelf.savepoint("b"), shelf.savepoint("c")]
    newest = shelf.checkpoint()

    dropped = subsume(shelf.stream)
    discard(shelf.stream, dropped, reason="subsumed", lease=None)

    assert [snapshot.number for snapshot in dropped] == subsumed
    assert all(shelf.is_whole(snapshot) for snapshot in [*savepoints, newest])


def test_savepoints_are_never_subsumed(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    shelf.checkpoint()
    savepoint = shelf.savepoint("mine")
    shelf.checkpoint()

    assert [snapshot.number for snapshot in subsume(shelf.stream)] == [1]
    assert shelf.is_whole(savepoint)


def test_the_newest_checkpoint_outlives_newer_savepoints(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    checkpoint = shelf.checkpoint()
    shelf.savepoint("mine")
    shelf.savepoint("another")

    assert subsume(shelf.stream) == []
    assert shelf.is_whole(checkpoint)


def test_a_snapshot_that_an_attempt_builds_on_is_not_deleted(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()

    report = discard(shelf.stream, [snapshot], reason="subsumed", lease=None, protected=[snapshot.location or ""])

    assert "an attempt in progress shares its objects" in report.failed[0]
    assert shelf.is_whole(snapshot)


def test_an_execution_that_has_lost_the_lease_marks_nothing_for_deletion(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()
    with keeping(shelf.stream.catalog) as lease:
        shelf.stream.catalog.leases.release(lease.record)

        with pytest.raises(LeaseLostError):
            discard(shelf.stream, [snapshot], reason="a test", lease=lease)

    assert shelf.listed() == {snapshot.snapshot_id}
    assert shelf.is_whole(snapshot)


def test_an_execution_that_loses_the_lease_while_it_deletes_leaves_the_rest_to_its_successor(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = shelf.checkpoint()
    with keeping(shelf.stream.catalog) as lease:

        def losing(location: str, *, protected: Iterable[str] = ()) -> None:
            shelf.stream.catalog.leases.release(lease.record)

        monkeypatch.setattr(shelf.stream.store, "discard", losing)
        with pytest.raises(LeaseLostError):
            discard(shelf.stream, [snapshot], reason="a test", lease=lease)

    assert shelf.listed(SnapshotStatus.DELETING) == {snapshot.snapshot_id}


def test_what_is_in_use_is_left_for_a_later_pass_and_what_is_tagged_stays(shelf: Shelf) -> None:
    read, tagged = shelf.checkpoint(), shelf.checkpoint()
    shelf.stream.catalog.holds.use([read], holder="a copy", ttl_ms=60_000)
    shelf.stream.catalog.holds.tag(tagged.snapshot_id, label="end of june", holder="a person")

    report = discard(shelf.stream, [read, tagged], reason="a test", lease=None)

    assert [each.partition(":")[0] for each in report.held] == ["chk-1 at batch 1"]
    assert [each.partition(":")[0] for each in report.kept] == ["chk-2 at batch 2"]
    assert shelf.listed() == {read.snapshot_id, tagged.snapshot_id}


def test_bytes_outside_of_the_streams_storage_are_deleted_of_savepoints_alone(shelf: Shelf) -> None:
    """A copied catalog names the checkpoints of the original one."""
    checkpoint, savepoint = shelf.checkpoint(), shelf.savepoint("mine")
    elsewhere = open_store(FileSystemCheckpointStorage(f"file://{shelf.root}/elsewhere"), "orders")

    report = discard(replace(shelf.stream, store=elsewhere), [checkpoint, savepoint], reason="a test", lease=None)

    left = f", but not its bytes: {checkpoint.location} is outside of the stream's storage"
    assert report == RetentionReport(deleted=(f"chk-1 at batch 1{left}", "savepoint mine at batch 2"))
    assert shelf.reasons() == [f"a test{left}", "a test"]
    assert shelf.is_whole(checkpoint)
    assert not Path((savepoint.location or "").removeprefix("file://")).exists()
    assert shelf.listed() == set()


def test_a_checkpoint_that_an_attempt_builds_on_is_left_for_a_later_pass(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    first, second = shelf.checkpoint(), shelf.checkpoint()
    shelf.checkpoint()

    assert subsume(shelf.stream, protected=[first.location or ""]) == [second]
