"""Several `stream_definitions` in one code location: each with its names, and none acts on another's streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.events import EngineEventData
from dagster.components.testing import create_defs_folder_sandbox
from orchestration_catalog import begin_execution, register, take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import RequestKind
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.component import StreamsComponent
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.observed_runs import Silences, report_lost_runs
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.run_status import (
    DEPLOYMENT_TAG,
    OPERATION_TAG,
    RESTART_OF_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
)
from dagster_ckpt.orchestration.stream import StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.streaming_asset import declare_stream, streaming_asset, streaming_multi_asset
from dagster_ckpt.orchestration.translator import RESOURCES, StreamTranslator
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.stream.liveness import LIVELY_MS, SLOW_START_MS
from dagster_ckpt.values.modes import DesiredState

REGIONS = ("eu", "us")
# No process has it: Linux' numbers end at 4194304.
NOBODY = 2**31 - 1
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def translator(region: str) -> StreamTranslator:
    return StreamTranslator(region, {resource: f"{region}_{resource}" for resource in RESOURCES})


def orders_of(region: str, *, desired: DesiredState | None = None) -> StreamingAsset:
    """A stream with the same stream id in every region."""

    @streaming_asset(
        name="orders",
        key_prefix=region,
        stream_id="orders",
        checkpointing=CheckpointConfig(interval=1_000),
        restart_strategy=RestartStrategies.fixed_delay_restart(5, 0),
        desired_state=desired,
        code_version="1",
        translator=translator(region),
    )
    def orders(context: Any) -> Any: ...

    return orders


@dataclass
class Region:
    """One deployment: its catalog, and its part of the code location."""

    name: str
    catalog: Catalog
    resource: CheckpointCatalogResource
    instance: dg.DagsterInstance
    location: dg.Definitions

    def tick(self, sensor: str, cursor: str | None = None) -> Any:
        definition = self.location.resolve_sensor_def(f"{self.name}_{sensor}")
        resources = {f"{self.name}_checkpoint_catalog": self.resource}
        context = dg.build_sensor_context(self.instance, cursor, resources=resources, definitions=self.location)
        return definition.evaluate_tick(context)

    def requests(self) -> list[dg.RunRequest]:
        requests = list(self.tick("checkpoint_supervisor_sensor").run_requests or [])
        for request in requests:
            assert request.job_name is not None
            assert dg.validate_run_config(self.location.resolve_job_def(request.job_name), request.run_config)
        return requests

    def operate(self, op: str, **config: Any) -> dg.ExecuteInProcessResult:
        job = self.location.resolve_job_def(f"{self.name}_{op}_job")
        return job.execute_in_process({"ops": {op: {"config": config}}}, instance=self.instance, raise_on_error=False)


@pytest.fixture
def regions(
    instance: dg.DagsterInstance, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[dict[str, Region]]:
    desired: DesiredState | None = getattr(request, "param", None)
    resources: dict[str, Any] = {}
    catalogs: dict[str, CheckpointCatalogResource] = {}
    for region in REGIONS:
        catalogs[region] = CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/{region}.db")
        resources |= {
            f"{region}_pyspark": dg.ResourceDefinition.none_resource(),
            f"{region}_checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/{region}/checkpoints"),
            f"{region}_state_backend": StateBackendResource(live_directory=f"{tmp_path}/{region}/live"),
            f"{region}_checkpoint_catalog": catalogs[region],
        }
    location = dg.Definitions.merge(
        *(stream_definitions(orders_of(region, desired=desired)) for region in REGIONS),
        dg.Definitions(resources=resources),
    )
    dg.Definitions.validate_loadable(location)
    made = {}
    for region in REGIONS:
        catalog = catalogs[region].catalog()
        register(catalog, "orders")
        made[region] = Region(region, catalog, catalogs[region], instance, location)
    yield made
    for each in made.values():
        each.catalog.close()


def test_without_a_translator_the_names_are_those_on_the_pages() -> None:
    names = StreamTranslator()

    assert names.get_job_name("cancel_stream_job") == "cancel_stream_job"
    assert names.keys_of(RESOURCES) == RESOURCES


def test_everything_of_a_region_has_its_prefix(regions: dict[str, Region]) -> None:
    location = regions["eu"].location
    repository = location.get_repository_def()
    jobs = {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")}

    assert {name.split("_")[0] for name in jobs} == set(REGIONS)
    assert {name for name in jobs if name.endswith("orders_stream")} == {"eu_orders_stream", "us_orders_stream"}
    assert {sensor.name.split("_")[0] for sensor in repository.sensor_defs} == set(REGIONS)
    assert {schedule.name.split("_")[0] for schedule in repository.schedule_defs} == set(REGIONS)
    assert len({name.split("_", 1)[1] for name in jobs}) * 2 == len(jobs)


def test_a_failure_is_restarted_by_the_supervisor_of_its_region_alone(regions: dict[str, Region]) -> None:
    eu, us = regions["eu"], regions["us"]
    run = eu.instance.add_run(
        dg.DagsterRun("eu_orders_stream", status=DagsterRunStatus.FAILURE, tags={STREAM_ID_TAG: "orders"})
    )
    execution = begin_execution(eu.catalog, "orders", run.run_id)

    eu.requests()
    [restart] = eu.requests()

    assert restart.job_name == "eu_orders_stream"
    assert restart.tags[RESTART_OF_TAG] == execution.execution_id
    assert restart.tags[DEPLOYMENT_TAG] == eu.catalog.deployment_id
    assert us.requests() == []
    assert us.catalog.executions.of_stream("orders") == []


@pytest.mark.parametrize("regions", [DesiredState.RUNNING], indirect=True)
def test_a_start_that_failed_in_one_region_fails_none_of_the_same_id_in_the_other(regions: dict[str, Region]) -> None:
    eu, us = regions["eu"], regions["us"]
    starts = {region.name: region.requests() for region in (eu, us)}
    [of_us] = starts["us"] or us.requests()
    # The same stream, generation and step: the same request id in both catalogs.
    run = dg.DagsterRun(str(of_us.job_name), status=DagsterRunStatus.FAILURE, tags={**of_us.tags})
    us.instance.add_run(run)

    [again] = eu.requests()

    assert again.tags[START_REQUEST_TAG] == of_us.tags[START_REQUEST_TAG]
    assert again.job_name == "eu_orders_stream"
    assert [request.kind for request in eu.catalog.requests.pending("orders")] == [RequestKind.START]
    us.requests()
    assert us.catalog.requests.pending("orders") == []


@pytest.mark.parametrize(("of", "told"), [("eu", 1), ("us", 0)])
def test_a_lost_run_is_ended_by_the_supervisor_of_its_region_alone(
    regions: dict[str, Region], of: str, told: int
) -> None:
    region = regions[of]
    tags = {STREAM_ID_TAG: "orders", DEPLOYMENT_TAG: region.catalog.deployment_id}
    run = region.instance.add_run(dg.DagsterRun("orders_stream", status=DagsterRunStatus.STARTED, tags=tags))
    lose(region.instance, run)

    assert len(looked(regions["eu"])) == told


@pytest.mark.parametrize(
    ("more", "told"), [({}, 0), ({RESTART_OF_TAG: "x"}, 0), ({"dagster_ckpt/retention_of": "x"}, 1)]
)
def test_a_run_of_an_operator_that_is_silent_for_long_goes_on(
    regions: dict[str, Region], more: dict[str, str], told: int
) -> None:
    eu = regions["eu"]
    tags = {STREAM_ID_TAG: "orders", OPERATION_TAG: "verify_snapshots", **more}
    run = eu.instance.add_run(dg.DagsterRun("verify", status=DagsterRunStatus.STARTED, tags=tags))
    lose(eu.instance, run)

    assert len(looked(eu)) == told


def lose(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    event = EngineEventData({"pid": dg.MetadataValue.text(str(NOBODY))})
    instance.report_engine_event("Started process for run", run, event)


def looked(region: Region) -> list[str]:
    clock = {"ms": 0}
    silences = Silences(lambda: clock["ms"])
    told: list[str] = []
    for clock["ms"] in (LIVELY_MS, LIVELY_MS + SLOW_START_MS + 1):
        told += report_lost_runs(region.instance, region.catalog, {"orders"}, silences, [])
    return told


def test_a_checkpoint_is_reported_on_the_asset_of_its_region(regions: dict[str, Region]) -> None:
    take_snapshot(regions["eu"].catalog, "orders")

    [event] = regions["eu"].tick("checkpoint_catalog_sensor").asset_events

    assert event.asset_key == dg.AssetKey(["eu", "orders"])
    assert regions["us"].tick("checkpoint_catalog_sensor").asset_events == []


def test_health_is_that_of_the_region(regions: dict[str, Region]) -> None:
    eu, us = regions["eu"], regions["us"]
    for region in (eu, us):
        run = region.instance.add_run(dg.DagsterRun(f"{region.name}_orders_stream", status=DagsterRunStatus.STARTED))
        begin_execution(region.catalog, "orders", run.run_id)

    checked = {region.name: region.tick("checkpoint_health_sensor").asset_events for region in (eu, us)}

    assert {each.asset_key.path[0] for each in checked["eu"]} == {"eu"}
    assert {each.asset_key.path[0] for each in checked["us"]} == {"us"}


def test_an_operator_reaches_the_streams_of_the_region_alone(regions: dict[str, Region]) -> None:
    done = regions["eu"].operate("set_desired_state", stream_id="orders", state="SUSPENDED")

    assert done.success
    [row] = desired(regions["eu"])
    assert row.desired is DesiredState.SUSPENDED
    assert desired(regions["us"]) == []
    run = regions["eu"].instance.get_run_by_id(done.run_id)
    assert run is not None
    assert (run.tags[STREAM_ID_TAG], run.tags[OPERATION_TAG]) == ("orders", "set_desired_state")
    assert run.tags[DEPLOYMENT_TAG] == regions["eu"].catalog.deployment_id
    with pytest.raises(dg.DagsterInvalidConfigError, match="us_orders"):
        regions["eu"].operate("show_stream", stream_id="us_orders")


def desired(region: Region) -> list[DesiredRecord]:
    return list(region.catalog.desired_states.all().values())


def test_schedules_ask_for_the_jobs_of_their_region(regions: dict[str, Region]) -> None:
    location = regions["eu"].location
    schedule = location.resolve_schedule_def("eu_checkpoint_housekeeping_schedule")

    [request] = schedule.evaluate_tick(dg.build_schedule_context(scheduled_execution_time=NOON)).run_requests

    assert schedule.job.name == "eu_apply_retention_job"
    assert dg.validate_run_config(location.resolve_job_def("eu_apply_retention_job"), request.run_config)


class InTheWarehouse(StreamTranslator):
    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(key=spec.key.with_prefix("warehouse"), group_name="streams").merge_attributes(
            tags={"tier": "gold"}
        )

    def get_start_job_name(self, name: str) -> str:
        return f"run_{name}"


def test_a_translator_of_ones_own_chooses_keys_groups_tags_and_the_start_job() -> None:
    @streaming_asset(deps=["landing"], kinds={"spark", "delta"}, translator=InTheWarehouse())
    def orders(context: Any) -> Any: ...

    [spec] = orders.asset.specs

    assert spec.key == orders.key == dg.AssetKey(["warehouse", "orders"])
    assert (spec.group_name, spec.kinds, spec.tags["tier"]) == ("streams", {"spark", "delta"}, "gold")
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("landing")]
    assert orders.stream_id == "warehouse.orders"
    assert orders.start_job is not None
    assert orders.start_job.name == "run_orders"


def test_several_assets_of_one_query_have_names_with_one_prefix() -> None:
    @streaming_multi_asset(specs=[dg.AssetSpec("good"), dg.AssetSpec("bad")], translator=StreamTranslator("eu"))
    def orders(context: Any) -> Any: ...

    definitions = stream_definitions(orders, savepoint_schedules={"orders": "0 3 * * *"})

    assert orders.name == "eu_orders"
    assert orders.start_job is not None
    assert orders.start_job.name == "eu_orders_stream"
    assert "eu_orders_savepoint_schedule" in {str(each.name) for each in definitions.schedules or ()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("e u", {}), "name_prefix is 'e u', which cannot begin a name in Dagster"),
        ((None, {"catalog": "eu_catalog"}), "resource_keys names 'catalog', but streams use the resources"),
    ],
)
def test_what_a_translator_refuses(given: tuple[str | None, dict[str, str]], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StreamTranslator(*given)


def test_streams_of_different_translators_share_no_jobs() -> None:
    with pytest.raises(OptionError, match=r"have different translators.*call stream_definitions once for each"):
        stream_definitions(orders_of("eu"), replace(orders_of("us"), spec=StreamSpec.of("others")))


def test_streams_with_one_name_under_two_prefixes_are_told_of_their_start_jobs() -> None:
    def orders(context: Any) -> Any: ...

    made = [streaming_asset(name="orders", key_prefix=prefix)(orders) for prefix in ("a", "b")]

    with pytest.raises(OptionError, match=r"'a\.orders' and 'b\.orders' both have the start job 'orders_stream'"):
        stream_definitions(*made)


def test_a_stream_in_ones_own_job_is_operated_under_the_translators_names() -> None:
    @dg.op(config_schema={"start_from": dg.Field(str, default_value="latest")})
    def consume(context) -> None: ...

    @dg.job
    def own() -> None:
        consume()

    stream = declare_stream(StreamSpec.of("consumed"), own, translator=StreamTranslator("eu"))
    names = {job.name for job in stream_definitions(stream).jobs or ()}

    assert {"own", "eu_cancel_stream_job"} <= names


def a_component(region: str, home: Path) -> dict[str, Any]:
    return {
        "type": "dagster_ckpt.StreamsComponent",
        "attributes": {
            "name_prefix": region,
            "streams": [
                {
                    "name": "orders",
                    "assets": [{"key": f"{region}/orders"}],
                    "sources": [{"name": "rates", "format": "rate"}],
                    "sink": {"format": "console"},
                    "savepoints": {"cron_schedule": "0 3 * * *"},
                }
            ],
            "resources": {
                "spark_config": {},
                "checkpoint_storage": {"path": f"file://{home}/{region}/checkpoints"},
                "state_backend": {"live_directory": f"{home}/{region}/live"},
                "checkpoint_catalog": {"url": f"sqlite:///{home}/{region}.db"},
            },
        },
    }


def test_two_components_in_one_project_each_with_resources_and_names(tmp_path: Path) -> None:
    with create_defs_folder_sandbox() as sandbox, dg.DagsterInstance.ephemeral() as instance:
        for region in REGIONS:
            sandbox.scaffold_component(component_cls=StreamsComponent, defs_yaml_contents=a_component(region, tmp_path))
        with sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)
            for region in REGIONS:
                config = {"set_desired_state": {"config": {"stream_id": "orders", "state": "CANCELED"}}}
                job = definitions.resolve_job_def(f"{region}_set_desired_state_job")
                if region == "eu":
                    assert job.execute_in_process({"ops": config}, instance=instance).success
                assert definitions.resolve_job_def(f"{region}_orders_stream")
                assert definitions.resolve_schedule_def(f"{region}_orders_savepoint_schedule")
    there = {region: CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/{region}.db").catalog() for region in REGIONS}
    assert {region: set(catalog.desired_states.all()) for region, catalog in there.items()} == {
        "eu": {"orders"},
        "us": set(),
    }
    for catalog in there.values():
        catalog.close()
