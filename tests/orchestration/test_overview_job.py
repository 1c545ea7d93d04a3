"""A stream on the result page of `show_stream_job`."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from orchestration_catalog import HOST, begin_execution, take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LaunchRecord
from dagster_ckpt.orchestration.jobs.inspection_jobs import build_inspection_jobs
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer

PAGE = "http://here:4040"


class Shown:
    """The job over one stream."""

    def __init__(self, folder: Path, resource: CheckpointCatalogResource, stream: StreamingAsset) -> None:
        self._job = next(job for job in build_inspection_jobs([stream]) if job.name == "show_stream_job")
        self._resources = {
            "checkpoint_storage": CheckpointStorageResource(path=f"file://{folder}/checkpoints"),
            "state_backend": StateBackendResource(live_directory=f"{folder}/live"),
            "checkpoint_catalog": resource,
        }

    def show(self, **config: object) -> dict[str, dg.MetadataValue]:
        result = self._job.execute_in_process(
            {"ops": {"show_stream": {"config": {"stream_id": "orders", **config}}}}, resources=self._resources
        )
        (output,) = [event for event in result.all_events if event.is_successful_output]
        return dict(output.step_output_data.metadata)


@pytest.fixture
def shown(tmp_path: Path, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset) -> Shown:
    return Shown(tmp_path, catalog_resource, orders)


def table(value: dg.MetadataValue) -> list[dict[str, object]]:
    assert isinstance(value, dg.TableMetadataValue)
    assert {column.name for column in value.schema.columns} >= {name for row in value.records for name in row.data}
    return [dict(record.data) for record in value.records]


def test_its_snapshots_are_a_table_newest_first(shown: Shown, catalog: Catalog) -> None:
    take_snapshot(catalog, "orders", batch_id=3)
    take_snapshot(catalog, "orders", batch_id=4, kind=SnapshotKind.SAVEPOINT, rows=None)

    metadata = shown.show()

    newest, older = table(metadata["dagster_ckpt/snapshots"])
    assert (newest["batch"], newest["kind"], newest["rows"]) == (4, "SAVEPOINT", "-")
    assert (older["batch"], older["bytes"], older["duration ms"]) == (3, 5_000_000_000, 350)
    assert metadata["dagster_ckpt/snapshot_count"].value == 2
    assert metadata["dagster_ckpt/snapshot_bytes_written"].value == 2 * 1234


def test_the_rows_of_a_table_are_limited_and_the_count_is_not(shown: Shown, catalog: Catalog) -> None:
    for _ in range(3):
        take_snapshot(catalog, "orders")

    metadata = shown.show(limit=2)

    assert len(table(metadata["dagster_ckpt/snapshots"])) == 2
    assert metadata["dagster_ckpt/snapshot_count"].value == 3


def test_where_it_runs_what_it_started_from_and_the_link_to_sparks_page(shown: Shown, catalog: Catalog) -> None:
    execution = begin_execution(catalog, "orders", "a run")
    as_writer(catalog).executions.running(
        execution.execution_id,
        live_directory="file:///live/live-1",
        recovery={"reason": "restored chk-7 at batch 41"},
        application={"id": "local-1", "master": "local[1]", "page": PAGE},
    )
    catalog.leases.acquire("orders", HOST, 60_000)

    metadata = shown.show()

    (row,) = table(metadata["dagster_ckpt/executions"])
    assert (row["run"], row["status"], row["application"]) == ("a run", "RUNNING", "local-1")
    assert row["started from"] == "restored chk-7 at batch 41"
    assert metadata["dagster_ckpt/started_from"].value == "restored chk-7 at batch 41"
    assert metadata["dagster_ckpt/runs"].value is True
    assert metadata["dagster_ckpt/spark_page"] == dg.MetadataValue.url(PAGE)


def test_a_stream_that_does_not_run_has_no_link_to_a_page_that_is_gone(shown: Shown, catalog: Catalog) -> None:
    execution = begin_execution(catalog, "orders", "a run")
    as_writer(catalog).executions.running(
        execution.execution_id, live_directory="file:///live/live-1", recovery={}, application={"page": PAGE}
    )

    metadata = shown.show()

    assert metadata["dagster_ckpt/runs"].value is False
    assert "dagster_ckpt/spark_page" not in metadata


def test_a_launched_driver_has_a_log(shown: Shown, catalog: Catalog) -> None:
    catalog.launches.record(
        LaunchRecord(
            request_id="request",
            stream_id="orders",
            run_id="r",
            host="here",
            boot_id="b",
            pid=1,
            process_start_ticks=1,
            command="spark-submit orders.py",
            log="/var/log/orders.log",
        )
    )

    metadata = shown.show()

    assert metadata["dagster_ckpt/driver_log"] == dg.MetadataValue.path("/var/log/orders.log")
    assert metadata["dagster_ckpt/driver_command"].value == "spark-submit orders.py"


def test_a_stream_that_was_never_started_is_an_error_that_says_so(
    tmp_path: Path, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> None:
    with pytest.raises(dg.Failure, match="has no stream 'orders'"):
        Shown(tmp_path, catalog_resource, orders).show()
