"""The ends of an attempt: what is recorded, told and deleted, also where the catalog or the storage is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import Holder, RequestKind, RequestStatus, SnapshotStatus
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import (
    CatalogError,
    IncompleteCutError,
    LeaseLostError,
    NothingCommittedError,
    SnapshotTooLargeError,
    StorageAccessError,
)
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Alignment,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CheckpointFailureReason,
    CleaningChanged,
    Event,
)
from dagster_ckpt.runtime.execution_end import RetryQueue
from dagster_ckpt.runtime.triggers import TriggerKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf

Spoil = Callable[[str, bool], None]
Away = Callable[[str, str], AbstractContextManager[None]]


@dataclass
class Stage:
    """A stream whose attempt 1, asked for by a person, is under way."""

    shelf: Shelf
    runner: AttemptRunner
    retry_queue: RetryQueue
    request_id: str

    def end(self) -> Event:
        """What is told of the attempt at its end."""
        self.runner.order_cuts(lambda _number: None)
        while True:
            for event in self.runner.news():
                if isinstance(event, AttemptCompleted | AttemptFailed):
                    return event

    def store_and_abort(self) -> Event:
        """Let the attempt expire when its snapshot is already whole."""
        self.runner.order_cuts(lambda _number: None)
        while not self.stored():
            pass
        assert self.runner.abort(Abort(1, CheckpointFailureReason.CHECKPOINT_EXPIRED)) == []
        return self.end()

    def cleaned(self) -> list[int]:
        """How many deletions are under way, as it is told, until none is."""
        told: list[int] = []
        while not told or told[-1] > 0:
            told += [event.pending for event in self.runner.news() if isinstance(event, CleaningChanged)]
        return told

    def stored(self) -> list[str]:
        return [location.rpartition("/")[2] for location in self.shelf.stream.store.checkpoints()]

    def answer(self) -> RequestStatus:
        return self.shelf.stream.catalog.requests.get(self.request_id).status

    def begin_another(self) -> tuple[list[Event], str]:
        """Begin attempt 2, and the request that asks for it."""
        requests = self.shelf.stream.catalog.requests
        request = requests.submit(STREAM, RequestKind.SAVEPOINT, origin="a test")
        as_writer(self.shelf.stream.catalog, STREAM).requests.accept(request.request_id)
        attempt = Attempt(2, TriggerKind.SAVEPOINT, request.request_id, Alignment.NEWEST_COMMIT, None, 1 << 60)
        return self.runner.start(attempt), request.request_id


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    shelf = Shelf.at(tmp_path)
    catalog = shelf.stream.catalog
    request = catalog.requests.submit(STREAM, RequestKind.CHECKPOINT, origin="a test")
    as_writer(catalog, STREAM).requests.accept(request.request_id)
    lease = catalog.leases.acquire(STREAM, Holder("first", "run", "host", 1, 1, "boot"), 60_000)
    with LeaseKeeper(catalog, lease, ttl_ms=60_000) as keeper:
        retry_queue = RetryQueue()
        runner = AttemptRunner(
            shelf.stream,
            "first",
            PreparedStart(LiveDirectory(str(shelf.live))),
            BatchLog(),
            keeper,
            retry_queue=retry_queue,
            facts=QueryFacts,
            predecessor_ended=False,
            wall_clock=lambda: 1,
        )
        runner.start(Attempt(1, TriggerKind.CHECKPOINT, request.request_id, Alignment.WAIT_FOR_COMMIT, None, 1 << 60))
        yield Stage(shelf, runner, retry_queue, request.request_id)
        runner.close("the test is over")
    catalog.close()


@pytest.fixture
def spoil(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Let a method of the catalog's snapshots break, before or after it has done its work."""
    snapshots = stage.shelf.stream.catalog.snapshots

    def spoiled(method: str, is_done: bool) -> None:
        work = getattr(snapshots, method)

        def broken(*args: Any, **kwargs: Any) -> None:
            if is_done:
                work(*args, **kwargs)
            raise CatalogError("the connection broke")

        monkeypatch.setattr(snapshots, method, broken)

    return spoiled


