"""A query that hangs is seen by its health, and one that has nothing to do is left in peace: with a real Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.health import Finding, Verdict, progress
from dagster_ckpt.client.health_facts import HealthSettings, health_facts
from dagster_ckpt.errors import QueryStalledError
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.stall import LOOK_AT_TASKS_AFTER_MS, QueryInactivity
from dagster_ckpt.runtime.supervision import STOP_STALLED_MS
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from tests.support.query_bench import DEADLINE_S, Bench, Person, make_stream, when
from tests.support.small_spark import small_spark

pytestmark = [pytest.mark.spark, pytest.mark.thorough(sample="tests/runtime/test_stall.py")]

# What has not moved between two heartbeats is stalled.
IMMEDIATELY = HealthSettings(max_stall_ms=1)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class BlockingBench(Bench):
    """A stream whose sink waits for an event in its second batch."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        super().__init__(spark, root, make_stream(root))
        self.resume = threading.Event()

    def start_query(self, live: LiveDirectory, *, output: str = "output") -> SupervisedQuery:
        stream = self.spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1)

        def write(_frame: DataFrame, batch_id: int) -> None:
            if batch_id == 1:
                self.resume.wait(DEADLINE_S)

        return start_query(stream.json(str(self.root / "landing")).writeStream.foreachBatch(write), "orders", live)

    def judged(self, batch_id: int) -> tuple[int, Finding] | None:
        """The last heartbeat, where it told of a batch, and what the health was at that very moment."""
        execution = self.stream.catalog.executions.latest("orders")
        if execution is None or (execution.progress or {}).get("batch_id") != batch_id:
            return None
        at_ms = execution.heartbeat_at_ms
        facts = health_facts(self.stream.catalog, {"orders": IMMEDIATELY}, now_ms=at_ms)["orders"]
        return at_ms, progress(facts, self.stream.options, IMMEDIATELY, now_ms=at_ms)


def test_an_idle_query_is_well_and_one_whose_batch_hangs_is_not(spark: SparkSession, tmp_path: Path) -> None:
    bench = BlockingBench(spark, tmp_path)
    idle: dict[int, Finding] = {}
    ill: list[Finding] = []

    def is_idle_for_three_heartbeats() -> bool:
        idle.update(filter(None, [bench.judged(0)]))
        return len(idle) == 3

    def is_ill() -> bool:
        ill.extend(finding for _, finding in filter(None, [bench.judged(0)]) if finding.verdict is Verdict.ERROR)
        return bool(ill)

    def is_well_again() -> bool:
        found = bench.judged(1)
        return found is not None and found[1].verdict is Verdict.PASS

    stages = [(is_idle_for_three_heartbeats, lambda: bench.feed(1)), (is_ill, bench.resume.set), (is_well_again, None)]

    def live_through() -> bool:
        condition, then = stages[0]
        if condition():
            del stages[0]
            if then is not None:
                then()
        return not stages

    bench.feed(1)
    bench.run(live_through)

    assert [finding.verdict for finding in idle.values()] == [Verdict.PASS] * 3
    assert "the query has been at 'Processing new data' since " in ill[0].message
    assert "Use jstack to find out" in ill[0].message


def test_a_query_whose_streams_get_no_core_fails_its_run_after_the_time_that_the_stream_allows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_ckpt.runtime.supervision.REPORT_AFTER_MS", LOOK_AT_TASKS_AFTER_MS)
    stream = replace(
        make_stream(tmp_path),
        stall_timeout_ms=LOOK_AT_TASKS_AFTER_MS,
        restart=RestartStrategies.fixed_delay_restart(9, 1),
    )
    bench = Bench(spark, tmp_path, stream)
    bench.feed(1)
    context = spark.sparkContext
    tracker = context.statusTracker()

    def take_every_core() -> None:
        context.addJobTag("in-the-way")
        spark.range(0, 2, 1, 2).selectExpr("reflect('java.lang.Thread', 'sleep', 600000L)").collect()

    def has_every_core() -> bool:
        stages = filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds()))
        return [stage.numActiveTasks for stage in stages] == [2]

    in_the_way = Person(take_every_core)
    when(has_every_core, list)()
    try:
        # A restart in this process would wait for the same cores.
        with pytest.raises(QueryStalledError, match=r"no running task in its 1 active Spark jobs.*a new process"):
            bench.run(lambda: False)
    finally:
        context.cancelJobsWithTag("in-the-way")
    when(lambda: in_the_way.done, list)()

    [execution] = stream.catalog.executions.of_stream("orders")
    assert (execution.status, execution.settled) == (ExecutionStatus.FAILED, False)
    still = QueryInactivity.of_record((execution.progress or {})["activity"])
    assert still is not None
    assert still.tasks is not None
    assert (still.tasks.jobs, still.tasks.running, still.tasks.done) == (1, 0, 0)
    # What it waited for is in the run's log.
    [told] = [each for each in bench.reports if "Its thread is" in each]
    assert "DAGScheduler.runJob" in told
    assert "MicroBatchExecution.runActivatedStream" in told
    # The stop could not have hung either.
    assert spark.conf.get("spark.sql.streaming.stopTimeout") == str(STOP_STALLED_MS)
    # Its successor goes on where it was.
    bench.feed(3)
    bench.run_to_the_end()
    bench.assert_exact()
