"""While an upgrade is under way, the snapshot that it would be rolled back to stays, whatever retention says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, subsume
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support.retention_shelf import STREAM, Shelf

NONE = ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS
OVER = [phase for phase in UpgradePhase if phase.is_over]
UNDER_WAY = [phase for phase in UpgradePhase if not phase.is_over]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path, num_retained=1)
    yield shelf
    shelf.stream.catalog.close()


def upgrade(shelf: Shelf, phase: UpgradePhase, snapshot: SnapshotRecord | None) -> None:
    desired = shelf.stream.catalog.desired_states
    snapshot_id = snapshot.snapshot_id if snapshot is not None else None
    record = UpgradeRecord(
        phase, "1", "2", UpgradeMode.LAST_STATE, began_at_ms=1, reason="a test", snapshot_id=snapshot_id
    )
    assert desired.advance(desired.ensure(STREAM, origin="a test"), upgrade=record, alert=None, request_id=None)


def subsumed(shelf: Shelf) -> list[str]:
    return [snapshot.snapshot_id for snapshot in subsume(shelf.stream)]


@pytest.mark.parametrize("phase", UNDER_WAY)
def test_newer_checkpoints_do_not_subsume_it(shelf: Shelf, phase: UpgradePhase) -> None:
    before, old, _newest = shelf.checkpoint(), shelf.checkpoint(), shelf.checkpoint()
    upgrade(shelf, phase, before)
    assert subsumed(shelf) == [old.snapshot_id]


@pytest.mark.parametrize("phase", OVER)
def test_once_the_upgrade_is_over_they_do(shelf: Shelf, phase: UpgradePhase) -> None:
    before, old, _newest = shelf.checkpoint(), shelf.checkpoint(), shelf.checkpoint()
    upgrade(shelf, phase, before)
    assert subsumed(shelf) == [before.snapshot_id, old.snapshot_id]


def test_an_upgrade_without_a_snapshot_holds_nothing(shelf: Shelf) -> None:
    old, _newest = shelf.checkpoint(), shelf.checkpoint()
    upgrade(shelf, UpgradePhase.UPGRADING, None)
    assert subsumed(shelf) == [old.snapshot_id]


def test_a_managed_stream_that_was_never_upgraded_holds_nothing(shelf: Shelf) -> None:
    old, _newest = shelf.checkpoint(), shelf.checkpoint()
    shelf.stream.catalog.desired_states.ensure(STREAM, origin="a test")
    assert subsumed(shelf) == [old.snapshot_id]


@pytest.mark.parametrize("phase", UNDER_WAY)
def test_it_outlives_the_end_of_an_execution(shelf: Shelf, phase: UpgradePhase) -> None:
    before = shelf.checkpoint()
    shelf.checkpoint(base=before)
    upgrade(shelf, phase, before)

    report = apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", TerminalState.SUSPENDED)

    assert shelf.listed() == {before.snapshot_id}
    assert shelf.is_whole(before)
    assert report.kept == ("chk-1 at batch 1: an upgrade is in progress: a start may need it",)


def test_it_is_kept_beside_the_snapshot_that_a_broken_live_directory_needs(shelf: Shelf) -> None:
    before, _old, newest = shelf.checkpoint(), shelf.checkpoint(), shelf.checkpoint()
    upgrade(shelf, UpgradePhase.UPGRADING, before)
    shelf.break_live_directory("broken")

    apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", TerminalState.FAILED)

    assert shelf.listed() == {before.snapshot_id, newest.snapshot_id}


def test_after_the_upgrade_the_end_of_an_execution_deletes_it(shelf: Shelf) -> None:
    before = shelf.checkpoint()
    upgrade(shelf, UpgradePhase.STABLE, before)

    apply_terminal_retention(shelf.cleaning_up(NONE).stream, "first", TerminalState.SUSPENDED)

    assert shelf.listed() == set()
