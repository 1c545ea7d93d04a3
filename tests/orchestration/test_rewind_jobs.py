"""The jobs around going back, as a person launches them, and what their result pages show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import begin_execution

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import RequestKind
from dagster_ckpt.orchestration.jobs.rewind_jobs import build_rewind_jobs, preview_metadata
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset, stream_handle
from dagster_ckpt.orchestration.supervisor_sensor import SupervisorTick
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import as_writer

# Of the files that the stream has read.
MODIFIED_MS = 1


class Streams:
    """Two streams; `orders` has committed four batches of a file source to a file sink."""

    def __init__(
        self, root: Path, catalog: Catalog, resource: CheckpointCatalogResource, streams: list[StreamingAsset]
    ) -> None:
        self.root = root
        self.catalog = catalog
        self.resources = {
            "checkpoint_catalog": resource,
            "checkpoint_storage": CheckpointStorageResource(path=f"file://{root}/snapshots"),
            "state_backend": StateBackendResource(live_directory=str(root / "live")),
        }
        self.jobs = {job.name: job for job in build_rewind_jobs(streams)}
        orders = streams[0]
        with dg.build_resources(self.resources) as opened:
            self.orders = stream_handle(orders, opened)
        live = self.orders.live_directory(1, 0)
        for batch in range(4):
            part = f"part-00000-00000000-0000-0000-0000-00000000000{batch}.parquet"
            self._lay(f"out/{part}", "rows")
            self._lay(f"in/{batch}", "rows")
            os.utime(root / f"in/{batch}", ns=(0, MODIFIED_MS * 1_000_000))
            self._lay(f"out/_spark_metadata/{batch}", "v1\n" + json.dumps({"path": f"file://{root}/out/{part}"}))
            self._lay(
                f"live/orders/live-1-0/sources/0/{batch}",
                "v1\n" + json.dumps({"path": f"file://{root}/in/{batch}", "timestamp": MODIFIED_MS, "batchId": batch}),
            )
            conf = {"spark.sql.shuffle.partitions": "1"}
            metadata = {"batchWatermarkMs": 0, "batchTimestampMs": 60_000 * batch, "conf": conf}
            self._lay(f"live/orders/live-1-0/offsets/{batch}", f'v1\n{json.dumps(metadata)}\n{{"logOffset":{batch}}}')
            self._lay(f"live/orders/live-1-0/commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        self._lay("live/orders/live-1-0/metadata", '{"id":"11111111-2222"}')
        as_writer(catalog).streams.switch_live_directory(live.url)
        execution = begin_execution(catalog, "orders", "run", running=False)
        as_writer(catalog).executions.running(execution.execution_id, live_directory=live.url, recovery={})
        self.wrote(f"FileSink[file:{root}/out]")

    def wrote(self, *sinks: str) -> None:
        execution = self.catalog.executions.latest("orders")
        assert execution is not None
        as_writer(self.catalog).executions.heartbeat(execution.execution_id, {"batch_id": 3, "sinks": list(sinks)})

    def launch(self, name: str, *, fails: bool = False, **config: Any) -> tuple[dict[str, Any], str]:
        """Run a job as from the launchpad; returns its result metadata and why it failed."""
        op = name.removesuffix("_job")
        with dg.DagsterInstance.ephemeral() as instance:
            result = self.jobs[name].execute_in_process(
                run_config={"ops": {op: {"config": config}}},
                resources=self.resources,
                instance=instance,
                raise_on_error=False,
            )
            assert result.success is not fails, result.all_events
            failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
            why = failures[0].user_failure_data.description if failures and failures[0].user_failure_data else ""
            outputs = [event for event in result.all_events if event.is_successful_output]
            metadata = outputs[0].step_output_data.metadata if outputs else {}
            return {key: value.value for key, value in metadata.items()}, why or ""

    def _lay(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


@pytest.fixture
def streams(
    tmp_path: Path,
    catalog: Catalog,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> Streams:
    return Streams(tmp_path, catalog, catalog_resource, [orders, payments])


def test_the_preview_is_a_table_of_what_is_undone_and_of_what_each_sink_does(streams: Streams) -> None:
    streams.wrote(f"FileSink[file:{streams.root}/out]", "ForeachBatchSink")

    shown, _ = streams.launch("preview_rewind_job", stream_id="orders", start_from="batch-1")

    assert "| committed batches processed again | 2 |" in shown["dagster_ckpt/rewind"]
    assert "| processing time of these batches | 2 min |" in shown["dagster_ckpt/rewind"]
    assert "| source 0 | 2 files |" in shown["dagster_ckpt/rewind"]
    assert f"| FileSink[file:{streams.root}/out] | EXACT |" in shown["dagster_ckpt/sinks"]
    assert "| ForeachBatchSink | UNKNOWN |" in shown["dagster_ckpt/sinks"]
    assert (shown["dagster_ckpt/left_snapshots"], shown["dagster_ckpt/may_lose_rows"]) == ("none", False)


def test_what_cannot_be_gone_back_to_fails_with_our_own_words(streams: Streams) -> None:
    _, why = streams.launch("preview_rewind_job", fails=True, stream_id="orders", start_from="batch-7")

    assert "which retains batches 0 to 3" in why


def test_a_fork_shows_where_it_goes_on_and_where_it_must_not_write(streams: Streams) -> None:
    shown, _ = streams.launch(
        "fork_stream_job", stream_id="orders", into_stream_id="shop.payments", start_from="batch-2"
    )

    assert "| continues after batch | 2 |" in shown["dagster_ckpt/fork"]
    assert f"| must not write to | file:{streams.root}/out |" in shown["dagster_ckpt/fork"]
    assert streams.catalog.streams.get("shop.payments").live_directory is not None


def test_cleaning_is_a_dry_run_unless_told_otherwise(streams: Streams) -> None:
    orphan = streams.root / "out/_spark_metadata/3"
    orphan.unlink()
    (streams.root / "live/orders/live-1-0/commits/3").unlink()

    listed, _ = streams.launch("clean_sink_job", stream_id="orders", grace_hours=0)
    assert (listed["dagster_ckpt/removable_files"], listed["dagster_ckpt/deleted"]) == (1, False)
    assert "would be deleted" in listed["dagster_ckpt/orphans"]
    assert len(list((streams.root / "out").glob("part-*"))) == 4

    deleted, _ = streams.launch("clean_sink_job", stream_id="orders", grace_hours=0, dry_run=False)
    assert (deleted["dagster_ckpt/removable_bytes"], deleted["dagster_ckpt/deleted"]) == (4, True)
    assert len(list((streams.root / "out").glob("part-*"))) == 3


@pytest.mark.parametrize("how", [{}, {"accept_loss": True}, {"new_query_id": True}])
def test_an_explicit_yes_reaches_the_run_that_the_supervisor_launches(
    streams: Streams, orders: StreamingAsset, how: dict[str, bool]
) -> None:
    request = verbs.request_start(streams.orders, StartFrom("batch-1", **how), origin="a test")

    tick = SupervisorTick(dg.DagsterInstance.ephemeral(), streams.catalog, {"orders": orders}, "retain", "roll back")
    [run] = tick.requested_starts()

    assert request.kind is RequestKind.START
    assert run.run_config == {"ops": {"orders": {"config": {"start_from": "batch-1", **how}}}}


def test_a_name_with_a_bar_does_not_break_a_table(streams: Streams) -> None:
    streams.wrote("foreach(a|b)")

    shown = preview_metadata(verbs.start_preview(streams.orders, StartFrom("batch-3")))

    assert "| foreach(a\\|b) | UNKNOWN |" in str(shown["dagster_ckpt/sinks"].value)
