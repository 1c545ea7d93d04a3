"""An upgrade that failed is rolled back: state and sinks go back to the snapshot from before, whatever happens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import PROGRAM, StartCause
from dagster_ckpt.client import requests
from dagster_ckpt.client.reconciliation import Definition, Orchestrator, StepRuns, observe, roll_back
from dagster_ckpt.errors import LeaseHeldError, RequestFailedError, RowsAtRiskError, StorageAccessError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.policies.upgrade import UpgradePolicy
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, discard, subsume
from dagster_ckpt.recovery.live_directories import LEFT_AFTER_MS, SCRATCH_FOLDER, remove_leftovers
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support import verbs
from tests.support.as_writer import as_writer, keeping
from tests.support.executioner import Executioner, Killed
from tests.support.failed_upgrade import WRONG, failed_upgrade, row, upgrade_in
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


def test_state_and_sinks_go_back_to_where_the_old_code_had_stopped(history: History) -> None:
    failed_upgrade(history)
    query_id = history.query_id

    after = roll_back(history.shelf.stream, run_id="a run")

    assert (history.batch, history.sink_batch, history.query_id) == (LAST, LAST, query_id)
    assert after.phase is UpgradePhase.ROLLED_BACK
    assert row(history).upgrade == after
    assert after.reason == (
        "rolled back to savepoint before at batch 8, because: no batch in time; load code version 1, or a newer one "
        "than 2, to continue there"
    )
    assert (row(history).alert or "").startswith("code version 2: rolled back")
    assert not requests.is_running(history.shelf.stream)


def test_the_old_code_is_named_by_what_its_runs_recorded(history: History) -> None:
    failed_upgrade(history)
    program = {"image": "registry/orders:1", "commit": "0a1b2c"}
    writer = as_writer(history.shelf.stream.catalog)
    holder = this_holder("old", "a run", None)
    writer.executions.start("old", run_id="a run", cause=StartCause.MANUAL, holder=holder, code_version="1")
    writer.executions.running("old", live_directory="/live", recovery={PROGRAM: program})

    after = roll_back(history.shelf.stream, run_id="a run")

    assert "load code version 1 (commit 0a1b2c, image registry/orders:1)" in after.reason


def test_code_that_had_moved_its_output_goes_back_to_the_folder_before(history: History) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin="a test", label="before")
    old, new = history.sink, history.shelf.root / "moved to"
    savepoint = history.shelf.stream.catalog.snapshots.restorable(STREAM)[0]
    history.sink = new
    for batch in range(LAST + 1, WRONG + 1):
        history.commit(batch)
    history.sinks(f"FileSink[file:{new}]")
    upgrade_in(history.shelf.stream, UpgradePhase.RESTORING, savepoint.snapshot_id)
    theirs = {path.name: path.read_bytes() for path in (new / "_spark_metadata").iterdir()}

    after = roll_back(history.shelf.stream, run_id="a run")

    assert after.phase is UpgradePhase.ROLLED_BACK, after.reason
    assert {path.name: path.read_bytes() for path in (new / "_spark_metadata").iterdir()} == theirs
    history.sink = old
    assert (history.batch, history.sink_batch) == (LAST, LAST)
    # The next start, of the code before, goes on there.
    plan = verbs.planned_start(history.shelf.stream, StartFrom())
    with keeping(history.shelf.stream.catalog, STREAM) as lease:
        prepare(history.shelf.stream, plan, lease, NamedOutput("parquet", str(old)))
    stopped = verbs.trigger_savepoint(history.shelf.stream, origin="a test", label="after")
    noted = stopped.properties["sinks"]
    assert isinstance(noted, list)
    assert noted[0]["path"] == f"file:{old}"


def test_killed_anywhere_it_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 0
    killed = True
    while killed:
        (tmp_path / str(step)).mkdir()
        history = History(tmp_path / str(step))
        failed_upgrade(history)
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                roll_back(history.shelf.stream, run_id="a run")
                killed = False
            except Killed:
                step += either(quick=3, thorough=1)
        if killed:
            assert row(history).upgrade is not None
            assert roll_back(history.shelf.stream, run_id="another run").phase is UpgradePhase.ROLLED_BACK
        assert (history.batch, history.sink_batch) == (LAST, LAST), f"killed at step {step}"
        history.close()
    assert step > 3


def test_where_the_snapshot_is_gone_a_person_has_to_say_what_follows(history: History) -> None:
    savepoint = failed_upgrade(history)
    shutil.rmtree((savepoint.location or "").removeprefix("file://"))

    after = roll_back(history.shelf.stream, run_id="a run")

    assert after.phase is UpgradePhase.ROLLBACK_FAILED
    assert "cannot be rolled back" in (row(history).alert or "")
    assert (history.batch, history.sink_batch) == (WRONG, WRONG)


def test_where_the_sink_cannot_be_written_for_a_moment_it_is_tried_again(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_upgrade(history)

    def fails(_folder: LocalFileIO, path: str) -> None:
        raise StorageAccessError(f"Cannot write {path}")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileIO, "flush", fails)
        with pytest.raises(StorageAccessError, match="could not be rolled back to batch 8"):
            roll_back(history.shelf.stream, run_id="a run")
    waiting = row(history).upgrade
    assert waiting is not None
    assert waiting.phase is UpgradePhase.RESTORING

    assert roll_back(history.shelf.stream, run_id="another run").phase is UpgradePhase.ROLLED_BACK
    assert (history.batch, history.sink_batch) == (LAST, LAST)


def test_where_the_sink_does_not_answer_for_a_moment_it_is_tried_again(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preview asks the sink before anything is written; an error is not a verdict about its rows."""
    failed_upgrade(history)
    listed = LocalFileIO.list

    def fails(folder: LocalFileIO, path: str = "", **how: bool) -> object:
        if path == "_spark_metadata":
            raise StorageAccessError(f"Cannot list {folder.url}")
        return listed(folder, path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileIO, "list", fails)
        with pytest.raises(StorageAccessError, match="Cannot list"):
            roll_back(history.shelf.stream, run_id="a run")
    waiting = row(history).upgrade
    assert waiting is not None
    assert waiting.phase is UpgradePhase.RESTORING

    assert roll_back(history.shelf.stream, run_id="another run").phase is UpgradePhase.ROLLED_BACK
    assert (history.batch, history.sink_batch) == (LAST, LAST)


