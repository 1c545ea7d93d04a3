"""Who owns a savepoint that a start names: real catalog, real storage, a live directory written by hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import OptionError, SnapshotNotFoundError
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, discard, housekeeping, subsume
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, RecoveryClaimMode, SnapshotKind, TerminalState
from tests.support.as_writer import as_writer, keeping
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.taken_snapshot import taken
from tests.support.verbs import request_start

MODES = list(RecoveryClaimMode)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path, num_retained=1)
    yield shelf
    shelf.stream.catalog.close()


def started_from(shelf: Shelf, name: str, mode: RecoveryClaimMode) -> str:
    plan = planned_start(shelf.stream, StartFrom(name, claim_mode=mode))
    with keeping(shelf.stream.catalog, STREAM) as lease:
        prepare(shelf.stream, plan, lease)
    return plan.reason


def subsume_checkpoints(shelf: Shelf) -> list[str]:
    dropped = subsume(shelf.stream)
    assert discard(shelf.stream, dropped, reason="subsumed", lease=None).failed == ()
    return [snapshot.snapshot_id for snapshot in dropped]


def is_there(snapshot: SnapshotRecord) -> bool:
    return Path((snapshot.location or "").removeprefix("file://")).exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_claimed_savepoint_is_subsumed_by_the_next_checkpoint_and_any_other_stays(
    shelf: Shelf, mode: RecoveryClaimMode
) -> None:
    savepoint = taken(shelf, SnapshotKind.SAVEPOINT, label="mine")
    reason = started_from(shelf, "mine", mode)
    assert subsume_checkpoints(shelf) == []
    assert is_there(savepoint)

    checkpoint = taken(shelf, SnapshotKind.CHECKPOINT)
    gone = subsume_checkpoints(shelf)

    is_claimed = mode is RecoveryClaimMode.CLAIM
    assert gone == ([savepoint.snapshot_id] if is_claimed else [])
    assert is_there(savepoint) is not is_claimed
    assert shelf.is_whole(checkpoint)
    assert ("owns from now on" in reason) is is_claimed


@pytest.mark.parametrize("mode", MODES)
def test_the_checkpoint_after_a_restore_needs_nothing_of_the_savepoint(shelf: Shelf, mode: RecoveryClaimMode) -> None:
    savepoint = taken(shelf, SnapshotKind.SAVEPOINT, label="mine")
    started_from(shelf, "mine", mode)
    checkpoint = taken(shelf, SnapshotKind.CHECKPOINT)

    shutil.rmtree((savepoint.location or "").removeprefix("file://"))

    assert shelf.is_whole(checkpoint)
    started_from(shelf, f"chk-{checkpoint.number}", RecoveryClaimMode.NO_CLAIM)
    assert taken(shelf, SnapshotKind.CHECKPOINT).batch_id == savepoint.batch_id


def test_a_savepoint_in_between_does_not_make_the_next_checkpoint_depend_on_it(shelf: Shelf) -> None:
    taken(shelf, SnapshotKind.SAVEPOINT, label="mine")
    started_from(shelf, "mine", RecoveryClaimMode.NO_CLAIM)
    between = taken(shelf, SnapshotKind.SAVEPOINT, label="between")
    checkpoint = taken(shelf, SnapshotKind.CHECKPOINT)

    shutil.rmtree((between.location or "").removeprefix("file://"))

    assert shelf.is_whole(checkpoint)


@pytest.mark.parametrize("state", TerminalState)
@pytest.mark.parametrize("cleanup", ExternalizedCheckpointCleanup)
def test_a_claimed_savepoint_meets_the_fate_of_checkpoints_at_the_end(
    shelf: Shelf, cleanup: ExternalizedCheckpointCleanup, state: TerminalState
) -> None:
    claimed = taken(shelf, SnapshotKind.SAVEPOINT, label="claimed")
    started_from(shelf, "claimed", RecoveryClaimMode.CLAIM)
    checkpoint, mine = taken(shelf, SnapshotKind.CHECKPOINT), taken(shelf, SnapshotKind.SAVEPOINT, label="mine")

    apply_terminal_retention(shelf.cleaning_up(cleanup).stream, "first", state)

    assert is_there(claimed) is is_there(checkpoint)
    assert is_there(mine)


def test_the_deletion_of_a_claimed_savepoint_that_was_cut_off_is_finished(shelf: Shelf) -> None:
    claimed = taken(shelf, SnapshotKind.SAVEPOINT, label="claimed")
    started_from(shelf, "claimed", RecoveryClaimMode.CLAIM)
    as_writer(shelf.stream.catalog, STREAM).mark_deleting(claimed.snapshot_id)

    assert housekeeping(shelf.stream).deleted == ("savepoint claimed at batch 0",)
    assert not is_there(claimed)


def test_a_checkpoint_of_the_stream_is_its_own_in_either_mode(shelf: Shelf) -> None:
    first = taken(shelf, SnapshotKind.CHECKPOINT)
    started_from(shelf, f"chk-{first.number}", RecoveryClaimMode.NO_CLAIM)
    second = taken(shelf, SnapshotKind.CHECKPOINT)

    assert subsume_checkpoints(shelf) == [first.snapshot_id]
    assert shelf.is_whole(second)


def test_a_snapshot_that_the_catalog_does_not_list_cannot_be_claimed(shelf: Shelf, tmp_path: Path) -> None:
    savepoint = taken(shelf, SnapshotKind.SAVEPOINT)
    moved = shutil.move((savepoint.location or "").removeprefix("file://"), tmp_path / "moved")

    with pytest.raises(SnapshotNotFoundError, match=r"cannot be claimed.*does not list it.*NO_CLAIM"):
        planned_start(shelf.stream, StartFrom(str(moved), claim_mode="CLAIM"))

    assert planned_start(shelf.stream, StartFrom(str(moved))).snapshot is not None


def test_a_request_to_start_carries_the_claim_mode(shelf: Shelf) -> None:
    taken(shelf, SnapshotKind.SAVEPOINT, label="mine")

    request = request_start(shelf.stream, StartFrom("mine", claim_mode="CLAIM"), origin="test")

    assert request.arguments["claim_mode"] == "CLAIM"


@pytest.mark.parametrize("word", ["latest", "empty", "batch-3"])
def test_only_a_snapshot_can_be_claimed(word: str) -> None:
    with pytest.raises(OptionError, match="which names none"):
        StartFrom(word, claim_mode=RecoveryClaimMode.CLAIM)


def test_no_claim_is_the_default_and_the_words_are_read_in_any_case() -> None:
    assert StartFrom("chk-7").claim_mode is RecoveryClaimMode.NO_CLAIM
    assert StartFrom("chk-7", claim_mode="claim").claim_mode is RecoveryClaimMode.CLAIM


@pytest.mark.parametrize(("word", "says"), [("LEGACY", "LEGACY is not supported"), ("ours", "Give NO_CLAIM or CLAIM")])
def test_flinks_legacy_mode_and_unknown_words_are_refused_in_words(word: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        StartFrom("chk-7", claim_mode=word)
