"""The Python examples of every page run, in their order; YAML and TOML are read by what reads them for a user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import dagster as dg
import pytest
import yaml

import dagster_ckpt
from dagster_ckpt import streaming_asset
from dagster_ckpt.cli.command import Deployment
from dagster_ckpt.client.client import Client
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.flink.execution_config import ConfiguredProgram
from tests.support.page_blocks import DOCS, Block, blocks_of

ROOT = DOCS.parent
# Whose examples need more than a process: the tests that run them.
ELSEWHERE = {
    "custom-storage.md": "tests/storage/test_custom_storage.py",
    "environment.md": "tests/flink/test_environment_script.py",
    "get-started.md": "tests/e2e/test_get_started.py",
    "migrate.md": "tests/recovery/test_adopt.py",
    "guides/backfill-then-stream.md": "tests/recovery/test_backfill_then_stream.py",
    "guides/delete-a-customers-data.md": "tests/client/test_state_editing.py",
    "guides/debug-a-batch.md": "tests/client/test_debug_batch.py",
    "guides/look-into-state.md": "tests/client/test_state_with_spark.py",
    "policies.md": "tests/policies/test_policies_page.py",
    "python-api.md": "tests/client/test_python_api_page.py",
    "guides/test-a-stream.md": "tests/testing/test_run_to_completion.py",
    "sinks.md": "tests/sinks/test_sink_of_your_own.py",
}
PAGES = ["../README.md", *(str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md")))]
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples take for granted: a stream `orders`, and functions of the reader."""

    @streaming_asset()
    def orders(context: Any, pyspark: Any) -> Any: ...

    @streaming_asset(name="us_orders", translator=dagster_ckpt.StreamTranslator("us"))
    def us_orders(context: Any, pyspark: Any) -> Any: ...

    monkeypatch.chdir(tmp_path)
    transitions = logging.getLogger("dagster_ckpt.transitions")
    handlers = list(transitions.handlers)
    yield {
        "__name__": "page",
        "__file__": str(tmp_path / "definitions.py"),
        **{"dg": dg, "orders": orders, "us_orders": us_orders},
        "CHECKPOINTING": dagster_ckpt.CheckpointConfig(interval=60_000),
        "page_on_call": print,
        "client": create_autospec(Client, instance=True),
        "env": ConfiguredProgram(),
        "EmbeddedRocksDBStateBackend": EmbeddedRocksDBStateBackend,
    }
    # An example adds one, whose file lies in the folder of the test.
    for handler in set(transitions.handlers) - set(handlers):
        transitions.removeHandler(handler)
        handler.close()


def run(block: Block, page: dict[str, Any], name: str) -> None:
    # As a user runs it: without the `__future__` imports of this file.
    exec(compile(block.text, name, "exec", dont_inherit=True), page)


@pytest.mark.parametrize("name", [page for page in WITH_PYTHON if page not in ELSEWHERE])
def test_the_examples_of_a_page_run(page: dict[str, Any], name: str) -> None:
    for block in blocks_of(name):
        if block.language == "python":
            run(block, page, name)


def test_the_pages_that_other_tests_run_are_there() -> None:
    assert set(ELSEWHERE) <= set(WITH_PYTHON)
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../README.md", "get-started.md"])
def test_the_definitions_of_a_first_stream_load(page: dict[str, Any], name: str) -> None:
    (block,) = [block for block in blocks_of(name) if block.file_name == "definitions.py"]
    run(block, page, name)
    defs: dg.Definitions = page["defs"]
    dg.Definitions.validate_loadable(defs)
    assert defs.resolve_job_def("orders_stream")


def test_an_alert_is_sent_for_a_check_that_failed(page: dict[str, Any]) -> None:
    sent: list[str] = []
    page["page_on_call"] = sent.append
    for block in blocks_of("guides/alert-on-missing-checkpoints.md"):
        if block.language == "python":
            run(block, page, "alerts")
    with dg.DagsterInstance.ephemeral() as instance:
        for passed in (True, False):
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("orders"),
                    check_name="checkpoint_age",
                    passed=passed,
                    severity=dg.AssetCheckSeverity.ERROR,
                    description="no snapshot for 6 minutes",
                )
            )
        context = dg.build_sensor_context(instance)
        page["failed_check_alerts"](context)
        page["failed_check_alerts"](dg.build_sensor_context(instance, cursor=context.cursor))
    assert sent == ["orders: checkpoint_age: no snapshot for 6 minutes"]


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, block.text) for name in PAGES for block in blocks_of(name) if block.language == "toml"],
)
def test_a_file_of_the_command_line_is_read(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster_ckpt.toml").write_text(
        text.replace("postgresql+psycopg://streams@db/streams", "sqlite:///c.db")
    )
    monkeypatch.chdir(tmp_path)
    Deployment().connect(may_create=True).close()


@pytest.mark.parametrize("name", PAGES)
def test_yaml_is_yaml(name: str) -> None:
    for block in blocks_of(name):
        if block.language == "yaml":
            assert yaml.safe_load(block.text)
