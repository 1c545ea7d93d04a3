"""Dagster integration on top of the client. Start with `definitions`.

`stream` says what a stream is, `streaming_asset` and `external_asset` define them, `stream_run` executes one inside a
Dagster run, `catalog_sensor` reports snapshots, and `supervisor_sensor` restarts and reconciles streams.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_ckpt import __version__
from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.config.state_backend import OnStateChange
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.checks import build_health_checks, build_health_sensor
from dagster_ckpt.orchestration.component import StreamsComponent
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.downstream import ReadCheckpoint, reading_checkpoint
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.jobs.inspection_jobs import build_inspection_jobs
from dagster_ckpt.orchestration.jobs.operator_jobs import build_operator_jobs
from dagster_ckpt.orchestration.jobs.rewind_jobs import build_rewind_jobs
from dagster_ckpt.orchestration.jobs.schedules import (
    PeriodicReplication,
    PeriodicSavepoints,
    build_housekeeping_schedule,
    build_replication_schedule,
    build_savepoint_schedule,
    build_verification_schedule,
)
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendKind,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings, StreamRunConfig, UpgradeSettings
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.streaming_asset import (
    StreamResource,
    declare_stream,
    default_freshness,
    streaming_asset,
    streaming_multi_asset,
)
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor
from dagster_ckpt.orchestration.translator import StreamTranslator

__all__ = [
    "CheckpointCatalogResource",
    "CheckpointSettings",
    "CheckpointStorageResource",
    "DriverLaunch",
    "HealthCheck",
    "HealthSettings",
    "OnStateChange",
    "PeriodicReplication",
    "PeriodicSavepoints",
    "ReadCheckpoint",
    "RestartSettings",
    "SparkSessionResource",
    "StateBackendKind",
    "StateBackendResource",
    "Stream",
    "StreamResource",
    "StreamRunConfig",
    "StreamSpec",
    "StreamTranslator",
    "StreamingAsset",
    "StreamsComponent",
    "UpgradeSettings",
    "build_catalog_sensor",
    "build_health_checks",
    "build_health_sensor",
    "build_housekeeping_schedule",
    "build_inspection_jobs",
    "build_operator_jobs",
    "build_replication_schedule",
    "build_rewind_jobs",
    "build_savepoint_schedule",
    "build_supervisor_sensor",
    "build_verification_schedule",
    "declare_stream",
    "default_freshness",
    "external_streaming_asset",
    "reading_checkpoint",
    "stream_definitions",
    "streaming_asset",
    "streaming_multi_asset",
]

# Shows this library and its version on Dagster's page and in its telemetry.
DagsterLibraryRegistry.register("dagster-ckpt", __version__, is_dagster_package=False)
