"""Flink's scenarios of restarts and of what its operator does, and that no scenario of the list was forgotten."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import pytest
import yaml

from dagster_ckpt.orchestration.jobs.schedules import PeriodicSavepoints, build_savepoint_schedule
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import FailureHistory, NoRestart, RestartAt, RestartStrategies
from dagster_ckpt.policies.retention import (
    RetainedKind,
    RetainedSnapshot,
    RetentionContext,
    SavepointHistory,
    decide_retention,
    needed_of_history,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = yaml.safe_load((HERE / "policies.yaml").read_text(encoding="utf-8"))
STRATEGIES = {
    "exponential_delay": RestartStrategies.exponential_delay_restart,
    "failure_rate": RestartStrategies.failure_rate_restart,
}
ELSEWHERE = [
    HERE.parent / "recovery" / "scenarios.yaml",
    *sorted((HERE.parent / "runtime" / "coordinator_cases").glob("*.yaml")),
]


def cases(kind: str) -> list[Any]:
    return [pytest.param(case, id=f"{case['scenario']}: {case['says']}") for case in CASES if kind in case]


@pytest.mark.parametrize("case", cases("strategy"))
def test_a_restart_strategy_answers(case: dict[str, Any]) -> None:
    failed_at = case["failed_at"]
    strategy = STRATEGIES[case["strategy"]](**case["values"])

    decision = strategy.decide(FailureHistory(tuple(failed_at)), failed_at[-1], Random(0))

    if case["restarts_at"] is None:
        assert isinstance(decision, NoRestart)
    else:
        assert isinstance(decision, RestartAt)
        assert decision.at_ms == case["restarts_at"]


@pytest.mark.parametrize("case", cases("cron"))
def test_a_schedule_of_savepoints_takes_an_expression_or_refuses_it_at_once(case: dict[str, Any]) -> None:
    @streaming_asset()
    def stream(context: Any) -> Any: ...

    @dg.job
    def trigger_savepoint_job() -> None:
        return None

    if case["is_taken"]:
        assert build_savepoint_schedule(stream, trigger_savepoint_job, PeriodicSavepoints(case["cron"])).cron_schedule
    else:
        with pytest.raises(dg.DagsterInvalidDefinitionError):
            build_savepoint_schedule(stream, trigger_savepoint_job, PeriodicSavepoints(case["cron"]))


@pytest.mark.parametrize("case", cases("history"))
def test_a_history_of_savepoints_makes_room(case: dict[str, Any]) -> None:
    taken = [RetainedSnapshot(str(at_ms), RetainedKind.SAVEPOINT, at_ms) for at_ms in case["taken_at"]]

    decision = decide_retention(
        SavepointHistory(**{"max_count": None, **case["history"]}),
        taken,
        RetentionContext(taken[-1].taken_at_ms),
        needed=needed_of_history(taken, ()),
    )

    assert [int(savepoint.snapshot_id) for savepoint in decision.dropped] == case["leave"]


@pytest.mark.parametrize("case", cases("absent"))
def test_what_the_product_does_not_have_it_says(case: dict[str, Any]) -> None:
    page = " ".join((ROOT / case["said_in"]).read_text(encoding="utf-8").split())

    assert case["words"] in page
    assert case["absent"] in page


def test_every_case_is_of_a_kind_that_is_run() -> None:
    assert all(len({"strategy", "cron", "history", "absent"} & case.keys()) == 1 for case in CASES)


def test_every_one_of_the_36_scenarios_has_a_case() -> None:
    elsewhere = [case for file in ELSEWHERE for case in yaml.safe_load(file.read_text(encoding="utf-8"))]
    assert {case["scenario"] for case in [*CASES, *elsewhere] if "scenario" in case} == set(range(1, 37))
