"""Runs the contract cases in `coordinator_cases/`: a clock script of events, and what must follow each."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from coordinator_script import FixedDelay, event, told

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.runtime.checkpoint_messages import FailQuery, Refuse
from dagster_ckpt.runtime.coordinator import CheckpointCoordinator
from dagster_ckpt.values.modes import CheckpointingMode

CASES = [
    pytest.param(case, id=f"{file.stem}: {case['name']}")
    for file in sorted((Path(__file__).parent / "coordinator_cases").glob("*.yaml"))
    for case in yaml.safe_load(file.read_text(encoding="utf-8"))
]
STATE = {"next", "pending", "waiting", "failures", "alignment", "alignment_deadline", "expires"}
COORDINATOR_SCENARIOS = {*range(1, 22), 31}


@pytest.mark.parametrize("case", CASES)
def test_contract(case: dict[str, Any]) -> None:
    values = dict(case.get("options", {}))
    if "mode" in values:
        values["mode"] = CheckpointingMode[values["mode"]]
    options = CheckpointOptions(**values)
    coordinator = CheckpointCoordinator(
        options, first_number=case.get("first_number", 1), random=FixedDelay(case.get("first_delay", 0), options)
    )
    for step in case["steps"]:
        for round_ in range(step.get("repeat", 1)):
            line = step["event"].format(i=round_)
            expected = [action.format(i=round_) for action in step.get("then", [])]
            actions = coordinator.handle(event(step["at"], line))
            assert [told(action) for action in actions] == expected, step
            details = [action.detail for action in actions if isinstance(action, Refuse | FailQuery)]
            assert details == step.get("saying", details), step
        _check_state(coordinator, step)


def _check_state(coordinator: CheckpointCoordinator, step: dict[str, Any]) -> None:
    state = {
        "next": coordinator.next_deadline_ms,
        "pending": [attempt.number for attempt in coordinator.pending],
        "waiting": [request.request_id or "timer" for request in coordinator.waiting],
        "failures": coordinator.consecutive_failures,
        "alignment": [attempt.alignment.name for attempt in coordinator.pending],
        "alignment_deadline": [attempt.alignment_deadline_ms for attempt in coordinator.pending],
        "expires": [attempt.expires_at_ms for attempt in coordinator.pending],
    }
    stated = {key: step[key] for key in STATE & step.keys()}
    assert {key: state[key] for key in stated} == stated, step


def test_every_scenario_of_the_coordinator_has_a_case() -> None:
    stated = {case.values[0].get("scenario") for case in CASES}
    assert stated - {None} == COORDINATOR_SCENARIOS


def test_no_case_says_a_word_the_driver_does_not_read() -> None:
    said = {key for case in CASES for step in case.values[0]["steps"] for key in step}
    assert said <= STATE | {"at", "event", "then", "saying", "repeat"}
