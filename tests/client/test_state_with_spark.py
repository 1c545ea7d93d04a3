"""Looking into the state of a stream: what is read, held and left behind. Every operator: tests/spark."""

from __future__ import annotations

import json
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

from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.client.state_browsing import StreamState, StreamStateDiff, show_differences, show_state, write_rows
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import NothingCommittedError, OptionError, SnapshotNotFoundError
from dagster_ckpt.orchestration.jobs.inspection_jobs import build_inspection_jobs
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.restore import Filler, materialize
from dagster_ckpt.state.diff import Change
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import GOLDEN, STREAM, GoldenStream
from tests.support.small_spark import small_spark

GUIDE = Path(__file__).parents[2] / "docs/guides/look-into-state.md"
pytestmark = pytest.mark.spark
# State after batch 4: how often each key was seen, and its largest value.
AFTER_4 = {k: (15, 408 + k) for k in range(4)}
AFTER_3 = {k: (12, 308 + k) for k in range(4)}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with small_spark({"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}) as session:
        yield session


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    """A stream after batch 4 with a checkpoint of it, whose live directory went back to batch 3."""
    golden = GoldenStream(tmp_path, num_retained=1).make()
    golden.snapshot()
    earlier = golden.stream.live_directory(2, 0)
    store = open_store(FileSystemCheckpointStorage(f"file://{GOLDEN}"), STREAM)

    def fill(filler: Filler) -> None:
        store.extract(f"file://{GOLDEN}/golden/chk-1", lambda entry, chunks: filler(entry.path, chunks))

    materialize(earlier, fill)
    golden._writer.streams.switch_live_directory(earlier.url)
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path / 'catalog.db'}")
    yield golden
    assert not [path for path in (tmp_path / "live" / SCRATCH_FOLDER).rglob("*") if path.is_file()]
    golden.close()


def rows(state: StreamState) -> dict[int, tuple[int, ...]]:
    return {row.key.k: tuple(row.value) for row in state.rows().collect()}


@pytest.mark.thorough
def test_a_snapshot_and_the_live_directory_are_read(spark: SparkSession, golden: GoldenStream) -> None:
    with Client(golden.stream.catalog) as client:
        with client.state(STREAM, "chk-1", spark=spark) as state:
            assert (state.batch_id, str(state), rows(state)) == (4, "chk-1 at batch 4", AFTER_4)
            # A checkpoint that is subsumed meanwhile is held until it was read.
            [hold] = golden.stream.catalog.holds.on(state.snapshot.snapshot_id if state.snapshot else "")
            assert hold.holder == "reader of state"
        with client.state(STREAM, "live") as live:
            assert (live.batch_id, rows(live)) == (3, AFTER_3)
        # Cells of a notebook do not share a block.
        state = client.state(STREAM, operator="stateStoreSave", state="default")
        assert rows(state) == AFTER_4
        state.close()
        with pytest.raises(SnapshotNotFoundError, match="chk-9"):
            client.state(STREAM, "chk-9")
        with pytest.raises(OptionError, match="operator 5"):
            client.state(STREAM, operator=5)
        golden._writer.streams.forget_live_directory()
        with pytest.raises(NothingCommittedError, match="Name a snapshot instead"):
            client.state(STREAM, "live")


@pytest.mark.thorough
def test_two_points_are_compared(spark: SparkSession, golden: GoldenStream, tmp_path: Path) -> None:
    with StreamStateDiff(golden.stream, "live", "chk-1", spark=spark) as diff:
        [state] = diff.states
        assert state.counts == {Change.ADDED: 0, Change.REMOVED: 0, Change.CHANGED: 4}
        found = {row.key.k: (tuple(row.before), tuple(row.after)) for row in state.rows.collect()}
        assert found == {k: (AFTER_3[k], AFTER_4[k]) for k in range(4)}
        [shown] = show_differences(diff, limit=2)
        assert (shown.counts["CHANGED"], len(shown.first), shown.first[0][1]) == (4, 2, '{"k":0}')
        [url] = write_rows(((each.name, each.rows) for each in diff.states), str(tmp_path / "rows"))
        assert spark.read.parquet(url).count() == 4
    with StreamStateDiff(golden.stream, "chk-1", "latest") as same:
        assert same.is_empty


@pytest.mark.thorough
def test_what_is_shown_of_a_state_is_text(spark: SparkSession, golden: GoldenStream) -> None:
    with StreamState(golden.stream, "chk-1") as state:
        [shown] = show_state(state, where="k > 0 AND value.count = 15", limit=2, largest=1)
        assert (shown.rows, shown.columns) == (3, ("key", "value", "partition"))
        assert {first[0] for first in shown.first} <= {f'{{"k":{k}}}' for k in range(1, 4)}
        assert [each.rows for each in shown.largest] == [1]
        with pytest.raises(OptionError, match=r"Its columns are: k, key, value, partition"):
            show_state(state, where="user_id = 7")


def test_the_commands_print_tables_and_json(
    spark: SparkSession, golden: GoldenStream, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(commands(), ["state", *arguments])
        assert result.exit_code == 0, result.output + str(result.exception)
        return result.stdout

    shown = run("show", STREAM, "chk-1", "--where", "k = 2")
    assert "default of operator 0 (stateStoreSave): 1 rows" in shown
    assert '{"k":2}' in shown
    [state] = json.loads(run("show", STREAM, "live", "--limit", "0", "--json", "--write-to", str(tmp_path / "rows")))
    assert (state["rows"], state["first"]) == (4, [])
    assert spark.read.parquet(str(tmp_path / "rows/operator=0/state=default")).count() == 4
    assert "CHANGED" in run("diff", STREAM, "live", "chk-1")
    [difference] = json.loads(run("diff", STREAM, "chk-1", "chk-1", "--json"))
    assert set(difference["counts"].values()) == {0}

    capfd.readouterr()
    wrong = CliRunner().invoke(commands(), ["state", "show", STREAM, "--where", "k = 'seven'"])
    assert re.search(r"with the condition \"k = 'seven'\": \[CAST_INVALID_INPUT\]", wrong.stderr)
    assert "SQLQueryContextLogger" not in wrong.output + capfd.readouterr().err


@pytest.fixture
def settings_of_the_guide(golden: GoldenStream, tmp_path: Path) -> list[tuple[str, str]]:
    """What the guide names, and what it is here."""
    golden.snapshot(SnapshotKind.SAVEPOINT, label="before-release-42")
    return [
        ("sqlite:////var/lib/streams/catalog.db", f"sqlite:///{tmp_path / 'catalog.db'}"),
        ('"orders"', f'"{STREAM}"'),
        (" orders ", f" {STREAM} "),
        ("user_id", "k"),
    ]


def test_the_examples_of_the_guide_run(
    spark: SparkSession,
    settings_of_the_guide: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = GUIDE.read_text()
    for name, value in settings_of_the_guide:
        text = text.replace(name, value)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, GUIDE.name, "exec"), names)
    names["client"].close()
    assert "0 stateStoreSave default 2" in capsys.readouterr().out
    found = re.findall(r"^\$ dagster-ckpt (.*)$", text, re.MULTILINE)
    assert len(found) == 3
    for line in found:
        result = CliRunner().invoke(commands(), shlex.split(line))
        assert result.exit_code == 0, result.output + str(result.exception)


@pytest.mark.thorough
def test_the_jobs_show_tables_and_write_files(spark: SparkSession, golden: GoldenStream, tmp_path: Path) -> None:
    @streaming_asset(name=STREAM)
    def asset(context: Any) -> Any: ...

    resources = {
        "pyspark": dg.ResourceDefinition.hardcoded_resource(SimpleNamespace(spark_session=spark)),
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/snapshots"),
        "state_backend": StateBackendResource(live_directory=str(tmp_path / "live")),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{tmp_path / 'catalog.db'}"),
    }

    def page(op: str, **config: Any) -> dict[str, Any]:
        job = next(job for job in build_inspection_jobs([asset]) if job.name == f"{op}_job")
        configured = {"ops": {op: {"config": {"stream_id": STREAM, **config}}}}
        with dg.DagsterInstance.ephemeral() as instance:
            result = job.execute_in_process(run_config=configured, resources=resources, instance=instance)
        [output] = [event for event in result.all_events if event.is_successful_output]
        return dict(output.step_output_data.metadata)

    def cells(table: dg.TableMetadataValue) -> list[dict[str, Any]]:
        return [dict(record.data) for record in table.records]

    browsed = page("browse_state", snapshot="chk-1", where="k < 2", write_to=str(tmp_path / "rows"))
    name = {"operator": "0 stateStoreSave", "state": "default"}
    assert cells(browsed["dagster_ckpt/states"]) == [{**name, "rows": 2}]
    assert {each["key"] for each in cells(browsed["dagster_ckpt/largest_keys"])} == {'{"k":0}', '{"k":1}'}
    assert len(cells(browsed["dagster_ckpt/operator_0_default"])) == 2
    [url] = browsed["dagster_ckpt/written"].value
    assert spark.read.parquet(url).count() == 2

    compared = page("diff_state", before="live", after="chk-1", limit=1)
    assert cells(compared["dagster_ckpt/states"]) == [{**name, "added": 0, "removed": 0, "changed": 4, "note": "-"}]
    assert compared["dagster_ckpt/changed"].value == 4
    assert len(cells(compared["dagster_ckpt/operator_0_default"])) == 1
