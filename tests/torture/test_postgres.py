"""A slice of `make torture-postgres`: five operations, each with two faults at one commit."""

from __future__ import annotations

import pytest

from tests.torture.faults import ServerFault
from tests.torture.postgres import torture
from tests.torture.trial import Calls

SLICE = [
    ("checkpoint", 5, (ServerFault.KILLED_AFTER, ServerFault.ANSWER_LOST)),
    ("savepoint", 4, (ServerFault.CUT_OFF, ServerFault.ANSWER_LOST)),
    ("restore", 4, (ServerFault.KILLED_AFTER, ServerFault.CUT_OFF)),
    ("rewind to a savepoint", 6, (ServerFault.KILLED, ServerFault.ANSWER_LOST)),
    ("run: resume, end of the run", 10, (ServerFault.KILLED_AFTER, ServerFault.ANSWER_LOST)),
]


@pytest.mark.thorough(but=("restore", "checkpoint"))
@pytest.mark.parametrize(("name", "commit", "faults"), SLICE, ids=[name for name, _, _ in SLICE])
def test_a_fault_at_a_commit_of_an_operation_loses_nothing(
    postgres: str, name: str, commit: int, faults: tuple[ServerFault, ...]
) -> None:
    outcomes = torture(postgres, name, faults, Calls(commit, at_most=1))

    assert [(each.fault, each.points, each.violations) for each in outcomes] == [(fault, 1, []) for fault in faults]
