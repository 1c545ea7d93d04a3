"""The supervisor sensor brings managed streams to their desired state, by the one way in which runs are started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import begin_execution, take_snapshot
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import RequestKind, RequestStatus
from dagster_ckpt.client.managed_stream import ORIGIN
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG, STREAM_ID_TAG
from dagster_ckpt.orchestration.settings import UpgradeSettings
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.values.modes import DesiredState
from tests.support.as_writer import as_writer


def managed(
    code_version: str, desired: DesiredState | None = DesiredState.RUNNING, *, name: str = "clicks"
) -> StreamingAsset:
    @streaming_asset(
        name=name,
        checkpointing=CheckpointConfig(interval=1000),
        restart_strategy=RestartStrategies.fixed_delay_restart(10, 0),
        desired_state=desired,
        upgrade=UpgradeSettings(rollback_after_ms=60_000),
        code_version=code_version,
    )
    def clicks(context: Any) -> Any: ...

    return clicks


class Location:
    """A code location with one stream, whose runs the test plays."""

    def __init__(self, instance: dg.DagsterInstance, resource: CheckpointCatalogResource, catalog: Catalog) -> None:
        self.instance = instance
        self.catalog = catalog
        self.resource = resource
        self.definitions = dg.Definitions()
        self.load("1")

    def load(
        self, code_version: str, desired: DesiredState | None = DesiredState.RUNNING, *, beside: Sequence[str] = ()
    ) -> None:
        resources = {
            "pyspark": dg.ResourceDefinition.none_resource(),
            "checkpoint_storage": CheckpointStorageResource(path="file:///nowhere"),
            "state_backend": StateBackendResource(live_directory="/nowhere"),
            "checkpoint_catalog": self.resource,
        }
        others = [managed(code_version, desired, name=name) for name in beside]
        streams = stream_definitions(managed(code_version, desired), *others)
        self.definitions = dg.Definitions.merge(streams, dg.Definitions(resources=resources))

    def tick(self) -> list[Any]:
        sensor = self.definitions.resolve_sensor_def("checkpoint_supervisor_sensor")
        context = dg.build_sensor_context(
            self.instance, resources={"checkpoint_catalog": self.resource}, definitions=self.definitions
        )
        requests = list(sensor.evaluate_tick(context).run_requests or [])
        for request in requests:
            assert request.job_name is not None
            job = self.definitions.resolve_job_def(request.job_name)
            assert dg.validate_run_config(job, request.run_config)
        return requests

    def ticks(self) -> list[Any]:
        """Ticks until nothing changes any more."""
        launched: dict[str, Any] = {}
        for _ in range(8):
            launched |= {request.run_key: request for request in self.tick()}
        return list(launched.values())

    def runs(self, request: Any, code_version: str, status: DagsterRunStatus = DagsterRunStatus.STARTED) -> Any:
        """The run of a start goes so far that its query runs."""
        run = dg.DagsterRun(request.job_name, status=status, tags={STREAM_ID_TAG: "clicks", **request.tags})
        execution = begin_execution(
            self.catalog, "clicks", self.instance.add_run(run).run_id, code_version=code_version
        )
        as_writer(self.catalog).requests.resolve(request.tags[START_REQUEST_TAG], RequestStatus.COMPLETED)
        return execution

    def set_desired_state(self, state: str) -> Any:
        job = self.definitions.resolve_job_def("set_desired_state_job")
        config = {"ops": {"set_desired_state": {"config": {"stream_id": "clicks", "state": state}}}}
        return job.execute_in_process(config, instance=self.instance)

    @property
    def asked(self) -> list[RequestKind]:
        return [request.kind for request in self.catalog.requests.pending("clicks") if request.origin == ORIGIN]


@pytest.fixture
def location(instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource) -> Iterator[Location]:
    catalog = catalog_resource.catalog()
    yield Location(instance, catalog_resource, catalog)
    catalog.close()


def test_a_stream_whose_row_cannot_be_read_keeps_no_other_from_being_started(location: Location) -> None:
    location.load("1", beside=["broken"])
    location.catalog.streams.ensure("broken", name="broken", asset_key="broken", options={})
    with location.catalog.database.writing() as connection:
        connection.execute(text("UPDATE streams SET pending_restore = 'nothing that can be read'"))

    assert [request.job_name for request in location.ticks()] == ["clicks_stream"]


def test_a_stream_that_is_to_run_is_started_once_by_the_first_sensor_that_sees_it(location: Location) -> None:
    [request] = location.ticks()
    assert request.job_name == "clicks_stream"
    assert request.run_config == {"ops": {"clicks": {"config": {"start_from": "latest"}}}}

    location.runs(request, "1")
    assert location.ticks() == []
    row = location.catalog.desired_states.all()["clicks"]
    assert (row.desired, row.reached) == (None, row.generation)


def test_a_stream_of_which_nobody_says_what_it_is_to_be_is_left_alone(location: Location) -> None:
    location.load("1", desired=None)
    assert location.ticks() == []
    assert location.catalog.desired_states.all() == {}


def test_what_a_person_says_in_the_launchpad_is_done(location: Location) -> None:
    location.load("1", desired=None)
    said = location.set_desired_state("RUNNING")
    table = said.all_node_events
    assert any("dagster_ckpt/desired_state" in str(event.event_specific_data) for event in table)
    [request] = location.ticks()
    location.runs(request, "1")
    location.set_desired_state("SUSPENDED")
    assert location.ticks() == []
    assert location.asked == [RequestKind.STOP_WITH_SAVEPOINT]


def test_a_stream_that_is_to_rest_is_not_restarted_after_a_failure(location: Location) -> None:
    [request] = location.ticks()
    execution = location.runs(request, "1", DagsterRunStatus.FAILURE)
    location.set_desired_state("SUSPENDED")
    assert location.ticks() == []
    assert location.catalog.executions.get(execution.execution_id).settled


def test_a_stream_that_is_to_run_is_restarted_by_its_strategy(location: Location) -> None:
    [request] = location.ticks()
    execution = location.runs(request, "1", DagsterRunStatus.FAILURE)
    [restart] = location.ticks()
    assert restart.tags[RESTART_OF_TAG] == execution.execution_id


def test_a_canceled_wish_for_a_stream_at_rest_is_a_run_that_cleans_up(location: Location) -> None:
    [request] = location.ticks()
    execution = location.runs(request, "1", DagsterRunStatus.FAILURE)
    location.set_desired_state("CANCELED")
    [clean_up] = location.ticks()
    assert clean_up.job_name == "apply_retention_job"
    config = clean_up.run_config["ops"]["apply_retention"]["config"]
    assert config == {"stream_id": "clicks", "execution_id": execution.execution_id, "state": "CANCELED"}


def test_another_code_version_is_tried_by_a_run_of_the_streams_own_job(location: Location) -> None:
    [request] = location.ticks()
    location.runs(request, "1")
    take_snapshot(location.catalog, "clicks")
    location.load("2")

    [trial] = location.ticks()

    assert trial.job_name == "clicks_stream"
    assert trial.run_config["ops"]["clicks"]["config"] == {"preflight": True}
    assert trial.tags[STEP_TAG].endswith("/PREFLIGHT")
    row = location.catalog.desired_states.all()["clicks"]
    assert row.upgrade is not None
    assert (row.upgrade.phase, row.upgrade.from_version, row.upgrade.to_version) == (UpgradePhase.PREFLIGHT, "1", "2")


def test_a_dead_run_of_the_old_code_is_not_restarted_with_code_that_was_not_tried(location: Location) -> None:
    [request] = location.ticks()
    location.runs(request, "1", DagsterRunStatus.FAILURE)
    take_snapshot(location.catalog, "clicks")
    location.load("2")
    assert [request.tags.get(RESTART_OF_TAG) for request in location.ticks()] == [None]


def test_yaml_says_the_same_as_python() -> None:
    given = {
        "mode": "LAST_STATE",
        "max_checkpoint_age_ms": 5,
        "rollback_after_ms": 7,
        "preflight": False,
        "stop_timeout_ms": 9,
    }
    settings = UpgradeSettings.model_validate(given)
    assert settings.upgrade_policy() == UpgradePolicy(UpgradeMode.LAST_STATE, 5, 7, preflight=False, stop_timeout_ms=9)
    assert UpgradeSettings().upgrade_policy() == UpgradePolicy()


@pytest.mark.parametrize("name", ["max_checkpoint_age_ms", "rollback_after_ms", "stop_timeout_ms"])
def test_a_duration_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is 0, but must be a positive number"):
        UpgradeSettings.model_validate({name: 0}).upgrade_policy()
