"""A plan as a record: bounded, and read back as it was."""

import json

import pytest

from dagster_ckpt.spark.query.plan import PlanDescription, PlanOperator, read_plan

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
