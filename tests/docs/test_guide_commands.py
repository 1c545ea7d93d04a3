"""The commands of the guides run, in the order of the page, on a stream whose process answers them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import requests
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.recovery import query_plan_check
from dagster_ckpt.spark.versions import RELEASES
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.page_blocks import DOCS, blocks_of
from tests.support.stream_program import StreamProgram

# The savepoint that the pages start from, whether or not they take it.
LABEL = "before-release-42"
DEPLOYMENT = "3f6c9b1e-7a52-4d0e-9c41-5b8a2f6d7e10"
# Their commands start Spark: tests/client/test_debug_batch.py, test_state_with_spark.py, test_state_editing.py and
# tests/cli/test_check.py and tests/recovery/test_adopt_with_spark.py run them.
WITH_SPARK = [
    *("check-a-release.md", "debug-a-batch.md", "declarative-pipelines.md", "delete-a-customers-data.md"),
    "look-into-state.md",
]
# Its command serves until Ctrl-C: tests/ui/test_checkpoint_page.py and test_metrics.py.
SERVING = ["metrics.md"]
# Java archives its classes, for which Spark starts twice.
WITH_AN_ARCHIVE = "guides/recover-in-seconds.md"
GUIDES = [path for path in sorted((DOCS / "guides").glob("*.md")) if path.name not in (*WITH_SPARK, *SERVING)]
PAGES = ["command-line.md", *(str(path.relative_to(DOCS)) for path in GUIDES)]


def commands_of(page: str) -> list[list[str]]:
    """The arguments of each call of `dagster-ckpt` in the console blocks of a page."""
    lines = [line for block in blocks_of(page) for line in block.commands]
    return [
        shlex.split(line.partition(" | ")[0], comments=True)[1:] for line in lines if line.startswith("dagster-ckpt ")
    ]


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path)
    options = CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION", num_retained=5).options
    golden.stream = replace(golden.stream, options=options)
    golden.make().snapshot()
    golden.end()
    monkeypatch.setattr(requests, "POLL_S", 0.02)
    # `rewriter install` replaces what is there.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path}/catalog.db")
    yield golden
    golden.close()
    # A whole PySpark.
    shutil.rmtree(tmp_path / "data", ignore_errors=True)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.thorough if page == WITH_AN_ARCHIVE else ())
        for page in PAGES
        if commands_of(page)
    ],
)
def test_the_commands_of_a_page_run(golden: GoldenStream, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_commands(golden, page, monkeypatch)


def test_each_command_prints_json(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    run_commands(golden, "command-line.md", monkeypatch, "--json")


def run_commands(golden: GoldenStream, page: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run the commands of a page; with `--json` each prints one document."""
    here = {
        "orders": STREAM,
        "orders+": f"{STREAM}+",
        "batch-640": "batch-4",
        "s3://new-bucket/savepoints": str(golden.root / "new-bucket"),
        "s3://second/checkpoints": str(golden.root / "second"),
        "s3://second/checkpoints/orders/chk-81": str(golden.root / "second" / STREAM / "chk-1"),
        "sqlite:////var/lib/streams/new.db": f"sqlite:///{golden.root / 'new.db'}",
        "s3://bucket/checkpoints": str(golden.root / "snapshots"),
        "/var/lib/streams/live": str(golden.root / "live"),
        "/var/cache/spark.jsa": str(golden.root / "spark.jsa"),
        DEPLOYMENT: golden.stream.catalog.deployment_id,
    }
    if not any("--label" in words and LABEL in words for words in commands_of(page)):
        golden.snapshot(SnapshotKind.SAVEPOINT, LABEL)
    program = StreamProgram(golden)
    if page == "guides/lost-catalog.md":
        program.stop()
        monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{golden.root}/new.db")
    # The program is none of Spark, which would have to rewrite state.
    monkeypatch.setattr(query_plan_check, "installed_release", lambda: RELEASES[-1])
    try:
        for words in commands_of(page):
            more = [option for option in options if option not in words]
            done = CliRunner().invoke(commands(), [*(here.get(word, word) for word in words), *more])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception}"
            if options:
                assert json.loads(done.stdout) is not None, shlex.join(words)
    finally:
        program.end()
