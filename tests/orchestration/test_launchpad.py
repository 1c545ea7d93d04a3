"""What the launchpad of each job fills in, offers and refuses, and which operator jobs there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.snap import build_config_schema_snapshot
from dagster._core.snap.snap_to_yaml import default_values_yaml_from_type_snap

from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.component import StreamsComponent
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.orchestration.translator import StreamTranslator


def location(home: Path, *streams: Stream, **options: Any) -> dg.Definitions:
    resources = {
        "pyspark": SparkSessionResource(spark_config={"spark.driver.memory": "4g"}),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{home}/catalog.db"),
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{home}/checkpoints"),
        "state_backend": StateBackendResource(live_directory=f"{home}/live"),
    }
    return dg.Definitions.merge(stream_definitions(*streams, **options), dg.Definitions(resources=resources))


def filled_in(job: dg.JobDefinition) -> Any:
    """What Dagster's page writes into an untouched launchpad."""
    types = build_config_schema_snapshot(job)
    root = job.run_config_schema.config_type
    return yaml.safe_load(default_values_yaml_from_type_snap(types, types.get_config_snap(root.key)))


def jobs_of(definitions: dg.Definitions) -> list[str]:
    names = definitions.get_repository_def().job_names
    return sorted(name for name in names if not name.startswith("__"))


def test_an_untouched_launchpad_names_the_only_stream_and_nothing_else(orders: StreamingAsset, tmp_path: Path) -> None:
    definitions = location(tmp_path, orders)

    for name in jobs_of(definitions):
        if name.endswith("_job"):
            op = name.removesuffix("_job")
            field = "into_stream_id" if op == "import_stream" else "stream_id"
            expected = {} if "savepoint_set" in op else {"ops": {op: {"config": {field: "orders"}}}}
            assert filled_in(definitions.resolve_job_def(name)) == expected
    assert filled_in(definitions.resolve_job_def("orders_stream")) == {}


def test_with_several_streams_one_has_to_be_chosen(
    orders: StreamingAsset, payments: StreamingAsset, tmp_path: Path
) -> None:
    job = location(tmp_path, orders, payments).resolve_job_def("cancel_stream_job")

    def config(**given: Any) -> dict[str, Any]:
        return {"ops": {"cancel_stream": {"config": given}}}

    assert filled_in(job) == {}
    assert dg.validate_run_config(job, config(stream_id="shop.payments"))
    with pytest.raises(dg.DagsterInvalidConfigError, match=r"stream_id not in enum type StreamId_.* got ordres"):
        dg.validate_run_config(job, config(stream_id="ordres"))
    with pytest.raises(dg.DagsterInvalidConfigError, match='Missing required config entry "ops"'):
        dg.validate_run_config(job, {})


def test_two_locations_in_one_process_offer_their_own_streams(
    orders: StreamingAsset, payments: StreamingAsset, tmp_path: Path
) -> None:
    for stream, other in ((orders, payments), (payments, orders)):
        job = location(tmp_path, stream).resolve_job_def("cancel_stream_job")
        given = {"ops": {"cancel_stream": {"config": {"stream_id": other.stream_id}}}}
        with pytest.raises(dg.DagsterInvalidConfigError):
            dg.validate_run_config(job, given)


def test_a_default_that_is_not_filled_in_is_described(orders: StreamingAsset, tmp_path: Path) -> None:
    job = location(tmp_path, orders).resolve_job_def("trigger_checkpoint_job")
    [node] = [dict(field.config_type.fields) for field in [job.run_config_schema.config_type.fields["ops"]]]
    shown = node["trigger_checkpoint"].config_type.fields["config"].config_type.fields["timeout_seconds"]

    assert not shown.default_provided
    assert "Default: 60" in shown.description


def test_the_run_of_an_external_driver_and_of_a_prefixed_location(tmp_path: Path) -> None:
    driven = external_streaming_asset(
        "driven", launch=DriverLaunch(("false",), log_directory=str(tmp_path)), translator=StreamTranslator("eu")
    )
    definitions = location(tmp_path, driven)

    assert filled_in(definitions.resolve_job_def("eu_driven_stream")) == {}
    assert filled_in(definitions.resolve_job_def("eu_doctor_job")) == {
        "ops": {"doctor": {"config": {"stream_id": "driven"}}}
    }
    follow = {"ops": {"driven": {"config": {"follow": False}}}}
    assert dg.validate_run_config(definitions.resolve_job_def("eu_driven_stream"), follow)


class TestOperatorJobs:
    ALWAYS = ("apply_retention_job", "orders_stream", "roll_back_upgrade_job")

    def test_those_that_are_named_and_those_that_sensors_launch(self, orders: StreamingAsset, tmp_path: Path) -> None:
        definitions = location(tmp_path, orders, operator_jobs=["restart_stream_job"])

        assert jobs_of(definitions) == sorted([*self.ALWAYS, "restart_stream_job"])
        assert "checkpoint_verification_schedule" not in {
            each.name for each in definitions.get_repository_def().schedule_defs
        }
        dg.Definitions.validate_loadable(definitions)

    def test_the_jobs_of_schedules(self, orders: StreamingAsset, tmp_path: Path) -> None:
        definitions = location(
            tmp_path, orders, operator_jobs=["verify_snapshots_job"], savepoint_schedules={"orders": "0 3 * * *"}
        )

        assert jobs_of(definitions) == sorted([*self.ALWAYS, "trigger_savepoint_job", "verify_snapshots_job"])
        dg.Definitions.validate_loadable(definitions)

    def test_an_unknown_one_is_refused_with_the_nearest(self, orders: StreamingAsset) -> None:
        with pytest.raises(OptionError, match=r"names 'restart_job'. Did you mean restart_stream_job\?"):
            stream_definitions(orders, operator_jobs=["restart_job"])

    def test_under_a_prefix_and_in_yaml(self) -> None:
        @streaming_asset(translator=StreamTranslator("eu"))
        def eu_orders(context: Any, pyspark: Any) -> Any: ...

        definitions = stream_definitions(eu_orders, operator_jobs=["doctor_job"])
        assert "eu_doctor_job" in {job.name for job in definitions.jobs or ()}
        assert "operator_jobs" in StreamsComponent.model().model_fields
