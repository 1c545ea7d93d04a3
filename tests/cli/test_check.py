"""The verdict on the code of a code location, from a terminal, in CI, in pytest and in Dagster."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from dagster_ckpt import run_stream
from dagster_ckpt.cli.main import commands
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.orchestration.query import streams_of
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.testing import assert_compatible
from tests.docs.test_guide_commands import commands_of
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark
CODE = """
import dagster as dg
from pyspark.sql import functions as F
from dagster_ckpt import (
    CheckpointCatalogResource, CheckpointStorageResource, SparkSessionResource, StateBackendResource,
    stream_definitions, streaming_asset,
)
from dagster_ckpt.orchestration import StateBackendKind

HERE = "{folder}"
SOURCES, KEY = ["a"], "value"

@streaming_asset(key_prefix="shop", stream_id="orders")
def orders(context, pyspark: SparkSessionResource, greeting: dg.ResourceParam[str]):
    context.log.info(greeting)
    return describe(pyspark.spark_session)

def describe(spark):
    frames = [spark.readStream.schema("value long, other long").json(f"{{HERE}}/{{each}}") for each in SOURCES]
    frame = frames[0]
    for each in frames[1:]:
        frame = frame.union(each)
    counts = frame.groupBy(KEY).count()
    return counts.writeStream.outputMode("update").foreachBatch(take).trigger(availableNow=True)

def take(frame, _batch):
    frame.collect()

defs = dg.Definitions.merge(
    stream_definitions(orders),
    dg.Definitions(resources={{
        "pyspark": SparkSessionResource(),
        "greeting": "hello",
        "checkpoint_storage": CheckpointStorageResource(path=f"{{HERE}}/snapshots"),
        "state_backend": StateBackendResource(live_directory=f"{{HERE}}/live", kind=StateBackendKind.HASHMAP),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{{HERE}}/catalog.db"),
    }}),
)
"""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.fixture
def module(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `definitions` of a stream that has run."""
    (tmp_path / "definitions.py").write_text(CODE.format(folder=tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for source in "ab":
        (tmp_path / source).mkdir()
        lay_file(tmp_path / source, 0, [{"value": 1, "other": 2}])
    monkeypatch.delitem(sys.modules, "definitions", raising=False)
    found = importlib.import_module("definitions")
    run_stream(
        "orders",
        found.describe,
        catalog=f"sqlite:///{tmp_path}/catalog.db",
        storage=f"{tmp_path}/snapshots",
        live_root=f"{tmp_path}/live",
        spark=spark,
    )
    return found


def check(*options: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(commands(), ["-m", "definitions", "check", "orders", "--json", *options])
    assert done.stdout, f"{done.output}\n{done.exception}"
    return done.exit_code, json.loads(done.stdout)


def test_each_verdict_has_an_exit_status(module: ModuleType) -> None:
    status, report = check()
    assert (status, report["verdict"]) == (0, "SAME"), report

    module.SOURCES = ["a", "b"]
    status, report = check()
    assert (status, report["verdict"], report["options"]) == (5, "MIGRATABLE", {"map_sources": "0=0,1=new"})
    status, report = check("--map-sources", "0=new:latest,1=new")
    assert (status, report["verdict"]) == (5, "MIGRATABLE")
    assert any("the files that come after the 1 that are there now" in str(note) for note in report["notes"])  # type: ignore[attr-defined]

    module.SOURCES, module.KEY = ["a"], "other"
    status, report = check()
    assert (status, report["verdict"]) == (3, "INCOMPATIBLE")
    assert any("key 1: value bigint -> other bigint" in str(step) for step in report["steps"])  # type: ignore[attr-defined]
    status, report = check("--accept-plan-change")
    assert (status, report["verdict"]) == (0, "COMPATIBLE")


def test_the_commands_of_the_guide_run(module: ModuleType) -> None:
    del module
    for words in commands_of("guides/check-a-release.md"):
        done = CliRunner().invoke(commands(), words)
        assert done.exit_code == 0, done.output
        assert "orders: SAME, compared with batch 0" in done.output


@pytest.mark.thorough
def test_a_test_and_a_run_in_dagster_fail_for_a_changed_key(module: ModuleType) -> None:
    assert_compatible("shop/orders", module.defs)
    job = module.defs.resolve_job_def("check_job")
    config = {"ops": {"check": {"config": {"stream_id": "orders"}}}}
    assert job.execute_in_process(run_config=config).output_for_node("check")["verdict"] == "SAME"

    module.KEY = "other"

    with pytest.raises(AssertionError, match="orders: INCOMPATIBLE"):
        assert_compatible("orders", module.defs)
    assert not job.execute_in_process(run_config=config, raise_on_error=False).success


@pytest.mark.thorough
def test_a_machine_without_the_live_directory_compares_with_the_newest_snapshot(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CliRunner().invoke(commands(), ["-m", "definitions", "savepoint", "orders", "--label", "june"])
    (tmp_path / "live").rename(tmp_path / "elsewhere")
    status, report = check()
    assert (status, report["verdict"]) == (0, "SAME")
    assert "june" in str(report["compared_with"])

    def unreachable(*_arguments: object) -> None:
        raise StorageAccessError("no credentials for the bucket")

    with monkeypatch.context() as without_storage:
        without_storage.setattr(ObjectSnapshotStore, "manifest", unreachable)
        status, report = check()
        assert (status, report["verdict"]) == (0, "COMPATIBLE"), report
        assert any("not compared: no credentials" in str(step) for step in report["steps"])  # type: ignore[attr-defined]

        module.KEY = "other"
        status, report = check()
        assert (status, report["verdict"]) == (3, "INCOMPATIBLE")
        assert any("key 1: value bigint -> other bigint" in str(step) for step in report["steps"])  # type: ignore[attr-defined]

    # A start would be refused.
    module.KEY = "value"
    (tmp_path / "snapshots").rename(tmp_path / "gone")
    status, report = check()
    assert (status, report["verdict"]) == (3, "INCOMPATIBLE")
    assert any("There is no snapshot" in str(step) for step in report["steps"])  # type: ignore[attr-defined]


def test_a_stream_that_never_ran_has_nothing_to_fit(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "catalog.db").unlink()
    assert [stream.stream_id for stream in streams_of(module.defs)] == ["orders"]
    status, report = check()
    assert (status, report["verdict"], report["steps"]) == (0, "SAME", [])
