"""The power goes at any file call of a start, a snapshot, a claim or a fork: no state is lost.

Every few calls here; every one by `make torture`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lost_power import SCENARIOS, Scenario
from tests.support.power_loss import Disk, Survivors, every_call
from tests.support.thorough import either

# Of up to a hundred calls.
EVERY = either(quick=70, thorough=15)


# Of each scenario, `make test` tries one way in which files survive.
CASES = [
    pytest.param(
        scenario,
        survivors,
        id=f"{scenario.name}-{survivors}",
        marks=[pytest.mark.thorough] if (row - column) % 3 else [],
    )
    for row, scenario in enumerate(SCENARIOS)
    for column, survivors in enumerate(Survivors)
]


@pytest.mark.parametrize(("scenario", "survivors"), CASES)
def test_nothing_is_lost_with_the_power(tmp_path: Path, scenario: Scenario, survivors: Survivors) -> None:
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    scenario.make(disk.root)
    disk.freeze()

    for trouble, ran in every_call(disk, lambda: scenario.work(disk.root), survivors, step=EVERY):
        assert scenario.problems(disk.root) == [], (trouble, ran.calls[-1:], ran.error)
        assert ran.reached or ran.error is None
