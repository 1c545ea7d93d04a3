import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.restart import (
    DecidingRestartStrategy,
    FailureHistory,
    NoRestart,
    RestartAt,
    RestartStrategies,
    effective_restart_strategy,
    restart_description,
)

CONTRACT = yaml.safe_load((Path(__file__).parent / "restart_strategies.yaml").read_text())
MAKERS: dict[str, Callable[..., DecidingRestartStrategy]] = {
    "none": RestartStrategies.no_restart,
    "fixed_delay": RestartStrategies.fixed_delay_restart,
    "failure_rate": RestartStrategies.failure_rate_restart,
    "exponential_delay": RestartStrategies.exponential_delay_restart,
}
CASES = [case | {"make": make} for make in MAKERS for case in CONTRACT[make]]


def strategy_of(case: dict[str, Any]) -> DecidingRestartStrategy:
    values = case.get("values", [])
    maker = MAKERS[case["make"]]
    return maker(**values) if isinstance(values, dict) else maker(*values)


def decisions(case: dict[str, Any], times: int) -> set[RestartAt | NoRestart]:
    history = FailureHistory(tuple(case["failed_at"]))
    now_ms = case.get("now", max(case["failed_at"]))
    random = Random(7)
    return {strategy_of(case).decide(history, now_ms, random) for _ in range(times)}


def named(case: dict[str, Any]) -> str:
    return f"{case['make']}: {case['says']}"


@pytest.mark.parametrize("case", [c for c in CASES if isinstance(c.get("restarts_at"), int)], ids=named)
def test_a_restart_comes_when_the_strategy_says(case: dict[str, Any]) -> None:
    (decision,) = decisions(case, times=1)
    assert isinstance(decision, RestartAt)
    assert decision.at_ms == case["restarts_at"]
    assert decision.reason


@pytest.mark.parametrize("case", [c for c in CASES if isinstance(c.get("restarts_at"), list)], ids=named)
def test_jitter_fills_its_range_and_stays_in_it(case: dict[str, Any]) -> None:
    earliest, latest = case["restarts_at"]
    times = {decision.at_ms for decision in decisions(case, times=3_000) if isinstance(decision, RestartAt)}
    margin = (latest - earliest) / 20
    assert earliest <= min(times) <= earliest + margin
    assert latest - margin <= max(times) <= latest


@pytest.mark.parametrize("case", [c for c in CASES if "gives_up" in c], ids=named)
def test_a_stream_is_given_up_with_the_reason(case: dict[str, Any]) -> None:
    (decision,) = decisions(case, times=1)
    assert isinstance(decision, NoRestart)
    assert case["gives_up"] in decision.reason


@pytest.mark.parametrize("case", CONTRACT["impossible"], ids=lambda case: case["rejects"])
def test_an_impossible_strategy_never_decides(case: dict[str, Any]) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=case["rejects"]):
        strategy_of(case).decide(FailureHistory((0,)), 0, Random(0))


@pytest.mark.parametrize("case", CONTRACT["impossible"], ids=lambda case: case["rejects"])
def test_an_impossible_strategy_is_refused_before_the_stream_starts(case: dict[str, Any]) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=case["rejects"]):
        effective_restart_strategy(strategy_of(case), checkpointing_enabled=True)


def test_thousands_of_failures_in_a_row_overflow_nothing() -> None:
    history = FailureHistory(tuple(range(0, 5_000_000, 1_000)))
    decision = RestartStrategies.exponential_delay_restart().decide(history, history.last_ms, Random(0))
    assert isinstance(decision, RestartAt)
    assert decision.at_ms == history.last_ms + 60_000


def test_a_strategy_is_not_asked_before_a_failure() -> None:
    with pytest.raises(OptionError, match="decides only after a failure"):
        FailureHistory(())


def test_the_same_seed_gives_the_same_restart_however_often_it_is_asked() -> None:
    strategy = RestartStrategies.exponential_delay_restart(jitter_factor=0.9)
    history = FailureHistory((0, 9_000, 20_000))
    answers = {strategy.decide(history, 20_000, Random("execution-1")) for _ in range(20)}
    assert len(answers) == 1


def test_the_exponential_defaults_are_those_of_flink_since_1_19() -> None:
    strategy = RestartStrategies.exponential_delay_restart()
    assert strategy.get_initial_backoff() == timedelta(seconds=1)
    assert strategy.get_max_backoff() == timedelta(minutes=1)
    assert strategy.get_backoff_multiplier() == 1.5
    assert strategy.get_reset_backoff_threshold() == timedelta(hours=1)
    assert strategy.get_jitter_factor() == 0.1
    assert strategy.attempts_before_reset_backoff == 2**31 - 1
    assert strategy.get_description() == (
        "Restart with exponential delay: starting at PT1S, increasing by 1.500000, with maximum PT1M. "
        "Delay resets after PT1H with jitter 0.100000"
    )


def test_durations_are_milliseconds_or_timedeltas() -> None:
    in_words = RestartStrategies.failure_rate_restart(2, timedelta(minutes=1), timedelta(seconds=1))
    assert in_words == RestartStrategies.failure_rate_restart(2, 60_000, 1_000)


@pytest.mark.parametrize("fallback", [None, RestartStrategies.fall_back_restart()])
def test_without_a_strategy_checkpointing_decides(fallback: Any) -> None:
    on = effective_restart_strategy(fallback, checkpointing_enabled=True)
    off = effective_restart_strategy(fallback, checkpointing_enabled=False)
    assert on == RestartStrategies.exponential_delay_restart()
    assert off == RestartStrategies.no_restart()


def test_a_fallback_takes_the_deployments_strategy() -> None:
    deployment = RestartStrategies.fixed_delay_restart(3, 1_000)
    fallback = RestartStrategies.fall_back_restart()
    found = effective_restart_strategy(fallback, deployment=deployment, checkpointing_enabled=True)
    assert found is deployment


def test_a_streams_own_strategy_holds_over_the_deployments() -> None:
    own = RestartStrategies.no_restart()
    deployment = RestartStrategies.fixed_delay_restart(3, 1_000)
    assert effective_restart_strategy(own, deployment=deployment, checkpointing_enabled=True) is own


def test_what_is_no_strategy_is_rejected() -> None:
    with pytest.raises(OptionTypeError, match="restart_strategy is 'none'"):
        effective_restart_strategy("none", checkpointing_enabled=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", MAKERS)
def test_a_strategy_survives_pickling(make: str) -> None:
    strategy = strategy_of(CASES[[case["make"] for case in CASES].index(make)])
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_a_person_reads_durations_in_units() -> None:
    strategy = RestartStrategies.failure_rate_restart(3, timedelta(hours=24), timedelta(minutes=1))
    assert "PT24H" in strategy.get_description()
    said = "Failure rate restart with maximum of 3 failures within interval 24 h and fixed delay 1 min."
    assert restart_description(strategy) == said
    assert restart_description(RestartStrategies.no_restart()) == "Restart deactivated."
