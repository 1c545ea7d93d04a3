"""A stream's retention policy decides what is subsumed, and never takes what a recovery needs; a real catalog."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotTrigger
from dagster_ckpt.policies.retention import Every, Latest, NewestPer, RetentionPolicy, YoungerThan
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.verbs import apply_savepoint_history

HOUR_MS = 3_600_000


class Nothing:
    """Keeps nothing at all."""

    def keep(self, snapshots: Any, context: Any) -> Any:
        return []


class Raises:
    def keep(self, snapshots: Any, context: Any) -> Any:
        raise ZeroDivisionError("a bug")


class Strangers:
    def keep(self, snapshots: Any, context: Any) -> Any:
        return ["chk-1"]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def subsumed(shelf: Shelf, policy: RetentionPolicy, **options: Any) -> list[int | None]:
    """The numbers that are subsumed, and deleted, under a policy."""
    chosen = replace(shelf.stream.options, num_retained=1, retention=policy, **options)
    shelf.stream = replace(shelf.stream, options=chosen)
    dropped = subsume(shelf.stream)
    assert discard(shelf.stream, dropped, reason="subsumed", lease=None).failed == ()
    return [snapshot.number for snapshot in dropped]


def test_a_policy_decides_by_the_clock_of_the_catalog(shelf: Shelf) -> None:
    now_ms = shelf.stream.catalog.now_ms()
    for age in (30, 28, 27, 5, 1):
        shelf.completed_at(shelf.checkpoint(), now_ms - age * HOUR_MS)
    assert subsumed(shelf, Latest(1) | (Every(2 * HOUR_MS) & YoungerThan(29 * HOUR_MS))) == [1, 3]


def test_the_newest_of_each_day_stays(shelf: Shelf) -> None:
    day_ms = 24 * HOUR_MS
    today_ms = shelf.stream.catalog.now_ms() // day_ms * day_ms
    for days, hour in ((2, 3), (2, 20), (1, 4), (0, 0)):
        shelf.completed_at(shelf.checkpoint(), today_ms - days * day_ms + hour * HOUR_MS)
    assert subsumed(shelf, NewestPer("day", 2)) == [1, 2]


@pytest.mark.parametrize("policy", [Raises(), Strangers()])
def test_a_policy_that_fails_deletes_nothing(shelf: Shelf, policy: RetentionPolicy) -> None:
    taken = {shelf.checkpoint().snapshot_id for _ in range(3)}
    assert subsumed(shelf, policy) == []
    assert shelf.listed() == taken


@pytest.mark.parametrize("count_savepoints", [False, True])
def test_a_policy_that_keeps_nothing_leaves_what_a_recovery_would_take_and_every_savepoint(
    shelf: Shelf, count_savepoints: bool
) -> None:
    shelf.checkpoint()
    newest = shelf.checkpoint()
    savepoint = shelf.savepoint("mine")
    assert subsumed(shelf, Nothing(), count_savepoints=count_savepoints) == [1]
    assert shelf.listed() == {newest.snapshot_id, savepoint.snapshot_id}
    assert shelf.is_whole(newest)
    assert shelf.is_whole(savepoint)


def test_a_policy_that_keeps_nothing_leaves_what_is_tagged_or_built_upon(shelf: Shelf) -> None:
    tagged, base, _old, newest = (shelf.checkpoint() for _ in range(4))
    shelf.stream.catalog.holds.tag(tagged.snapshot_id, label="keep", holder="a person")
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, num_retained=1, retention=Nothing()))
    dropped = subsume(shelf.stream, protected=[base.location or ""])
    assert [snapshot.number for snapshot in dropped] == [3]
    assert newest.snapshot_id in shelf.listed()


def test_after_a_rewind_the_newest_restorable_checkpoint_stays_beside_a_newer_one_that_was_left(shelf: Shelf) -> None:
    taken = [shelf.checkpoint() for _ in range(4)]
    as_writer(shelf.stream.catalog, STREAM).streams.switch_live_directory(
        shelf.stream.live_directory(2, 0).url, restored_snapshot_id=taken[1].snapshot_id
    )
    restorable = shelf.stream.catalog.snapshots.restorable(STREAM)[0]
    assert restorable.snapshot_id == taken[1].snapshot_id
    assert taken[1].number not in subsumed(shelf, Nothing())
    assert shelf.is_whole(taken[1])


def test_the_history_of_a_schedule_is_any_policy_and_one_that_fails_deletes_nothing(shelf: Shelf) -> None:
    taken = [shelf.savepoint(name, SnapshotTrigger.PERIODIC, schedule="nightly") for name in "abc"]
    everything = {snapshot.snapshot_id for snapshot in taken}

    report = apply_savepoint_history(shelf.stream, "nightly", Raises())
    assert shelf.listed() == everything
    assert "ZeroDivisionError: a bug" in report.kept[0]

    apply_savepoint_history(shelf.stream, "nightly", Nothing())
    assert shelf.listed() == {taken[-1].snapshot_id}
    assert shelf.reasons() == ["history of nightly: Nothing()"] * 2


def test_a_policy_that_keeps_nothing_leaves_the_newest_besides_a_newer_one_that_is_tagged(shelf: Shelf) -> None:
    shelf.checkpoint()
    shelf.checkpoint()
    tagged = shelf.checkpoint()
    shelf.stream.catalog.holds.tag(tagged.snapshot_id, label="end of june", holder="a person")

    assert subsumed(shelf, Nothing()) == [1]
