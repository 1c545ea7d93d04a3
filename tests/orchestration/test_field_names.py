"""A field of a component's YAML that there is not is told at its own line, with the nearest right name."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from dagster_ckpt.orchestration.component import StreamsComponent

PAGE = Path(__file__).parents[2] / "docs/components.md"
EXAMPLE = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)[0]

# What has to be there, by place.
NEEDED: dict[str, dict[str, Any]] = {
    "assets": {"key": "rates"},
    "savepoints": {"cron_schedule": "0 3 * * *"},
    "freshness": {"fail_after_ms": 60_000},
    "trigger": {"processing_time": "1 minute"},
    "transform": {"sql": "SELECT 1"},
    "checkpoint_storage": {"path": "file:///checkpoints"},
    "state_backend": {"live_directory": "/live"},
    "checkpoint_catalog": {"url": "sqlite:////catalog.db"},
}
STREAM = {"name": "rates", "sources": [{"name": "rates", "format": "rate"}], "sink": {"format": "console"}}
# Where, what is written there, and what was meant.
MISSPELLED: list[tuple[str, str, str]] = [
    ("", "strems", "streams"),
    ("", "health_check", "health_checks"),
    ("resources", "checkpoint_catalogue", "checkpoint_catalog"),
    ("resources.checkpoint_storage", "savepoint_pth", "savepoint_path"),
    ("resources.state_backend", "live_dir", "live_directory"),
    ("resources.checkpoint_catalog", "urll", "url"),
    ("streams.0", "checkpoint", "checkpointing"),
    ("streams.0.sources.0", "option", "options"),
    ("streams.0.transform", "functions", "function"),
    ("streams.0.sink", "partitionBy", "partition_by"),
    ("streams.0.trigger", "available", "available_now"),
    ("streams.0.checkpointing", "num_retaned", "num_retained"),
    ("streams.0.checkpointing", "intervall", "interval"),
    ("streams.0.restart_strategy", "kindd", "kind"),
    ("streams.0.upgrade", "moed", "mode"),
    ("streams.0.savepoints", "cron", "cron_schedule"),
    ("streams.0.freshness", "fail_after", "fail_after_ms"),
    ("streams.0.health", "source_retention", "source_retention_ms"),
    ("streams.0.assets.0", "owner", "owners"),
]


def with_field(place: str, name: str) -> dict[str, Any]:
    """A component that is right but for one field."""
    attributes: dict[str, Any] = {"streams": [deepcopy(STREAM)]}
    at: Any = attributes
    for step in filter(None, place.split(".")):
        needed = dict(NEEDED.get(step, {}))
        at = at[int(step)] if step.isdecimal() else at.setdefault(step, [needed] if step == "assets" else needed)
    at[name] = "hunter2"
    return attributes


def loaded(attributes: dict[str, Any]) -> str:
    """What loading it says."""
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=StreamsComponent,
            defs_yaml_contents={"type": "dagster_ckpt.orchestration.StreamsComponent", "attributes": attributes},
        )
        with (
            pytest.raises(Exception, match="Error while loading") as error,
            sandbox.load_component_and_build_defs(path),
        ):
            pass
        line = next(
            number
            for number, text in enumerate((path / "defs.yaml").read_text().splitlines(), start=1)
            if "hunter2" in text
        )
    assert isinstance(error.value.__cause__, ValidationError)
    return str(error.value.__cause__).replace(f"defs.yaml:{line}`", "AT ITS LINE")


@pytest.mark.parametrize(("place", "wrong", "right"), MISSPELLED, ids=str)
def test_loading_names_it_at_its_line_with_the_nearest_right_name(place: str, wrong: str, right: str) -> None:
    said = loaded(with_field(place, wrong))

    where = ".".join(filter(None, ["attributes", place, wrong]))
    assert re.search(rf"`{re.escape(where)} at .*AT ITS LINE\n", said), said
    assert f"There is no field {wrong} here. Did you mean {right}? " in said
    assert "Input should be a valid string" not in said
    assert "hunter2" not in said


@pytest.mark.parametrize(("place", "wrong", "right"), MISSPELLED, ids=str)
def test_the_schema_that_dg_check_yaml_reads_names_it(place: str, wrong: str, right: str) -> None:
    validator = Draft202012Validator(StreamsComponent.model().model_json_schema())
    attributes = with_field(place, wrong)

    told = [error for error in validator.iter_errors(attributes) if repr(wrong) in error.message]

    assert [".".join(map(str, error.absolute_path)) for error in told] == [place]
    assert told[0].message.startswith(f"{wrong!r} is not one of [")
    assert repr(right) in told[0].message


def test_the_example_of_the_page_is_right_for_the_schema() -> None:
    validator = Draft202012Validator(StreamsComponent.model().model_json_schema())

    assert [error.message for error in validator.iter_errors(yaml.safe_load(EXAMPLE)["attributes"])] == []


def test_any_part_may_be_a_template() -> None:
    validator = Draft202012Validator(StreamsComponent.model().model_json_schema())
    part = "{{ shared }}"

    for attributes in (
        {"streams": part},
        {"streams": [{**STREAM, "checkpointing": part, "sink": part}]},
        {"streams": [STREAM], "resources": {"checkpoint_storage": part}},
    ):
        assert [error.message for error in validator.iter_errors(attributes)] == []


def test_what_else_is_wrong_is_told_once() -> None:
    said = loaded({"streams": [{**STREAM, "checkpointing": {"num_retained": "hunter2"}}]})

    assert "attributes.streams.0.checkpointing.num_retained at" in said
    assert "1 validation error" in said
