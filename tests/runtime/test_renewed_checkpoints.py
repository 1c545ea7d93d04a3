"""An unchanged position renews the newest checkpoint; nothing is deleted before the execution has committed a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import EventType, Holder, RequestKind, RequestStatus, SnapshotStatus
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.checkpoint_messages import Abort, Alignment, Attempt, AttemptCompleted, AttemptFailed
from dagster_ckpt.runtime.checkpoint_messages import CheckpointFailureReason as Reason
from dagster_ckpt.runtime.execution_end import RetryQueue
from dagster_ckpt.runtime.triggers import TriggerKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.snapshotting import sharing_base
from tests.support.manual_clock import ManualClock
from tests.support.retention_shelf import STREAM, Shelf


class Idle:
    """A stream that resumed after batch 0 and waits for input."""

    def __init__(self, shelf: Shelf, keeper: LeaseKeeper) -> None:
        self.shelf = shelf
        self.keeper = keeper
        self.numbers = count(shelf.stream.catalog.streams.get(STREAM).next_number)
        self.resume()

    def resume(self, restored: str | None = None) -> None:
        """Another execution resumes after the newest commit, in a live directory restored from the snapshot, if any."""
        live = LiveDirectory(str(self.shelf.live))
        self.runner = AttemptRunner(
            self.shelf.stream,
            "first",
            PreparedStart(live, began=live.positions(), proves=restored),
            BatchLog(),
            self.keeper,
            retry_queue=RetryQueue(),
            facts=QueryFacts,
            predecessor_ended=True,
            wall_clock=lambda: 1,
        )

    def attempt(self, kind: TriggerKind = TriggerKind.CHECKPOINT, request_id: str | None = None) -> int:
        number = next(self.numbers)
        assert self.runner.start(Attempt(number, kind, request_id, Alignment.WAIT_FOR_COMMIT, None, 1 << 60)) == []
        self.runner.order_cuts(lambda _number: None)
        return number

    def checkpoint(self, kind: TriggerKind = TriggerKind.CHECKPOINT, request_id: str | None = None) -> int:
        number = self.attempt(kind, request_id)
        while True:
            for event in self.runner.news():
                assert not isinstance(event, AttemptFailed), event
                if isinstance(event, AttemptCompleted):
                    self.runner.subsume_checkpoints()
                    return number

    def commit(self, batch_id: int) -> None:
        for log in ("offsets", "commits"):
            text = (self.shelf.live / log / "0").read_text()
            (self.shelf.live / log / str(batch_id)).write_text(text)

    @property
    def newest_id(self) -> str:
        return self.shelf.stream.catalog.snapshots.completed(STREAM)[0].snapshot_id

    @property
    def listed(self) -> list[tuple[int | None, SnapshotStatus]]:
        return [(each.number, each.status) for each in reversed(self.shelf.stream.catalog.snapshots.of_stream(STREAM))]


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Idle]:
    shelf = Shelf.at(tmp_path, num_retained=1)
    catalog = shelf.stream.catalog
    lease = catalog.leases.acquire(STREAM, Holder("first", "run", "host", 1, 1, "boot"), 60_000)
    with LeaseKeeper(catalog, lease, ttl_ms=60_000) as keeper:
        stream = Idle(shelf, keeper)
        yield stream
        stream.runner.close("the test is over")
    catalog.close()


def test_an_unchanged_position_renews_the_newest_checkpoint_and_writes_nothing(idle: Idle) -> None:
    catalog = idle.shelf.stream.catalog
    first = idle.checkpoint()
    before = catalog.snapshots.completed(STREAM)[0]
    request = catalog.requests.submit(STREAM, RequestKind.CHECKPOINT, origin="a test")
    catalog.requests.accept(idle.keeper.record, request.request_id)

    renewal = idle.checkpoint(request_id=request.request_id)

    assert idle.listed == [(first, SnapshotStatus.COMPLETED)]
    renewed = catalog.snapshots.completed(STREAM)[0]
    assert (renewed.completed_at_ms or 0) >= (before.completed_at_ms or 0)
    assert renewed.location == before.location
    assert (before.is_renewed, renewed.is_renewed) == (False, True)
    assert idle.shelf.stream.store.checkpoints() == [before.location]
    answered = catalog.requests.get(request.request_id)
    assert (answered.status, answered.snapshot_id) == (RequestStatus.COMPLETED, before.snapshot_id)
    snapshot = idle.runner.snapshot(renewal)
    assert snapshot is not None
    assert snapshot.snapshot_id == before.snapshot_id
    events = [event.type for event in catalog.events.after(0, limit=1000)]
    assert events.count(EventType.CHECKPOINT_COMPLETED) == 1


def test_a_batch_a_savepoint_and_another_program_are_no_renewal(idle: Idle) -> None:
    first = idle.checkpoint()
    idle.checkpoint(TriggerKind.SAVEPOINT)
    idle.checkpoint(TriggerKind.SAVEPOINT)
    idle.shelf.stream = replace(idle.shelf.stream, code_version="next")
    idle.resume()
    other = idle.checkpoint()
    assert [number for number, _ in idle.listed] == [first, first + 1, first + 2, other]

    idle.commit(1)
    idle.resume()
    assert idle.checkpoint() == idle.listed[-1][0]


def test_a_checkpoint_that_is_broken_or_at_which_a_recovery_failed_is_not_renewed(idle: Idle) -> None:
    catalog = idle.shelf.stream.catalog
    first = idle.checkpoint()
    catalog.snapshots.verified(catalog.snapshots.completed(STREAM)[0].snapshot_id, "an object is truncated")
    second = idle.checkpoint()
    catalog.recoveries.failed(
        idle.keeper.record,
        "first",
        f"snapshot:{catalog.snapshots.completed(STREAM)[0].snapshot_id}",
        error="E",
        detail="d",
        batch_id=0,
    )
    third = idle.checkpoint()
    assert [number for number, _ in idle.listed] == [first, second, third]
    # None of them was taken after a batch, so the failure still counts.
    assert len(catalog.recoveries.of_stream(STREAM)) == 1


def test_a_renewal_ends_a_streak_of_failures(idle: Idle) -> None:
    idle.checkpoint()
    idle.runner.abort(Abort(idle.attempt(), Reason.CHECKPOINT_EXPIRED))
    while not any(isinstance(event, AttemptCompleted | AttemptFailed) for event in idle.runner.news()):
        pass
    failures = [idle.shelf.stream.catalog.history.of_streams({STREAM: 0})[STREAM].failures]
    idle.checkpoint()
    failures.append(idle.shelf.stream.catalog.history.of_streams({STREAM: 0})[STREAM].failures)
    assert failures == [1, 0]


def test_a_renewal_that_comes_too_late_deletes_nothing(idle: Idle) -> None:
    idle.checkpoint()
    location = idle.shelf.stream.catalog.snapshots.completed(STREAM)[0].location or ""
    number = idle.attempt()
    idle.runner.abort(Abort(number, Reason.CHECKPOINT_EXPIRED))
    while not any(isinstance(event, AttemptCompleted | AttemptFailed) for event in idle.runner.news()):
        pass
    idle.runner.discard_late(number)
    idle.attempt()
    idle.runner.close("the query ended")
    assert idle.shelf.stream.store.verify(location) == []


@pytest.mark.parametrize("is_restored", [True, False])
def test_before_a_batch_nothing_is_subsumed_and_the_first_batch_proves_what_was_restored(
    idle: Idle, is_restored: bool
) -> None:
    """A start in the live directory has read no snapshot, and proves none."""
    catalog = idle.shelf.stream.catalog
    first = idle.checkpoint()
    catalog.snapshots.verified(idle.newest_id, None, state_was_read=True)
    idle.commit(1)
    idle.resume()
    second = idle.checkpoint()
    idle.runner.subsume_checkpoints()
    assert idle.listed == [(first, SnapshotStatus.COMPLETED), (second, SnapshotStatus.COMPLETED)]
    idle.resume(idle.newest_id if is_restored else None)

    idle.commit(2)
    third = idle.checkpoint()
    idle.runner.close("the query ended")
    statuses = dict(idle.listed)
    # Of these the newest that was loaded stays; num_retained=1 alone would keep only the third.
    loaded, other = (second, first) if is_restored else (first, second)
    assert statuses[other] is SnapshotStatus.DELETED
    assert statuses[loaded] is statuses[third] is SnapshotStatus.COMPLETED
    proven = {each.number for each in catalog.snapshots.completed(STREAM) if each.is_proven}
    assert proven == {loaded}


def test_damage_that_was_found_is_not_inherited(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from a checkpoint that was taken before, and may share the damaged object."""
    clock = ManualClock(idle.shelf.stream.catalog.now_ms())
    monkeypatch.setattr(idle.shelf.stream.catalog.database, "_clock", clock)
    snapshots = idle.shelf.stream.catalog.snapshots
    idle.checkpoint()
    damaged = idle.newest_id
    idle.commit(1)
    idle.checkpoint()
    assert sharing_base(idle.shelf.stream) is not None
    snapshots.verified(damaged, "an object is truncated")
    assert sharing_base(idle.shelf.stream) is None
    clock.now_ms += 1
    idle.commit(2)
    idle.checkpoint()
    base = sharing_base(idle.shelf.stream)
    assert base is not None
    assert base.snapshot_id == idle.newest_id
    # Read again, the same damage is no news.
    clock.now_ms += 1
    snapshots.verified(damaged, "an object is truncated")
    assert sharing_base(idle.shelf.stream) == base
    snapshots.verified(damaged, None)
    snapshots.verified(damaged, "an object is truncated")
    assert sharing_base(idle.shelf.stream) is None


def test_a_batch_that_an_earlier_execution_had_planned_proves_nothing(idle: Idle) -> None:
    idle.checkpoint()
    (idle.shelf.live / "offsets/1").write_text((idle.shelf.live / "offsets/0").read_text())
    idle.resume()
    idle.commit(1)
    assert not idle.runner.has_progressed()
    idle.commit(2)
    assert idle.runner.has_progressed()


def test_an_interrupted_deletion_is_finished_by_the_next_completed_checkpoint(idle: Idle) -> None:
    catalog = idle.shelf.stream.catalog
    first = idle.checkpoint()
    newest = catalog.snapshots.completed(STREAM)[0].snapshot_id
    catalog.snapshots.mark_deleting(newest, lease=idle.keeper.record)
    idle.resume()
    idle.commit(1)
    idle.checkpoint()
    idle.runner.close("the query ended")
    assert dict(idle.listed)[first] is SnapshotStatus.DELETED
