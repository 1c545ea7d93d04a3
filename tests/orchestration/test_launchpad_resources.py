"""A run's config cannot take a stream, or an operation on one, to another catalog, storage or live directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.orchestration import resources as resource_module
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.stream import StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.streaming_asset import StreamResource, declare_stream
from dagster_ckpt.stream.liveness import this_holder

OVERRIDES = {
    "checkpoint_catalog": {"url": "sqlite:///{elsewhere}/catalog.db"},
    "checkpoint_storage": {"path": "file://{elsewhere}/checkpoints"},
    "state_backend": {"live_directory": "{elsewhere}/live"},
}
SPEC = StreamSpec.of("own")


@dg.asset(output_required=False)
def own(context: dg.AssetExecutionContext, config: StreamRunConfig, streams: StreamResource):  # type: ignore[no-untyped-def]
    yield from streams.run(context, SPEC, describe=lambda spark: pytest.fail("it was started"))


class Location:
    """A code location with a stream of each form, and the runs that are launched in it."""

    def __init__(self, orders: StreamingAsset, home: Path, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.deployed = {
            "checkpoint_catalog": {"url": f"sqlite:///{home}/catalog.db"},
            "checkpoint_storage": {"path": f"file://{home}/checkpoints"},
            "state_backend": {"live_directory": f"{home}/live"},
        }
        resources: dict[str, Any] = {
            "pyspark": SparkSessionResource(),
            "checkpoint_catalog": CheckpointCatalogResource(**self.deployed["checkpoint_catalog"]),
            "checkpoint_storage": CheckpointStorageResource(**self.deployed["checkpoint_storage"]),
            "state_backend": StateBackendResource(**self.deployed["state_backend"]),
        }
        driven = external_streaming_asset("driven", launch=DriverLaunch(("false",), log_directory=str(home)))
        self.definitions = dg.Definitions.merge(
            stream_definitions(orders, driven, declare_stream(SPEC, own)),
            dg.Definitions(resources={**resources, "streams": StreamResource(**resources)}),
        )

    def launch(self, job: str, config: dict[str, Any]) -> tuple[bool, str]:
        """Whether a run succeeded, and why not."""
        result = self.definitions.resolve_job_def(job).execute_in_process(
            config, instance=self.instance, raise_on_error=False
        )
        failures = [event.step_failure_data.user_failure_data for event in result.all_events if event.is_step_failure]
        return result.success, str(failures[0].description) if failures and failures[0] else ""


@pytest.fixture
def location(
    orders: StreamingAsset, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> Location:
    monkeypatch.setattr(resource_module, "session_with", lambda _settings: pytest.fail("Spark was started"))
    return Location(orders, tmp_path, instance)


@pytest.mark.parametrize("resource", OVERRIDES)
@pytest.mark.parametrize(
    ("job", "ops"),
    [
        ("orders_stream", {}),
        ("driven_stream", {}),
        ("own_stream", {}),
        ("apply_retention_job", {"apply_retention": {"config": {"stream_id": "orders"}}}),
        ("rebuild_catalog_job", {"rebuild_catalog": {"config": {"stream_id": "orders"}}}),
        ("cancel_stream_job", {"cancel_stream": {"config": {"stream_id": "orders"}}}),
        ("show_stream_job", {"show_stream": {"config": {"stream_id": "orders"}}}),
    ],
)
def test_a_run_with_another_resource_than_its_code_location_is_refused_before_it_does_anything(
    location: Location, tmp_path: Path, job: str, ops: dict[str, Any], resource: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    given = {name: value.format(elsewhere=elsewhere) for name, value in OVERRIDES[resource].items()}

    success, why = location.launch(job, {"resources": {resource: {"config": given}}, "ops": ops})

    assert not success
    [field] = given
    assert f"sets {field} of resource {resource} differently than its code location does" in why
    assert f"Remove resources.{resource} from the config" in why
    assert not elsewhere.exists()


def test_what_the_launchpad_fills_in_is_no_change(location: Location) -> None:
    resources = {name: {"config": config} for name, config in location.deployed.items()}
    ops = {"set_desired_state": {"config": {"stream_id": "orders", "state": "SUSPENDED"}}}

    assert location.launch("set_desired_state_job", {"resources": resources, "ops": ops}) == (True, "")


def test_a_start_of_a_stream_that_is_running_is_refused_before_spark_is_started(location: Location) -> None:
    catalog = CheckpointCatalogResource(**location.deployed["checkpoint_catalog"]).catalog()
    holder = this_holder("an execution", "a run in progress", None)
    run = location.instance.add_run(dg.DagsterRun("orders_stream", status=dg.DagsterRunStatus.STARTED))
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
    catalog.leases.acquire("orders", replace(holder, run_id=run.run_id), 30_000)

    success, why = location.launch("orders_stream", {})

    assert not success
    assert f"is being written by run {run.run_id}" in why
    catalog.close()
