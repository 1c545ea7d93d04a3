"""What becomes of an execution whose process could not settle its own affairs."""

from __future__ import annotations

from random import Random

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.reconciliation import LAUNCH_MS, RecordedEnd, Restart, Retain, Verdict, Wait, reconcile
from dagster_ckpt.policies.restart import DecidingRestartStrategy, RestartStrategies
from dagster_ckpt.values.modes import TerminalState

FAILED_AT_MS = 1_000_000
NEVER = RestartStrategies.no_restart()
TWICE_AFTER_A_MINUTE = RestartStrategies.fixed_delay_restart(2, 60_000)
ONCE_AN_HOUR = RestartStrategies.failure_rate_restart(1, 3_600_000, 60_000)
GROWING = RestartStrategies.exponential_delay_restart(10_000, 600_000, 2.0, 3_600_000, 0.5)


def verdict(
    recorded: RecordedEnd,
    strategy: DecidingRestartStrategy = TWICE_AFTER_A_MINUTE,
    *,
    failures: tuple[int, ...] = (FAILED_AT_MS,),
    after_ms: int = 60_000,
    seed: str = "execution",
    ended: ExecutionStatus = ExecutionStatus.FAILED,
    holds_lease: bool = False,
) -> Verdict:
    return reconcile(
        recorded,
        ended,
        strategy,
        failures,
        holds_lease=holds_lease,
        now_ms=FAILED_AT_MS + after_ms,
        random=Random(seed),
    )


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        (ExecutionStatus.FINISHED, TerminalState.FINISHED),
        (ExecutionStatus.SUSPENDED, TerminalState.SUSPENDED),
        (ExecutionStatus.CANCELED, TerminalState.CANCELED),
    ],
)
@pytest.mark.parametrize("recorded", [RecordedEnd.FAILED, RecordedEnd.CANCELED, RecordedEnd.SUCCEEDED])
def test_what_ended_on_purpose_and_was_killed_while_it_cleaned_up_is_not_started_again(
    recorded: RecordedEnd, ended: ExecutionStatus, state: TerminalState
) -> None:
    decided = verdict(recorded, ended=ended, after_ms=10_000_000)

    assert isinstance(decided, Retain)
    assert decided.state is state


def test_nothing_is_deleted_under_a_process_that_still_stops() -> None:
    assert isinstance(verdict(RecordedEnd.CANCELED, holds_lease=True), Wait)
    assert isinstance(verdict(RecordedEnd.CANCELED, holds_lease=False), Retain)
    # A new run waits for the lease by itself, and its start takes a while.
    assert isinstance(verdict(RecordedEnd.FAILED, holds_lease=True), Restart)


@pytest.mark.parametrize(
    "strategy", [NEVER, TWICE_AFTER_A_MINUTE, ONCE_AN_HOUR, GROWING], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize(
    ("recorded", "state"),
    [(RecordedEnd.CANCELED, TerminalState.CANCELED), (RecordedEnd.SUCCEEDED, TerminalState.SUSPENDED)],
)
def test_a_run_that_did_not_fail_is_never_restarted(
    recorded: RecordedEnd, state: TerminalState, strategy: DecidingRestartStrategy
) -> None:
    decided = verdict(recorded, strategy, after_ms=10_000_000)

    assert isinstance(decided, Retain)
    assert decided.state is state


@pytest.mark.parametrize("strategy", [NEVER, TWICE_AFTER_A_MINUTE], ids=lambda s: type(s).__name__)
def test_a_run_that_is_not_over_is_left_alone(strategy: DecidingRestartStrategy) -> None:
    assert verdict(RecordedEnd.STILL_RUNNING, strategy, after_ms=10_000_000) == Wait("its run has not ended")


def test_a_failed_run_without_a_restart_strategy_is_over() -> None:
    decided = verdict(RecordedEnd.FAILED, NEVER)

    assert isinstance(decided, Retain)
    assert decided.state is TerminalState.FAILED
    assert decided.reason


@pytest.mark.parametrize(
    ("after_ms", "expected"),
    [
        (0, Wait),
        (60_000 - LAUNCH_MS - 1, Wait),
        (60_000 - LAUNCH_MS, Restart),
        (60_000, Restart),
        (86_400_000, Restart),
    ],
)
def test_a_failed_run_is_restarted_once_the_delay_is_over_save_for_the_time_a_launch_takes(
    after_ms: int, expected: type[Verdict]
) -> None:
    assert isinstance(verdict(RecordedEnd.FAILED, after_ms=after_ms), expected)


def test_a_wait_says_how_long_it_will_be() -> None:
    decided = verdict(RecordedEnd.FAILED, after_ms=20_000)

    assert isinstance(decided, Wait)
    assert "due in 40000 ms" in decided.reason


@pytest.mark.parametrize(("attempts", "expected"), [(1, Restart), (2, Restart), (3, Retain), (4, Retain)])
def test_a_fixed_number_of_restarts_is_used_up(attempts: int, expected: type[Verdict]) -> None:
    failures = tuple(FAILED_AT_MS - 100_000 * back for back in range(attempts))[::-1]

    assert isinstance(verdict(RecordedEnd.FAILED, failures=failures), expected)


def test_a_rate_of_failures_forgets_those_of_long_ago() -> None:
    long_ago, lately = FAILED_AT_MS - 4_000_000, FAILED_AT_MS - 1_000_000

    assert isinstance(verdict(RecordedEnd.FAILED, ONCE_AN_HOUR, failures=(long_ago, FAILED_AT_MS)), Restart)
    assert isinstance(verdict(RecordedEnd.FAILED, ONCE_AN_HOUR, failures=(lately, FAILED_AT_MS)), Retain)


def test_a_failure_that_nobody_recorded_counts_from_now() -> None:
    decided = verdict(RecordedEnd.FAILED, failures=(), after_ms=0)

    assert isinstance(decided, Wait)
    assert "due in 60000 ms" in decided.reason


def test_every_look_at_the_same_failure_gives_the_same_delay() -> None:
    looks = [verdict(RecordedEnd.FAILED, GROWING, after_ms=0, seed="execution-1") for _ in range(5)]

    assert len(set(looks)) == 1
    assert isinstance(looks[0], Wait)


def test_the_delays_of_different_executions_are_spread() -> None:
    delays = {verdict(RecordedEnd.FAILED, GROWING, after_ms=0, seed=f"execution-{n}") for n in range(20)}

    assert len(delays) > 10
