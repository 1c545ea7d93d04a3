"""The savepoints of a schedule: a number, an age, and the newest always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies.retention import (
    KeptBecause,
    RetainedKind,
    RetainedSnapshot,
    RetentionContext,
    SavepointHistory,
    decide_retention,
    needed_of_history,
)

CASES = yaml.safe_load((Path(__file__).parent / "savepoint_history.yaml").read_text(encoding="utf-8"))
HOUR_MS = 3_600_000
NOW_MS = 10_000 * HOUR_MS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_what_a_history_has_no_room_for_leaves(case: dict[str, Any]) -> None:
    taken = [
        RetainedSnapshot(name.rstrip("*"), RetainedKind.SAVEPOINT, NOW_MS - age * HOUR_MS)
        for name, age in case["taken"].items()
    ]
    held = {name.rstrip("*") for name in case["taken"] if name.endswith("*")}
    hours = case.get("max_age_hours")
    history = SavepointHistory(case.get("max_count"), hours * HOUR_MS if hours else None)

    broken = {each.snapshot_id for each in taken if each.snapshot_id.endswith("!")}
    needed = needed_of_history(taken, held, broken=broken)

    decision = decide_retention(history, taken, RetentionContext(NOW_MS), needed=needed)

    assert [snapshot.snapshot_id for snapshot in decision.dropped] == case["leaves"]
    assert {decision.kept[snapshot_id] for snapshot_id in held} <= {KeptBecause.IN_USE}


@pytest.mark.parametrize("limits", [{"max_count": 0}, {"max_age_ms": 0}, {"max_count": -1}])
def test_a_history_that_keeps_nothing_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must be a whole number"):
        SavepointHistory(**limits)
