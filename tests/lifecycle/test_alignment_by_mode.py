"""Which queries may have their running batch carried in an image, decided by how Spark executes them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from retention_shelf import JOB, Shelf

from dagster_ckpt.catalog.records import Holder
from dagster_ckpt.checkpointing.coordinator.messages import Alignment, Attempt, AttemptCompleted
from dagster_ckpt.checkpointing.coordinator.requests import TriggerKind
from dagster_ckpt.checkpointing.progress import BatchLog
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.attempt_runner import AttemptRunner
from dagster_ckpt.runtime.retry_queue import OwedChanges
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.guarantees import ExecutionMode
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.lease import LeaseKeeper


@dataclass
class Stage:
    """A job that is to take unaligned images, forced, and whose query is in the middle of batch 1."""

    shelf: Shelf
    keeper: LeaseKeeper
    runners: list[AttemptRunner] = field(default_factory=list)

    def begin(self, mode: ExecutionMode | None) -> AttemptRunner:
        live = LiveDirectory(str(self.shelf.live))
        runner = AttemptRunner(
            self.shelf.job,
            "first",
            PreparedStart(live),
            BatchLog(),
            self.keeper,
            owed=OwedChanges(),
            facts=lambda: QueryFacts(mode),
            predecessor_ended=False,
            wall_clock=lambda: 1,
        )
        self.runners.append(runner)
        runner.begin(Attempt(1, TriggerKind.CHECKPOINT, None, Alignment.CARRY_IN_FLIGHT, None, 1 << 60))
        return runner

    def plan(self, batch: int) -> None:
        offsets = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {"spark.sql.shuffle.partitions": "1"}}
        entry = {"path": f"file:///in/{batch}.json", "timestamp": 1, "batchId": batch}
        (self.shelf.live / f"sources/0/{batch}").write_text(f"v1\n{json.dumps(entry)}")
        (self.shelf.live / f"offsets/{batch}").write_text(f'v1\n{json.dumps(offsets)}\n{{"logOffset":{batch}}}')

    def commit(self, batch: int) -> None:
        (self.shelf.live / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    shelf = Shelf.at(tmp_path)
    shelf.job = replace(shelf.job, options=replace(shelf.job.options, unaligned=True, force_unaligned=True))
    lease = shelf.job.catalog.leases.acquire(JOB, Holder("first", "run", "host", 1, 1, "boot"), 60_000)
    with LeaseKeeper(shelf.job.catalog, lease, ttl_ms=60_000) as keeper:
        made = Stage(shelf, keeper)
        made.plan(1)
        yield made
        for runner in made.runners:
            runner.close("the test is over")


def completed(runner: AttemptRunner) -> Callable[[], bool]:
    return lambda: any(isinstance(event, AttemptCompleted) for event in runner.news())


def never_stopped(number: int) -> None:
    raise AssertionError(f"attempt {number} stopped the query")


def image_of(runner: AttemptRunner) -> dict[str, object]:
    runner.order_cuts(never_stopped)
    done = completed(runner)
    while not done():
        pass
    image = runner.image(1)
    assert image is not None
    return {"batch_id": image.batch_id, "in_flight": image.properties["in_flight_batch"], **image.properties}


def test_the_running_batch_of_micro_batches_is_carried(stage: Stage) -> None:
    image = image_of(stage.begin(ExecutionMode.MICRO_BATCH))

    assert (image["batch_id"], image["in_flight"]) == (0, 1)


@pytest.mark.parametrize("mode", [ExecutionMode.REAL_TIME, ExecutionMode.CONTINUOUS, ExecutionMode.ASYNC_PROGRESS])
def test_other_modes_get_aligned_images_only_even_if_forced_and_the_image_says_so(
    stage: Stage, mode: ExecutionMode
) -> None:
    runner = stage.begin(mode)
    runner.order_cuts(never_stopped)
    stage.commit(1)

    image = image_of(runner)

    assert (image["batch_id"], image["in_flight"]) == (1, None)
    assert image["mode"] == mode.value
    guarantee = image["guarantee"]
    assert isinstance(guarantee, dict)
    assert guarantee["unaligned"] is False
    assert "Only aligned images" in guarantee["why"]


def test_a_mode_that_cannot_be_seen_is_taken_for_micro_batches(stage: Stage) -> None:
    image = image_of(stage.begin(None))

    assert (image["batch_id"], image["in_flight"]) == (0, 1)
    assert image["mode"] == "MICRO_BATCH"
