"""What is a change of the plan, and how it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_ckpt.errors import PlanChangedError
from dagster_ckpt.recovery.operator_compatibility import evolve, has_other_rows, plan_differences
from dagster_ckpt.recovery.query_plan_check import PlanChange, refuse_plan_change
from dagster_ckpt.spark.query.plan import COLUMNS, PlanDescription, PlanOperator, read_plan

WATERMARK = PlanOperator("EventTimeWatermark", (("t", "timestamp"),), settings=(("delay", "10 seconds"),))
COUNTS = PlanOperator(
    "Aggregate",
    (("window", "struct"), ("site", "string")),
    (("count(1)", "bigint"), ("sum(v)", "bigint")),
    definitions=(("window", "window(t, size 60 s, slide 60 s, start 0 s)"),),
)
FIRSTS = PlanOperator("Deduplicate", (("id", "string"),))
JOIN = PlanOperator("Join", values=(("left.v", "bigint"),), settings=(("type", "Inner"), ("condition", "(a = b)")))
PLAN = PlanDescription((WATERMARK, COUNTS), "Append")


def of(*operators: PlanOperator, mode: str = "Append") -> PlanDescription:
    return PlanDescription(operators, mode)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(PLAN, PLAN, (), id="the-same"),
        pytest.param(of(), of(mode="Update"), ("output mode: Append -> Update",), id="modes-are-compared"),
        pytest.param(
            PLAN,
            of(WATERMARK, replace(COUNTS, keys=(("window", "struct"), ("device", "string")))),
            ("operator 2 (aggregation), key 2: site string -> device string",),
            id="known-defect-4-another-column-of-the-same-type",
        ),
        pytest.param(
            PLAN,
            of(WATERMARK, replace(COUNTS, keys=(("window", "struct"), ("site", "int")))),
            ("operator 2 (aggregation), key 2: site string -> site int",),
            id="type-of-a-key",
        ),
        pytest.param(
            PLAN,
            of(WATERMARK, replace(COUNTS, values=(*COUNTS.values, ("max(v)", "bigint")))),
            ("operator 2 (aggregation), value 3: nothing -> max(v) bigint",),
            id="one-more-aggregate",
        ),
        pytest.param(
            PLAN,
            of(WATERMARK, replace(COUNTS, values=COUNTS.values[::-1])),
            (
                "operator 2 (aggregation), value 1: count(1) bigint -> sum(v) bigint",
                "operator 2 (aggregation), value 2: sum(v) bigint -> count(1) bigint",
            ),
            id="aggregates-of-one-type-that-change-places",
        ),
        pytest.param(
            PLAN,
            of(replace(WATERMARK, settings=(("delay", "1 hours"),)), COUNTS),
            ("operator 1 (watermark) delay: 10 seconds -> 1 hours",),
            id="delay",
        ),
        pytest.param(
            PLAN,
            of(WATERMARK, replace(COUNTS, definitions=(("window", "window(t, size 30 s, slide 30 s, start 0 s)"),))),
            (
                "operator 2 (aggregation), computed column window: window(t, size 60 s, slide 60 s, start 0 s) -> "
                "window(t, size 30 s, slide 30 s, start 0 s)",
            ),
            id="window",
        ),
        pytest.param(
            PLAN, of(WATERMARK, FIRSTS, COUNTS), ("operator 2, dropDuplicates by id, was added",), id="operator-added"
        ),
        pytest.param(
            of(WATERMARK, FIRSTS, COUNTS),
            PLAN,
            ("operator 2, dropDuplicates by id, was removed",),
            id="operator-removed",
        ),
        pytest.param(
            of(FIRSTS, COUNTS),
            of(COUNTS, FIRSTS),
            (
                "operator 1, aggregation by window, site, was added",
                "operator 2, aggregation by window, site, was removed",
            ),
            id="order-of-operators",
        ),
        pytest.param(
            of(JOIN),
            of(replace(JOIN, settings=(("type", "LeftOuter"), ("condition", "(a = c)")))),
            (
                "operator 1 (stream-stream join) type: Inner -> LeftOuter",
                "operator 1 (stream-stream join) condition: (a = b) -> (a = c)",
            ),
            id="type-of-a-join",
        ),
    ],
)
def test_each_difference_is_said_as_from_and_to(
    before: PlanDescription, after: PlanDescription, said: tuple[str, ...]
) -> None:
    assert plan_differences(before, after) == said


@pytest.mark.parametrize(
    ("after", "fits"),
    [
        (replace(COUNTS, keys=COUNTS.keys[:1]), False),
        (replace(COUNTS, keys=(COUNTS.keys[0], ("site", "int"))), False),
        (replace(COUNTS, keys=(COUNTS.keys[0], ("device", "string"))), True),
        # Of a structure, Spark does not compare the names.
        (replace(COUNTS, keys=(("window", "struct<begin:timestamp>"), COUNTS.keys[1])), True),
        (replace(COUNTS, values=(*COUNTS.values, ("max(v)", "bigint"))), False),
        (replace(COUNTS, values=(("count(1)", "bigint"), ("max(v)", "int"))), False),
        (replace(COUNTS, values=(("count(1)", "bigint"), ("max(v)", "bigint"))), True),
        # As many buffers as the two before it.
        (replace(COUNTS, values=(("avg(v)", "double"),)), True),
        (replace(COUNTS, values=(("my_function(v)", "double"),)), True),
        # With the flag of its sum.
        (replace(COUNTS, values=(("sum(d)", "decimal(20,2)"),)), True),
        (replace(FIRSTS, keys=COUNTS.keys), True),
    ],
)
def test_a_change_that_spark_certainly_refuses_is_known(after: PlanOperator, fits: bool) -> None:
    assert has_other_rows(evolve(PLAN, of(WATERMARK, after)), PLAN) is not fits


@pytest.mark.parametrize(
    ("fits", "is_migratable", "named"),
    [
        (True, False, {"accept_plan_change", "start_from=empty"}),
        (False, True, {"migrate_state", "start_from=empty"}),
        (True, True, {"migrate_state", "accept_plan_change", "start_from=empty"}),
        (False, False, {"start_from=empty"}),
    ],
)
def test_only_what_can_help_is_advised(fits: bool, is_migratable: bool, named: set[str]) -> None:
    change = PlanChange(("operator 2 changed",), "chk-1", "plan-2:1", False, fits=fits, is_migratable=is_migratable)
    with pytest.raises(PlanChangedError) as told:
        refuse_plan_change("orders", change)
    ways = ("migrate_state", "accept_plan_change", "start_from=empty")
    assert {each for each in ways if each in str(told.value)} == named


@pytest.mark.parametrize(("kind", "differs_before_4"), [("Join", False), ("Aggregate", True)])
def test_records_of_joins_identify_the_source_of_a_column_since_revision_4(kind: str, differs_before_4: bool) -> None:
    """Before, another source on one side of a join changed the numbers of the other side's."""

    def of(digest: str) -> PlanDescription:
        return PlanDescription((PlanOperator(kind, settings=((f"{COLUMNS}k", digest), ("type", "inner"))),), "append")

    for revision, differs in ((3, differs_before_4), (4, True)):
        recorded = read_plan({**of("1").as_record(), "revision": revision})
        assert recorded is not None
        assert bool(plan_differences(recorded, of("2"))) is differs, revision
        assert plan_differences(recorded, of("1")) == ()
