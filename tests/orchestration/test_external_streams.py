"""Streams whose query runs outside Dagster: what is declared, and what the supervisor sensor makes of their ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import HOST, begin_execution, register, take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.stream.liveness import SILENCE_MS, this_holder
from dagster_ckpt.values.durations import wall_clock_ms

COMMAND = DriverLaunch(("spark-submit", "clicks.py"), log_directory="/var/log/streams")


def stream(launch: DriverLaunch | None) -> StreamingAsset:
    return external_streaming_asset(
        "clicks",
        launch=launch,
        key_prefix="web",
        checkpointing=CheckpointConfig(interval=1000),
        restart_strategy=RestartStrategies.fixed_delay_restart(2, 0),
        description="What people click on.",
        code_version="3",
        owners=["team:web"],
    )


@pytest.fixture
def catalog(catalog_resource: CheckpointCatalogResource) -> Iterator[Catalog]:
    catalog = catalog_resource.catalog()
    register(catalog, "web.clicks")
    yield catalog
    catalog.close()


class TestDeclared:
    @pytest.mark.parametrize("launch", [None, COMMAND], ids=["started by others", "launched"])
    def test_it_is_an_asset_like_any_stream(self, launch: DriverLaunch | None) -> None:
        declared = stream(launch)

        (spec,) = declared.asset.specs
        assert (declared.stream_id, declared.name) == ("web.clicks", "web__clicks")
        assert spec.key == dg.AssetKey(["web", "clicks"])
        assert spec.metadata["dagster_ckpt/stream_id"] == "web.clicks"
        assert spec.metadata["dagster_ckpt/interval_ms"] == 1000
        assert (spec.description, spec.code_version, list(spec.owners)) == ("What people click on.", "3", ["team:web"])
        assert {"spark", "streaming"} <= set(spec.kinds)

    def test_started_by_others_it_cannot_be_materialized_by_a_click(self) -> None:
        declared = stream(None)

        assert not declared.asset.is_executable
        assert declared.start_job is None

    @pytest.mark.parametrize("launch", [None, COMMAND], ids=["started by others", "launched"])
    def test_a_code_location_of_it_loads_with_all_operator_jobs(
        self, launch: DriverLaunch | None, catalog_resource: CheckpointCatalogResource
    ) -> None:
        resource = dg.ResourceDefinition.none_resource()
        others = {"checkpoint_storage": resource, "state_backend": resource, "pyspark": resource}
        definitions = dg.Definitions.merge(
            stream_definitions(stream(launch)), dg.Definitions(resources={**others, "checkpoint_catalog": resource})
        )

        names = {job.name for job in definitions.resolve_all_job_defs()}

        assert {"trigger_savepoint_job", "stop_with_savepoint_job", "fork_stream_job", "preview_rewind_job"} <= names
        assert ("clicks_stream" in names) is (launch is not None)

    def test_a_job_id_that_cannot_name_a_folder_is_refused(self) -> None:
        with pytest.raises(OptionError, match="cannot name a folder"):
            external_streaming_asset("clicks", stream_id="../clicks")

    @pytest.mark.parametrize("command", ["spark-submit clicks.py", (), ("spark-submit", "{user}"), ("x", "{")])
    def test_a_command_that_could_not_be_run_is_refused(self, command: Any) -> None:
        with pytest.raises(OptionError, match="command is"):
            DriverLaunch(command, log_directory="/tmp")

    def test_a_command_names_its_job_and_its_request(self) -> None:
        launch = DriverLaunch(
            ("submit", "--name={stream_id}", "x.REQUEST={start_request}", "{{}}"), log_directory="/tmp"
        )

        assert launch.command_line(stream_id="j", start_request="r") == ["submit", "--name=j", "x.REQUEST=r", "{}"]

    def test_its_checkpoints_are_on_the_asset(
        self, catalog: Catalog, catalog_resource: CheckpointCatalogResource, instance: dg.DagsterInstance
    ) -> None:
        take_snapshot(catalog, "web.clicks")
        context = dg.build_sensor_context(instance, resources={"checkpoint_catalog": catalog_resource})

        events = build_catalog_sensor([stream(None)]).evaluate_tick(context).asset_events

        assert [event.asset_key for event in events] == [dg.AssetKey(["web", "clicks"])]


class Supervised:
    """The supervisor sensor over one stream outside, and what the world looks like to it."""

    def __init__(
        self,
        launch: DriverLaunch | None,
        instance: dg.DagsterInstance,
        resource: CheckpointCatalogResource,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        @dg.job(name="apply_retention_job")
        def retention() -> None: ...

        @dg.job(name="roll_back_job")
        def roll_back() -> None: ...

        self.instance, self.catalog, self._resource = instance, resource.catalog(), resource
        self._sensor = build_supervisor_sensor([stream(launch)], retention, roll_back)
        self.later_ms = 0
        monkeypatch.setattr(Catalog, "now_ms", lambda _self: wall_clock_ms() + self.later_ms)

    def execution(self, status: DagsterRunStatus = DagsterRunStatus.SUCCESS) -> str:
        """An execution that the catalog believes to run, of a run that has the status."""
        run = self.instance.add_run(dg.DagsterRun("clicks_stream", status=status))
        return begin_execution(self.catalog, "web.clicks", run.run_id).execution_id

    def tick(self) -> list[dg.RunRequest]:
        context = dg.build_sensor_context(self.instance, resources={"checkpoint_catalog": self._resource})
        return list(self._sensor.evaluate_tick(context).run_requests or [])


@pytest.fixture
def supervised(
    request: pytest.FixtureRequest,
    instance: dg.DagsterInstance,
    catalog: Catalog,
    catalog_resource: CheckpointCatalogResource,
    monkeypatch: pytest.MonkeyPatch,
) -> Supervised:
    return Supervised(getattr(request, "param", COMMAND), instance, catalog_resource, monkeypatch)


class TestSupervised:
    @pytest.mark.parametrize("status", [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE])
    def test_a_driver_that_holds_its_lease_is_left_alone_whatever_became_of_its_run(
        self, supervised: Supervised, status: DagsterRunStatus
    ) -> None:
        execution_id = supervised.execution(status)
        supervised.catalog.leases.acquire("web.clicks", HOST, 3_600_000)
        supervised.later_ms = SILENCE_MS * 10

        assert supervised.tick() == []
        assert supervised.catalog.executions.get(execution_id).status is ExecutionStatus.RUNNING

    @pytest.mark.parametrize("status", [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE])
    def test_a_driver_that_gave_up_its_lease_and_is_silent_is_launched_again(
        self, supervised: Supervised, status: DagsterRunStatus
    ) -> None:
        execution_id = supervised.execution(status)
        assert supervised.tick() == [], "it may be applying retention"

        supervised.later_ms = SILENCE_MS + 1
        (request,) = supervised.tick()

        assert request.job_name == "clicks_stream"
        assert request.tags[RESTART_OF_TAG] == execution_id
        assert supervised.catalog.executions.get(execution_id).status is ExecutionStatus.FAILED

    def test_a_driver_whose_process_is_known_to_be_gone_is_not_waited_for(
        self, supervised: Supervised, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = os.spawnlp(os.P_NOWAIT, "true", "true")
        os.waitpid(child, 0)
        monkeypatch.setattr("orchestration_catalog.HOST", replace(this_holder("", "", None), pid=child))
        supervised.execution()

        assert len(supervised.tick()) == 1

    def test_of_a_process_of_an_earlier_boot_only_its_silence_tells(
        self, supervised: Supervised, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = os.spawnlp(os.P_NOWAIT, "true", "true")
        os.waitpid(child, 0)
        before = replace(this_holder("", "", None), pid=child, boot_id="the boot before")
        monkeypatch.setattr("orchestration_catalog.HOST", before)
        supervised.execution()
        assert supervised.tick() == []

        supervised.later_ms = SILENCE_MS + 1
        assert len(supervised.tick()) == 1

    def test_a_driver_that_has_ended_may_still_be_applying_retention(self, supervised: Supervised) -> None:
        execution_id = supervised.execution()
        supervised.catalog.executions.end_unheld(execution_id, ExecutionStatus.FINISHED, "stopped with a savepoint")
        assert supervised.tick() == []

        supervised.later_ms = SILENCE_MS + 1
        (request,) = supervised.tick()

        assert request.job_name == "apply_retention_job"

    def test_a_run_that_follows_its_driver_sees_to_its_end_itself(self, supervised: Supervised) -> None:
        supervised.execution(DagsterRunStatus.STARTED)
        supervised.later_ms = SILENCE_MS + 1

        assert supervised.tick() == []

    def test_a_stream_whose_run_was_canceled_gets_its_retention(self, supervised: Supervised) -> None:
        supervised.execution(DagsterRunStatus.CANCELED)
        supervised.later_ms = SILENCE_MS + 1

        (request,) = supervised.tick()

        assert request.job_name == "apply_retention_job"

    @pytest.mark.parametrize("supervised", [None], indirect=True, ids=["started by others"])
    def test_a_driver_that_others_start_is_recorded_as_gone_and_left_to_them(self, supervised: Supervised) -> None:
        execution_id = supervised.execution()
        supervised.later_ms = SILENCE_MS + 1

        assert supervised.tick() == []
        assert supervised.catalog.executions.get(execution_id).status is ExecutionStatus.FAILED

    @pytest.mark.parametrize("supervised", [None], indirect=True, ids=["started by others"])
    def test_a_start_of_it_waits_for_the_program_itself(self, supervised: Supervised) -> None:
        asked = supervised.catalog.requests.submit("web.clicks", RequestKind.START, origin="a person")

        assert supervised.tick() == []
        assert supervised.catalog.requests.get(asked.request_id).status is RequestStatus.PENDING

    def test_a_start_is_left_to_the_run_that_launches_its_driver_while_that_lives(self, supervised: Supervised) -> None:
        launcher = supervised.instance.add_run(dg.DagsterRun("clicks_stream", status=DagsterRunStatus.STARTED))
        asked = supervised.catalog.requests.submit(
            "web.clicks", RequestKind.START, arguments={"run_id": launcher.run_id}, origin="its run"
        )
        assert supervised.tick() == []

        supervised.instance.report_run_failed(launcher)
        (request,) = supervised.tick()

        assert request.tags[START_REQUEST_TAG] == asked.request_id
