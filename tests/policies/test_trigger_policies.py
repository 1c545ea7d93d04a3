"""Trigger policies: each rule, their combinations, failing ones, and the coordinator that asks them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.trigger import (
    FALLBACK_TRIGGER,
    AllOf,
    AnyOf,
    Blackout,
    EveryBatches,
    EveryRows,
    GuardedTrigger,
    Interval,
    MinPause,
    OutsideBlackouts,
    TriggerPolicy,
    TriggerProgress,
)
from dagster_ckpt.runtime.checkpoint_messages import (
    AttemptCompleted,
    CutTaken,
    Progressed,
    QueryStarted,
    StartAttempt,
)
from dagster_ckpt.runtime.checkpoint_messages import Tick as TimeTick
from dagster_ckpt.runtime.coordinator import CheckpointCoordinator
from dagster_ckpt.runtime.triggers import PeriodicTrigger

START = TriggerProgress(now_ms=5_000, wall_ms=5_000, started_ms=1_000)
MIDNIGHT = Blackout("00:00", "00:01")


@dataclass(frozen=True)
class At:
    """A policy of a user: five lines, no base class."""

    answer: Any

    def due_at_ms(self, progress: TriggerProgress) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("policy", "progress", "due"),
    [
        (Interval(100), START, 1_000),
        (Interval(100, first_after_ms=40), START, 1_040),
        (Interval(timedelta(seconds=1)), replace(START, share=0.5), 1_500),
        (Interval(100), replace(START, share=0.9999999), 1_100),
        (Interval(100), replace(START, last_due_ms=4_000, last_triggered_ms=4_020), 4_100),
        (Interval(100), replace(START, last_due_ms=4_000, last_triggered_ms=4_350), 4_400),
        (MinPause(500), START, 1_000),
        (MinPause(500), replace(START, last_completed_ms=4_800), 5_300),
        (EveryBatches(3), replace(START, batches=2), None),
        (EveryBatches(3), replace(START, batches=3), 5_000),
        (EveryRows(10), replace(START, rows=9), None),
        (EveryRows(10), replace(START, rows=12), 5_000),
        (OutsideBlackouts(MIDNIGHT), START, 60_000),
        (OutsideBlackouts(MIDNIGHT), replace(START, wall_ms=59_000), 6_000),
        (OutsideBlackouts(MIDNIGHT), replace(START, wall_ms=60_000), 1_000),
        (Interval(100) | At(7), START, 7),
        (At(7) | Interval(100), START, 7),
        (AnyOf(At(None), At(9)), START, 9),
        (AnyOf(At(None), At(None)), START, None),
        (Interval(100) & At(7_000), START, 7_000),
        (At(None) & Interval(100), START, None),
    ],
    ids=str,
)
def test_when_a_checkpoint_is_due(policy: TriggerPolicy, progress: TriggerProgress, due: int | None) -> None:
    assert policy.due_at_ms(progress) == due


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Interval(9), "checkpoint interval is 9"),
        (lambda: Interval(100, first_after_ms=101), "first_after is 101 ms, but must be at most the interval"),
        (lambda: MinPause(-1), "min pause between checkpoints is -1"),
        (lambda: EveryBatches(0), "batches is 0"),
        (lambda: EveryRows(0), "rows is 0"),
        (AllOf, "must hold one policy or more"),
    ],
)
def test_a_value_that_no_trigger_can_have_is_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("value", [60_000, "interval", Interval, object()])
def test_what_is_no_trigger_is_refused_with_what_to_write(value: Any) -> None:
    what_to_write = (
        "must be a policy such as Interval(60_000) | EveryBatches(100), or an object of your own with a method "
        "due_at_ms(progress)."
    )
    with pytest.raises(OptionTypeError, match=re.escape(what_to_write) + "$"):
        CheckpointConfig(trigger=value)
    with pytest.raises(OptionTypeError):
        AnyOf(Interval(100), value)
    with pytest.raises(OptionTypeError, match=r"must be one Blackout\('22:00', '06:00'\) or more\.$"):
        OutsideBlackouts(value)


times = st.none() | st.integers(0, 10_000)


@given(times, times, times)
def test_combinators_are_the_earliest_and_the_latest(one: int | None, two: int | None, three: int | None) -> None:
    def due(policy: TriggerPolicy) -> float:
        answer = policy.due_at_ms(START)
        return float("inf") if answer is None else answer

    a, b, c = At(one), At(two), At(three)
    assert due(AnyOf(a, b)) == min(due(a), due(b)) == due(AnyOf(b, a))
    assert due(AllOf(a, b)) == max(due(a), due(b)) == due(AllOf(b, a))
    assert due(AnyOf(a, AnyOf(b, c))) == due(AnyOf(AnyOf(a, b), c)) == due(AnyOf(a, b, c))
    assert due(AllOf(a, AnyOf(b, c))) == due(AnyOf(AllOf(a, b), AllOf(a, c)))
    assert due(AnyOf(a, a)) == due(AllOf(a, a)) == due(a)


@pytest.mark.parametrize(
    ("policy", "interval_ms"),
    [
        (Interval(100), 100),
        (Interval(100) | EveryRows(5), 100),
        (Interval(100) | Interval(70), 70),
        (Interval(100) & MinPause(300), 300),
        (Interval(100) & EveryRows(5), None),
        (Interval(100) & OutsideBlackouts(MIDNIGHT), None),
        (At(5), None),
    ],
    ids=str,
)
def test_the_interval_that_health_may_expect(policy: TriggerPolicy, interval_ms: int | None) -> None:
    assert CheckpointConfig(trigger=policy).options.known_interval_ms == interval_ms


# Policies that fail


class Raises:
    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        raise ZeroDivisionError("a bug")


class Answers:
    """A policy that gives one answer after the other."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def __repr__(self) -> str:
        return "Answers()"

    def due_at_ms(self, progress: TriggerProgress) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "policy",
    [Raises(), Interval(100) & Raises(), At("soon"), At(True), At(1.5)],
    ids=["raises", "part raises", "text", "true", "fraction"],
)
def test_a_trigger_that_raises_or_answers_nonsense_is_replaced_and_logged_once(
    policy: TriggerPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = GuardedTrigger(policy)
    assert guarded.due_at_ms(START) == FALLBACK_TRIGGER.due_at_ms(START)
    assert guarded.due_at_ms(START) == FALLBACK_TRIGGER.due_at_ms(START)
    assert len(caplog.records) == 1
    assert "Trigger policy" in caplog.text


def test_a_trigger_that_fails_again_after_it_worked_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    policy = Answers(
        [ZeroDivisionError("a bug"), ZeroDivisionError("a bug"), 7_000, ZeroDivisionError("a bug"), "soon"]
    )
    guarded = GuardedTrigger(policy)

    assert [guarded.due_at_ms(START) for _ in range(5)].count(7_000) == 1
    failed = f"Trigger policy Answers() failed, so {FALLBACK_TRIGGER} applies: "
    assert [record.getMessage() for record in caplog.records] == [
        f"{failed}ZeroDivisionError: a bug",
        f"{failed}ZeroDivisionError: a bug",
        f"{failed}it returned 'soon', which is neither a time in ms nor None",
    ]


# The coordinator


class Coordinated:
    """A coordinator whose attempts complete at once."""

    def __init__(self, **options: Any) -> None:
        self.coordinator = CheckpointCoordinator(CheckpointConfig(**options).options, first_number=1, random=Random(1))
        self.coordinator.handle(QueryStarted(0))

    def progressed(self, at_ms: int, *, batches: int = 0, rows: int = 0, wall_ms: int | None = None) -> list[int]:
        """Pass progress on, then a tick if one is due; the numbers of the checkpoints that are taken."""
        self.coordinator.handle(Progressed(at_ms, at_ms if wall_ms is None else wall_ms, batches, rows))
        deadline = self.coordinator.next_deadline_ms
        actions = self.coordinator.handle(TimeTick(at_ms)) if deadline is not None and deadline <= at_ms else []
        numbers = [action.attempt.number for action in actions if isinstance(action, StartAttempt)]
        for number in numbers:
            self.coordinator.handle(CutTaken(at_ms, number))
            self.coordinator.handle(AttemptCompleted(at_ms, number))
        return numbers


def test_a_checkpoint_every_so_many_batches_counts_from_the_one_before() -> None:
    stream = Coordinated(trigger=EveryBatches(3))
    assert stream.coordinator.next_deadline_ms is None
    taken = {batch: numbers for batch in range(1, 9) if (numbers := stream.progressed(batch * 10, batches=batch))}
    assert taken == {3: [1], 6: [2]}


def test_the_minimum_pause_holds_for_every_trigger_and_loses_no_checkpoint() -> None:
    stream = Coordinated(trigger=EveryBatches(1), min_pause=100)
    taken = [at_ms for at_ms in range(10, 400, 10) if stream.progressed(at_ms, batches=at_ms // 10)]
    assert taken == [10, 110, 210, 310]


def test_an_interval_counts_from_a_checkpoint_that_another_rule_triggered() -> None:
    stream = Coordinated(trigger=Interval(1_000) | EveryRows(50))
    first_ms = stream.coordinator.next_deadline_ms or 0
    assert stream.progressed(first_ms, rows=10) == [1]
    assert stream.coordinator.next_deadline_ms == first_ms + 1_000
    assert stream.progressed(first_ms + 700, rows=59) == []
    assert stream.progressed(first_ms + 800, rows=60) == [2]
    assert stream.coordinator.next_deadline_ms == first_ms + 1_800


def test_a_checkpoint_that_falls_into_a_blackout_is_taken_at_its_end() -> None:
    stream = Coordinated(trigger=Interval(20_000) & OutsideBlackouts(MIDNIGHT))
    taken = [at_ms for at_ms in range(0, 90_000, 1_000) if stream.progressed(at_ms)]
    assert taken[0] == 60_000
    # Then at the fixed rate again.
    assert taken[1] <= 80_000


def test_a_trigger_that_fails_leaves_a_checkpoint_per_minute() -> None:
    stream = Coordinated(trigger=Raises())
    assert len([at_ms for at_ms in range(0, 600_000, 1_000) if stream.progressed(at_ms)]) == 10


class Watching:
    """A policy that keeps what it was last shown, and is always due."""

    shown: TriggerProgress

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        self.shown = progress
        return progress.now_ms


@pytest.fixture
def watched() -> tuple[Watching, PeriodicTrigger]:
    watching = Watching()
    return watching, PeriodicTrigger(watching, min_pause_ms=0, random=Random(1))


def test_a_policy_sees_both_clocks_the_share_of_the_start_and_what_came_since_the_last_firing(
    watched: tuple[Watching, PeriodicTrigger],
) -> None:
    watching, trigger = watched
    share = Random(1).random()

    trigger.start(100)
    trigger.due_at_ms(100)
    assert watching.shown == TriggerProgress(100, 100, 100, share)

    trigger.progressed(150, wall_ms=1_150, batches=3, rows=30)
    trigger.completed(160)
    assert trigger.fires(170)
    assert watching.shown == TriggerProgress(170, 1_170, 100, share, last_completed_ms=160, batches=3, rows=30)

    trigger.progressed(180, wall_ms=1_180, batches=5, rows=70)
    assert trigger.fires(190)
    fired = TriggerProgress(190, 1_190, 100, share, 170, 170, 160, batches=2, rows=40)
    assert watching.shown == fired

    trigger.postpone(500)
    assert trigger.due_at_ms(190) == 500
    assert watching.shown == fired


def test_a_firing_that_never_was_can_be_postponed(watched: tuple[Watching, PeriodicTrigger]) -> None:
    _, trigger = watched

    trigger.postpone(500)
    assert trigger.due_at_ms(0) is None
    trigger.start(100)
    trigger.postpone(500)

    assert trigger.due_at_ms(200) == 500
