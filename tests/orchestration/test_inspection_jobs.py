"""The doctor and the verification as Dagster jobs: typed configuration in, a readable page and plain data out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.orchestration.jobs.inspection_jobs import build_inspection_jobs
from dagster_ckpt.orchestration.metadata import markdown_table
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset, stream_handle
from tests.support import verbs
from tests.support.as_writer import as_writer


@pytest.fixture
def resources(tmp_path: Path, catalog_resource: CheckpointCatalogResource) -> dict[str, Any]:
    return {
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/snapshots"),
        "state_backend": StateBackendResource(live_directory=str(tmp_path / "live")),
        "checkpoint_catalog": catalog_resource,
    }


@pytest.fixture
def live(tmp_path: Path, catalog: Catalog) -> Path:
    """A stateless query that has committed batches 0 and 1 of a file source."""
    root = tmp_path / "live" / "orders" / "live-1"
    offsets = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {"spark.sql.shuffle.partitions": "1"}}
    files = {"metadata": json.dumps({"id": "11111111-2222"})}
    for batch in range(2):
        entry = {"path": f"file:///in/{batch}.json", "timestamp": 1, "batchId": batch}
        files[f"sources/0/{batch}"] = f"v1\n{json.dumps(entry)}"
        files[f"offsets/{batch}"] = "\n".join(["v1", json.dumps(offsets), json.dumps({"logOffset": batch})])
        files[f"commits/{batch}"] = 'v1\n{"nextBatchWatermarkMs":0}'
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    as_writer(catalog).streams.switch_live_directory(str(root))
    return root


@pytest.fixture
def savepoint(live: Path, orders: StreamingAsset, resources: dict[str, Any]) -> SnapshotRecord:
    job = stream_handle(orders, SimpleNamespace(**resources))
    taken = verbs.trigger_savepoint(job, origin="a test", label="before")
    job.catalog.close()
    return taken


def run(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, op: str, **config: Any
) -> dg.ExecuteInProcessResult:
    job = next(job for job in build_inspection_jobs([orders]) if job.name == f"{op}_job")
    return job.execute_in_process(
        run_config={"ops": {op: {"config": {"stream_id": "orders", **config}}}},
        resources=resources,
        instance=instance,
        raise_on_error=False,
    )


def shown(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The metadata on the run's page, of a step that succeeded or failed."""
    for event in result.all_events:
        if event.is_successful_output:
            return {name: value.value for name, value in event.step_output_data.metadata.items()}
        if event.is_step_failure and event.step_failure_data.user_failure_data is not None:
            return {name: value.value for name, value in event.step_failure_data.user_failure_data.metadata.items()}
    return {}


def test_a_healthy_directory_is_a_green_run(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, savepoint: SnapshotRecord
) -> None:
    result = run(orders, resources, instance, "doctor")

    assert result.success
    record = result.output_for_node("doctor")
    assert (record["can_resume"], record["batch_id"], record["good_back_to"]) == (True, 1, 1)
    assert json.loads(json.dumps(record)) == record
    page = shown(result)
    assert page["dagster_ckpt/findings"] == "Nothing."
    assert page["dagster_ckpt/snapshot"] == savepoint.location
    assert page["dagster_ckpt/replayed_batches"] == 0


def test_a_broken_directory_is_a_red_run_with_a_table_of_findings_and_the_snapshot_to_use(
    orders: StreamingAsset,
    resources: dict[str, Any],
    instance: dg.DagsterInstance,
    live: Path,
    savepoint: SnapshotRecord,
) -> None:
    (live / "offsets" / "0").unlink()

    result = run(orders, resources, instance, "doctor")

    assert not result.success
    page = shown(result)
    assert "| ERROR | PREVIOUS_OFFSET_MISSING | offsets/0 |" in page["dagster_ckpt/findings"]
    assert f"start_from={savepoint.snapshot_id}" in page["dagster_ckpt/summary"]
    assert page["dagster_ckpt/can_resume"] is False


def test_a_report_alone_stays_green(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, live: Path
) -> None:
    shutil.rmtree(live / "commits")

    result = run(orders, resources, instance, "doctor", fail_on_error=False)

    assert result.success
    record = result.output_for_node("doctor")
    assert [item["code"] for item in record["findings"]] == ["COMMIT_LOG_LOST"]
    assert record["snapshot"]["snapshot_id"] is None


def test_another_directory_can_be_examined(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, live: Path, tmp_path: Path
) -> None:
    result = run(orders, resources, instance, "doctor", directory=str(tmp_path / "copy"), fail_on_error=False)

    assert [item["code"] for item in result.output_for_node("doctor")["findings"]] == ["DIRECTORY_MISSING"]


@pytest.mark.parametrize("snapshot", ["latest", "all", "before"])
def test_a_good_snapshot_is_a_green_run(
    orders: StreamingAsset,
    resources: dict[str, Any],
    instance: dg.DagsterInstance,
    savepoint: SnapshotRecord,
    snapshot: str,
) -> None:
    result = run(orders, resources, instance, "verify_snapshots", snapshot=snapshot)

    assert result.success
    assert [item["location"] for item in result.output_for_node("verify_snapshots")] == [savepoint.location]
    page = shown(result)
    assert (page["dagster_ckpt/good"], page["dagster_ckpt/broken"]) == (1, 0)
    assert f"| good | 1 | {savepoint.location} |" in page["dagster_ckpt/snapshots"]


def test_a_broken_snapshot_is_a_red_run_that_says_what_is_wrong(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, savepoint: SnapshotRecord
) -> None:
    metadata = Path((savepoint.location or "").removeprefix("file://")) / "_metadata"
    metadata.write_bytes(metadata.read_bytes()[:-3])

    result = run(orders, resources, instance, "verify_snapshots")

    assert not result.success
    page = shown(result)
    assert (page["dagster_ckpt/good"], page["dagster_ckpt/broken"]) == (0, 1)
    assert "BROKEN" in page["dagster_ckpt/snapshots"]


def test_a_snapshot_that_does_not_exist_is_refused_with_those_that_do(
    orders: StreamingAsset, resources: dict[str, Any], instance: dg.DagsterInstance, savepoint: SnapshotRecord
) -> None:
    result = run(orders, resources, instance, "verify_snapshots", snapshot="never-taken")

    failure = next(event for event in result.all_events if event.is_step_failure)
    description = failure.step_failure_data.user_failure_data
    assert description is not None
    assert f"savepoint {savepoint.label} at batch {savepoint.batch_id}" in (description.description or "")


def test_only_reading_the_state_and_a_check_of_the_code_start_spark(orders: StreamingAsset) -> None:
    needing_spark = [job.name for job in build_inspection_jobs([orders]) if "pyspark" in job.required_resource_keys]

    assert needing_spark == ["check_job", "verify_state_job", "browse_state_job", "diff_state_job"]


def test_a_cell_cannot_break_its_table() -> None:
    assert markdown_table(["a"], [["x|y\nz"]]).splitlines() == ["| a |", "| --- |", "| x\\|y z |"]
