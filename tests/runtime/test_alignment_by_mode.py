"""Which queries may have their running batch carried in a snapshot, decided by how Spark executes them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import Holder
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.checkpoint_messages import Alignment, Attempt, AttemptCompleted
from dagster_ckpt.runtime.execution_end import RetryQueue
from dagster_ckpt.runtime.triggers import TriggerKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.lease import LeaseKeeper
from tests.support.retention_shelf import STREAM, Shelf


@dataclass
class Stage:
    """A stream that is to take unaligned snapshots, forced, and whose query is in the middle of batch 1."""

    shelf: Shelf
    keeper: LeaseKeeper
    runners: list[AttemptRunner] = field(default_factory=list)

    def begin(self, mode: ExecutionMode | None) -> AttemptRunner:
        live = LiveDirectory(str(self.shelf.live))
        runner = AttemptRunner(
            self.shelf.stream,
            "first",
            PreparedStart(live),
            BatchLog(),
            self.keeper,
            retry_queue=RetryQueue(),
            facts=lambda: QueryFacts(mode),
            predecessor_ended=False,
            wall_clock=lambda: 1,
        )
        self.runners.append(runner)
        runner.start(Attempt(1, TriggerKind.CHECKPOINT, None, Alignment.CARRY_IN_FLIGHT, None, 1 << 60))
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
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, unaligned=True, force_unaligned=True))
    lease = shelf.stream.catalog.leases.acquire(STREAM, Holder("first", "run", "host", 1, 1, "boot"), 60_000)
    with LeaseKeeper(shelf.stream.catalog, lease, ttl_ms=60_000) as keeper:
        made = Stage(shelf, keeper)
        made.plan(1)
        yield made
        for runner in made.runners:
            runner.close("the test is over")


def completed(runner: AttemptRunner) -> Callable[[], bool]:
    return lambda: any(isinstance(event, AttemptCompleted) for event in runner.news())


def never_stopped(number: int) -> None:
    raise AssertionError(f"attempt {number} stopped the query")


def snapshot_of(runner: AttemptRunner) -> dict[str, object]:
    runner.order_cuts(never_stopped)
    done = completed(runner)
    while not done():
        pass
    snapshot = runner.snapshot(1)
    assert snapshot is not None
    return {"batch_id": snapshot.batch_id, "in_flight": snapshot.properties["in_flight_batch"], **snapshot.properties}


def test_the_running_batch_of_micro_batches_is_carried(stage: Stage) -> None:
    snapshot = snapshot_of(stage.begin(ExecutionMode.MICRO_BATCH))

    assert (snapshot["batch_id"], snapshot["in_flight"]) == (0, 1)


@pytest.mark.parametrize("mode", [ExecutionMode.REAL_TIME, ExecutionMode.CONTINUOUS, ExecutionMode.ASYNC_PROGRESS])
def test_other_modes_get_aligned_snapshots_only_even_if_forced_and_the_snapshot_says_so(
    stage: Stage, mode: ExecutionMode
) -> None:
    runner = stage.begin(mode)
    runner.order_cuts(never_stopped)
    stage.commit(1)

    snapshot = snapshot_of(runner)

    assert (snapshot["batch_id"], snapshot["in_flight"]) == (1, None)
    assert snapshot["mode"] == mode.value
    guarantee = snapshot["guarantee"]
    assert isinstance(guarantee, dict)
    assert guarantee["unaligned"] is False
    assert "Only aligned snapshots" in guarantee["why"]


def test_a_mode_that_cannot_be_seen_is_taken_for_micro_batches(stage: Stage) -> None:
    snapshot = snapshot_of(stage.begin(None))

    assert (snapshot["batch_id"], snapshot["in_flight"]) == (0, 1)
    assert snapshot["mode"] == "MICRO_BATCH"
