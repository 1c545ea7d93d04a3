"""What becomes of each operator's state when a query changes, and values that are taken apart as bytes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import OptionError, PlanChangedError, StateRewriteError
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.recovery.operator_compatibility import (
    Fate,
    _resolved,
    _values,
    evolve,
    has_other_rows,
    plan_differences,
    refused_reasons,
    ruled_operators,
    taken_rows,
)
from dagster_ckpt.recovery.state_migration import state_migration
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, NeededFile
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.query.plan import BRANCH, WATERMARK, PlanDescription, PlanOperator, read_plan
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


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [((COUNTS,), (DISTINCT, COUNTS), True), ((DISTINCT, COUNTS), (COUNTS,), True), ((COUNTS,), (DISTINCT,), False)],
)
def test_nor_does_it_pass_beside_an_operator_that_comes_or_goes(
    before: tuple[PlanOperator, ...], after: tuple[PlanOperator, ...], refused: bool
) -> None:
    decisions = evolve(PlanDescription(before, "update"), PlanDescription(after, "append"))
    assert any("output mode: update -> append" in each for each in refused_reasons(decisions)) is refused


def stored(number: int, *schemas: bytes, name: str = "stateStoreSave", version: int = 2) -> Operator:
    folder = MemoryFileIO("memory://state")
    files = tuple(
        NeededFile(folder, f"{number}-{at}", f"{number}-{at}", len(data), None, None, data, True)
        for at, data in enumerate(schemas)
    )
    return Operator(number, name, ("default",), False, files, 2, version)


def schema(key: str, *values: tuple[str, str]) -> bytes:
    def part(columns: Sequence[tuple[str, str]]) -> bytes:
        fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns]
        text = json.dumps({"type": "struct", "fields": fields}).encode()
        return struct.pack(">iH", 1, len(text)) + text

    return b"\x00\x02v2" + part([(key, "string")]) + part(values)


def test_state_with_column_families_is_taken_as_it_is_or_refused() -> None:
    """Its schema, of version 3, is one of families, not of a key and a value."""
    own = PlanOperator("TransformWithState", (("k", "bigint"),))
    before, after = (
        PlanDescription((replace(MARK, settings=(("delay", delay),)), own), "append")
        for delay in ("1 minute", "1 hour")
    )
    decisions = evolve(before, after)
    name = "transformWithStateExec"

    def taken_from(now: bytes) -> Any:
        was, new = (stored(0, b"{}", data, name=name, version=3) for data in (b"\x00\x02v3one", now))
        return taken_rows(decisions, before, after, [was], [new])

    assert [each.fate for each in decisions] == [Fate.MIGRATE, Fate.KEEP]
    assert taken_from(b"\x00\x02v3one") == {0: TakenRows(0)}
    with pytest.raises(StateRewriteError, match="its stored schemas differ"):
        taken_from(b"\x00\x02v3two")


def test_branches_of_a_plan_that_was_recorded_without_numbers_are_those_of_the_new_one_or_unknown() -> None:
    sums = (("sum(a)", "bigint"), ("sum(b)", "bigint"))
    of_site, of_user = (PlanOperator("Aggregate", ((key, "string"),), sums) for key in ("site", "user"))
    other = replace(of_site, values=sums[::-1])
    before = PlanDescription((of_site, of_user), "append")
    after = PlanDescription((other, of_user), "append", (0, 1))
    two = (("sum", "long"), ("sum", "long"))
    olds = [stored(at, schema(key, *two)) for at, key in enumerate(("site", "user"))]
    found = taken_rows(evolve(before, after), before, after, olds, olds)
    assert {number: [value.place for value in rows.values] for number, rows in found.items()} == {0: [1, 0], 1: []}

    linear = PlanDescription((DISTINCT, of_user), "append")
    with pytest.raises(StateRewriteError, match="which state is whose is not certain"):
        taken_rows(evolve(linear, after), linear, after, olds, olds)


NUMBERED, HIDDEN, NOT_RECORDED = (0, 1), (None, None), None


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        pytest.param((NUMBERED, NUMBERED), None, id="branches"),
        pytest.param((HIDDEN, HIDDEN), "SQL's WITH", id="branches by WITH"),
        pytest.param((NUMBERED, HIDDEN), "SQL's WITH", id="now by WITH"),
        pytest.param((HIDDEN, NUMBERED), "SQL's WITH", id="no longer by WITH"),
        pytest.param((NOT_RECORDED, HIDDEN), "SQL's WITH", id="by WITH, recorded by an earlier version"),
    ],
)
def test_state_of_branches_whose_numbers_the_plan_does_not_show_is_not_migrated(
    numbers: tuple[tuple[int | None, ...] | None, ...], why: str | None
) -> None:
    by_site, by_user = (PlanOperator("Aggregate", ((key, "string"),), (("sum(v)", "bigint"),)) for key in ("s", "u"))
    before, after = (
        PlanDescription((replace(by_site, values=((value, "bigint"),)), by_user), "append", each)
        for value, each in zip(("sum(a)", "sum(b)"), numbers, strict=True)
    )
    stores = [stored(at, schema(key, ("sum", "long"))) for at, key in enumerate(("s", "u"))]
    rules = [rule(1), rule(2)]
    decisions = evolve(before, after)
    if why is None:
        found = taken_rows(decisions, before, after, stores, stores)
        assert {number: len(rows.values) for number, rows in found.items()} == {0: 1, 1: 0}
        return
    reasons = refused_reasons(decisions)
    assert len(reasons) == 2
    assert all("which state is whose is not certain" in each and why in each for each in reasons)
    assert refused_reasons(evolve(before, replace(after, operators=before.operators))) == []
    ruled = evolve(before, after, rules)
    for refused in (taken_rows, ruled_operators):
        with pytest.raises(StateRewriteError, match=f"which state is whose is not certain.*{why}.*bootstrap_state"):
            refused(ruled, before, after, stores, stores)


@pytest.mark.parametrize(("numbers", "advises_a_rule"), [(HIDDEN, False), (NUMBERED, True)])
def test_a_rule_is_advised_only_where_it_can_help(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int | None, ...], advises_a_rule: bool
) -> None:
    before, after = (PlanDescription((DISTINCT, each), "append", numbers) for each in (COUNTS, BY_COUNTRY))
    monkeypatch.setattr("dagster_ckpt.recovery.state_migration.old_plan", lambda *_: before)
    stream: Any = SimpleNamespace(stream_id="orders", to_batch=None)
    with pytest.raises(PlanChangedError, match="bootstrap_state") as refused:
        state_migration(stream, stream, after, StartFrom(migrate_state=True), lambda: stream)
    assert ("state_migrations" in str(refused.value)) is advises_a_rule


def test_an_operator_that_is_now_in_a_branch_has_not_the_number_of_the_branch() -> None:
    """A rule permits this change; the former plan, without numbers, is a line."""
    in_branches = [replace(each, settings=((BRANCH, str(at)),)) for at, each in enumerate((DISTINCT, COUNTS))]
    before, after = PlanDescription((DISTINCT, COUNTS)), PlanDescription(tuple(in_branches), None, NUMBERED)
    stores = [stored(at, schema("k")) for at in (0, 1)]
    with pytest.raises(StateRewriteError, match="which state is whose is not certain"):
        ruled_operators(evolve(before, after, [rule(1), rule(2)]), before, after, stores, stores)


@pytest.mark.parametrize(("kind", "taken_as"), [("decimal(18,2)", 0), ("interval day to second", None)])
def test_a_new_average_begins_with_a_zero_of_its_type_or_is_refused(kind: str, taken_as: int | None) -> None:
    before = PlanDescription((replace(COUNTS, values=COUNTS.values[:1]),), "update")
    after = PlanDescription((replace(COUNTS, values=(*COUNTS.values[:1], ("avg(price)", kind))),), "update")
    count = ("count", "long")
    old, new = stored(0, schema("site", count)), stored(0, schema("site", count, ("sum", kind), count))
    if taken_as is None:
        with pytest.raises(StateRewriteError, match="begins with a value of type interval"):
            taken_rows(evolve(before, after), before, after, [old], [new])
        return
    values = taken_rows(evolve(before, after), before, after, [old], [new])[0].values
    row = taken(encode([5], ["bigint"]), 1, values)
    assert struct.unpack("<qqqq", row) == (0, 5, taken_as, 0)


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


def _aggregate(*values: str, definitions: tuple[tuple[str, str], ...] = (), **settings: str) -> PlanDescription:
    pairs = tuple((text, "bigint") for text in values)
    made = PlanOperator("Aggregate", (("k", "string"),), pairs, tuple(settings.items()), definitions)
    return PlanDescription((made,), "Update")


@pytest.mark.parametrize(
    ("before", "after", "fate"),
    [
        pytest.param(
            _aggregate("sum(x)", definitions=(("x", "y"),)),
            _aggregate("sum(x)", definitions=(("x", "y"), ("y", "z"))),
            Fate.MIGRATE,
            id="a chain of names leads to another column: its sum begins again",
        ),
        pytest.param(
            _aggregate("sum(x)"),
            _aggregate("sum(x)", definitions=(("x", "y"), ("y", "x"))),
            Fate.REFUSE,
            id="two columns change their names",
        ),
        pytest.param(
            _aggregate("sum(v)", branch="0"),
            _aggregate("sum(v)", branch="1"),
            Fate.REFUSE,
            id="another input of a union",
        ),
        pytest.param(_aggregate("sum(v)"), _aggregate("sum(V)", "count(1)"), Fate.REFUSE, id="another case of a name"),
    ],
)
def test_state_of_one_column_never_continues_as_that_of_another(
    before: PlanDescription, after: PlanDescription, fate: Fate
) -> None:
    (decision,) = evolve(before, after)
    assert decision.fate is fate


def test_the_sum_of_another_column_behind_the_same_name_takes_nothing() -> None:
    before = _aggregate("sum(x)", definitions=(("x", "y"),))
    after = _aggregate("sum(x)", definitions=(("x", "y"), ("y", "z")))
    assert [_resolved(each.operators[0]).values for each in (before, after)] == [
        (("sum(y)", "bigint"),),
        (("sum(z)", "bigint"),),
    ]


@pytest.mark.parametrize(
    ("former", "text", "definitions", "goes_on"),
    [
        ("sum(IF((k = 'price'), v, 0))", "sum(IF((k = 'price'), price, 0))", {"price": "v"}, True),
        ("sum(IF((k = 'tap'), tap, 0))", "sum(IF((k = 'click'), click, 0))", {"click": "tap"}, False),
        (r"sum(IF((k = 'it\'s, v('), w, v))", r"sum(IF((k = 'it\'s, v('), w, x))", {"x": "v", "w": "w"}, True),
        (r"sum(IF((k = '\\'), v, 'v'))", r"sum(IF((k = '\\'), x, 'v'))", {"x": "v"}, True),
        ("max(concat(v, 'a\nx'))", "max(concat(x, 'a\nx'))", {"x": "v"}, True),
        ("sum(n)", "sum(sum)", {"sum": "n"}, True),
        ("sum(abs(n))", "sum(abs(ABS))", {"abs": "n"}, True),
        ("sum(n)", "sum(`sum`)", {"sum": "n"}, True),
        ("sum(n)", "sum(`a``b'`)", {"a`b'": "n"}, True),
        ("sum((s.`v` + w))", "sum((s.`v` + v))", {"v": "w"}, True),
        ("sum(s.`v`)", "sum(t.`v`)", {"t": "s"}, True),
        ("sum(t.v)", "sum(t.v)", {"t": "time"}, True),
        ("sum((v + 2024))", "sum((`2024` + 2024))", {"2024": "v"}, True),
        ("max(CASE WHEN (e > 1) THEN e END)", "max(CASE WHEN (end > 1) THEN end END)", {"end": "e"}, True),
        ("max(d)", "max(DATE)", {"DATE": "d"}, True),
        ("max(CAST(d AS DATE))", "max(CAST(date AS DATE))", {"date": "d"}, True),
        ("sum(v)", "sum(X)", {"x": "v"}, True),
    ],
)
def test_a_renamed_column_is_replaced_only_where_it_is_a_column(
    former: str, text: str, definitions: dict[str, str], goes_on: bool
) -> None:
    before, after = _aggregate(former), _aggregate(text, "count(1)", definitions=tuple(definitions.items()))
    (decision,) = evolve(before, after)
    name = text.partition("(")[0]
    columns = [{"name": each, "type": "long", "nullable": True} for each in (name, "count")]
    values = _values(decision, _resolved(before.operators[0]), _resolved(decision.operator), columns[:1], columns)
    assert decision.fate is Fate.MIGRATE
    assert [value.place for value in values] == [0 if goes_on else None, None]


def test_a_column_that_is_named_like_the_word_for_none_is_one() -> None:
    other = replace(COUNTS, definitions=(("v", "nothing"),))
    assert fates((COUNTS,), (other,)) == fates((other,), (COUNTS,)) == [Fate.MIGRATE]
    assert plan_differences(PlanDescription((COUNTS,)), PlanDescription((other,))) == (
        "operator 1 (aggregation), computed column v: nothing -> `nothing`",
    )


def test_a_renamed_key_need_not_be_a_word() -> None:
    renamed = replace(COUNTS, keys=(("my site", "string"),), definitions=(("my site", "site"),))
    assert fates((COUNTS,), (renamed,)) == [Fate.MIGRATE]


@pytest.mark.parametrize("name", ["s", "size", "slide", "start"])
def test_a_renamed_column_is_not_replaced_in_the_sizes_of_a_window(name: str) -> None:
    window = ("window", "window(t, size 10 s, slide 5 s, start 0 s)")
    by_window = replace(COUNTS, keys=(("window", "struct<start:timestamp>"),), values=(("sum(v)", "bigint"),))
    before = replace(by_window, definitions=(window,))
    after = replace(by_window, values=((f"sum({name})", "bigint"),), definitions=((name, "v"), window))
    assert fates((before,), (after,)) == [Fate.MIGRATE]


@pytest.mark.parametrize(
    ("former", "text", "fate"),
    [
        ("sum(IF((k = 'tap'), v, 0))", "sum(IF((k = 'Tap'), v, 0))", Fate.MIGRATE),
        ("sum(IF((k = 'a.tap'), v, 0))", "sum(IF((k = 'b.tap'), v, 0))", Fate.MIGRATE),
        ("sum((v * 1.5))", "sum((v * 2.5))", Fate.MIGRATE),
        ("sum(IF((k = 'tap'), a.v, 0))", "sum(IF((k = 'tap'), `b.c`.V, 0))", Fate.REFUSE),
        ("sum(IF((k = 'price'), v, 0))", "sum(IF((k = 'price'), v, 0))", Fate.MIGRATE),
        ("sum(price(v))", "sum(price(v))", Fate.MIGRATE),
        ("sum(`price`)", "sum(`price`)", Fate.REFUSE),
    ],
)
def test_literals_and_functions_are_not_compared_as_columns(former: str, text: str, fate: Fate) -> None:
    """The definition of a column changes that some of them are named like."""
    before = _aggregate(former, definitions=(("price", "(v * 2)"),))
    after = _aggregate(text, definitions=(("price", "(v * 3)"),))
    (decision,) = evolve(before, after)
    assert decision.fate is fate


def test_aggregates_that_mean_the_same_are_not_mistaken_for_one() -> None:
    plan = _aggregate("sum(x)", "sum(v)", definitions=(("x", "v"),))
    (decision,) = evolve(plan, _aggregate("sum(x)", "sum(v)", "max(z)", definitions=(("x", "v"),)))
    stored = [{"name": "sum", "type": "long", "nullable": True}] * 2
    with pytest.raises(StateRewriteError, match="twice, under two names"):
        _values(decision, _resolved(plan.operators[0]), _resolved(decision.operator), stored, stored)


@pytest.mark.parametrize("columns", [60, 61, 84])
def test_a_long_plan_is_compared_as_it_was_recorded(columns: int) -> None:
    join = PlanOperator("Join", values=tuple((f"left.c{at}", "bigint") for at in range(columns)))
    marks = [PlanOperator("EventTimeWatermark", (("t", "timestamp"),), settings=(("delay", each),)) for each in "12"]
    before, after = (PlanDescription((mark, join), "Append") for mark in marks)
    recorded = read_plan(before.as_record())
    assert recorded is not None
    decisions = evolve(recorded, after)
    assert [each.fate for each in decisions] == [Fate.MIGRATE, Fate.KEEP]
    assert not has_other_rows(decisions, recorded)
