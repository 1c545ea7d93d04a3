"""Retention policies: each rule, their combinations, a user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any

import pendulum
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.retention import (
    AllOf,
    AnyOf,
    Every,
    KeepRules,
    KeptBecause,
    Latest,
    NewestPer,
    RetainedKind,
    RetainedSnapshot,
    RetentionContext,
    RetentionPolicy,
    SavepointHistory,
    YoungerThan,
    decide_retention,
    needed_for_recovery,
)
from dagster_ckpt.policies.serialization import read_retention, write_retention

HOUR_MS = 3_600_000
NOW = RetentionContext(1_000 * HOUR_MS)


def taken(*ages_hours: float) -> list[RetainedSnapshot]:
    """Checkpoints of these ages, oldest first."""
    return [
        RetainedSnapshot(f"chk-{number}", taken_at_ms=NOW.now_ms - round(age * HOUR_MS), number=number)
        for number, age in enumerate(ages_hours, start=1)
    ]


def kept(policy: RetentionPolicy, snapshots: Sequence[RetainedSnapshot]) -> list[int]:
    return [snapshot.number for snapshot in policy.keep(snapshots, NOW)]


@dataclass(frozen=True)
class EvenNumbers:
    """A policy of a user: five lines, no base class."""

    divisor: int = 2

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        return [snapshot for snapshot in snapshots if snapshot.number % self.divisor == 0]


@pytest.mark.parametrize(
    ("policy", "ages", "numbers"),
    [
        (Latest(2), (3, 2, 1), [2, 3]),
        (Latest(5), (3, 2, 1), [1, 2, 3]),
        (YoungerThan(timedelta(hours=2)), (3, 2, 1), [2, 3]),
        (YoungerThan(1), (3, 2, 1), []),
        (Every(timedelta(hours=6)), (20, 19, 14, 13, 8, 1), [1, 3, 5, 6]),
        (Every(6 * HOUR_MS) & YoungerThan(14 * HOUR_MS), (20, 19, 14, 13, 8, 1), [3, 5, 6]),
        (Latest(1) | EvenNumbers(), (5, 4, 3, 2, 1), [2, 4, 5]),
        (EvenNumbers() | Latest(1), (5, 4, 3, 2, 1), [2, 4, 5]),
        (EvenNumbers(3) & Latest(4), (7, 6, 5, 4, 3, 2, 1), [6]),
        (Latest(4) & EvenNumbers(3), (7, 6, 5, 4, 3, 2, 1), [6]),
        (SavepointHistory(None, None), (3, 2, 1), [1, 2, 3]),
    ],
    ids=str,
)
def test_what_a_policy_keeps(policy: RetentionPolicy, ages: tuple[float, ...], numbers: list[int]) -> None:
    assert kept(policy, taken(*ages)) == numbers


def test_the_newest_of_each_day_begins_a_day_where_the_user_lives() -> None:
    def at(time: str) -> RetainedSnapshot:
        at_ms = round(pendulum.parse(time, tz="Europe/Berlin").timestamp() * 1000)  # type: ignore[union-attr]
        return RetainedSnapshot(time, taken_at_ms=at_ms)

    snapshots = [at("2026-03-28T12:00"), at("2026-03-28T23:30"), at("2026-03-29T00:30"), at("2026-04-02T08:00")]
    berlin = NewestPer("day", 3, timezone="Europe/Berlin").keep(snapshots, NOW)
    assert [each.snapshot_id for each in berlin] == ["2026-03-28T23:30", "2026-03-29T00:30", "2026-04-02T08:00"]
    # At 00:30 in Berlin it is still the day before in UTC.
    utc = NewestPer("day", 3).keep(snapshots, NOW)
    assert [each.snapshot_id for each in utc] == ["2026-03-29T00:30", "2026-04-02T08:00"]
    assert [each.snapshot_id for each in NewestPer("month", 1).keep(snapshots, NOW)] == ["2026-04-02T08:00"]


@pytest.mark.parametrize("timezone", ["UTC", "Europe/Berlin"])
def test_an_hour_that_comes_twice_is_two(timezone: str) -> None:
    begin = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    night = [
        RetainedSnapshot(str(hour), taken_at_ms=round((begin + timedelta(hours=hour)).timestamp() * 1000), number=hour)
        for hour in range(4)
    ]
    assert kept(NewestPer("hour", 4, timezone=timezone), night) == [0, 1, 2, 3]
    assert kept(KeepRules(hourly=3, timezone=timezone), night) == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latest(0), "count is 0"),
        (lambda: YoungerThan(0), "max_age is 0"),
        (lambda: Every(timedelta(0)), "distance is"),
        (lambda: NewestPer("decade", 3), "period is 'decade', but must be one of hour, day, week, month, year"),
        (lambda: NewestPer("day", 0), "count is 0"),
        (lambda: NewestPer("day", 1, timezone="Berlin"), "timezone is 'Berlin'"),
        (AnyOf, "must hold one policy or more"),
    ],
)
def test_a_value_that_no_policy_can_have_is_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("value", [3, "latest", Latest, object()])
def test_what_is_no_policy_is_refused_with_what_to_write(value: Any) -> None:
    what_to_write = "NewestPer('day', 7), or an object of your own with a method keep(snapshots, context)."
    with pytest.raises(OptionTypeError, match="must be a policy such as .*" + re.escape(what_to_write) + "$"):
        CheckpointConfig(retention=value)
    with pytest.raises(OptionTypeError):
        AllOf(Latest(1), value)


# Policies that fail


class Raises:
    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        raise ZeroDivisionError("a bug")


class RaisesWhileIterated:
    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        yield snapshots[0]
        raise ZeroDivisionError("a bug")


class NeverEnds:
    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Iterable[RetainedSnapshot]:
        return repeat(snapshots[0])


@dataclass(frozen=True)
class Answers:
    answer: Any

    def keep(self, snapshots: Sequence[RetainedSnapshot], context: RetentionContext) -> Any:
        return self.answer


NONSENSE: list[Any] = [
    Raises(),
    RaisesWhileIterated(),
    NeverEnds(),
    Latest(1) | Raises(),
    Latest(1) & Raises(),
    Answers(None),
    Answers(3),
    Answers("chk-1"),
    Answers([None]),
    Answers([[]]),
    Answers([RetainedSnapshot("chk-99")]),
    Answers([True]),
]


@pytest.mark.parametrize("policy", NONSENSE, ids=lambda policy: re.sub(r" object at 0x\w+", "", str(policy)))
def test_a_policy_that_raises_or_answers_nonsense_drops_nothing(
    policy: RetentionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    decision = decide_retention(policy, taken(3, 2, 1), NOW, needed={})
    assert decision.dropped == ()
    assert set(decision.kept.values()) == {KeptBecause.POLICY_FAILED}
    assert decision.problem
    assert "nothing is deleted" in caplog.text


def test_an_empty_answer_leaves_what_a_recovery_needs() -> None:
    snapshots = [*taken(4, 3, 2), RetainedSnapshot("sp", RetainedKind.SAVEPOINT, NOW.now_ms, 4)]
    decision = decide_retention(Answers(()), snapshots, NOW, needed=needed_for_recovery(snapshots))
    assert [snapshot.number for snapshot in decision.dropped] == [1, 2]
    assert decision.kept == {"chk-3": KeptBecause.NEWEST, "sp": KeptBecause.NEWEST}


def test_a_policy_cannot_change_what_it_is_shown() -> None:
    class Clears:
        def keep(self, snapshots: Any, context: RetentionContext) -> Any:
            snapshots.clear()
            return snapshots

    assert decide_retention(Clears(), taken(2, 1), NOW, needed={}).dropped == ()


# Properties

snapshot_lists = st.lists(st.integers(0, 200), max_size=12).map(lambda ages: taken(*ages))
policies: st.SearchStrategy[RetentionPolicy] = st.recursive(
    st.one_of(
        st.integers(1, 6).map(Latest),
        st.integers(1, 200).map(lambda hours: YoungerThan(hours * HOUR_MS)),
        st.integers(1, 50).map(lambda hours: Every(hours * HOUR_MS)),
        st.builds(NewestPer, st.sampled_from(["hour", "day", "week", "month", "year"]), st.integers(1, 5)),
        st.integers(2, 4).map(EvenNumbers),
    ),
    lambda inner: st.builds(AnyOf, inner, inner) | st.builds(AllOf, inner, inner),
    max_leaves=4,
)


@given(policies, policies, snapshot_lists)
def test_combinators_are_union_and_intersection(
    one: RetentionPolicy, other: RetentionPolicy, snapshots: list[RetainedSnapshot]
) -> None:
    first, second = set(one.keep(snapshots, NOW)), set(other.keep(snapshots, NOW))
    assert set(AnyOf(one, other).keep(snapshots, NOW)) == first | second == set(AnyOf(other, one).keep(snapshots, NOW))
    assert set(AllOf(one, other).keep(snapshots, NOW)) == first & second == set(AllOf(other, one).keep(snapshots, NOW))
    assert set(AnyOf(one, one).keep(snapshots, NOW)) == first == set(AllOf(one).keep(snapshots, NOW))


@given(policies, snapshot_lists)
def test_a_decision_parts_the_snapshots_and_never_drops_what_is_needed(
    policy: RetentionPolicy, snapshots: list[RetainedSnapshot]
) -> None:
    needed = needed_for_recovery(snapshots)
    decision = decide_retention(policy, snapshots, NOW, needed=needed)
    assert sorted([*decision.kept, *(each.snapshot_id for each in decision.dropped)]) == sorted(
        each.snapshot_id for each in snapshots
    )
    assert not {each.snapshot_id for each in decision.dropped} & needed.keys()
    assert not snapshots or snapshots[-1].snapshot_id in decision.kept


@given(policies, snapshot_lists)
def test_a_policy_written_as_data_decides_the_same(policy: RetentionPolicy, snapshots: list[RetainedSnapshot]) -> None:
    again = read_retention(write_retention(policy))
    assert again == policy
    assert list(again.keep(snapshots, NOW)) == list(policy.keep(snapshots, NOW))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "must be one name with its arguments"),
        ({"latest": 1, "every": 2}, "must be one name with its arguments"),
        ({"newest": 3}, "must be one of latest, younger_than, every, newest_per"),
        ({"latest": {"number": 3}}, "retention latest has the arguments"),
        ({"latest": 0}, "count is 0"),
        ({"own": "company.nowhere:Policy"}, "cannot be imported"),
        ({"own": "no path"}, "must be the import path of a policy"),
        ({"own": {"arguments": {}}}, "must be the import path of a policy"),
        ({"any_of": []}, "must hold one policy or more"),
    ],
    ids=str,
)
def test_data_that_describes_no_policy_is_refused(written: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_retention(written)


def test_a_policy_that_nothing_leads_to_cannot_be_written() -> None:
    class Local(EvenNumbers):
        pass

    with pytest.raises(OptionError, match=r"Local\(divisor=2\), which cannot be written as data"):
        write_retention(Local())
