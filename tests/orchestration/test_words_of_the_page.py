"""What Dagster's page says of each job, op, field, sensor, schedule and check; and the choices that it offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._config import ConfigTypeKind

from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.values.modes import RecoveryClaimMode


@streaming_asset(checkpointing=CheckpointConfig(interval=1000), description="Orders of all shops.")
def orders(context: Any) -> Any: ...


CLICKS = external_streaming_asset(
    "clicks", launch=DriverLaunch(("spark-submit", "clicks.py"), log_directory="/tmp"), description="Clicks."
)
RESOURCES = {
    "pyspark": dg.ResourceDefinition.none_resource(),
    "checkpoint_storage": CheckpointStorageResource(path="file:///checkpoints"),
    "state_backend": StateBackendResource(live_directory="/live"),
    "checkpoint_catalog": CheckpointCatalogResource(url="sqlite:////catalog.db"),
}
DEFINITIONS = dg.Definitions.merge(
    stream_definitions(orders, CLICKS, savepoint_schedules={"orders": "0 3 * * *"}),
    dg.Definitions(resources=RESOURCES),
)
JOBS = {job.name: job for job in DEFINITIONS.resolve_all_job_defs() if not job.name.startswith("__")}
OPS = {op.name: op for job in JOBS.values() for op in job.all_node_defs if isinstance(op, dg.OpDefinition)}


def fields(config_type: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every field below a type of config, by its path."""
    kind = config_type.kind
    if ConfigTypeKind.is_shape(kind) or kind is ConfigTypeKind.SELECTOR:
        for name, field in config_type.fields.items():
            yield f"{path}.{name}", field
            yield from fields(field.config_type, f"{path}.{name}")
    elif kind in (ConfigTypeKind.NONEABLE, ConfigTypeKind.ARRAY):
        yield from fields(config_type.inner_type, path)


OP_FIELDS = {
    path: field for op in OPS.values() for path, field in fields(op.config_schema.as_field().config_type, op.name)
}
RESOURCE_FIELDS = {
    path: field
    for name, resource in RESOURCES.items()
    if isinstance(resource, dg.ConfigurableResource)
    for path, field in fields(resource.get_resource_definition().config_schema.as_field().config_type, name)
}


def test_there_is_something_to_look_at() -> None:
    assert {"orders_stream", "clicks_stream", "trigger_savepoint_job", "restart_stream_job"} <= JOBS.keys()
    assert {"restart_stream.start_from", "orders.start_from", "clicks.follow", "orders.checkpointing.interval"} <= (
        OP_FIELDS.keys()
    )


@pytest.mark.parametrize("name", sorted(JOBS))
def test_each_job_is_described(name: str) -> None:
    assert JOBS[name].description


@pytest.mark.parametrize("name", sorted(OPS))
def test_each_op_is_described(name: str) -> None:
    assert OPS[name].description


@pytest.mark.parametrize("path", sorted(OP_FIELDS))
def test_each_field_of_a_launchpad_is_described(path: str) -> None:
    assert OP_FIELDS[path].description


@pytest.mark.parametrize("path", sorted(RESOURCE_FIELDS))
def test_each_field_of_a_resource_is_described(path: str) -> None:
    assert RESOURCE_FIELDS[path].description


@pytest.mark.parametrize("path", ["orders.claim_mode", "clicks.claim_mode", "restart_stream.claim_mode"])
def test_a_choice_is_offered_as_one(path: str) -> None:
    assert {each.config_value for each in OP_FIELDS[path].config_type.inner_type.enum_values} == set(
        RecoveryClaimMode.__members__
    )


def test_every_field_has_a_default_but_those_that_name_something() -> None:
    needed = {path for path, field in OP_FIELDS.items() if field.is_required}

    assert {path.split(".")[-1] for path in needed} <= {
        "stream_id",
        "selection",
        "savepoint",
        "savepoint_set",
        "start_from",
        "into_stream_id",
        "location",
        "checkpoint_location",
        "to",
        "outputs",
        "snapshot",
        "schedule",
        "state",
        # What a comparison begins with, which rows are forgotten, and why.
        "before",
        "where",
        "reason",
    }


def test_sensors_schedules_and_checks_are_described() -> None:
    repository = DEFINITIONS.get_repository_def()
    named = [*repository.sensor_defs, *repository.schedule_defs]

    assert named
    assert [each.name for each in named if not each.description] == []
    checks = [spec for each in DEFINITIONS.asset_checks or () for spec in each.check_specs]
    assert checks
    assert [check.name for check in checks if not check.description] == []
