"""Policies as values: how they are combined, named, converted and refused, and what is logged of failing ones.

Each value is made in its test: those of a parameter table are made on import, before mutmut changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies import retention, trigger
from dagster_ckpt.policies.retention import (
    KeptBecause,
    Latest,
    RetainedSnapshot,
    RetentionContext,
    YoungerThan,
    decide_retention,
)
from dagster_ckpt.policies.retention import needed_of_history as needed
from dagster_ckpt.policies.trigger import (
    FALLBACK_TRIGGER,
    Blackout,
    EveryBatches,
    GuardedTrigger,
    Interval,
    MinPause,
    OutsideBlackouts,
    TriggerProgress,
)

SNAPSHOTS = [RetainedSnapshot(f"chk-{number}", number=number) for number in (1, 2, 3)]
START = TriggerProgress(now_ms=5_000, wall_ms=5_000, started_ms=1_000)


@dataclass(frozen=True)
class Mine:
    """A user's rule of both kinds, without a base class."""

    answer: Any = ()

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        return self.answer if self.answer is not all else snapshots

    def due_at_ms(self, progress: TriggerProgress) -> Any:
        return self.answer


def test_a_users_policy_may_stand_on_either_side() -> None:
    mine = Mine()
    for rule, module in ((Latest(1), retention), (Interval(10), trigger)):
        either: Any = rule
        assert (either | mine).policies == module.AnyOf(rule, mine).policies == (rule, mine)  # type: ignore[arg-type]
        assert (mine | either).policies == (mine, rule)
        assert (either & mine).policies == module.AllOf(rule, mine).policies == (rule, mine)  # type: ignore[arg-type]
        assert (mine & either).policies == (mine, rule)
        assert isinstance(mine | either, module.AnyOf)
        assert isinstance(mine & either, module.AllOf)


def test_a_combination_is_named_as_it_is_written() -> None:
    assert repr(Latest(1) | YoungerThan(5)) == "(Latest(count=1) | YoungerThan(max_age_ms=5))"
    assert repr(Latest(1) & YoungerThan(5)) == "(Latest(count=1) & YoungerThan(max_age_ms=5))"
    batches = EveryBatches(2)
    assert repr(MinPause(5) | batches) == "(MinPause(pause_ms=5) | EveryBatches(batches=2))"
    assert repr(MinPause(5) & batches) == "(MinPause(pause_ms=5) & EveryBatches(batches=2))"
    night, noon = Blackout("22:00", "06:00"), Blackout("11:00", "13:00")
    assert repr(OutsideBlackouts(night, noon)) == f"OutsideBlackouts({night!r}, {noon!r})"


def test_times_are_kept_as_milliseconds_and_periods_as_members() -> None:
    second = timedelta(seconds=1)
    assert (YoungerThan(second).max_age_ms, retention.Every(second).distance_ms) == (1_000, 1_000)
    assert (MinPause(second).pause_ms, Interval(second, second).interval_ms) == (1_000, 1_000)
    assert Interval(second, second).first_after_ms == 1_000
    assert retention.NewestPer("day", 7).period is retention.Period.DAY  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [retention, trigger], ids=["retention", "trigger"])
def test_a_combination_of_nothing_or_of_what_is_no_policy_is_refused(module: Any) -> None:
    for combined in (module.AnyOf, module.AllOf):
        with pytest.raises(OptionError, match=r"^policies is \(\), but must hold one policy or more\.$"):
            combined()
        with pytest.raises(OptionTypeError, match=r"is 'daily' \(str\), but must be a policy such as"):
            combined("daily")


def test_an_interval_begins_at_a_random_time_between_its_limits_and_then_keeps_its_rate() -> None:
    interval = Interval(100, first_after_ms=40)
    assert interval.due_at_ms(replace(START, share=0.5)) == 1_000 + 40 + 30
    # A checkpoint of another rule, before this one was ever due.
    assert interval.due_at_ms(replace(START, last_triggered_ms=3_000)) == 1_040
    assert trigger.known_interval_ms(EveryBatches(1) | Mine(5)) is None


def test_a_schedule_keeps_its_newest_savepoint_and_those_in_use() -> None:
    assert needed(SNAPSHOTS, ["chk-1"]) == {"chk-3": KeptBecause.NEWEST, "chk-1": KeptBecause.IN_USE}


def test_a_policy_may_keep_everything() -> None:
    decision = decide_retention(Mine(all), SNAPSHOTS, RetentionContext(0), needed={})

    assert (decision.dropped, decision.problem) == ((), None)


def test_a_failed_policy_is_logged_with_its_name_and_its_problem(caplog: pytest.LogCaptureFixture) -> None:
    stranger = RetainedSnapshot("chk-9")

    refused = decide_retention(Mine([stranger]), SNAPSHOTS, RetentionContext(0), needed={})
    guarded = GuardedTrigger(Mine("soon"))
    answers = {guarded.due_at_ms(START) for _ in range(2)}

    assert answers == {FALLBACK_TRIGGER.due_at_ms(START)}
    assert refused.problem == f"it returned {stranger!r}, which is not one of the snapshots"
    assert [record.getMessage() for record in caplog.records] == [
        f"Retention policy {Mine([stranger])} failed, so nothing is deleted: {refused.problem}",
        f"Trigger policy {Mine('soon')} failed, so {FALLBACK_TRIGGER} applies: "
        "it returned 'soon', which is neither a time in ms nor None",
    ]
