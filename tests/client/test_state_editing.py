"""An edited savepoint: what it records, that nothing else changes, and that only a start that names it uses it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client, StateEdit
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import OptionError, StateRewriteError, UnsupportedSparkError
from dagster_ckpt.orchestration.jobs.operator_jobs import build_operator_jobs
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.rewriter import Rewriter
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.needs import needs_rewriter
from tests.support.small_spark import small_spark

GUIDE = Path(__file__).parents[2] / "docs/guides/delete-a-customers-data.md"
pytestmark = pytest.mark.spark
writes_state = needs_rewriter()
AFTER_4 = {k: (15, 408 + k) for k in range(4)}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with small_spark({"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}) as session:
        yield session


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    """A stopped stream after batch 4, with a savepoint."""
    golden = GoldenStream(tmp_path).make()
    golden.snapshot(SnapshotKind.SAVEPOINT, label="before-forgetting")
    golden.end(ExecutionStatus.SUSPENDED)
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path / 'catalog.db'}")
    yield golden
    assert not [path for path in (tmp_path / "live" / SCRATCH_FOLDER).rglob("*") if path.is_file()]
    golden.close()


def rows(client: Client, spark: SparkSession, point: str) -> dict[int, tuple[int, ...]]:
    with client.state(STREAM, point, spark=spark) as state:
        return {row.key.k: tuple(row.value) for row in state.rows().collect()}


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@writes_state
def test_a_key_is_forgotten_in_a_savepoint_of_its_own(spark: SparkSession, golden: GoldenStream) -> None:
    live, old = content(golden.live), content(golden.root / "savepoints")
    client = Client(golden.stream.catalog, origin="ada")
    # A condition means what it means in the caller's session: there, second 2 is at nine o'clock.
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    at_nine = StateEdit(forget="k = 2 AND hour(timestamp_seconds(k)) = 9")

    try:
        done = client.edit_state(STREAM, at_nine, reason="request 4711", label="forgotten", spark=spark)
    finally:
        spark.conf.unset("spark.sql.session.timeZone")

    assert content(golden.live) == live
    assert old.items() <= content(golden.root / "savepoints").items()
    assert rows(client, spark, "forgotten") == {k: value for k, value in AFTER_4.items() if k != 2}
    assert rows(client, spark, "before-forgetting") == AFTER_4
    made = done.savepoint
    assert (made.trigger, made.batch_id, made.label, done.rows) == (SnapshotTrigger.EDIT, 4, "forgotten", 1)
    edit: Any = made.properties["edit"]
    assert (edit["by"], edit["reason"], edit["location"]) == ("ada", "request 4711", done.edited_from.location)
    assert edit["changes"] == {"default of operator 0 (stateStoreSave)": {"ADDED": 0, "REMOVED": 1, "CHANGED": 0}}
    assert made.properties["parent_snapshot_id"] == done.edited_from.snapshot_id
    assert golden.stream.store.verify(made.location or "") == []
    assert any("older snapshots contain the previous state" in message for message in done.messages())
    _used_only_by_name(golden, made)
    with client.state(STREAM, "live", spark=spark) as state:
        assert state.rows().where("key.k = 2").count() == 0


def _used_only_by_name(golden: GoldenStream, made: SnapshotRecord) -> None:
    snapshots = golden.stream.catalog.snapshots
    assert made.snapshot_id not in {each.snapshot_id for each in snapshots.restorable(STREAM)}
    plan = planned_start(golden.stream, StartFrom("latest-savepoint"))
    assert plan.snapshot is not None
    assert plan.snapshot.label == "before-forgetting"
    golden.start("forgotten")
    # A recovery goes on from it: the timeline began with it.
    assert made.snapshot_id in {each.snapshot_id for each in snapshots.restorable(STREAM)}


@pytest.mark.thorough
@writes_state
def test_rows_are_replaced_and_a_table_becomes_the_state(spark: SparkSession, golden: GoldenStream) -> None:
    client = Client(golden.stream.catalog)
    with client.state(STREAM, "before-forgetting", spark=spark) as state:
        corrected = F.col("value").withField("count", F.lit(100).cast("long"))
        row = state.rows().where("key.k = 3").withColumn("value", corrected)
        client.edit_state(STREAM, StateEdit(0, replace=row), reason="twice", label="corrected", spark=spark)
        # Of several edits of one key, the last decides.
        wrong = state.rows().where("key.k in (0, 3)").withColumn("value", corrected)
        edits = [
            StateEdit(0, replace=wrong),
            StateEdit(forget="k = 0"),
            StateEdit(0, forget="k in (1, 3)", replace=row),
        ]
        client.edit_state(STREAM, edits, reason="both", snapshot="before-forgetting", label="both", spark=spark)
        whole = StateEdit("stateStoreSave", forget="true", replace=row)
        client.edit_state(STREAM, whole, reason="table", snapshot="before-forgetting", label="table", spark=spark)
    assert rows(client, spark, "corrected") == AFTER_4 | {3: (100, 411)}
    assert rows(client, spark, "both") == {2: AFTER_4[2], 3: (100, 411)}
    assert rows(client, spark, "table") == {3: (100, 411)}


@writes_state
def test_what_cannot_be_done_is_refused_and_leaves_no_savepoint(spark: SparkSession, golden: GoldenStream) -> None:
    client = Client(golden.stream.catalog)
    before = content(golden.root / "savepoints")
    for edit, how, error, why in (
        (StateEdit(forget="user_id = 7"), {"reason": "x"}, StateRewriteError, "only the columns k"),
        (StateEdit(3, forget="k = 7"), {"reason": "x"}, OptionError, "operator 3"),
        (StateEdit(forget="k = 7"), {"reason": " "}, OptionError, "reason is empty"),
        (StateEdit(forget="k = 7"), {"reason": "x", "snapshot": "live"}, OptionError, "Take a savepoint first"),
    ):
        arguments: dict[str, Any] = how
        with pytest.raises(error, match=why):
            client.edit_state(STREAM, edit, spark=spark, **arguments)
    assert content(golden.root / "savepoints") == before
    assert len(client.list_snapshots(STREAM, status=None)) == 1


def test_a_spark_that_cannot_write_state_is_refused_by_name(spark: SparkSession, golden: GoldenStream) -> None:
    client = Client(golden.stream.catalog)
    by_itself = installed_release().has(Feature.STATE_REWRITER)
    if by_itself or Rewriter.find() is not None:
        assert client.edit_state(STREAM, StateEdit(forget="k = 9"), reason="x", spark=spark).rows == 0
        if by_itself:
            return
        # It would have to be sent to the other Spark.
        edit, why = StateEdit(forget=F.col("k") == 9), r"cannot get a condition that is a column\. Give it as SQL"
    else:
        edit, why = StateEdit(forget="k = 7"), "other rows.* `dagster-ckpt rewriter install`"
    before = len(client.list_snapshots(STREAM, status=None))
    with pytest.raises(UnsupportedSparkError, match=why):
        client.edit_state(STREAM, edit, reason="x", spark=spark)
    assert len(client.list_snapshots(STREAM, status=None)) == before


@writes_state
@pytest.mark.thorough
def test_the_guide_runs(spark: SparkSession, golden: GoldenStream, tmp_path: Path) -> None:
    text = GUIDE.read_text()
    for name, value in (
        ("sqlite:////var/lib/streams/catalog.db", f"sqlite:///{tmp_path / 'catalog.db'}"),
        ('"orders"', f'"{STREAM}"'),
        (" orders ", f" {STREAM} "),
        ("user_id", "k"),
        ("k = 7", "k = 2"),
    ):
        text = text.replace(name, value)
    [_stop, show, forget, _restart, remaining] = re.findall(r"^\$ dagster-ckpt (.*)$", text, re.MULTILINE)
    asks = CliRunner().invoke(commands(), shlex.split(forget))
    assert "confirm with --yes" in asks.output
    for line in (show, f"{forget} --yes"):
        result = CliRunner().invoke(commands(), shlex.split(line))
        assert result.exit_code == 0, result.output + str(result.exception)
    left = CliRunner().invoke(commands(), shlex.split(remaining))
    assert left.exit_code == 3
    assert re.findall(r"forgotten-4711 at batch 4: (savepoint \S+|the live directory)", left.output) == [
        "savepoint before-forgetting",
        "the live directory",
    ]
    with Client(golden.stream.catalog) as client:
        assert set(rows(client, spark, "forgotten-4711")) == {0, 1, 3}
        with client.state(STREAM, "before-forgetting", spark=spark) as state:
            names: dict[str, Any] = {"corrected_table": state.rows().where("key.k = 1")}
            for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
                exec(compile(example, GUIDE.name, "exec"), names)
            assert rows(client, spark, names["made"].savepoint.snapshot_id) == {1: AFTER_4[1]}


@writes_state
@pytest.mark.thorough
def test_the_job_shows_the_savepoint_and_what_is_older(
    spark: SparkSession, golden: GoldenStream, tmp_path: Path
) -> None:
    @streaming_asset(name=STREAM)
    def asset(context: Any) -> Any: ...

    resources = {
        "pyspark": dg.ResourceDefinition.hardcoded_resource(SimpleNamespace(spark_session=spark)),
        "checkpoint_storage": CheckpointStorageResource(
            path=f"file://{tmp_path}/snapshots", savepoint_path=f"file://{tmp_path}/savepoints"
        ),
        "state_backend": StateBackendResource(live_directory=str(tmp_path / "live")),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{tmp_path / 'catalog.db'}"),
    }
    [job] = [job for job in build_operator_jobs([asset]) if job.name == "forget_key_job"]
    config = {"stream_id": STREAM, "where": "k = 2", "reason": "request 4711", "label": "forgotten"}
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(
            run_config={"ops": {"forget_key": {"config": config}}}, resources=resources, instance=instance
        )
    [output] = [event for event in result.all_events if event.is_successful_output]
    page = {name: value.value for name, value in output.step_output_data.metadata.items()}
    assert page["dagster_ckpt/rows"] == 1
    assert page["dagster_ckpt/older_snapshots"] == ["savepoint before-forgetting at batch 4"]
    [edited] = [each for each in golden.stream.catalog.snapshots.completed(STREAM) if each.label == "forgotten"]
    assert result.output_for_node("forget_key") == edited.location
    assert "forget_key_job run" in str(edited.properties["edit"])
