"""The long test: streams that are killed in every way, at random, end with the rows of an uninterrupted run.

`make soak` runs it for half an hour; `make soak MINUTES=8 SEED=7` for eight minutes with the blows of seed 7.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import dagster as dg
import pytest

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.orchestration.run_status import STREAM_ID_TAG
from examples.flights.compare import compare_tables
from examples.flights.drill import Feed, run_uninterrupted
from examples.flights.streams import final_watermarks
from tests.e2e.stage import Stage
from tests.soak.mayhem import Mayhem

STREAMS = ("departure_delays", "flights_with_weather")
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED") or time.time_ns() % 1_000_000)
# The feed ends after the last blow: a join that is restarted after the last file of one side stays at its watermark.
RAGE, FEED = 0.7, 0.85
PAUSE_S = (1.0, 30.0)

pytestmark = [pytest.mark.soak, pytest.mark.dagster_dev, pytest.mark.timeout(MINUTES * 60 + 1800)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path, Path(__file__).with_name("soaked_streams.py")) as stage:
        yield stage


def test_streams_that_are_killed_at_random_write_the_rows_of_an_uninterrupted_run(stage: Stage) -> None:
    begun = time.monotonic()
    tell = partial(tell_since, begun)
    tell(f"seed {SEED}, {MINUTES:g} minutes")
    stage.start_dagster()
    for stream in STREAMS:
        stage.launch(f"{stream}_stream")
    for stream in STREAMS:
        stage.wait_for(lambda stream=stream: runs(stage, stream), f"{stream} to run")
    tell("both streams run")
    feed = Feed(stage.workspace.landing, 366 / (MINUTES * 60 * FEED))
    mayhem = Mayhem(stage, STREAMS, Random(SEED), tell)
    with feed.arriving():
        mayhem.rage(time.monotonic() + MINUTES * 60 * RAGE, pause_s=PAUSE_S)
        tell(f"peace after {mayhem.blows.total()} blows: {dict(mayhem.blows)}")
        feed.await_end()
    for stream, watermark in final_watermarks(feed.plan).items():
        await_caught_up(stage, mayhem, stream, watermark)
        tell(f"{stream} has processed the whole feed")
    for stream in STREAMS:
        stop_with_savepoint(stage, stream)

    spark, uninterrupted = run_uninterrupted(stage.workspace)
    try:
        compared = {
            stream: compare_tables(spark, str(stage.workspace.output / stream), str(uninterrupted / stream))
            for stream in STREAMS
        }
    finally:
        spark.stop()
    tell(str(compared))
    assert all(comparison.equal for comparison in compared.values()), f"seed {SEED}: {compared}"
    assert mayhem.blows.total() > 0
    unfinished = [run.run_id for run in runs_of_streams(stage) if not run.is_finished]
    assert not unfinished, f"seed {SEED}: Dagster still believes in {unfinished}"


def runs(stage: Stage, stream: str) -> bool:
    latest = stage.catalog.executions.latest(stream)
    return latest is not None and latest.status is ExecutionStatus.RUNNING


def await_caught_up(stage: Stage, mayhem: Mayhem, stream: str, watermark: str) -> None:
    def caught_up() -> bool:
        mayhem.keep_watch()
        execution = stage.catalog.executions.latest(stream)
        assert execution is not None
        progress = execution.progress or {}
        return (
            execution.status is ExecutionStatus.RUNNING
            and bool(progress.get("idle"))
            and progress.get("watermark") == watermark
        )

    stage.wait_for(caught_up, f"{stream} at watermark {watermark}")


def stop_with_savepoint(stage: Stage, stream: str) -> None:
    run_id = stage.launch(
        "stop_with_savepoint_job", {"ops": {"stop_with_savepoint": {"config": {"stream_id": stream}}}}
    )
    assert stage.dev.await_end(run_id, timeout_s=240) is dg.DagsterRunStatus.SUCCESS
    stage.wait_for(
        lambda: all(run.is_finished for run in runs_of_streams(stage) if run.tags[STREAM_ID_TAG] == stream),
        f"the runs of {stream} to be recorded as over",
    )


def runs_of_streams(stage: Stage) -> list[dg.DagsterRun]:
    return [run for stream in STREAMS for run in stage.instance.get_runs(dg.RunsFilter(tags={STREAM_ID_TAG: stream}))]


def tell_since(began: float, message: str) -> None:
    print(f"{time.monotonic() - began:7.1f} s  {message}", flush=True)
