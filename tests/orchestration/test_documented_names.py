"""README.md and docs/ name what is there: classes and functions, jobs, sensors and schedules, errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

import dagster_ckpt
from dagster_ckpt import errors, flink, orchestration, stream_definitions, streaming_asset

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Whose public names are documented by their modules.
ELSEWHERE = {
    "dagster_ckpt.client",
    "dagster_ckpt.client.platforms",
    "dagster_ckpt.flink",
    "dagster_ckpt.io.custom",
    "dagster_ckpt.orchestration",
    "dagster_ckpt.policies.restart",
    "dagster_ckpt.policies.retention",
    "dagster_ckpt.policies.trigger",
    "dagster_ckpt.sinks.sink",
    "dagster_ckpt.sinks.table",
    "dagster_ckpt.testing",
}
OURS = {*dagster_ckpt.__all__, *flink.__all__, *orchestration.__all__}
RESOURCES = ("pyspark", "checkpoint_storage", "state_backend", "checkpoint_catalog")
# What everybody knows from Python, and what never leaves the package.
NOT_EXPLAINED = {
    *(errors.CkptError, errors.OptionError, errors.OptionTypeError),
    *(errors.CutOvertakenError, errors.SnapshotAbortedError),
}


@streaming_asset()
def orders(context: Any, pyspark: Any) -> Any: ...


@streaming_asset()
def orders_v2(context: Any, pyspark: Any) -> Any: ...


def examples() -> list[ast.Module]:
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    return [ast.parse(block) for block in blocks]


def words() -> set[str]:
    return {word for page in PAGES for word in re.findall(r"`(\w+)`", page.read_text())}


def test_what_an_example_uses_is_imported_from_where_it_is_public() -> None:
    imports = [
        (node.module or "", alias.name)
        for example in examples()
        for node in ast.walk(example)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    ours = [(module, name) for module, name in imports if module.partition(".")[0] == "dagster_ckpt"]

    assert [(module, name) for module, name in ours if not hasattr(importlib.import_module(module), name)] == []
    assert {module for module, _ in ours} <= {"dagster_ckpt", *ELSEWHERE}
    assert {("dagster_ckpt", "HealthCheck"), ("dagster_ckpt.flink", "CustomCheckpointStorage")} <= set(ours)


def test_an_example_imports_what_it_uses_of_the_package() -> None:
    """The examples of one page build on each other."""
    for page in PAGES:
        blocks = [ast.parse(block) for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
        nodes = [node for block in blocks for node in ast.walk(block)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}

        assert used & OURS <= imported, page.name


@pytest.mark.parametrize("name", dagster_ckpt.__all__)
def test_every_public_name_has_an_example_in_its_docstring(name: str) -> None:
    assert "Example:" in (inspect.getdoc(getattr(dagster_ckpt, name)) or "")


def test_the_public_names_are_few_and_documented() -> None:
    named = dagster_ckpt.__all__

    # Functions for tables (`to_table`, `spark_packages`) and `StartFrom` on top of thirty.
    assert len(named) <= 34
    assert not [name for name in named if not (getattr(dagster_ckpt, name).__doc__ or "").strip()]
    # What both need is the same object in both.
    assert {"CheckpointConfig", "RestartStrategies"} == set(named) & set(flink.__all__)
    assert all(getattr(dagster_ckpt, name) is getattr(flink, name) for name in set(named) & set(flink.__all__))


@pytest.mark.parametrize("kind", ["job", "sensor", "schedule"])
def test_the_jobs_sensors_and_schedules_that_are_named_are_those_that_are_there(kind: str) -> None:
    definitions = stream_definitions(orders, replication=orchestration.PeriodicReplication("/second"))
    there = {str(each.name) for each in getattr(definitions, f"{kind}s")} - {"orders_stream"}
    named = {word for word in words() if re.fullmatch(rf"(?!build_|cron_|run_|test_)\w+_{kind}", word)}

    assert named == there


def test_every_error_is_explained() -> None:
    raised = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CkptError)}

    assert {kind.__name__ for kind in raised - NOT_EXPLAINED} <= words()


def launchpad_configs() -> list[tuple[str, dict[str, Any]]]:
    """The name of the op and its config, of each launchpad YAML on the pages."""
    blocks = [block for page in PAGES for block in re.findall(r"```yaml\n(ops:\n.*?)```", page.read_text(), re.DOTALL)]
    return [(op, given["config"]) for block in blocks for op, given in yaml.safe_load(block)["ops"].items()]


@pytest.mark.parametrize(("op", "config"), launchpad_configs())
def test_a_launchpad_config_on_a_page_is_valid(op: str, config: dict[str, Any]) -> None:
    resources = dict.fromkeys(RESOURCES, dg.ResourceDefinition.none_resource())
    definitions = dg.Definitions.merge(stream_definitions(orders, orders_v2), dg.Definitions(resources=resources))
    job = definitions.resolve_job_def("orders_stream" if op == "orders" else f"{op}_job")

    assert dg.validate_run_config(job, {"ops": {op: {"config": config}}})
