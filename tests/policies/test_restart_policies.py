"""A restart policy of a user: used wherever a strategy is, combined with Flink's, and guarded."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.reconciliation import RecordedEnd, Restart, Retain, reconcile
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.orchestration.settings import RestartSettings
from dagster_ckpt.orchestration.stream import StreamSpec
from dagster_ckpt.policies.restart import (
    FALLBACK_RESTART,
    AllOf,
    AnyOf,
    FailureHistory,
    NoRestart,
    RestartAt,
    RestartStrategies,
    decide_restart,
    effective_restart_strategy,
    restart_description,
)
from dagster_ckpt.values.modes import TerminalState

ONE = FailureHistory((1_000,))


@dataclass(frozen=True)
class Twice:
    """A policy of a user: five lines, no base class."""

    delay_ms: int = 500

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        if failures.count > 2:
            return NoRestart("it failed three times")
        return failures.restart_after(self.delay_ms, now_ms, "once more")


@dataclass(frozen=True)
class Answers:
    answer: Any

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> Any:
        return self.answer


class Raises:
    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        raise ZeroDivisionError("a bug")


def test_it_is_accepted_wherever_a_strategy_is() -> None:
    assert StreamSpec.of("orders", restart_strategy=Twice()).restart == Twice()
    assert effective_restart_strategy(None, deployment=Twice(), checkpointing_enabled=True) == Twice()
    environment = StreamExecutionEnvironment.get_execution_environment()
    environment.set_restart_strategy(Twice())
    assert environment.get_restart_strategy() == Twice()
    path = f"{__name__}:Twice"
    assert RestartSettings(kind="OWN", own=path).restart_strategy() == Twice()
    assert StreamSpec.of("orders", restart_strategy=RestartSettings(kind="OWN", own=path)).restart == Twice()
    assert StreamSpec.of("orders", restart_strategy=Twice()).metadata()["dagster_ckpt/restart_strategy"] == (
        "Twice(delay_ms=500)"
    )


@pytest.mark.parametrize("settings", [{"kind": "OWN"}, {"own": "a:b"}, {"kind": "OWN", "own": "company.nowhere:No"}])
def test_an_import_path_without_its_kind_or_without_an_object_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="own"):
        RestartSettings(**settings).restart_strategy()


@pytest.mark.parametrize("value", [3, "FIXED_DELAY", Twice, object()])
def test_what_is_no_policy_is_refused(value: Any) -> None:
    with pytest.raises(OptionTypeError, match="must be a value made by RestartStrategies, or an object of your own"):
        effective_restart_strategy(value, checkpointing_enabled=True)
    with pytest.raises(OptionTypeError, match="restart strategy is"):
        StreamExecutionEnvironment.get_execution_environment().set_restart_strategy(value)
    with pytest.raises(OptionTypeError):
        AnyOf(Twice(), value)
    with pytest.raises(OptionError):
        AllOf()


def test_it_decides_for_a_run_that_died() -> None:
    def verdict(failures: int) -> object:
        return reconcile(
            RecordedEnd.FAILED,
            ExecutionStatus.RUNNING,
            Twice(),
            [1_000] * failures,
            holds_lease=False,
            now_ms=5_000,
            random=Random(1),
        )

    assert verdict(2) == Restart("once more")
    assert verdict(3) == Retain(TerminalState.FAILED, "it failed three times")


@pytest.mark.parametrize(
    "policy", [Raises(), FALLBACK_RESTART | Raises(), AllOf(Twice(), Raises()), *map(Answers, (None, 5, True))]
)
def test_one_that_raises_or_answers_nonsense_is_replaced_by_flinks_default(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decision = decide_restart(policy, ONE, 1_000, Random(7))
    assert decision == FALLBACK_RESTART.decide(ONE, 1_000, Random(7))
    assert isinstance(decision, RestartAt)
    assert "Restart policy" in caplog.text


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Raises(), "Raises() failed, so {fallback} applies: ZeroDivisionError: a bug"),
        (
            Answers(5),
            "Answers(answer=5) failed, so {fallback} applies: it returned 5, which is neither RestartAt nor NoRestart",
        ),
    ],
)
def test_one_that_fails_is_logged_with_its_name_and_its_problem(
    policy: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    decide_restart(policy, ONE, 1_000, Random(7))

    assert [record.getMessage() for record in caplog.records] == [
        "Restart policy " + problem.format(fallback=FALLBACK_RESTART)
    ]


def test_its_jitter_is_drawn_from_what_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    class Jittered:
        def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
            return failures.restart_after(int(random.random() * 1_000_000), now_ms, "after a random delay")

    decision = decide_restart(Jittered(), ONE, 1_000, Random(7))

    assert decision == Jittered().decide(ONE, 1_000, Random(7))
    assert caplog.records == []


HOUR_MS = 3_600_000
FIXED = RestartStrategies.fixed_delay_restart(9, 60_000)


@pytest.mark.parametrize("later_ms", [0, 5_000, 60_000])
def test_a_failure_dated_by_a_clock_that_was_put_back_delays_nothing_until_then(later_ms: int) -> None:
    """At each look of the sensor the delay ends at the same time."""
    failed_ms = 98 * HOUR_MS
    decision = decide_restart(FIXED, FailureHistory((failed_ms, 100 * HOUR_MS)), failed_ms + later_ms, Random(7))
    assert decision == RestartAt(failed_ms + 60_000, "Restart attempt 2 of 9.")


def test_one_that_has_no_other_before_it_is_not_waited_for() -> None:
    decision = decide_restart(FIXED, FailureHistory((100 * HOUR_MS,)), 98 * HOUR_MS, Random(7))
    assert decision == RestartAt(98 * HOUR_MS, "Restart attempt 1 of 9.")


def test_failures_dated_ahead_keep_the_time_between_them() -> None:
    rate = RestartStrategies.failure_rate_restart(1, HOUR_MS, 1_000)
    failures = FailureHistory((10 * HOUR_MS, 98 * HOUR_MS, 100 * HOUR_MS))
    assert isinstance(decide_restart(rate, failures, 97 * HOUR_MS, Random(7)), RestartAt)
    assert isinstance(decide_restart(rate, failures, 98 * HOUR_MS - 1, Random(7)), RestartAt)


def test_it_is_described_in_flinks_words_or_by_its_name() -> None:
    assert restart_description(RestartStrategies.no_restart()) == "Restart deactivated."
    assert restart_description(Raises()) == "Raises()"
    both = Twice() | RestartStrategies.fixed_delay_restart(3, 1000)
    assert repr(both) == "(Twice(delay_ms=500) | Restart with fixed delay (1 s). #3 restart attempts.)"


decisions = st.builds(RestartAt, st.integers(0, 10_000), st.just("")) | st.just(NoRestart(""))


@given(decisions, decisions, decisions)
def test_combinators_are_the_earliest_and_the_latest(one: Any, two: Any, three: Any) -> None:
    def at(policy: Any) -> float:
        decision = policy.decide(ONE, 0, Random(0))
        return decision.at_ms if isinstance(decision, RestartAt) else float("inf")

    a, b, c = Answers(one), Answers(two), Answers(three)
    assert at(AnyOf(a, b)) == min(at(a), at(b)) == at(AnyOf(b, a))
    assert at(AllOf(a, b)) == max(at(a), at(b)) == at(AllOf(b, a))
    assert at(AllOf(a, AnyOf(b, c))) == at(AnyOf(AllOf(a, b), AllOf(a, c)))
    assert at(AnyOf(a, AnyOf(b, c))) == at(AnyOf(a, b, c))
