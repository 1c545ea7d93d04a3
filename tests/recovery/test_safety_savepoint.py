"""A rewind keeps the way back; people keep, release and promote checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import HoldKind, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import (
    OptionError,
    RequestFailedError,
    RestoreError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
)
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.rewind_preview import take_safety_savepoint
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support import verbs
from tests.support.as_writer import holding
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def rewound(history: History, text: str, **how: bool) -> str | None:
    """What is kept by a start, which is then done."""
    stream = history.shelf.stream
    start_from = StartFrom(text, **how)
    facts = recovery_facts(stream, start_from, predecessor_ended=True)
    with holding(stream.catalog, STREAM) as lease:
        kept = take_safety_savepoint(stream, facts, plan_recovery(facts), start_from, lease)
    history.start(text)
    return kept


def subsume_checkpoints(shelf: Shelf, num_retained: int = 1) -> None:
    stream = replace(shelf.stream, options=replace(shelf.stream.options, num_retained=num_retained))
    discard(stream, subsume(stream), reason="subsumed", lease=None)


def kept_snapshots(history: History) -> list[SnapshotRecord]:
    listed = history.shelf.stream.catalog.snapshots.completed(STREAM)
    return [snapshot for snapshot in listed if (snapshot.label or "").startswith("before-rewind-")]


@pytest.mark.parametrize("text", ["batch-5", "mine"])
def test_a_rewind_can_be_undone_however_many_checkpoints_come_after_it(history: History, text: str) -> None:
    """Seen by a user, 9: 40 s after the rewind everything later than it was deleted."""
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    history.commit(LAST + 1)
    ahead = verbs.start_preview(history.shelf.stream, StartFrom(text))
    assert any("a savepoint before-rewind-<n> of batch 9 is taken" in line for line in ahead.messages())

    kept = rewound(history, text)

    (snapshot,) = kept_snapshots(history)
    assert (snapshot.batch_id, snapshot.trigger, snapshot.kind) == (LAST + 1, SnapshotTrigger.REWIND, "SAVEPOINT")
    assert kept == f"took the savepoint {snapshot.label} at batch 9: start from it to undo the rewind"
    for _ in range(3):
        taken(history.shelf, SnapshotKind.CHECKPOINT)
        subsume_checkpoints(history.shelf)
    history.start(snapshot.label or "")
    assert history.batch == LAST + 1


def test_who_does_not_want_that_says_so_and_is_told_what_it_means(history: History) -> None:
    start_from = StartFrom("batch-5", no_safety_savepoint=True)
    ahead = verbs.start_preview(history.shelf.stream, start_from)
    assert any("can be lost permanently" in line for line in ahead.messages())

    assert rewound(history, "batch-5", no_safety_savepoint=True) is None
    assert kept_snapshots(history) == []


@pytest.mark.parametrize("text", ["latest", f"batch-{LAST}", "mine"])
def test_a_start_that_leaves_nothing_behind_takes_none(history: History, text: str) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    assert rewound(history, text) is None
    assert kept_snapshots(history) == []


def test_where_no_savepoint_can_be_taken_the_newest_snapshot_is_tagged(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    history.commit(LAST + 1)
    newest = taken(history.shelf, SnapshotKind.CHECKPOINT)
    monkeypatch.setattr("dagster_ckpt.recovery.rewind_preview.savepoint_of_stopped_stream", _no_room_for)

    kept = rewound(history, "mine")

    assert kept is not None
    assert "tagged chk-2 at batch 9 as before-rewind-3" in kept
    taken(history.shelf, SnapshotKind.CHECKPOINT)
    subsume_checkpoints(history.shelf)
    assert history.shelf.is_whole(newest)


def test_a_start_that_could_keep_nothing_changes_nothing(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_ckpt.recovery.rewind_preview.savepoint_of_stopped_stream", _no_room_for)
    before = history.live.url

    with pytest.raises(RestoreError, match=r"no room.*no_safety_savepoint"):
        rewound(history, "batch-5")

    assert history.live.url == before


def _no_room_for(*_: object, **__: object) -> SnapshotRecord:
    raise SnapshotCorruptError("no room.")


def test_what_was_taken_before_a_rewind_is_the_streams_own_once_it_is_released(history: History) -> None:
    rewound(history, "batch-5")
    (snapshot,) = kept_snapshots(history)

    released = verbs.release_checkpoint(history.shelf.stream, snapshot.label or "")

    assert released.claimed
    taken(history.shelf, SnapshotKind.CHECKPOINT)
    subsume_checkpoints(history.shelf)
    assert not Path((snapshot.location or "").removeprefix("file://")).exists()


def test_a_tagged_checkpoint_is_found_by_its_label_until_it_is_released(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    first = shelf.checkpoint()
    tagged = verbs.tag_checkpoint(shelf.stream, "chk-1", label="good-one", origin="a person")
    shelf.checkpoint(base=first)
    shelf.checkpoint(base=first)
    subsume_checkpoints(shelf)

    assert tagged.label == "good-one"
    assert shelf.listed() == {"snapshot-1", "snapshot-3"}
    plan = verbs.planned_start(shelf.stream, StartFrom("good-one"))
    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == first.snapshot_id
    assert [hold.kind for hold in shelf.stream.catalog.holds.on(first.snapshot_id)] == [HoldKind.TAG]

    verbs.release_checkpoint(shelf.stream, "good-one")
    subsume_checkpoints(shelf)
    assert shelf.listed() == {"snapshot-3"}
    with pytest.raises(SnapshotNotFoundError, match="chk-3"):
        verbs.tag_checkpoint(shelf.stream, "chk-1", label=None, origin="too late")


def test_what_is_not_kept_cannot_be_released(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    shelf.checkpoint()
    shelf.savepoint("mine")
    for reference in ("chk-1", "mine"):
        with pytest.raises(RequestFailedError, match="nothing to release"):
            verbs.release_checkpoint(shelf.stream, reference)


@pytest.mark.parametrize("label", ["empty", "chk-2", ""])
def test_a_tag_has_no_label_that_means_something_else(tmp_path: Path, label: str) -> None:
    shelf = Shelf.at(tmp_path)
    shelf.checkpoint()
    with pytest.raises(OptionError):
        verbs.tag_checkpoint(shelf.stream, "chk-1", label=label, origin="a person")
    with pytest.raises(OptionError):
        verbs.promote_checkpoint(shelf.stream, "chk-1", label=label)


def test_a_promoted_checkpoint_is_a_savepoint_that_needs_no_other_snapshot(history: History) -> None:
    stream = history.shelf.stream
    checkpoint = taken(history.shelf, SnapshotKind.CHECKPOINT)

    promoted = verbs.promote_checkpoint(stream, f"chk-{checkpoint.number}", label="promoted")

    assert (promoted.kind, promoted.label, promoted.batch_id) == ("SAVEPOINT", "promoted", LAST)
    discard(stream, [checkpoint], reason="a test", lease=None)
    assert stream.store.verify(promoted.location or "") == []
    history.start("promoted")
    assert history.batch == LAST


def test_bytes_that_can_be_linked_are_not_written_again_by_a_promotion(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    checkpoint = shelf.checkpoint()

    promoted = verbs.promote_checkpoint(shelf.stream, "chk-1")

    assert (promoted.incremental_bytes or 0) < (checkpoint.incremental_bytes or 0)
    discard(shelf.stream, [checkpoint], reason="a test", lease=None)
    assert shelf.is_whole(promoted)


def test_a_damaged_checkpoint_is_not_promoted(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    checkpoint = shelf.checkpoint()
    # What a verification has found in state that was damaged before it was stored.
    shelf.stream.catalog.snapshots.verified(checkpoint.snapshot_id, "a block of state/0/0/1.delta is damaged")
    with pytest.raises(SnapshotCorruptError, match=r"1\.delta is damaged.*verify it first"):
        verbs.promote_checkpoint(shelf.stream, "chk-1")
    shelf.stream.catalog.snapshots.verified(checkpoint.snapshot_id, None)
    (data,) = (tmp_path / "snapshots" / STREAM / "shared").iterdir()
    data.write_bytes(data.read_bytes()[:-1] + b"?")

    with pytest.raises(SnapshotCorruptError, match="cannot be promoted"):
        verbs.promote_checkpoint(shelf.stream, "chk-1")

    assert shelf.listed() == {"snapshot-1"}