@pytest.fixture
def away(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Away:
    """Let a method of the catalog fail for a while."""

    @contextmanager
    def for_a_while(room: str, method: str) -> Iterator[None]:
        def broken(*_args: Any, **_kwargs: Any) -> None:
            raise CatalogError("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(getattr(stage.shelf.stream.catalog, room), method, broken)
            yield

    return for_a_while


def test_a_recording_whose_answer_was_lost_is_a_completed_snapshot(stage: Stage, spoil: Spoil) -> None:
    spoil("complete", True)

    event = stage.end()

    assert isinstance(event, AttemptCompleted)
    assert stage.stored() == ["chk-1"]
    assert stage.shelf.stream.store.verify(stage.shelf.stream.store.checkpoints()[0]) == []
    assert [snapshot.status for snapshot in stage.shelf.stream.catalog.snapshots.of_stream(STREAM)] == [
        SnapshotStatus.COMPLETED
    ]
    assert stage.answer() is RequestStatus.COMPLETED


def test_a_snapshot_that_the_catalog_did_not_take_is_deleted(stage: Stage, spoil: Spoil) -> None:
    spoil("complete", False)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE
    # The failure may end the query at once: what is to be deleted is deleted even so.
    stage.runner.close("too many failures")
    assert stage.stored() == []
    [snapshot] = stage.shelf.stream.catalog.snapshots.of_stream(STREAM)
    assert snapshot.status is SnapshotStatus.FAILED
    assert "the connection broke" in (snapshot.failure_reason or "")
    assert stage.answer() is RequestStatus.FAILED


@pytest.mark.parametrize("is_done", [True, False], ids=["recorded", "not recorded"])
def test_where_the_catalog_cannot_say_nothing_is_deleted_and_the_failure_counts(
    stage: Stage, spoil: Spoil, is_done: bool
) -> None:
    spoil("complete", is_done)
    spoil("fail", False)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE
    [location] = stage.shelf.stream.store.checkpoints()
    assert location in event.detail
    assert stage.shelf.stream.store.verify(location) == []
    assert planned_start(stage.shelf.stream, StartFrom(location)).snapshot is not None


def test_an_attempt_that_cannot_be_recorded_has_failed_and_its_request_is_answered(stage: Stage, away: Away) -> None:
    with away("snapshots", "start"):
        [event], request_id = stage.begin_another()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.IO_EXCEPTION
    catalog = stage.shelf.stream.catalog
    assert catalog.requests.get(request_id).status is RequestStatus.FAILED
    assert catalog.snapshots.of_stream(STREAM, kind=SnapshotKind.SAVEPOINT, status=SnapshotStatus.IN_PROGRESS) == []


def test_the_snapshot_of_a_writer_that_was_replaced_is_not_recorded_and_its_bytes_are_left(stage: Stage) -> None:
    catalog = stage.shelf.stream.catalog
    lease = catalog.leases.current(STREAM)
    assert lease is not None
    catalog.leases.acquire(STREAM, Holder("another", "run", "host", 2, 1, "boot"), 60_000, take_over=lease)

    with pytest.raises(LeaseLostError, match="held by run run"):
        stage.end()
    stage.runner.close("the lease is lost")

    assert [snapshot.status for snapshot in catalog.snapshots.of_stream(STREAM)] == [SnapshotStatus.IN_PROGRESS]
    assert stage.stored() == ["chk-1"]
    assert stage.answer() is RequestStatus.ACCEPTED


def test_an_answer_that_the_catalog_did_not_take_is_given_when_it_is_back(stage: Stage, away: Away) -> None:
    with away("requests", "resolve"):
        event = stage.end()

    assert isinstance(event, AttemptCompleted)
    assert stage.answer() is RequestStatus.ACCEPTED
    stage.retry_queue.retry()
    assert stage.answer() is RequestStatus.COMPLETED


def test_a_catalog_that_is_away_when_room_is_to_be_made_does_not_end_the_query(stage: Stage, away: Away) -> None:
    assert isinstance(stage.end(), AttemptCompleted)

    with away("snapshots", "of_stream"):
        assert stage.runner.subsume_checkpoints() == []


def test_a_live_directory_that_cannot_be_reached_is_looked_at_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_self: LiveDirectory) -> None:
        raise StorageAccessError("the bucket is away")

    with monkeypatch.context() as patch:
        patch.setattr(LiveDirectory, "positions", away)
        stage.runner.order_cuts(lambda _number: None)
        [event], _ = stage.begin_another()

    assert isinstance(event, AttemptFailed)
    assert isinstance(stage.end(), AttemptCompleted)


def test_a_catalog_that_is_away_while_a_cut_fails_does_not_end_the_query(stage: Stage, spoil: Spoil) -> None:
    stage.shelf.break_live_directory("broken")
    spoil("fail", False)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.CHECKPOINT_DECLINED


@pytest.mark.parametrize(
    ("error", "after_cut", "reason"),
    [
        (NothingCommittedError("no batch yet"), False, CheckpointFailureReason.CHECKPOINT_DECLINED_TASK_NOT_READY),
        (IncompleteCutError("a file is gone"), False, CheckpointFailureReason.CHECKPOINT_DECLINED),
        (SnapshotTooLargeError("6 MB"), True, CheckpointFailureReason.CHECKPOINT_DECLINED),
        (StorageAccessError("away"), False, CheckpointFailureReason.IO_EXCEPTION),
        (StorageAccessError("away"), True, CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION),
        (OSError("disk full"), True, CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION),
        (RuntimeError("a bug"), False, CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION),
    ],
    ids=str,
)
def test_what_went_wrong_has_flinks_name(error: Exception, after_cut: bool, reason: CheckpointFailureReason) -> None:
    assert CheckpointFailureReason.of(error, after_cut=after_cut) is reason


def test_files_that_cannot_be_stored_after_the_cut_are_the_querys_failure(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_header: object, _files: object, *, stage: Callable[[list[Any]], object], **_how: object) -> None:
        stage([])
        raise StorageAccessError("the bucket is away")

    monkeypatch.setattr(stage.shelf.stream.store, "write_checkpoint", away)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION
    assert "the bucket is away" in event.detail


def test_a_snapshot_that_is_stored_after_its_attempt_expired_is_deleted(stage: Stage) -> None:
    assert isinstance(stage.store_and_abort(), AttemptCompleted)

    stage.runner.discard_late(1)

    assert stage.cleaned()[-1] == 0
    assert stage.stored() == []
    assert [snapshot.status for snapshot in stage.shelf.stream.catalog.snapshots.of_stream(STREAM)] == [
        SnapshotStatus.FAILED
    ]
    assert stage.answer() is RequestStatus.FAILED


def test_a_snapshot_that_is_stored_when_the_query_has_ended_is_deleted(stage: Stage) -> None:
    stage.runner.order_cuts(lambda _number: None)
    while not stage.stored():
        pass

    stage.runner.close("it was canceled")

    assert stage.stored() == []
    [snapshot] = stage.shelf.stream.catalog.snapshots.of_stream(STREAM)
    assert (snapshot.status, snapshot.failure_reason) == (SnapshotStatus.FAILED, "the query ended: it was canceled")
    assert stage.answer() is RequestStatus.FAILED


def test_deletions_are_told_to_the_coordinator_when_they_begin_and_when_they_end(stage: Stage) -> None:
    stage.shelf.numbers = 1
    assert isinstance(stage.end(), AttemptCompleted)
    for _ in range(3):
        stage.shelf.checkpoint()

    assert [event.pending for event in stage.runner.subsume_checkpoints() if isinstance(event, CleaningChanged)] == [1]

    assert stage.cleaned() == [0]
    assert stage.stored() == ["chk-2", "chk-3", "chk-4"]
