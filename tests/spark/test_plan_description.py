"""A plan as a record: bounded, and read back as it was; the numbers of its operators."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dagster_ckpt.spark.query.plan import PlanDescription, PlanOperator, describe_plan, read_plan

PLAN = PlanDescription((PlanOperator("Aggregate", (("site", "string"),), (("sum(v)", "bigint"),)),), "Append")


def test_a_record_is_read_back_as_it_was() -> None:
    assert read_plan(json.loads(json.dumps(PLAN.as_record()))) == PLAN


@pytest.mark.parametrize(
    "record", [None, {}, [], "x", {"version": 9, "operators": []}, {"version": 1}, {"operators": 3}]
)
def test_what_cannot_be_read_is_not_known(record: object) -> None:
    assert read_plan(record) is None


def wide(last: str) -> PlanDescription:
    keys = tuple((f"column{index}" * 20, "string") for index in range(200))
    operator = PlanOperator("Deduplicate", (*keys, (last, "string")))
    return PlanDescription((operator,) * 40)


def test_it_is_bounded_and_a_change_in_what_is_left_out_is_still_one() -> None:
    record = wide("a" * 5_000).as_record()

    assert len(json.dumps(record)) < 100_000
    assert wide("a" * 5_000).fingerprint == wide("a" * 5_000).fingerprint
    assert wide("a" * 5_000).fingerprint != wide("a" * 4_999 + "b").fingerprint
    assert read_plan(record) is not None


class Items(list[Any]):
    """A sequence of Scala."""

    size = list.__len__
    apply = list.__getitem__

    def toSeq(self) -> "Items":  # noqa: N802, as Scala calls it
        return self


class Node:
    """A node of a plan that names no columns."""

    def __init__(self, name: str, *inputs: "Node") -> None:
        self.name, self.inputs = name, Items(inputs)

    def nodeName(self) -> str:  # noqa: N802
        return self.name

    def children(self) -> Items:
        return self.inputs

    def isStreaming(self) -> bool:  # noqa: N802
        return True

    def references(self) -> Items:
        return Items()

    output = keys = projectList = aggregateExpressions = groupingExpressions = references  # noqa: N815


SOURCE, USE = Node("StreamingRelationV2"), Node("CTERelationRef")


def counts(of: Node = SOURCE) -> Node:
    return Node("Aggregate", of)


def with_(*definitions: Node, query: Node) -> Node:
    return Node("WithCTE", *(Node("CTERelationDef", each) for each in definitions), query)


@pytest.mark.parametrize(
    ("plan", "numbers"),
    [
        pytest.param(Node("Union", counts(), counts()), (0, 1), id="branches"),
        pytest.param(
            with_(counts(), counts(), query=Node("Union", USE, USE)), (None, None), id="branches that WITH defines"
        ),
        pytest.param(with_(SOURCE, query=Node("Union", counts(USE), counts(USE))), (0, 1), id="WITH without state"),
        pytest.param(with_(counts(), query=Node("Union", USE, SOURCE)), None, id="one operator that WITH defines"),
        pytest.param(with_(Node("Deduplicate", SOURCE), query=counts(USE)), None, id="a line that WITH defines"),
    ],
)
def test_numbers_of_operators_are_recorded_where_branches_keep_state(
    plan: Node, numbers: Sequence[int | None] | None
) -> None:
    described = describe_plan(plan, "Append")
    assert described.numbers == numbers
    assert read_plan(json.loads(json.dumps(described.as_record()))) == described
    assert described.fingerprint == replace(described, numbers=None).fingerprint


def test_numbers_of_a_shortened_record_are_not_known() -> None:
    long = describe_plan(Node("Union", *(counts() for _ in range(31))))
    recorded = read_plan(long.as_record())
    assert recorded is not None
    assert (long.has_unknown_numbers, recorded.has_unknown_numbers) == (False, True)
