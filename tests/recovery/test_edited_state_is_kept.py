"""Edited state after a start from it: no recovery undoes the edit, and a start that names an older snapshot says so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.preflight import planned_start, start_preview
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.client.reconciliation import roll_back
from dagster_ckpt.errors import LiveDirectoryError, RecoveryExhaustedError
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import set_stream
from tests.support.edited_savepoint import edited_savepoint
from tests.support.failed_upgrade import WRONG, failed_upgrade
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.rewind_history import History
from tests.support.verbs import promote_checkpoint

LATEST = StartFrom()


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    """A stopped stream after batch 4, with a checkpoint and a savepoint."""
    golden = GoldenStream(tmp_path).make()
    golden.snapshot()
    golden.snapshot(SnapshotKind.SAVEPOINT, label="before")
    golden.end()
    yield golden
    golden.close()


def lose(golden: GoldenStream, *snapshots: SnapshotRecord) -> None:
    """The live directories are lost, and these snapshots are found broken."""
    shutil.rmtree(golden.live.parent)
    for snapshot in snapshots:
        golden.stream.catalog.snapshots.verified(snapshot.snapshot_id, "damaged")


def recovered(golden: GoldenStream) -> str | None:
    """What an unattended recovery would restore."""
    plan = plan_recovery(recovery_facts(golden.stream, LATEST, predecessor_ended=True, is_automatic=True))
    assert plan.kind is RecoveryKind.RESTORE
    assert plan.snapshot is not None
    return plan.snapshot.label or f"chk-{plan.snapshot.number}"


def test_a_lost_checkpoint_after_the_edit_leads_to_the_edited_savepoint_and_no_further(golden: GoldenStream) -> None:
    edited = edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    golden.commit(5)
    after = golden.snapshot()
    assert after.state_edits == ("forgotten",)

    lose(golden, after)
    assert recovered(golden) == "forgotten"

    lost = edited.location or ""
    golden.stream.catalog.snapshots.verified(edited.snapshot_id, "damaged")
    with pytest.raises(RecoveryExhaustedError, match=r"would undo it: savepoint before at batch 4, chk-1 at batch 4"):
        recovered(golden)
    assert Path(lost.removeprefix("file://")).exists()


def test_a_preference_for_checkpoints_does_not_undo_an_edit(golden: GoldenStream) -> None:
    edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    shutil.rmtree(golden.live)
    golden.stream = replace(golden.stream, options=replace(golden.stream.options, prefer_checkpoint_for_recovery=True))
    assert recovered(golden) == "forgotten"


@pytest.mark.parametrize("further", ["chk-4", "batch-5"])
def test_later_timelines_keep_the_edit(golden: GoldenStream, further: str) -> None:
    edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    golden.commit(5)
    after = golden.snapshot()
    golden._begin("again", golden.live_url)
    golden._writer.executions.heartbeat("again", {"sinks": ["NoopTable"]})
    golden.start(further, accept_loss=True, no_safety_savepoint=True)

    lose(golden, after)
    assert recovered(golden) == "forgotten"


def test_an_edited_savepoint_and_a_copy_of_it_are_not_used_before_a_start_names_one(golden: GoldenStream) -> None:
    edited_savepoint(golden, "before", "forgotten")
    promote_checkpoint(golden.stream, "forgotten", label="copy")
    shutil.rmtree(golden.live)
    assert recovered(golden) == "before"
    golden.start("copy")
    shutil.rmtree(golden.live)
    assert recovered(golden) == "copy"


def test_a_start_that_names_an_older_snapshot_says_which_edits_it_undoes(golden: GoldenStream) -> None:
    edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    assert start_preview(golden.stream, LATEST).undone_edits == ()
    edited_savepoint(golden, "forgotten", "corrected")
    golden.start("corrected")

    ahead = start_preview(golden.stream, StartFrom("before"))
    assert "this undoes an edit of the state: savepoint forgotten at batch 4 (request 4711, by ada)" in ahead.messages()
    assert len(ahead.undone_edits) == 2
    assert len(start_preview(golden.stream, StartFrom("forgotten")).undone_edits) == 1

    golden.start("before")
    shutil.rmtree(golden.live)
    assert recovered(golden) == "before"


def test_a_stream_whose_edited_state_is_gone_does_not_begin_empty(golden: GoldenStream) -> None:
    edited = edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    with golden.stream.catalog.database.writing() as connection:
        connection.execute(text("UPDATE streams SET live_directory = NULL, origin = NULL"))
        connection.execute(text("UPDATE snapshots SET status = 'DELETED' WHERE label = 'forgotten'"))
    assert edited.state_edits == ("forgotten",)
    with pytest.raises(LiveDirectoryError, match="no snapshot has its edited state"):
        planned_start(golden.stream, LATEST)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_rebuilt_catalog_knows_the_edit_from_the_live_directory(golden: GoldenStream, has_checkpoint: bool) -> None:
    edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    if has_checkpoint:
        golden.commit(5)
        golden.snapshot()
    live = golden.live
    rebuild_in_a_new_catalog(golden)
    assert golden.live == live
    assert golden.stream.catalog.streams.get(STREAM).state_edits == ("forgotten",)
    shutil.rmtree(golden.live)
    assert recovered(golden) == ("chk-4" if has_checkpoint else "forgotten")


def test_a_rebuild_without_a_live_directory_names_the_edit_that_a_plain_start_would_undo(golden: GoldenStream) -> None:
    edited_savepoint(golden, "before", "forgotten")
    golden.start("forgotten")
    golden.commit(5)
    shutil.rmtree(golden.live.parent)
    messages = rebuild_in_a_new_catalog(golden)
    assert any("savepoint forgotten at batch 4 has edited state" in message for message in messages)


def rebuild_in_a_new_catalog(golden: GoldenStream) -> list[str]:
    deployment = golden.stream.catalog.deployment_id
    golden.stream.catalog.close()
    golden.stream = replace(golden.stream, catalog=Catalog(f"sqlite:///{golden.root / 'new-catalog.db'}"))
    return rebuild(golden.stream, origin="a test", take_over_deployment=deployment).messages()


def test_an_upgrade_that_failed_is_not_rolled_back_behind_an_edit(tmp_path: Path) -> None:
    history = History(tmp_path)
    failed_upgrade(history)
    set_stream(history.shelf.stream.catalog, history.shelf.stream.stream_id, state_edits='["an edit"]')

    after = roll_back(history.shelf.stream, run_id="a run")

    assert after.phase is UpgradePhase.ROLLBACK_FAILED
    assert "this would undo an edit of the state: edit an edit" in after.reason
    assert history.batch == WRONG
    history.close()
