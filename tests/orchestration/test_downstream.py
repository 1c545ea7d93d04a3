"""Checkpoints start what is downstream, and a rewind names every materialization that is built on what it undoes."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.reconstruct import ReconstructableRepository
from orchestration_catalog import begin_snapshot, take_snapshot
from test_catalog_sensor import Daemon
from test_rewind_jobs import Streams

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import BatchInput
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.downstream import (
    Basis,
    Dependent,
    ReadCheckpoint,
    batch_inputs,
    built_on_undone_data,
    reading_checkpoint,
)
from dagster_ckpt.orchestration.jobs.rewind_jobs import downstream_metadata
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from tests.support.as_writer import as_writer


class House:
    """A stream, an asset that records what it reads, one that does not, and one behind that."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        catalog: Catalog,
        resource: CheckpointCatalogResource,
        orders: StreamingAsset,
    ) -> None:
        self.instance, self.catalog, self.orders = instance, catalog, orders
        self.daemon = Daemon(instance, build_catalog_sensor([orders], report_interval_seconds=0), resource)
        eager = dg.AutomationCondition.eager()

        @dg.asset(deps=[orders.asset], automation_condition=eager)
        def revenue(context: dg.AssetExecutionContext) -> None:
            reading_checkpoint(context, orders)

        @dg.asset(deps=[orders.asset])
        def exact(context: dg.AssetExecutionContext) -> None:
            reading_checkpoint(context, orders.key, exactly=True)

        @dg.asset(deps=[orders.asset], automation_condition=eager)
        def counts() -> None: ...

        @dg.asset(deps=[counts])
        def report() -> None: ...

        @dg.asset
        def elsewhere() -> None: ...

        self.assets = [revenue, exact, counts, report, elsewhere]
        self.definitions = dg.Definitions(
            assets=[orders.asset, *self.assets],
            resources=dict.fromkeys(("pyspark", "checkpoint_storage", "state_backend"), "unused")
            | {"checkpoint_catalog": resource},
        )

    def checkpoint(self, batch_id: int) -> None:
        take_snapshot(self.catalog, "orders", batch_id=batch_id)
        self.daemon.tick()

    def make(self, *names: str) -> str:
        chosen = [asset for asset in self.assets if asset.key.to_user_string() in names]
        result = dg.materialize(
            [*chosen, dg.AssetSpec("orders"), *(dg.AssetSpec(name) for name in ("counts",) if name not in names)],
            instance=self.instance,
            selection=list(names),
        )
        return result.run_id

    def undone_by(self, to_batch: int | None, since_ms: int | None) -> list[Dependent]:
        graph = self.definitions.get_repository_def().asset_graph
        return built_on_undone_data(self.instance, graph, self.orders, to_batch=to_batch, undone_since_ms=since_ms)


