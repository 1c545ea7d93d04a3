"""A slice of `make torture`: each operation, and each fault at a call of it here and there."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from tests.torture import memory
from tests.torture.__main__ import TASKS
from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, Fault, FileFault, LeaseFault
from tests.torture.trial import Calls, Outcome, torture

# Of what the power leaves, `test_restore_and_power_loss.py` has a slice.
TRIED = {
    *(FileFault.KILLED, FileFault.FAILS, FileFault.ANSWER_LOST),
    *(CatalogFault.KILLED, CatalogFault.AWAY, CatalogFault.ANSWER_LOST),
    *(ObjectFault.KILLED, ObjectFault.FAILS, ObjectFault.ANSWER_LOST),
    LeaseFault.LOST,
}
SLICE = [(name, fault) for name, fault in TASKS if fault in TRIED]
# `make test` takes every eighth: of nine faults, an operation meets one or two, and each fault some operations.
PAIRS = [
    pytest.param(name, fault, id=f"{name}-{fault.name}-{number}", marks=[pytest.mark.thorough] if number % 8 else [])
    for number, (name, fault) in enumerate(SLICE)
]


@pytest.mark.parametrize(("name", "fault"), PAIRS)
def test_a_fault_somewhere_in_an_operation_loses_nothing(name: str, fault: Fault) -> None:
    # Always the same call, and each case another one.
    first = 1 + zlib.crc32(f"{name} {fault.name}".encode()) % 10
    assert torture(name, fault, Calls(first, at_most=1)).violations == []


def test_a_run_goes_on_with_what_the_last_one_left_out_unless_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of-the-torture" / "outcomes.json"
    assert memory.recalled(file) == memory.Memory()
    tried = memory.Memory([Outcome(*TASKS[0], calls=12, points=7, violations=["lost"])], 61.5, 2)
    memory.remember(tried, file)
    assert memory.recalled(file) == tried
    monkeypatch.setattr(memory, "digest_of_the_code", lambda: "of other code")
    assert memory.recalled(file) == memory.Memory()
