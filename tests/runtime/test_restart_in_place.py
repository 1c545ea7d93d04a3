"""Runs whose query fails or is interrupted: restarts in place, and what is left to the caller."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from dagster_ckpt.catalog.records import ExecutionStatus, StartCause
from dagster_ckpt.policies.restart import FailureHistory, NoRestart, RestartStrategies
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from tests.support.played_query import PlayedQuery, Stage


def test_a_failed_query_is_restarted_in_place_as_often_as_its_strategy_says(stage: Callable[..., Stage]) -> None:
    failing = [PlayedQuery(error=f"failure {number}") for number in (1, 2, 3)]
    play = stage(*failing, restart=RestartStrategies.fixed_delay_restart(2, 0))

    outcome = play.run()

    assert outcome.end.kind is EndKind.FAILED
    failed, _, examined = (outcome.end.reason or "").partition("\n")
    assert failed == "failure 3"
    assert "was examined after the failure and is intact" in examined
    assert [(status, cause) for status, cause, _ in play.ends()] == [
        (ExecutionStatus.FAILED, StartCause.MANUAL),
        (ExecutionStatus.FAILED, StartCause.RESTART_IN_PLACE),
        (ExecutionStatus.FAILED, StartCause.RESTART_IN_PLACE),
    ]
    assert [settled for _, _, settled in play.ends()] == [True, True, False]
    assert all(query.stopped for query in failing)


def test_a_decision_in_place_draws_the_same_numbers_as_the_sensor_for_its_execution(
    stage: Callable[..., Stage],
) -> None:
    drawn: list[float] = []

    class Draws:
        def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> NoRestart:
            drawn.append(random.random())
            return NoRestart("once is enough")

    play = stage(PlayedQuery(error="failure"), restart=Draws())

    play.run()

    [execution] = play.stream.catalog.executions.of_stream("orders")
    assert drawn == [Random(execution.execution_id).random()]


def test_a_query_that_ends_before_it_reports_anything_keeps_the_sinks_that_were_named_at_its_start(
    stage: Callable[..., Stage],
) -> None:
    play = stage(PlayedQuery(ends=True))
    start, catalog = play.start_query, play.stream.catalog

    def noted_then_started(live: LiveDirectory) -> Any:
        [execution] = catalog.executions.of_stream("orders")
        lease = catalog.leases.current("orders")
        assert lease is not None
        catalog.executions.heartbeat(lease, execution.execution_id, {"sinks": ["FileSink[/out]"]})
        return start(live)

    outcome = execute_stream(play.stream, RunRequest(run_id="run", start_query=noted_then_started))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert catalog.executions.last_sinks("orders") == ["FileSink[/out]"]


def test_an_interrupt_ends_the_wait_for_a_restart(stage: Callable[..., Stage]) -> None:
    play = stage(PlayedQuery(error="failure"), restart=RestartStrategies.fixed_delay_restart(5, 3_600_000))

    outcome = play.run(interrupted=lambda: bool(play.reports) and "failure" in " ".join(play.reports))

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert len(play.started_in) == 1


def test_an_interrupted_query_is_stopped_and_left_for_its_caller_to_settle(stage: Callable[..., Stage]) -> None:
    query = PlayedQuery()
    play = stage(query)

    outcome = play.run(interrupted=lambda: bool(play.started_in))

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert query.stopped
    assert play.ends() == [(ExecutionStatus.RUNNING, StartCause.MANUAL, False)]
    assert play.stream.catalog.leases.current("orders") is None
