"""What a start does with a table: one decision for Delta, Iceberg and a user's own, and how it is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import LeaseLostError, SinkRollbackError
from dagster_ckpt.sinks.sink import Replay, RollBack, SinkEffect
from dagster_ckpt.sinks.table import Obstacle, Step, TablePlan, TableSink, VersionTakenError, verdict

CASES = yaml.safe_load(Path(__file__).with_name("table_verdicts.yaml").read_text())


def planned(case: dict[str, Any]) -> TablePlan | None:
    if case["plan"] == "none":
        return None
    given = {"moves": False, "how": "It goes back", "command": "UNDO IT", **case["plan"]}
    if "obstacle" in given:
        effect, may_stay = SinkEffect(given["obstacle"]), given.pop("may_stay", False)
        given["obstacle"] = Obstacle(effect, "A stone is in the way.", "Please clear it.", may_stay=may_stay)
    return TablePlan(**given)


class Table(TableSink):
    """A table whose plans are given, and that notes what is done to it."""

    table_format = "Test"
    remembers_undone = True

    def __init__(self, plan: TablePlan | None, *, others_commit: int = 0) -> None:
        super().__init__("Table[orders]", "orders")
        self.given, self.others_commit = plan, others_commit
        self.done: list[str] = []

    def plan(self, to: RollBack) -> TablePlan | None:
        return self.given

    def commit(self, plan: TablePlan) -> None:
        if self.others_commit:
            self.others_commit -= 1
            raise VersionTakenError
        self.done.append("committed")

    def fence(self, plan: TablePlan) -> None:
        self.done.append("fenced")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_the_verdict(case: dict[str, Any]) -> None:
    found = verdict(planned(case), RollBack(**{"batch_id": 3, **case.get("to", {})}))

    assert (found.step, found.effect) == (Step(case["step"]), SinkEffect(case["effect"])), found
    assert case.get("reason", "") in found.reason
    assert case.get("advice", "") in found.advice


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_forecast_check_and_roll_back_follow_it(case: dict[str, Any]) -> None:
    table, to = Table(planned(case)), {"batch_id": 3, **case.get("to", {})}
    back = RollBack(**to)
    replay = Replay(back.batch_id, None, keeps_query_id=not back.may_repeat, roll_back_tables=back.roll_back_tables)

    told = table.forecast(replay)

    found = verdict(table.given, back)
    assert (told.effect, told.reason.startswith(found.reason)) == (found.effect, True)
    assert ("continues under a new id" in told.reason) is (found.step is Step.ROLL_BACK)
    if found.step is Step.REFUSE:
        for refuse in (lambda: table.check_roll_back(back), lambda: table.roll_back(back, nullcontext)):
            with pytest.raises(SinkRollbackError, match="The Test table orders was not changed"):
                refuse()
    else:
        table.check_roll_back(back)
        table.roll_back(back, nullcontext)
    is_touched = table.given is not None and back.roll_back_tables
    done = {Step.ROLL_BACK: ["committed"], Step.LEAVE: ["fenced"], Step.REFUSE: []}[found.step]
    assert table.done == (done if is_touched else [])


def test_a_roll_back_plans_again_as_long_as_others_commit_first() -> None:
    table = Table(TablePlan(moves=True), others_commit=3)

    table.roll_back(RollBack(3), nullcontext)

    assert table.done == ["committed"]
    with pytest.raises(SinkRollbackError, match="others committed to it during each of 10 attempts"):
        Table(TablePlan(moves=True), others_commit=10).roll_back(RollBack(3), nullcontext)


@pytest.mark.parametrize("others", ["", "versions 7"])
def test_a_former_holder_commits_nothing_and_learns_that_it_is_one(others: str) -> None:
    """What its successor has written looks like that of others."""
    table = Table(TablePlan(moves=True, others=others))

    @contextmanager
    def not_mine() -> Iterator[None]:
        raise LeaseLostError("a successor has it")
        yield

    with pytest.raises(LeaseLostError):
        table.roll_back(RollBack(3), not_mine)

    assert table.done == []
