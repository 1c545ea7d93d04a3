"""Health is reported as asset checks: each change of a verdict, and now and then that it is as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import begin_execution, begin_snapshot, register, take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.checks import build_health_checks, build_health_sensor
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import default_freshness, streaming_asset, streaming_multi_asset
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import DesiredState
from tests.support.as_writer import as_writer


class Watch:
    """A health sensor, and a daemon that stores what it reports."""

    def __init__(
        self, instance: dg.DagsterInstance, resource: CheckpointCatalogResource, streams: Any, **options: Any
    ) -> None:
        self.instance, self.resource = instance, resource
        self.sensor = build_health_sensor(streams, **options)
        self.cursor: str | None = None

    def tick(self) -> dict[tuple[str, str], dg.AssetCheckEvaluation]:
        context = dg.build_sensor_context(
            self.instance, cursor=self.cursor, resources={"checkpoint_catalog": self.resource}
        )
        result = self.sensor.evaluate_tick(context)
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        self.cursor = result.cursor
        return {(each.asset_key.to_user_string(), each.check_name): each for each in result.asset_events}


@pytest.fixture
def watch(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> Watch:
    """Of two streams that have run."""
    has_run(catalog, "orders", "shop.payments")
    return Watch(instance, catalog_resource, [orders, payments])


def has_run(catalog: Catalog, *stream_ids: str) -> None:
    for stream_id in stream_ids:
        register(catalog, stream_id)
        execution = begin_execution(catalog, stream_id, f"the run of {stream_id}")
        as_writer(catalog, stream_id).executions.end(execution.execution_id, ExecutionStatus.SUSPENDED, "a test")


def test_the_first_look_reports_every_check_and_the_next_one_nothing(watch: Watch) -> None:
    first = watch.tick()

    assert set(first) == {(key, check.value) for key in ("orders", "shop/payments") for check in HealthCheck}
    assert watch.tick() == {}


def test_a_verdict_is_reported_when_it_changes_with_its_reason_and_severity(watch: Watch, catalog: Catalog) -> None:
    watch.tick()
    for expected in (dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR):
        while True:
            as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders").snapshot_id, "the disk is full")
            news = watch.tick()
            if news:
                break
        [(where, evaluation)] = news.items()
        assert where == ("orders", "consecutive_failures")
        assert (evaluation.passed, evaluation.severity) == (False, expected)
        assert "the disk is full" in (evaluation.description or "")
    take_snapshot(catalog, "orders", full_bytes=5)

    news = watch.tick()

    assert news["orders", "consecutive_failures"].passed


def test_a_stream_that_was_never_started_is_not_evaluated_and_hides_no_other(
    watch: Watch, catalog: Catalog, orders: StreamingAsset
) -> None:
    @streaming_asset(checkpointing=CheckpointConfig(interval=1000))
    def deployed_a_moment_ago(context: Any) -> Any: ...

    watch = Watch(watch.instance, watch.resource, [deployed_a_moment_ago, orders])
    assert {key for key, _ in watch.tick()} == {"orders"}
    register(catalog, "deployed_a_moment_ago")
    catalog.desired_states.put("deployed_a_moment_ago", DesiredState.RUNNING, origin="a person")

    # It is to run, and does not.
    assert {key: each.severity for key, each in watch.tick().items()} == {
        ("deployed_a_moment_ago", name): dg.AssetCheckSeverity.ERROR for name in ("checkpoint_age", "progress")
    }


def test_of_a_stream_that_has_no_history_any_more_nothing_stays_green(
    watch: Watch, tmp_path: Path, orders: StreamingAsset
) -> None:
    before = watch.tick()
    with closing(Catalog(f"sqlite:///{tmp_path}/another.db")) as another:
        another_url = CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/another.db")
        assert another.deployment_id != before["orders", "progress"].metadata["dagster_ckpt/deployment"].value
        # The deployment that has a history goes on reporting.
        assert Watch(watch.instance, another_url, [orders]).tick() == {}
        has_run(another, "orders")
        assert set(Watch(watch.instance, another_url, [orders]).tick()) == {("orders", each) for each in HealthCheck}


def test_of_two_deployments_with_the_same_assets_the_one_started_last_reports(
    watch: Watch, tmp_path: Path, orders: StreamingAsset, capfd: pytest.CaptureFixture[str]
) -> None:
    watch.tick()
    with closing(Catalog(f"sqlite:///{tmp_path}/another.db")) as another:
        has_run(another, "orders")
        later = Watch(watch.instance, CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/another.db"), [orders])
        assert len(later.tick()) == len(HealthCheck)
        capfd.readouterr()

        assert [watch.tick() for _ in range(3)] == [{}, {}, {}]
        assert later.tick() == {}

    said = f"orders: deployment {another.deployment_id} has reported on the same asset keys"
    assert capfd.readouterr().err.count(said) == 1
    # Loaded again, it takes the stream back.
    again = Watch(watch.instance, watch.resource, [orders])
    assert len(again.tick()) == len(HealthCheck)


def test_what_nobody_knows_does_not_pass(watch: Watch, catalog: Catalog) -> None:
    take_snapshot(catalog, "orders")
    evaluation = watch.tick()["orders", "restorability"]

    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert evaluation.metadata["dagster_ckpt/verdict"].value == "UNKNOWN"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, catalog_resource: CheckpointCatalogResource) -> Iterator[list[int]]:
    """The time of the catalog, which every sensor reads."""
    now = [wall_clock_ms()]
    catalog = Catalog(catalog_resource.url, clock=lambda: now[0])
    monkeypatch.setattr(CheckpointCatalogResource, "catalog", lambda _self: catalog)
    register(catalog, "orders")
    yield now
    catalog.close()


def progress_with(source: str) -> dict[str, Any]:
    activity = {"doing": "Waiting for data to arrive", "is_idle": True, "stalled_for_ms": 0}
    return {"batch_id": 3, "rows_per_second": 9.0, "sources": [{"source": source}], "activity": activity}


def test_a_healthy_stream_of_files_passes_every_check(
    clock: list[int], instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> None:
    watch, catalog = Watch(instance, catalog_resource, [orders]), catalog_resource.catalog()
    assert watch.tick() == {}
    execution = begin_execution(catalog, "orders", "a run")

    # Until a snapshot was verified, nobody knows whether one can be restored.
    assert [name for (_, name), each in watch.tick().items() if not each.passed] == ["restorability"]
    as_writer(catalog).executions.heartbeat(execution.execution_id, progress_with("FileStreamSource[/in]"))
    catalog.snapshots.verified(take_snapshot(catalog, "orders").snapshot_id, None)

    watch.tick()

    latest = {name: each for (_, name), each in everything(watch).items()}
    assert [name for name, each in latest.items() if not each.passed] == []


def everything(watch: Watch) -> dict[tuple[str, str], dg.AssetCheckEvaluation]:
    """The verdicts of now, as a sensor that has reported nothing yet reports them."""
    with dg.DagsterInstance.ephemeral() as fresh:
        context = dg.build_sensor_context(fresh, resources={"checkpoint_catalog": watch.resource})
        events = watch.sensor.evaluate_tick(context).asset_events
    return {(each.asset_key.to_user_string(), each.check_name): each for each in events}


def test_a_killed_stream_is_red_within_an_interval_also_where_no_supervisor_runs(
    clock: list[int], instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> None:
    watch, catalog = Watch(instance, catalog_resource, [orders]), catalog_resource.catalog()
    execution = begin_execution(catalog, "orders", "a run")
    holder = this_holder(execution.execution_id, "a run", None)
    lease = catalog.leases.acquire("orders", holder, 30_000)
    as_writer(catalog).executions.heartbeat(execution.execution_id, progress_with("FileStreamSource[/in]"))
    watch.tick()
    clock[0] += 25_000
    assert everything(watch)["orders", "progress"].passed

    # Its process and its host are gone: no heartbeat, no renewal, and no run monitoring.
    clock[0] += lease.expires_at_ms - clock[0] + 1

    red = watch.tick()["orders", "progress"]
    assert (red.passed, red.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "the stream should be running but is not: process" in (red.description or "")


def test_a_stream_that_restores_for_long_is_not_taken_for_dead(
    clock: list[int], instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> None:
    watch, catalog = Watch(instance, catalog_resource, [orders]), catalog_resource.catalog()
    execution = begin_execution(catalog, "orders", "a run", running=False)
    lease = catalog.leases.acquire("orders", this_holder(execution.execution_id, "a run", None), 30_000)
    for _ in range(20):
        clock[0] += 20_000
        catalog.leases.renew(lease, 30_000)

    assert everything(watch)["orders", "progress"].passed


def test_several_evaluations_of_one_check_stay_apart_in_its_history(watch: Watch, catalog: Catalog) -> None:
    watch.tick()
    as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders").snapshot_id, "the disk is full")
    watch.tick()
    take_snapshot(catalog, "orders")
    watch.tick()

    key = dg.AssetCheckKey(dg.AssetKey("orders"), "consecutive_failures")
    history = watch.instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    assert [each.evaluation.passed for each in history if each.evaluation][::-1] == [True, False, True]


def test_an_unchanged_verdict_is_reported_again_after_a_day(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.tick()
    later_ms = wall_clock_ms() + 24 * 3_600_000
    monkeypatch.setattr("dagster_ckpt.orchestration.checks.wall_clock_ms", lambda: later_ms)

    assert len(watch.tick()) == 2 * len(HealthCheck)


def test_many_streams_are_looked_at_in_turn(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
    payments: StreamingAsset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagster_ckpt.orchestration.checks.STREAMS_PER_TICK", 1)
    has_run(catalog, "orders", "shop.payments")
    watch = Watch(instance, catalog_resource, [payments, orders], checks=[HealthCheck.CHECKPOINT_AGE])

    assert [[key for key, _ in watch.tick()] for _ in range(3)] == [["orders"], ["shop/payments"], []]
    watch.cursor = "what a person wrote"
    assert watch.tick() == {}


def test_thresholds_by_stream(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> None:
    has_run(catalog, "orders", "shop.payments")
    for stream_id in ("orders", "shop.payments"):
        for _ in range(4):
            begun = begin_snapshot(catalog, stream_id)
            as_writer(catalog, stream_id).snapshots.fail(begun.snapshot_id, "the disk is full")
    watch = Watch(
        instance,
        catalog_resource,
        [orders, payments],
        settings={"orders": HealthSettings(failures_to_warn=9, failures_to_fail=9)},
        checks=[HealthCheck.CONSECUTIVE_FAILURES],
    )

    assert {key: each.passed for (key, _), each in watch.tick().items()} == {"orders": True, "shop/payments": False}


@pytest.fixture
def look(orders: StreamingAsset, catalog_resource: CheckpointCatalogResource) -> dg.JobDefinition:
    """The job that runs the checks."""
    [checks] = build_health_checks([orders])
    definitions = dg.Definitions(
        assets=[orders.asset],
        asset_checks=[checks],
        jobs=[dg.define_asset_job("look", selection=dg.AssetSelection.checks(checks))],
        resources=dict.fromkeys(("pyspark", "checkpoint_storage", "state_backend"), "unused")
        | {"checkpoint_catalog": catalog_resource},
    )
    return definitions.resolve_job_def("look")


def test_a_check_that_a_run_has_yet_to_evaluate_is_one_that_nobody_evaluated(
    watch: Watch, look: dg.JobDefinition
) -> None:
    watch.tick()
    run = watch.instance.create_run_for_job(look)
    assert watch.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED)

    assert set(watch.tick()) == {("orders", check.value) for check in HealthCheck}
    assert watch.tick() == {}


def test_the_checks_can_be_run_from_the_page(
    instance: dg.DagsterInstance, catalog: Catalog, look: dg.JobDefinition
) -> None:
    begin_execution(catalog, "orders", "run")

    result = look.execute_in_process(instance=instance)

    evaluations = {each.check_name: each.passed for each in result.get_asset_check_evaluations()}
    assert set(evaluations) == {check.value for check in HealthCheck}
    assert evaluations["checkpoint_age"]


def test_the_job_that_starts_a_stream_does_not_run_its_checks(orders: StreamingAsset) -> None:
    names = ("pyspark", "checkpoint_storage", "state_backend", "checkpoint_catalog")
    resources = dg.Definitions(resources=dict.fromkeys(names, "unused"))
    definitions = dg.Definitions.merge(stream_definitions(orders), resources)
    job = definitions.get_repository_def().get_job("orders_stream")
    assert [node.name for node in job.nodes] == ["orders"]


@pytest.mark.parametrize(
    ("interval_ms", "warn_s", "fail_s"), [(1000, 180, 360), (60_000, 180, 360), (600_000, 1800, 3600)]
)
def test_a_stream_is_fresh_as_long_as_checkpoints_come(interval_ms: int, warn_s: int, fail_s: int) -> None:
    policy = default_freshness(CheckpointConfig(interval=interval_ms).options)
    assert policy is not None
    assert (policy.warn_window.to_timedelta().total_seconds(), policy.fail_window.to_timedelta().total_seconds()) == (
        warn_s,
        fail_s,
    )


def test_without_periodic_checkpoints_nobody_can_say_what_is_fresh_and_a_policy_of_ones_own_wins() -> None:
    assert default_freshness(CheckpointConfig().options) is None
    own = dg.FreshnessPolicy.cron(deadline_cron="0 3 * * *", lower_bound_delta=timedelta(hours=1))

    @streaming_asset(checkpointing=CheckpointConfig(interval=1000), freshness_policy=own)
    def orders(context: Any) -> Any: ...

    assert next(iter(orders.asset.specs)).freshness_policy == own


class TestAStreamThatWritesSeveralAssets:
    @pytest.fixture
    def sorted_orders(self, catalog: Catalog) -> StreamingAsset:
        @streaming_multi_asset(specs=[dg.AssetSpec("good"), dg.AssetSpec("bad")])
        def sorted_orders(context: Any) -> Any: ...

        register(catalog, "sorted_orders")
        return sorted_orders

    def test_its_checks_are_on_the_first_and_each_further_one_says_how_they_are(
        self,
        instance: dg.DagsterInstance,
        catalog_resource: CheckpointCatalogResource,
        catalog: Catalog,
        sorted_orders: StreamingAsset,
    ) -> None:
        has_run(catalog, "sorted_orders")
        watch = Watch(instance, catalog_resource, [sorted_orders], checks=[HealthCheck.CONSECUTIVE_FAILURES])
        first = watch.tick()
        for _ in range(3):
            as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "sorted_orders").snapshot_id, "the disk is full")
        news = watch.tick()

        assert {key: each.passed for key, each in first.items()} == {
            ("good", "consecutive_failures"): True,
            ("bad", "stream_health"): True,
        }
        summary = news["bad", "stream_health"]
        assert (summary.passed, summary.severity) == (False, dg.AssetCheckSeverity.ERROR)
        assert re.search("checks of good: consecutive_failures: 3 .*the disk is full", summary.description or "")

    def test_each_can_be_run_from_the_page(
        self, instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, sorted_orders: StreamingAsset
    ) -> None:
        [checks] = build_health_checks([sorted_orders])
        selection = dg.AssetSelection.checks(dg.AssetCheckKey(dg.AssetKey("bad"), "stream_health"))
        definitions = dg.Definitions(
            assets=[sorted_orders.asset],
            asset_checks=[checks],
            jobs=[dg.define_asset_job("look", selection=selection)],
            resources=dict.fromkeys(("pyspark", "checkpoint_storage", "state_backend"), "unused")
            | {"checkpoint_catalog": catalog_resource},
        )

        result = definitions.resolve_job_def("look").execute_in_process(instance=instance)

        assert [each.check_name for each in result.get_asset_check_evaluations()] == ["stream_health"]


def test_an_upgrade_that_was_refused_is_an_asset_check_that_fails_until_it_is_tried_again(
    watch: Watch, catalog: Catalog
) -> None:
    begin_execution(catalog, "orders", "run")
    row = catalog.desired_states.ensure("orders", origin="a test")
    watch.tick()
    refused = UpgradeRecord(UpgradePhase.REFUSED, "1", "2", UpgradeMode.SAVEPOINT, 1, "the state has another schema")
    catalog.desired_states.advance(row, upgrade=refused, alert="2: the state has another schema", request_id=None)

    evaluation = watch.tick()["orders", "desired_state"]
    catalog.desired_states.put("orders", None, origin="a person", retry_refused=True)
    again = watch.tick()["orders", "desired_state"]

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "the state has another schema. The stream continues with the previous code" in (evaluation.description or "")
    assert again.passed
