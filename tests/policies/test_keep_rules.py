"""restic's rules, beside what restic keeps; the size budget; and why each snapshot stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pendulum
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.retention import (
    KeepRules,
    Latest,
    MaxBytes,
    NewestPer,
    RetainedSnapshot,
    RetentionContext,
    RetentionPolicy,
    bytes_of,
    reasons_to_keep,
)
from dagster_ckpt.policies.serialization import read_retention, write_retention

RECORDED = yaml.safe_load((Path(__file__).parent / "restic_forget.yaml").read_text())
BUDGETS = yaml.safe_load((Path(__file__).parent / "size_budgets.yaml").read_text())
NOW = RetentionContext(0)


def at(time: str, label: str | None = None) -> RetainedSnapshot:
    moment = pendulum.parse(time, tz="UTC")
    assert isinstance(moment, pendulum.DateTime)
    return RetainedSnapshot(time, taken_at_ms=round(moment.timestamp() * 1000), label=label)


TAKEN = [at(each) if isinstance(each, str) else at(*each) for each in RECORDED["snapshots"]]


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: str(case["rules"]))
def test_each_rule_keeps_what_restic_keeps_for_the_same_reasons(case: dict[str, Any]) -> None:
    expected = {time: set(reasons) for time, reasons in {**case["keeps"], **case.get("since", {})}.items()}
    rules = KeepRules(**case["rules"])
    assert {time: set(reasons) for time, reasons in rules.reasons(TAKEN, NOW).items()} == expected
    assert [each.snapshot_id for each in rules.keep(TAKEN, NOW)] == sorted(expected)


def test_minus_one_keeps_all_and_a_label_may_be_a_pattern() -> None:
    assert KeepRules(last=-1).keep(TAKEN, NOW) == TAKEN
    assert KeepRules(daily=-1).keep(TAKEN, NOW) == KeepRules(daily=1_000).keep(TAKEN, NOW)
    labels = [each.label for each in KeepRules(labels=["release-*"]).keep(TAKEN, NOW)]
    assert labels == ["release-1", "release-2"]


def test_a_day_begins_where_the_user_lives() -> None:
    assert [each.snapshot_id for each in KeepRules(daily=2).keep(TAKEN, NOW)] == [
        "2026-03-13 23:59",
        "2026-03-14 09:30",
    ]
    berlin = KeepRules(daily=2, timezone="Europe/Berlin").keep(TAKEN, NOW)
    assert [each.snapshot_id for each in berlin] == ["2026-03-13 22:59", "2026-03-14 09:30"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "has no rule"),
        ({"timezone": "Europe/Berlin"}, "has no rule"),
        ({"daily": -2}, "daily is -2"),
        ({"daily": "7"}, "daily is '7'"),
        ({"within_ms": -1}, "within_ms is -1"),
        ({"labels": "release"}, "labels is 'release'"),
        ({"daily": 1, "timezone": "Berlin"}, "timezone is 'Berlin'"),
    ],
)
def test_rules_that_nobody_can_mean_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=message):
        KeepRules(**rules)


# The size budget


def sized(taken: dict[str, list[int]]) -> list[RetainedSnapshot]:
    return [RetainedSnapshot(name, full_bytes=full, new_bytes=new) for name, (full, new) in taken.items()]


@pytest.mark.parametrize("case", BUDGETS, ids=lambda case: case["says"])
def test_a_budget_keeps_the_newest_that_fit(case: dict[str, Any]) -> None:
    snapshots = sized(case["taken"])
    of = Only(tuple(case["of"])) if "of" in case else None
    kept = list(MaxBytes(case["limit"], of).keep(snapshots, NOW))
    assert [each.snapshot_id for each in kept] == case["keeps"]
    assert bytes_of(kept, snapshots) == case["bytes"]


class Only:
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def keep(self, snapshots: Any, context: RetentionContext) -> Any:
        return [each for each in snapshots if each.snapshot_id in self.names]


def test_objects_that_are_known_decide_and_count_once_by_what_is_needed_of_each() -> None:
    def with_objects(name: str, **objects: int) -> RetainedSnapshot:
        return RetainedSnapshot(name, full_bytes=1, objects=objects)

    snapshots = [with_objects("a", pack=80, a=10), with_objects("b", pack=100, b=10), with_objects("c", pack=20, c=30)]
    assert [bytes_of(snapshots[-count:], snapshots) for count in (1, 2, 3)] == [50, 140, 150]
    assert list(MaxBytes(149).keep(snapshots, NOW)) == snapshots[1:]
    assert list(MaxBytes(150, Only(("a", "c"))).keep(snapshots, NOW)) == [snapshots[0], snapshots[2]]
    assert bytes_of([snapshots[0], snapshots[2]], snapshots) == 120


sizes = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=10)


@given(sizes=sizes, limit=st.integers(1, 300))
def test_a_budget_is_never_exceeded_by_more_than_the_newest_and_holds_as_many_as_it_can(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    snapshots = [
        RetainedSnapshot(str(number), full_bytes=full + new, new_bytes=new) for number, (full, new) in enumerate(sizes)
    ]
    kept = list(MaxBytes(limit).keep(snapshots, NOW))
    assert kept == snapshots[-len(kept) :]
    assert len(kept) == 1 or bytes_of(kept, snapshots) <= limit
    if len(kept) < len(snapshots):
        assert bytes_of(snapshots[-len(kept) - 1 :], snapshots) > limit


@pytest.mark.parametrize("limit", [0, -1, 1.5, "500GB"])
def test_a_budget_is_a_positive_number_of_bytes(limit: Any) -> None:
    with pytest.raises((OptionError, OptionTypeError), match="limit is"):
        MaxBytes(limit)


# As data, and why


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ({"keep_rules": {"daily": 7, "labels": ["release-*"]}}, KeepRules(daily=7, labels=("release-*",))),
        ({"max_bytes": 500}, MaxBytes(500)),
        ({"max_bytes": {"limit": 500, "of": {"latest": 3}}}, MaxBytes(500, Latest(3))),
        (
            {"any_of": [{"latest": 2}, {"max_bytes": {"limit": 9, "of": {"keep_rules": {"yearly": -1}}}}]},
            Latest(2) | MaxBytes(9, KeepRules(yearly=-1)),
        ),
    ],
)
def test_both_are_written_as_data(written: dict[str, Any], policy: RetentionPolicy) -> None:
    assert read_retention(written) == policy
    assert read_retention(write_retention(policy)) == policy


def test_why_a_snapshot_stays_is_told_by_the_rules_that_keep_it() -> None:
    policy = MaxBytes(10**9, KeepRules(last=1, monthly=2)) | (Latest(2) & NewestPer("hour", 9))
    reasons = reasons_to_keep(policy, TAKEN, NOW)
    assert reasons["2026-03-14 09:30"] == (
        *("last", "monthly", "Latest(count=2)"),
        "NewestPer(period=<Period.HOUR: 'hour'>, count=9, timezone='UTC')",
    )
    assert reasons["2026-02-28 10:00"] == ("monthly",)
    assert set(reasons) == {each.snapshot_id for each in policy.keep(TAKEN, NOW)}