def test_where_a_sink_could_lose_rows_nothing_is_changed(history: History) -> None:
    failed_upgrade(history)
    history.sinks("HoodieStreamingSink[/table]")

    after = roll_back(history.shelf.stream, run_id="a run")

    assert after.phase is UpgradePhase.ROLLBACK_FAILED
    assert "HoodieStreamingSink" in after.reason
    assert (history.batch, history.sink_batch) == (WRONG, WRONG)


@pytest.mark.parametrize("phase", [UpgradePhase.UPGRADING, UpgradePhase.STABLE])
def test_an_upgrade_that_works_is_marked_and_rolled_back_once_the_stream_is_stopped(
    history: History, phase: UpgradePhase
) -> None:
    savepoint = failed_upgrade(history)
    upgrade_in(history.shelf.stream, phase, savepoint.snapshot_id)
    told: list[str] = []

    ordered = roll_back(history.shelf.stream, run_id="a person", report=told.append)

    assert (ordered.phase, ordered.reason) == (UpgradePhase.ROLLING_BACK, "a person asked for it")
    assert row(history).upgrade == ordered
    assert any("batch 8" in message for message in told), "what it undoes is said before"
    assert (history.batch, history.sink_batch) == (WRONG, WRONG)
    assert roll_back(history.shelf.stream, run_id="a person") == ordered
    # The supervisor's step, once the run is over.
    upgrade_in(history.shelf.stream, UpgradePhase.RESTORING, savepoint.snapshot_id)
    assert roll_back(history.shelf.stream, run_id="a run").phase is UpgradePhase.ROLLED_BACK
    assert (history.batch, history.sink_batch) == (LAST, LAST)


def test_an_upgrade_that_was_rolled_back_during_the_preview_is_not_marked_again(history: History) -> None:
    savepoint = failed_upgrade(history)
    upgrade_in(history.shelf.stream, UpgradePhase.STABLE, savepoint.snapshot_id)

    def rolled_back(_message: str) -> None:
        upgrade_in(history.shelf.stream, UpgradePhase.ROLLED_BACK, savepoint.snapshot_id)

    with pytest.raises(RequestFailedError, match="its desired state changed"):
        roll_back(history.shelf.stream, run_id="a person", report=rolled_back)
    assert row(history).upgrade is not None
    assert row(history).upgrade.phase is UpgradePhase.ROLLED_BACK  # type: ignore[union-attr]


@pytest.mark.parametrize(("cause", "counted"), [(StartCause.MANUAL, 0), (StartCause.RESTART_NEW_RUN, 1)])
def test_only_restarts_that_no_user_asked_for_count_against_new_code(
    history: History, cause: StartCause, counted: int
) -> None:
    upgrade_in(history.shelf.stream, UpgradePhase.UPGRADING, None, started_at_ms=1)
    writer = as_writer(history.shelf.stream.catalog)
    before = observed(history)
    writer.executions.start("again", run_id="a run", cause=cause, holder=this_holder("again", "a run", None))
    assert observed(history) - before == counted