@pytest.fixture
def house(
    instance: dg.DagsterInstance, catalog: Catalog, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> House:
    return House(instance, catalog, catalog_resource, orders)


def names(dependents: list[Dependent]) -> dict[str, Basis]:
    return {each.asset_key.to_user_string(): each.basis for each in dependents}


FOREVER_MS = 10**15


def test_automation_conditions_start_what_is_downstream_of_a_reported_checkpoint(house: House) -> None:
    def wanted(cursor: Any) -> Any:
        return dg.evaluate_automation_conditions(house.definitions, house.instance, cursor=cursor)

    before = wanted(None)
    house.checkpoint(640)
    once = wanted(before.cursor)
    again = wanted(once.cursor)

    assert before.total_requested == 0
    assert {key for key in map(dg.AssetKey, ("revenue", "counts")) if once.get_num_requested(key)} == {
        dg.AssetKey("revenue"),
        dg.AssetKey("counts"),
    }
    assert again.total_requested == 0

    house.make("revenue", "counts")
    made = wanted(again.cursor)
    house.checkpoint(641)
    assert (made.total_requested, wanted(made.cursor).total_requested) == (0, 2)


def test_a_streams_run_holds_nothing_back_once_it_has_begun(house: House) -> None:
    job = dg.Definitions.merge(house.definitions, dg.Definitions(jobs=[house.orders.start_job])).resolve_job_def(
        "orders_stream"
    )
    launched = {"status": dg.DagsterRunStatus.STARTED, "asset_selection": frozenset({house.orders.key})}
    house.instance.create_run_for_job(job, **launched)
    held_back = dg.evaluate_automation_conditions(house.definitions, house.instance)
    house.checkpoint(640)
    held_back = dg.evaluate_automation_conditions(house.definitions, house.instance, cursor=held_back.cursor)

    # Its resources are none: it comes no further than to its begin.
    assert not job.execute_in_process(instance=house.instance, raise_on_error=False).success
    started = dg.evaluate_automation_conditions(house.definitions, house.instance, cursor=held_back.cursor)

    assert (held_back.total_requested, started.total_requested) == (0, 2)
    planned = house.instance.event_log_storage.get_latest_planned_materialization_info(house.orders.key)
    assert planned is not None
    assert planned.run_id == ""


def test_a_failed_attempt_starts_nothing(house: House) -> None:
    house.checkpoint(640)
    house.make("revenue", "counts")
    cursor = dg.evaluate_automation_conditions(house.definitions, house.instance).cursor
    as_writer(house.catalog).snapshots.fail(begin_snapshot(house.catalog, "orders").snapshot_id, "the disk is full")
    assert len(house.daemon.tick().asset_events) == 1

    assert dg.evaluate_automation_conditions(house.definitions, house.instance, cursor=cursor).total_requested == 0


def test_an_asset_records_which_checkpoint_it_has_read(house: House) -> None:
    house.checkpoint(640)
    house.make("revenue")

    [record] = house.instance.fetch_materializations(dg.AssetKey("revenue"), limit=5).records
    assert record.asset_materialization is not None
    entries = {name: entry.value for name, entry in record.asset_materialization.metadata.items()}
    snapshot = house.catalog.snapshots.completed("orders")[0]
    assert entries["dagster_ckpt/read_stream"] == "orders"
    assert entries["dagster_ckpt/read_snapshot"] == snapshot.snapshot_id
    assert (entries["dagster_ckpt/read_batch"], entries["dagster_ckpt/read_timeline"]) == (640, 0)


def test_before_the_first_checkpoint_nothing_is_recorded(house: House) -> None:
    house.make("revenue")

    assert names(house.undone_by(5, None)) == {"revenue": Basis.TIME}


def test_what_has_read_an_undone_batch_is_listed_by_what_was_recorded(house: House) -> None:
    house.checkpoint(640)
    house.make("revenue", "exact", "counts", "elsewhere")

    undone = house.undone_by(639, FOREVER_MS)

    # What recorded nothing is known by the data version that Dagster notes of each input.
    assert names(undone) == {"revenue": Basis.RECORDED, "exact": Basis.RECORDED, "counts": Basis.DATA_VERSION}
    assert {each.read_batch for each in undone} == {640}
    assert house.undone_by(640, FOREVER_MS) == []


def test_what_may_have_read_a_little_more_than_is_known_is_listed_by_time(house: House) -> None:
    house.checkpoint(640)
    house.make("revenue", "exact", "counts")

    assert names(house.undone_by(640, 0)) == {"revenue": Basis.TIME, "counts": Basis.TIME}


def test_what_is_behind_a_downstream_asset_is_listed_by_time(house: House) -> None:
    house.checkpoint(640)
    house.make("counts")
    house.make("report", "elsewhere")

    assert names(house.undone_by(639, 0)) == {"counts": Basis.DATA_VERSION, "report": Basis.TIME}


def test_where_the_time_is_not_known_everything_is_listed(house: House) -> None:
    house.checkpoint(640)
    house.make("counts", "report")

    assert names(house.undone_by(700, None)) == {"counts": Basis.TIME, "report": Basis.TIME}


def test_every_materialization_is_listed_newest_first_and_shown_as_a_table(house: House) -> None:
    house.checkpoint(640)
    runs = [house.make("revenue") for _ in range(3)]

    undone = house.undone_by(None, 0)

    assert [each.run_id for each in undone] == runs[::-1]
    shown = downstream_metadata(undone)
    assert shown["dagster_ckpt/downstream_materializations"] == dg.MetadataValue.int(3)
    assert "| revenue |" in str(shown["dagster_ckpt/downstream"].value)
    assert "| 640 | recorded |" in str(shown["dagster_ckpt/downstream"].value)
    assert "no code location" in str(downstream_metadata(None)["dagster_ckpt/downstream"].value)


CODE_LOCATION = """
import dagster as dg
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration import *

@streaming_asset(checkpointing=CheckpointConfig(interval=1000))
def orders(context): ...

@dg.asset(deps=[orders.asset])
def revenue(context: dg.AssetExecutionContext):
    reading_checkpoint(context, orders)

defs = dg.Definitions.merge(
    stream_definitions(orders),
    dg.Definitions(
        assets=[revenue],
        resources={{
            "pyspark": "unused",
            "checkpoint_catalog": CheckpointCatalogResource(url="{url}"),
            "checkpoint_storage": CheckpointStorageResource(path="file://{root}/snapshots"),
            "state_backend": StateBackendResource(live_directory="{root}/live"),
        }},
    ),
)
"""


def test_the_preview_of_a_rewind_lists_them_in_the_code_location_of_the_run(
    tmp_path: Path,
    catalog: Catalog,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> None:
    Streams(tmp_path, catalog, catalog_resource, [orders, payments])
    (tmp_path / "location.py").write_text(CODE_LOCATION.format(url=catalog_resource.url, root=tmp_path))
    location = ReconstructableRepository.for_file(str(tmp_path / "location.py"), "defs")
    read = ReadCheckpoint("orders", "snapshot", batch_id=3, timeline=0, exactly=True).metadata()
    with dg.instance_for_test() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("revenue", metadata=read))
        preview = {"stream_id": "orders", "start_from": "batch-1"}
        result = dg.execute_job(
            location.get_reconstructable_job("preview_rewind_job"),
            instance,
            run_config={"ops": {"preview_rewind": {"config": preview}}},
        )
        [output] = [event for event in result.all_events if event.is_successful_output]

    metadata = output.step_output_data.metadata
    assert metadata["dagster_ckpt/downstream_materializations"].value == 1
    assert "| revenue |" in metadata["dagster_ckpt/downstream"].value


def test_batch_assets_between_two_streams_are_found_however_many_there_are() -> None:
    @dg.asset
    def orders() -> None: ...

    @dg.asset(deps=[orders])
    def cleaned() -> None: ...

    @dg.asset(deps=[cleaned])
    def report() -> None: ...

    @dg.asset(deps=[orders])
    def totals() -> None: ...

    @dg.asset(deps=[report, totals, orders, "elsewhere"])
    def monthly() -> None: ...

    graph = dg.Definitions([orders, cleaned, report, totals, monthly]).resolve_asset_graph()
    streams = {"orders": "orders", "totals": "totals of it", "monthly": "monthly"}

    assert batch_inputs(graph, [monthly.key], streams) == [BatchInput("orders", "report")]
    assert batch_inputs(graph, [totals.key], streams) == []
    assert batch_inputs(graph, [dg.AssetKey("unknown")], streams) == []
