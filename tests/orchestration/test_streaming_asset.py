"""What `@streaming_asset` and `stream_definitions` make of a function, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import RunRequest

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import CatalogError, OptionError, StorageAccessError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendKind,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset, stream_handle
from dagster_ckpt.orchestration.streaming_asset import streaming_asset

OPERATOR_JOBS = [
    "check_job",
    "trigger_checkpoint_job",
    "trigger_savepoint_job",
    "stop_with_savepoint_job",
    "cancel_stream_job",
    "restart_stream_job",
    "prefer_savepoint_job",
    "savepoint_set_job",
    "restart_savepoint_set_job",
    "apply_retention_job",
    "tag_checkpoint_job",
    "release_checkpoint_job",
    "promote_checkpoint_job",
    "replicate_snapshots_job",
    "rebuild_catalog_job",
    "doctor_job",
    "verify_snapshots_job",
    "verify_state_job",
    "browse_state_job",
    "diff_state_job",
    "forget_key_job",
    "preview_rewind_job",
    "fork_stream_job",
    "import_stream_job",
    "adopt_stream_job",
    "export_snapshot_job",
    "clean_sink_job",
    "set_desired_state_job",
    "roll_back_upgrade_job",
    "show_stream_job",
]


@pytest.fixture
def resources(tmp_path: Path) -> dict[str, Any]:
    return {
        "pyspark": dg.ResourceDefinition.hardcoded_resource(None),
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/checkpoints"),
        "state_backend": StateBackendResource(live_directory=f"{tmp_path}/live"),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/catalog.db"),
    }


@pytest.fixture
def definitions(resources: dict[str, Any], orders: StreamingAsset, payments: StreamingAsset) -> dg.Definitions:
    return dg.Definitions.merge(
        stream_definitions(orders, payments, savepoint_schedules={"orders": "0 6 * * *"}),
        dg.Definitions(resources=resources),
    )


class TestDecorator:
    def test_the_job_id_is_the_asset_key_joined_by_dots(self, orders: StreamingAsset, payments: StreamingAsset) -> None:
        assert (orders.stream_id, orders.key) == ("orders", dg.AssetKey("orders"))
        assert (payments.stream_id, payments.key) == ("shop.payments", dg.AssetKey(["shop", "payments"]))

    def test_a_job_id_of_its_own_stays_when_the_asset_is_renamed(self) -> None:
        @streaming_asset(stream_id="orders", name="orders_v2", key_prefix=["shop", "eu"])
        def renamed(context: Any) -> Any: ...

        assert renamed.stream_id == "orders"
        assert renamed.key == dg.AssetKey(["shop", "eu", "orders_v2"])
        assert renamed.start_job.name == "orders_v2_stream"

    @pytest.mark.parametrize("stream_id", ["../up", "a/b", ".hidden", "with space", "x" * 129, "orders\n"])
    def test_a_job_id_that_cannot_name_a_folder_is_refused(self, stream_id: str) -> None:
        with pytest.raises(OptionError, match="cannot name a folder"):

            @streaming_asset(stream_id=stream_id)
            def stream(context: Any) -> Any: ...

    def test_a_stall_is_not_a_matter_of_seconds(self) -> None:
        with pytest.raises(OptionError, match=r"stall_timeout_ms of stream 'shop\.orders' is 29999"):

            @streaming_asset(stall_timeout_ms=29_999, key_prefix="shop")
            def orders(context: Any) -> Any: ...

    def test_the_job_of_a_stream_allows_as_long_a_stall_as_the_stream(self, resources: dict[str, Any]) -> None:
        @streaming_asset(stall_timeout_ms=30_000)
        def stream(context: Any) -> Any: ...

        assert stream_handle(stream, Bundle(resources)).stall_timeout_ms == 30_000

    def test_a_function_without_parameters_is_refused(self) -> None:
        with pytest.raises(OptionError, match="takes no parameters"):

            @streaming_asset()
            def stream() -> Any: ...

    def test_dagster_neither_limits_nor_retries_a_stream(self, definitions: dg.Definitions) -> None:
        job = definitions.resolve_job_def("orders_stream")

        for tags in (job.tags, job.get_node_named("orders").definition.tags):
            assert tags["dagster/max_runtime"] == "0"
            assert tags["dagster/max_retries"] == "0"
        assert job.tags["dagster_ckpt/stream_id"] == "orders"

    def test_every_parameter_after_the_context_is_a_resource(self) -> None:
        @streaming_asset()
        def stream(context: Any, pyspark: Any, warehouse: Any) -> Any: ...

        assert stream.asset.op.required_resource_keys == {
            "pyspark",
            "warehouse",
            "checkpoint_storage",
            "state_backend",
            "checkpoint_catalog",
        }

    def test_the_asset_says_how_it_is_checkpointed(self) -> None:
        @streaming_asset(checkpointing=CheckpointConfig(interval=5000), metadata={"team": "sales"})
        def stream(context: Any) -> Any:
            """Orders as they come."""

        metadata = stream.asset.metadata_by_key[stream.key]
        assert metadata["dagster_ckpt/stream_id"] == "stream"
        assert metadata["dagster_ckpt/interval_ms"] == 5000
        assert "xponential" in metadata["dagster_ckpt/restart_strategy"]
        assert metadata["team"] == "sales"
        assert stream.asset.descriptions_by_key[stream.key] == "Orders as they come."

    def test_without_checkpointing_it_is_off_and_nothing_is_restarted(self) -> None:
        @streaming_asset()
        def stream(context: Any) -> Any: ...

        metadata = stream.asset.metadata_by_key[stream.key]
        assert metadata["dagster_ckpt/interval_ms"] == "off"
        assert stream.spec.options.interval is None

    @pytest.mark.parametrize("config", [{}, {"config": {"start_from": "chk-7"}}])
    def test_a_stream_starts_with_and_without_a_start_from(
        self, definitions: dg.Definitions, config: dict[str, Any]
    ) -> None:
        assert dg.validate_run_config(definitions.resolve_job_def("orders_stream"), {"ops": {"orders": config}})


class TestDefinitions:
    def test_they_can_be_loaded(self, definitions: dg.Definitions) -> None:
        dg.Definitions.validate_loadable(definitions)

    def test_they_hold_everything_a_code_location_needs(self, definitions: dg.Definitions) -> None:
        repository = definitions.get_repository_def()

        jobs = {name for name in repository.job_names if not name.startswith("__")}
        assert jobs == {"orders_stream", "payments_stream", *OPERATOR_JOBS}
        assert {sensor.name for sensor in repository.sensor_defs} == {
            "checkpoint_catalog_sensor",
            "checkpoint_supervisor_sensor",
            "checkpoint_health_sensor",
        }
        assert {schedule.name for schedule in repository.schedule_defs} == {
            "checkpoint_housekeeping_schedule",
            "checkpoint_verification_schedule",
            "orders_savepoint_schedule",
        }

    def test_two_streams_of_one_job_id_are_refused(self, orders: StreamingAsset) -> None:
        @streaming_asset(stream_id="orders")
        def other(context: Any) -> Any: ...

        with pytest.raises(OptionError, match="share a stream id"):
            stream_definitions(orders, other)

    def test_a_schedule_for_a_stream_that_is_not_there_is_refused(self, orders: StreamingAsset) -> None:
        with pytest.raises(OptionError, match=r"names 'order'; the streams are \['orders'\]"):
            stream_definitions(orders, savepoint_schedules={"order": "0 6 * * *"})

    @pytest.mark.parametrize("name", [*OPERATOR_JOBS, "orders_stream"])
    def test_the_launchpad_explains_every_field(self, definitions: dg.Definitions, name: str) -> None:
        job = definitions.resolve_job_def(name)
        [node] = job.nodes
        fields = node.definition.config_field.config_type.fields

        assert fields
        for field_name, field in fields.items():
            assert len(field.description or "") > 20, f"{name}: {field_name} has no description"
        assert job.description

    @pytest.mark.parametrize(
        ("name", "op"), [("trigger_savepoint_job", "trigger_savepoint"), ("cancel_stream_job", "cancel_stream")]
    )
    def test_a_stream_that_was_never_started_cannot_be_operated(
        self, definitions: dg.Definitions, name: str, op: str
    ) -> None:
        result = definitions.resolve_job_def(name).execute_in_process(
            {"ops": {op: {"config": {"stream_id": "orders"}}}}, raise_on_error=False
        )

        [failure] = [event for event in result.all_events if event.is_step_failure]
        assert "never started" in failure.step_failure_data.user_failure_data.description


class TestSchedules:
    AT = datetime(2013, 5, 1, 6, 0, tzinfo=UTC)

    def requests(self, definitions: dg.Definitions, name: str) -> Iterator[tuple[dg.JobDefinition, RunRequest]]:
        schedule = definitions.resolve_schedule_def(name)
        tick = schedule.evaluate_tick(dg.build_schedule_context(scheduled_execution_time=self.AT))
        for request in tick.run_requests or []:
            yield definitions.resolve_job_def(schedule.job_name), request

    def test_a_savepoint_is_labelled_with_its_time(self, definitions: dg.Definitions) -> None:
        [(job, request)] = self.requests(definitions, "orders_savepoint_schedule")

        config = request.run_config["ops"]["trigger_savepoint"]["config"]
        assert config["label"] == "scheduled-2013-05-01T06-00"
        assert dg.validate_run_config(job, request.run_config)

    def test_housekeeping_is_one_run_for_each_stream(self, definitions: dg.Definitions) -> None:
        asked = list(self.requests(definitions, "checkpoint_housekeeping_schedule"))

        assert len({request.run_key for _, request in asked}) == 2
        for job, request in asked:
            assert dg.validate_run_config(job, request.run_config)


class TestResources:
    @pytest.mark.parametrize("path", ["", "checkpoints", "relative/path", "nowhere://bucket/path"])
    def test_a_storage_path_that_is_none_is_refused(
        self, resources: dict[str, Any], orders: StreamingAsset, path: str
    ) -> None:
        with pytest.raises(
            (OptionError, StorageAccessError), match=re.escape(repr(path)) if "://" not in path else path
        ):
            stream_handle(orders, Bundle({**resources, "checkpoint_storage": CheckpointStorageResource(path=path)}))

    @pytest.mark.parametrize("threshold", [-2, 1_048_577])
    def test_a_threshold_out_of_range_is_refused(self, threshold: int) -> None:
        with pytest.raises(OptionError):
            CheckpointStorageResource(path="file:///a", file_state_size_threshold=threshold).storage()

    def test_savepoints_are_below_the_checkpoints_unless_told_otherwise(self) -> None:
        storage = CheckpointStorageResource(path="file:///a/").storage()

        assert isinstance(storage, FileSystemCheckpointStorage)
        assert storage.get_savepoint_path() == "file:/a/savepoints"

    def test_settings_of_another_state_backend_are_refused(self) -> None:
        resource = StateBackendResource(live_directory="a", kind=StateBackendKind.HASHMAP, settings={"k": "v"})

        with pytest.raises(OptionError, match=r"HASHMAP, which takes no settings.*\['k'\]"):
            resource.backend()

    @pytest.mark.parametrize("url", ["", "catalog.db", "nowhere://host/database", "sqlite:////dev/null/folder/c.db"])
    def test_a_catalog_that_cannot_be_opened_says_so(self, url: str) -> None:
        with pytest.raises(CatalogError):
            CheckpointCatalogResource(url=url).catalog()


class Bundle:
    """Resources by attribute, as Dagster hands them to an op."""

    def __init__(self, resources: dict[str, Any]) -> None:
        self.__dict__.update(resources)
