"""An image is stored, and the catalog's answer to its recording is an error or is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from retention_shelf import JOB, Shelf

from dagster_ckpt.catalog import Holder, ImageStatus, RequestKind, RequestStatus
from dagster_ckpt.coordinator import (
    Alignment,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CheckpointFailureReason,
    Event,
    TriggerKind,
)
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.lifecycle.attempt_runner import AttemptRunner
from dagster_ckpt.lifecycle.batch_log import BatchLog
from dagster_ckpt.lifecycle.operations import preview_start
from dagster_ckpt.lifecycle.prepare import PreparedStart
from dagster_ckpt.lifecycle.start_from import StartFrom
from dagster_ckpt.lifecycle.writer_lease import LeaseKeeper
from dagster_ckpt.spark import LiveDirectory, QueryFacts

Spoil = Callable[[str, bool], None]


@dataclass
class Stage:
    """A job whose attempt 1, asked for by a person, is under way."""

    shelf: Shelf
    runner: AttemptRunner
    request_id: str

    def end(self) -> Event:
        """What is told of the attempt once its image is stored, and once what it deletes is deleted."""
        self.runner.order_cuts(lambda _number: None)
        while True:
            for event in self.runner.news():
                if isinstance(event, AttemptCompleted | AttemptFailed):
                    self.runner.close("the test is over")
                    return event

    def stored(self) -> list[str]:
        return [location.rpartition("/")[2] for location in self.shelf.job.store.checkpoints()]

    def answer(self) -> RequestStatus:
        return self.shelf.job.catalog.requests.get(self.request_id).status


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    shelf = Shelf.at(tmp_path)
    catalog = shelf.job.catalog
    request = catalog.requests.submit(JOB, RequestKind.CHECKPOINT, origin="a test")
    catalog.requests.accept(request.request_id)
    lease = catalog.leases.acquire(JOB, Holder("first", "run", "host", 1, 1, "boot"), 60_000)
    with LeaseKeeper(catalog, lease, ttl_ms=60_000) as keeper:
        runner = AttemptRunner(
            shelf.job,
            "first",
            PreparedStart(LiveDirectory(str(shelf.live)), 1),
            BatchLog(),
            keeper,
            facts=QueryFacts,
            predecessor_ended=False,
            wall_clock=lambda: 1,
        )
        runner.begin(Attempt(1, TriggerKind.CHECKPOINT, request.request_id, Alignment.WAIT_FOR_COMMIT, None, 1 << 60))
        yield Stage(shelf, runner, request.request_id)
        runner.close("the test is over")
    catalog.close()


@pytest.fixture
def spoil(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Let a method of the catalog's images break, before or after it has done its work."""
    images = stage.shelf.job.catalog.images

    def spoiled(method: str, is_done: bool) -> None:
        work = getattr(images, method)

        def broken(*args: Any, **kwargs: Any) -> None:
            if is_done:
                work(*args, **kwargs)
            raise CatalogError("the connection broke")

        monkeypatch.setattr(images, method, broken)

    return spoiled


def test_a_recording_whose_answer_was_lost_is_a_completed_image(stage: Stage, spoil: Spoil) -> None:
    spoil("complete", True)

    event = stage.end()

    assert isinstance(event, AttemptCompleted)
    assert stage.stored() == ["chk-1"]
    assert stage.shelf.job.store.verify(stage.shelf.job.store.checkpoints()[0]) == []
    assert [image.status for image in stage.shelf.job.catalog.images.of_job(JOB)] == [ImageStatus.COMPLETED]
    assert stage.answer() is RequestStatus.COMPLETED


def test_an_image_that_the_catalog_did_not_take_is_deleted(stage: Stage, spoil: Spoil) -> None:
    spoil("complete", False)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE
    assert stage.stored() == []
    [image] = stage.shelf.job.catalog.images.of_job(JOB)
    assert image.status is ImageStatus.FAILED
    assert "the connection broke" in (image.failure_reason or "")
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
    [location] = stage.shelf.job.store.checkpoints()
    assert location in event.detail
    assert stage.shelf.job.store.verify(location) == []
    assert preview_start(stage.shelf.job, StartFrom.parse(location)).image is not None


def test_a_catalog_that_is_away_while_a_cut_fails_does_not_end_the_query(stage: Stage, spoil: Spoil) -> None:
    stage.shelf.break_live_directory("broken")
    spoil("fail", False)

    event = stage.end()

    assert isinstance(event, AttemptFailed)
    assert event.reason is CheckpointFailureReason.CHECKPOINT_DECLINED
