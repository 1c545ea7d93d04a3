"""The examples of docs/policies.md run, and its data describes the policies beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.policies.retention import RetainedSnapshot, RetentionContext
from dagster_ckpt.policies.serialization import read_retention, read_trigger
from dagster_ckpt.policies.trigger import TriggerProgress

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
DOCUMENTS = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
ROWS = re.findall(r"^\| `([A-Z]\w+\(.*?\))` \|.*\| `(\w+: .*?)` \|$", PAGE, re.M)


def after_all_programs() -> dict[str, Any]:
    """The names that a reader has who runs every example in order, and each configuration on the way."""
    names: dict[str, Any] = {"configs": []}
    exec("from datetime import timedelta\nfrom dagster_ckpt.policies.retention import *", names)
    for program in PROGRAMS:
        exec(program, names)
        names["configs"].append(names["config"])
    return names


def test_the_examples_run() -> None:
    names = after_all_programs()
    snapshots = [RetainedSnapshot(f"chk-{n}", number=n, is_verified=n == 1) for n in (1, 2, 3, 4, 5)]
    kept = names["configs"][1].options.retention_policy.keep(snapshots, RetentionContext(0))
    assert [snapshot.number for snapshot in kept] == [1, 3, 4, 5]
    idle = TriggerProgress(now_ms=70_000, wall_ms=0, started_ms=0)
    assert names["config"].options.trigger_policy.due_at_ms(idle) is None


@pytest.mark.parametrize(("policy", "written"), ROWS)
def test_each_policy_of_a_table_is_the_data_beside_it(policy: str, written: str) -> None:
    names = after_all_programs()
    exec("from dagster_ckpt.policies.trigger import *", names)
    expected, data = eval(policy, names), yaml.safe_load(written)
    read = read_retention if hasattr(expected, "keep") else read_trigger
    assert read(data) == expected


def test_the_tables_name_every_policy_that_data_can_name() -> None:
    names = {written.partition(":")[0] for _, written in ROWS}
    with pytest.raises(ValueError, match="must be one of") as retention:
        read_retention({"no": 1})
    with pytest.raises(ValueError, match="must be one of") as trigger:
        read_trigger({"no": 1})
    for name in names:
        assert name in f"{retention.value} {trigger.value}"
    told = re.findall(r"\w+", f"{retention.value} {trigger.value}".partition("one of")[2])
    others = {
        "any_of",
        "all_of",
        "own",
        "savepoint_history",
        "trigger",
        "is",
        "no",
        "1",
        "but",
        "must",
        "be",
        "one",
        "of",
    }
    assert set(told) - others <= names


def test_the_yaml_is_what_a_component_takes() -> None:
    first = yaml.safe_load(DOCUMENTS[0])["checkpointing"]
    options = CheckpointConfig(**first).options
    assert str(options.retention_policy).startswith("(Latest(count=3) | NewestPer(")
    assert str(options.trigger_policy).startswith("(Interval(interval_ms=60000")
    assert yaml.safe_load(DOCUMENTS[1])["checkpointing"]["retention"]["any_of"][1]["own"]["arguments"] == {"hour": 6}
