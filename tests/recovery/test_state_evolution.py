"""What becomes of each operator's state when a query changes, and values that are taken apart as bytes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import OptionError, StateRewriteError
from dagster_ckpt.recovery.state_evolution import Fate, evolve, refused_reasons
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.plan import WATERMARK, PlanDescription, PlanOperator
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.state.unsafe_rows import Graft, Taken, TakenRows, encode, taken
from dagster_ckpt.stream.start_from import StartFrom

COUNTS = PlanOperator("Aggregate", (("site", "string"),), (("count(1)", "bigint"), ("sum(v)", "bigint")))
MARK = PlanOperator(WATERMARK, (("at", "timestamp"),), settings=(("delay", "10 minutes"),))
DISTINCT = PlanOperator("Deduplicate", (("id", "bigint"),))
JOIN = PlanOperator("Join", settings=(("type", "Inner"),))


def fates(before: tuple[PlanOperator, ...], after: tuple[PlanOperator, ...]) -> list[Fate]:
    return [each.fate for each in evolve(PlanDescription(before, "update"), PlanDescription(after, "update"))]


def test_a_renamed_column_is_the_same_column() -> None:
    renamed = replace(COUNTS, keys=(("place", "string"),), definitions=(("place", "site"),))
    assert fates((COUNTS,), (renamed,)) == fates((renamed,), (COUNTS,)) == [Fate.MIGRATE]


def test_another_column_of_the_same_name_is_not() -> None:
    before = replace(COUNTS, definitions=(("v", "(amount * 2)"),))
    after = replace(COUNTS, definitions=(("v", "(amount * 3)"),))
    assert fates((before,), (after,)) == fates((before,), (COUNTS,)) == fates((COUNTS,), (after,)) == [Fate.REFUSE]


def test_a_new_aggregate_may_have_a_column_of_its_own() -> None:
    more = replace(COUNTS, values=(*COUNTS.values, ("max(x)", "bigint")), definitions=(("x", "(amount * 3)"),))
    assert fates((COUNTS,), (more,)) == fates((more,), (COUNTS,)) == [Fate.MIGRATE]


def test_operators_come_and_go() -> None:
    assert fates((), (COUNTS,)) == [Fate.ADD]
    assert fates((MARK, DISTINCT, COUNTS), (MARK, COUNTS)) == [Fate.KEEP, Fate.DROP, Fate.KEEP]
    assert fates((COUNTS,), (MARK, COUNTS)) == [Fate.ADD, Fate.KEEP]
    assert fates((MARK, COUNTS), (MARK, MARK, COUNTS)) == [Fate.REFUSE, Fate.KEEP, Fate.KEEP]
    assert fates((MARK, COUNTS), (replace(MARK, settings=(("delay", "1 hour"),)), COUNTS)) == [Fate.MIGRATE, Fate.KEEP]


def test_it_is_refused_where_two_states_could_be_mistaken() -> None:
    assert Fate.REFUSE in fates((DISTINCT, DISTINCT), (DISTINCT, DISTINCT, COUNTS))
    assert Fate.REFUSE in fates((DISTINCT, JOIN), (DISTINCT, JOIN, COUNTS))


def test_another_output_mode_is_refused() -> None:
    decisions = evolve(PlanDescription((COUNTS,), "append"), PlanDescription((COUNTS,), "update"))
    assert refused_reasons(decisions) == ["aggregation by site: output mode: append -> update"]


BY_COUNTRY = replace(COUNTS, keys=(("country", "string"),))


def rule(operator: int | str, former: int | str | None = None) -> StateMigration:
    def by_country(_old: object) -> Any:
        raise AssertionError

    return StateMigration(operator, by_country, former)


def ruled(
    before: tuple[PlanOperator, ...], after: tuple[PlanOperator, ...], *rules: StateMigration
) -> list[tuple[Fate, int | None, str]]:
    decisions = evolve(PlanDescription(before, "update"), PlanDescription(after, "update"), rules)
    return [(each.fate, each.was, each.why.rpartition("; ")[2]) for each in decisions]


@pytest.mark.parametrize("named", [2, "aggregation by country"])
def test_a_rule_decides_about_its_operator_only(named: int | str) -> None:
    before, after = (DISTINCT, COUNTS), (replace(DISTINCT, keys=(("id", "string"),)), BY_COUNTRY)
    other, own = ruled(before, after, rule(named))
    assert other[0] is Fate.REFUSE
    assert own == (Fate.MIGRATE, 1, "by your function by_country")


def test_a_rule_for_an_added_operator_gets_no_rows_or_those_that_it_names() -> None:
    assert ruled((), (COUNTS,), rule(1)) == [(Fate.MIGRATE, None, "by your function by_country")]
    assert ruled((DISTINCT,), (COUNTS,), rule(1)) == [
        (Fate.DROP, 0, "removed"),
        (Fate.MIGRATE, None, "by your function by_country"),
    ]
    assert ruled((DISTINCT,), (COUNTS,), rule(1, "dropDuplicates by id")) == [
        (Fate.MIGRATE, 0, "by your function by_country")
    ]


def test_a_rule_leaves_an_unchanged_operator_and_a_limit_alone() -> None:
    assert ruled((MARK, COUNTS), (replace(MARK, settings=(("delay", "1 hour"),)), COUNTS), rule(2))[1][0] is Fate.KEEP
    limit = PlanOperator("GlobalLimit")
    assert ruled((), (limit,), rule(1))[0][0] is Fate.REFUSE


def test_another_output_mode_is_refused_with_a_rule_too() -> None:
    decisions = evolve(PlanDescription((COUNTS,), "append"), PlanDescription((BY_COUNTRY,), "update"), [rule(1)])
    assert [each.fate for each in decisions] == [Fate.MIGRATE, Fate.REFUSE]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (rule(1), "operator 1: the new code has no operator called so. It has: 2 (aggregation by country)"),
        (rule("dropDuplicates"), "the new code has no operator"),
        (rule(2, 4), "operator 4: the former code has no operator called so"),
    ],
)
def test_a_rule_must_name_an_operator_with_state(made: StateMigration, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)):
        ruled((MARK, COUNTS), (MARK, BY_COUNTRY), made)


TYPES = ["bigint", "string", ("wide_decimal", 2), "int", "double"]
ROW = [7, "a longer text", Decimal("-12345678901234567890.12"), -3, 1.5]
WIDE = "decimal(30,2)"


def test_fields_are_taken_as_spark_would_write_them() -> None:
    row = encode(ROW, TYPES)
    picked = [Taken("string", 1, "string"), Taken("long", 3, "integer"), Taken(WIDE, 2, WIDE)]
    started = [Taken("long", start=0), Taken("string"), Taken(WIDE), Taken("double", start=0.0)]
    wanted = [*ROW[1:2], ROW[3], ROW[2], 0, None, None, 0.0]
    types = ["string", "bigint", TYPES[2], "bigint", "string", TYPES[2], "double"]
    assert taken(row, len(ROW), [*picked, *started]) == encode(wanted, types)


def test_nulls_stay_nulls() -> None:
    row = encode([None] * 5, TYPES)
    kinds = ["long", "string", WIDE, "integer", "double"]
    same = [Taken(kind, place, kind) for place, kind in enumerate(kinds)]
    assert taken(row, 5, same) == row
    assert taken(row, 5, same[::-1]) == encode([None] * 5, TYPES[::-1])


def test_more_than_64_fields_have_more_null_bits() -> None:
    row = encode([*range(70), None], ["bigint"] * 71)
    assert taken(row, 71, [Taken("long", 70, "long"), Taken("long", 69, "long")]) == encode([None, 69], ["bigint"] * 2)


def test_a_value_is_not_narrowed() -> None:
    with pytest.raises(StateRewriteError, match="long cannot become integer"):
        taken(encode([1], ["bigint"]), 1, [Taken("integer", 0, "long")])


def test_an_order_to_another_spark_keeps_the_graft() -> None:
    taken_rows = {1: TakenRows(0, 2, (Taken("long", 0, "long"), Taken("long", start=0)))}
    graft = Graft(LiveDirectory("file:///made"), taken_rows, {2: LiveDirectory("file:///given/2")})
    again = Graft.of_record(json.loads(json.dumps(graft.as_record())))
    assert (again.state.url, again.rows, again.given) == (graft.state.url, graft.rows, graft.given)


@pytest.mark.parametrize("other", [{"bootstrap_state": True}, {"map_sources": "0=0"}, {"state_partitions": 3}])
def test_one_start_does_one_thing(other: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="for two starts, one after the other"):
        StartFrom(migrate_state=True, **other)  # type: ignore[arg-type]


def test_the_table_of_the_docs_names_cases_of_the_matrix() -> None:
    root = Path(__file__).parents[2]
    cases = yaml.safe_load((root / "tests/recovery/state_changes.yaml").read_text())
    page = (root / "docs/evidence/coverage.md").read_text()
    _, _, table = page.partition("### Changed state")
    rows = [line.split(" | ") for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    named = {name.strip() for row in rows for name in row[-1].rstrip(" |").split(",") if name.strip()}
    assert len(rows) > 20
    assert named <= {case["case"] for case in cases}