def observed(history: History) -> int:
    policy = UpgradePolicy(rollback_after_ms=60_000, rollback_if_restarted=True)
    nothing = Orchestrator(lambda _run: True, lambda _run: None, lambda _step: StepRuns())
    definition = Definition(STREAM, None, policy, "2")
    return observe(history.shelf.stream.catalog, row(history), definition, nothing).restarts


def test_an_upgrade_is_not_marked_where_its_snapshot_is_gone(history: History) -> None:
    savepoint = failed_upgrade(history)
    upgrade_in(history.shelf.stream, UpgradePhase.STABLE, savepoint.snapshot_id)
    upgraded = row(history).upgrade
    discard(history.shelf.stream, [savepoint], reason="a test", lease=None)
    with pytest.raises(RequestFailedError, match="no snapshot from before the upgrade to code version 2 is left"):
        roll_back(history.shelf.stream, run_id="a person")
    assert row(history).upgrade == upgraded


def test_an_upgrade_is_not_marked_where_a_sink_could_lose_rows(history: History) -> None:
    savepoint = failed_upgrade(history)
    upgrade_in(history.shelf.stream, UpgradePhase.STABLE, savepoint.snapshot_id)
    history.sinks("HoodieStreamingSink[/table]")
    upgraded = row(history).upgrade
    with pytest.raises(RowsAtRiskError, match="HoodieStreamingSink"):
        roll_back(history.shelf.stream, run_id="a person")
    assert row(history).upgrade == upgraded


@pytest.mark.parametrize("phase", [UpgradePhase.PREFLIGHT, UpgradePhase.STARTING, UpgradePhase.ROLLED_BACK])
def test_only_an_upgrade_that_waits_for_it_is_rolled_back(history: History, phase: UpgradePhase) -> None:
    upgrade_in(history.shelf.stream, phase, "a snapshot")
    with pytest.raises(RequestFailedError, match="Stream 'orders' has no upgrade to roll back"):
        roll_back(history.shelf.stream, run_id="a run")


def test_a_stream_that_runs_is_not_rolled_back(history: History) -> None:
    failed_upgrade(history)
    history.shelf.stream.catalog.leases.acquire(STREAM, this_holder("an execution", "a run", None), 60_000)
    with pytest.raises(LeaseHeldError):
        roll_back(history.shelf.stream, run_id="another run")
    assert (history.batch, history.sink_batch) == (WRONG, WRONG)


class TestTheSnapshotOfAnUpgrade:
    """It is kept until the upgrade is over: without it there is no way back."""

    def test_is_not_deleted_with_the_others_when_the_new_code_fails(self, tmp_path: Path) -> None:
        shelf = Shelf.at(tmp_path).cleaning_up(ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS)
        kept, other = shelf.checkpoint(), shelf.checkpoint()
        upgrade_in(shelf.stream, UpgradePhase.UPGRADING, kept.snapshot_id)

        apply_terminal_retention(shelf.stream, "first", TerminalState.FAILED)

        left = {snapshot.snapshot_id for snapshot in shelf.stream.catalog.snapshots.completed(STREAM)}
        assert left == {kept.snapshot_id}
        assert other.snapshot_id not in left

    @pytest.mark.parametrize(("phase", "is_kept"), [(UpgradePhase.UPGRADING, True), (UpgradePhase.STABLE, False)])
    def test_makes_no_room_for_others_until_it_is_over(
        self, tmp_path: Path, phase: UpgradePhase, is_kept: bool
    ) -> None:
        shelf = Shelf.at(tmp_path, num_retained=1)
        kept = shelf.checkpoint()
        shelf.checkpoint()
        upgrade_in(shelf.stream, phase, kept.snapshot_id)
        assert (kept.snapshot_id in {snapshot.snapshot_id for snapshot in subsume(shelf.stream)}) is not is_kept


def test_copies_that_a_killed_preflight_left_are_removed_once_nobody_can_use_them(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(history.shelf.stream.live_root) / SCRATCH_FOLDER / STREAM
    now_ms = 10 * LEFT_AFTER_MS
    for name in (f"{now_ms - LEFT_AFTER_MS - 1}-old", f"{now_ms - LEFT_AFTER_MS}-young", "unknown"):
        (folder / name / "state").mkdir(parents=True)
    monkeypatch.setattr(history.shelf.stream.catalog, "now_ms", lambda: now_ms)
    remove_leftovers(history.shelf.stream)
    assert {path.name for path in folder.iterdir()} == {f"{now_ms - LEFT_AFTER_MS}-young", "unknown"}
