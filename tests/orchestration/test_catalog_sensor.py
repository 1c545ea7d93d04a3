"""Every completed snapshot becomes one event on its streaming asset, whenever the daemon dies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import FIGURES, begin_execution, begin_snapshot, register, take_snapshot
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.catalog_sensor import PAGE, SensorCursor, build_catalog_sensor
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer


@dg.op
def summarize() -> None: ...


@dg.job
def summary_job() -> None:
    summarize()


class Daemon:
    """Evaluates a sensor as Dagster's daemon does: stores a tick's events one by one, then the cursor."""

    def __init__(
        self, instance: dg.DagsterInstance, sensor: dg.SensorDefinition, resource: CheckpointCatalogResource
    ) -> None:
        self.instance = instance
        self.sensor = sensor
        self.resource = resource
        self.cursor: str | None = None

    def evaluate(self) -> Any:
        context = dg.build_sensor_context(
            self.instance, cursor=self.cursor, resources={"checkpoint_catalog": self.resource}
        )
        return self.sensor.evaluate_tick(context)

    def tick(self, *, dies_after: int | None = None) -> Any:
        result = self.evaluate()
        for event in result.asset_events[:dies_after]:
            self.instance.report_runless_asset_event(event)
        if dies_after is None:
            self.cursor = result.cursor
        return result


@pytest.fixture
def daemon(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> Daemon:
    sensor = build_catalog_sensor([orders, payments], report_interval_seconds=0)
    return Daemon(instance, sensor, catalog_resource)


def on_asset(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[Any]:
    """Snapshot ids on an asset, oldest first; "foreign" for a materialization of other code."""
    found: list[Any] = []
    for record in instance.fetch_materializations(key, limit=2000, ascending=True).records:
        assert record.asset_materialization is not None
        entry = record.asset_materialization.metadata.get("dagster_ckpt/snapshot_id")
        found.append(entry.value if entry else "foreign")
    return found


def ids(snapshots: Sequence[Any]) -> list[str]:
    return [snapshot.snapshot_id for snapshot in snapshots]


@pytest.mark.parametrize("kind", list(SnapshotKind))
def test_a_completed_snapshot_is_reported_with_numbers_that_the_page_plots(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, kind: str
) -> None:
    snapshot = take_snapshot(catalog, "orders", kind=kind)

    [materialization] = daemon.tick().asset_events

    assert materialization.asset_key == orders.key
    plotted = {
        name.removeprefix("dagster_ckpt/"): entry.value
        for name, entry in materialization.metadata.items()
        if isinstance(entry, dg.IntMetadataValue | dg.FloatMetadataValue)
    }
    assert plotted == {"rows": 1000, "state_rows": 77, "duration_s": 0.35, "full_mb": 5000.0, "incremental_mb": 0.001}
    told = {
        name: materialization.metadata[f"dagster_ckpt/{name}"].value for name in ("sequence", "batch_id", "timeline")
    }
    assert told == {"sequence": "1", "batch_id": "41", "timeline": "0"}
    assert materialization.metadata["dagster_ckpt/snapshot"].value == snapshot.reference
    assert materialization.metadata["dagster_ckpt/kind"].value == kind
    assert materialization.metadata["dagster_ckpt/watermark"].value == 1357095845.678
    assert materialization.metadata["dagster_ckpt/location"] == dg.MetadataValue.path(FIGURES["location"])
    assert materialization.tags == {"dagster/data_version": "41"}


def test_nothing_that_only_begins_is_reported(daemon: Daemon, catalog: Catalog) -> None:
    begin_execution(catalog, "orders", "run")
    begin_snapshot(catalog, "orders")

    result = daemon.tick()

    assert result.asset_events == []
    assert result.skip_message == "no new checkpoints"
    assert SensorCursor.parse(result.cursor).sequence == catalog.events.latest_sequence()


@pytest.mark.parametrize("kind", list(SnapshotKind))
def test_a_failure_that_is_the_only_news_of_a_tick_is_reported(
    daemon: Daemon, catalog: Catalog, instance: dg.DagsterInstance, kind: SnapshotKind
) -> None:
    take_snapshot(catalog, "orders")
    daemon.tick()

    as_writer(catalog, "orders").snapshots.fail(begin_snapshot(catalog, "orders", kind=kind).snapshot_id, "a full disk")
    [report] = daemon.tick().asset_events

    assert isinstance(report, dg.AssetObservation)
    assert "a full disk" in str(report.metadata["dagster_ckpt/failure"].value)


def test_snapshots_of_a_job_of_another_code_location_are_left_to_it(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
) -> None:
    take_snapshot(catalog, "shop.payments")
    mine = take_snapshot(catalog, "orders")
    daemon = Daemon(instance, build_catalog_sensor([orders]), catalog_resource)

    daemon.tick()

    assert on_asset(instance, orders.key) == [mine.snapshot_id]


def test_a_snapshot_without_a_watermark_is_reported_without_one(daemon: Daemon, catalog: Catalog) -> None:
    take_snapshot(catalog, "orders", watermark=None, state_rows=None)

    [materialization] = daemon.tick().asset_events

    assert not [name for name in materialization.metadata if "watermark" in name or "state_rows" in name]


@pytest.mark.parametrize("stored", range(6))
def test_a_daemon_that_dies_in_the_middle_of_a_tick_reports_the_rest_and_nothing_twice(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, payments: StreamingAsset, stored: int
) -> None:
    of_orders, of_payments = [], []
    for _ in range(3):
        of_orders.append(take_snapshot(catalog, "orders"))
        of_payments.append(take_snapshot(catalog, "shop.payments"))

    assert len(daemon.tick(dies_after=stored).asset_events) == 6
    assert len(daemon.tick().asset_events) == 6 - stored

    assert on_asset(daemon.instance, orders.key) == ids(of_orders)
    assert on_asset(daemon.instance, payments.key) == ids(of_payments)
    assert daemon.tick().asset_events == []


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("foreign", [1, PAGE + 20])
def test_materializations_by_other_code_hide_none_of_ours(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, foreign: int, before: int
) -> None:
    earlier = [take_snapshot(catalog, "orders") for _ in range(before)]
    daemon.tick()
    snapshots = [take_snapshot(catalog, "orders") for _ in range(3)]
    daemon.tick(dies_after=2)
    for _ in range(foreign):
        daemon.instance.report_runless_asset_event(dg.AssetMaterialization(orders.key))

    daemon.tick()

    assert on_asset(daemon.instance, orders.key) == [
        *ids(earlier),
        *ids(snapshots[:2]),
        *["foreign"] * foreign,
        snapshots[2].snapshot_id,
    ]


def test_a_cursor_that_a_person_resets_reports_nothing_twice(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("EVENTS_PER_TICK", "EVENTS_IN_FIRST_TICK"):
        monkeypatch.setattr(f"dagster_ckpt.orchestration.catalog_sensor.{limit}", 2)
    snapshots = [take_snapshot(catalog, "orders") for _ in range(5)]
    for _ in range(2):
        as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders").snapshot_id, "the disk is full")
    for _ in range(4):
        daemon.tick()
    daemon.cursor = None

    for _ in range(4):
        assert daemon.tick().asset_events == []

    assert on_asset(daemon.instance, orders.key) == ids(snapshots)


def test_what_a_tick_was_asked_for_again_is_not_reported_twice(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset
) -> None:
    daemon.tick()
    first = take_snapshot(catalog, "orders")
    as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders").snapshot_id, "the disk is full")
    daemon.tick(dies_after=2)
    # On the page somebody tries the sensor, before the daemon is back.
    daemon.evaluate()
    second = take_snapshot(catalog, "orders")

    assert [type(event) for event in daemon.tick().asset_events] == [dg.AssetMaterialization]

    assert on_asset(daemon.instance, orders.key) == ids([first, second])


def test_a_tick_after_one_that_was_stored_does_not_read_what_dagster_has_stored(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = [take_snapshot(catalog, "orders")]
    daemon.tick()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Dagster was asked for what this process has reported itself")

    with monkeypatch.context() as patch:
        for name in ("fetch_materializations", "fetch_observations"):
            patch.setattr(type(daemon.instance), name, refuse)
        for _ in range(2):
            snapshots.append(take_snapshot(catalog, "orders"))
            as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders").snapshot_id, "the disk is full")
            daemon.tick()

    newest = daemon.instance.get_latest_materialization_event(orders.key)
    assert newest is not None
    assert newest.asset_materialization is not None
    assert newest.asset_materialization.metadata["dagster_ckpt/new_checkpoints"].value == 1
    assert on_asset(daemon.instance, orders.key) == ids(snapshots)


def test_of_two_deployments_with_the_same_asset_the_one_started_last_reports(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = take_snapshot(catalog, "orders")
    daemon.tick()
    url = f"sqlite:///{tmp_path}/another.db"
    with closing(Catalog(url)) as another:
        register(another, "orders")
        later = Daemon(
            daemon.instance,
            build_catalog_sensor([orders], report_interval_seconds=0),
            CheckpointCatalogResource(url=url),
        )
        theirs = take_snapshot(another, "orders")
        later.tick()
        for _ in range(2):
            take_snapshot(catalog, "orders")
            assert daemon.tick().asset_events == []
        again = take_snapshot(another, "orders")
        later.tick()

    assert on_asset(daemon.instance, orders.key) == ids([first, theirs, again])
    assert capfd.readouterr().err.count(f"orders: deployment {another.deployment_id} has reported") == 1


def test_snapshots_of_a_catalog_that_was_made_anew_are_reported(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset
) -> None:
    before = [take_snapshot(catalog, "orders") for _ in range(3)]
    daemon.tick()
    with catalog.database.writing() as connection:
        connection.execute(text("DELETE FROM events"))
        connection.execute(text("DELETE FROM snapshots"))
        connection.execute(text("UPDATE event_counter SET last_sequence = 0"))
    after = [take_snapshot(catalog, "orders") for _ in range(2)]

    daemon.tick(dies_after=1)
    daemon.tick()

    assert on_asset(daemon.instance, orders.key) == ids([*before, *after])


def test_more_events_than_a_tick_takes_come_with_the_next_ones(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_ckpt.orchestration.catalog_sensor.EVENTS_IN_FIRST_TICK", 2)
    monkeypatch.setattr("dagster_ckpt.orchestration.catalog_sensor.EVENTS_PER_TICK", 4)
    snapshots = [take_snapshot(catalog, "orders") for _ in range(7)]

    assert [len(daemon.tick().asset_events) for _ in range(4)] == [2, 4, 1, 0]

    assert on_asset(daemon.instance, orders.key) == ids(snapshots)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE snapshots SET properties = 'not JSON', trigger = 'SUPERSTITION', status = '?' WHERE snapshot_id = :id",
        "UPDATE snapshots SET watermark = 'yesterday, about noon' WHERE snapshot_id = :id",
        "UPDATE snapshots SET batch_id = 'many', rows = NULL WHERE snapshot_id = :id",
        "UPDATE events SET payload = '{cut o' WHERE snapshot_id = :id",
        "DELETE FROM snapshots WHERE snapshot_id = :id",
    ],
)
def test_a_broken_row_is_reported_as_far_as_it_goes_and_holds_nothing_up(
    daemon: Daemon, catalog: Catalog, orders: StreamingAsset, damage: str
) -> None:
    snapshots = [take_snapshot(catalog, "orders") for _ in range(3)]
    with catalog.database.writing() as connection:
        connection.execute(text(damage), {"id": snapshots[1].snapshot_id})

    daemon.tick(dies_after=2)
    daemon.tick()

    assert on_asset(daemon.instance, orders.key) == ids(snapshots)


class TestDownstream:
    @pytest.fixture
    def daemon(
        self,
        instance: dg.DagsterInstance,
        catalog_resource: CheckpointCatalogResource,
        catalog: Catalog,
        orders: StreamingAsset,
    ) -> Daemon:
        return Daemon(instance, build_catalog_sensor([orders], downstream=summary_job), catalog_resource)

    def start(self, daemon: Daemon) -> str:
        return daemon.instance.create_run_for_job(summary_job, status=dg.DagsterRunStatus.STARTED).run_id

    def test_it_starts_once_for_all_the_snapshots_of_a_tick(self, daemon: Daemon, catalog: Catalog) -> None:
        for _ in range(3):
            take_snapshot(catalog, "orders")

        [request] = daemon.tick().run_requests

        assert request.job_name == "summary_job"
        assert daemon.tick().run_requests == []

    def test_a_daemon_that_dies_before_the_cursor_asks_with_the_same_run_key(
        self, daemon: Daemon, catalog: Catalog
    ) -> None:
        take_snapshot(catalog, "orders")

        [first] = daemon.tick(dies_after=1).run_requests
        [again] = daemon.tick().run_requests

        assert first.run_key == again.run_key

    def test_it_waits_for_a_run_in_progress_and_then_starts_without_a_further_snapshot(
        self, daemon: Daemon, catalog: Catalog
    ) -> None:
        run_id = self.start(daemon)
        take_snapshot(catalog, "orders")

        assert daemon.tick().run_requests == []
        assert daemon.tick().run_requests == []
        run = daemon.instance.get_run_by_id(run_id)
        assert run is not None
        daemon.instance.report_run_failed(run)

        assert len(daemon.tick().run_requests) == 1
        assert daemon.tick().run_requests == []

    def test_the_interval_between_two_starts_is_respected(
        self,
        instance: dg.DagsterInstance,
        catalog_resource: CheckpointCatalogResource,
        catalog: Catalog,
        orders: StreamingAsset,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        now_ms = 1_000_000
        monkeypatch.setattr("dagster_ckpt.orchestration.catalog_sensor.wall_clock_ms", lambda: now_ms)
        sensor = build_catalog_sensor([orders], downstream=summary_job, downstream_interval_seconds=60)
        daemon = Daemon(instance, sensor, catalog_resource)
        take_snapshot(catalog, "orders")
        assert len(daemon.tick().run_requests) == 1
        take_snapshot(catalog, "orders")

        now_ms += 59_999
        assert daemon.tick().run_requests == []
        now_ms += 1
        assert len(daemon.tick().run_requests) == 1

    def test_snapshots_that_a_dying_daemon_has_stored_still_start_it(self, daemon: Daemon, catalog: Catalog) -> None:
        take_snapshot(catalog, "orders")
        daemon.tick(dies_after=1)

        result = daemon.tick()

        assert result.asset_events == []
        assert len(result.run_requests) == 1


def test_each_report_and_asset_links_to_the_checkpoint_page(
    instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, catalog: Catalog, orders: StreamingAsset
) -> None:
    daemon = Daemon(
        instance, build_catalog_sensor([orders], checkpoint_page="http://localhost:3080/"), catalog_resource
    )
    snapshot = take_snapshot(catalog, "orders")
    [report] = daemon.tick().asset_events
    link = report.metadata["dagster_ckpt/checkpoint_page"].value
    assert link == f"http://localhost:3080/streams/{orders.stream_id}/-/snapshots/{snapshot.snapshot_id}"

    [asset] = stream_definitions(orders, checkpoint_page="http://localhost:3080").assets or ()
    assert isinstance(asset, dg.AssetsDefinition)
    [spec] = asset.specs
    assert spec.metadata["dagster_ckpt/checkpoint_page"].value == f"http://localhost:3080/streams/{orders.stream_id}"
    graph = spec.metadata["dagster_ckpt/stream_graph"].value
    assert graph == f"http://localhost:3080/graph?stream={orders.stream_id}"


def test_an_address_of_the_page_that_is_none_is_refused(orders: StreamingAsset) -> None:
    with pytest.raises(OptionError, match="checkpoint_page is 'localhost:3080'"):
        build_catalog_sensor([orders], checkpoint_page="localhost:3080")


@pytest.mark.parametrize(
    ("sinks", "uri"),
    [
        ({"sinks": [{"path": "s3://bucket/orders"}]}, "s3://bucket/orders"),
        ({"sinks": [], "other_sinks": ["DeltaSink[/tables/orders]"]}, "/tables/orders"),
        ({"sinks": [{"path": "/good"}, {"path": "/bad"}]}, None),
        ({"sinks": [], "other_sinks": ["ForeachBatchSink"]}, None),
        ({}, None),
    ],
)
def test_a_report_names_the_place_of_the_only_sink_in_dagsters_own_field(
    catalog: Catalog, daemon: Daemon, sinks: dict[str, Any], uri: str | None
) -> None:
    take_snapshot(catalog, "orders", properties=sinks)

    [report] = daemon.tick().asset_events

    found = report.metadata.get("dagster/uri")
    assert (found.value if found is not None else None) == uri
    assert "dagster/column_schema" not in report.metadata


def test_a_report_has_the_columns_of_the_rows_in_the_only_sink(catalog: Catalog, daemon: Daemon) -> None:
    columns = [["shop", "bigint"], ["items", "array<string>"]]
    take_snapshot(catalog, "orders", properties={"sinks": [{"path": "s3://bucket/orders"}], "columns": columns})

    [report] = daemon.tick().asset_events

    found = report.metadata["dagster/column_schema"].value
    assert [[each.name, each.type] for each in found.columns] == columns
