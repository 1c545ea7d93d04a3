"""Flink-grade checkpoints and savepoints for Spark Structured Streaming queries that run as Dagster assets.

Define a stream with `streaming_asset`, `streaming_multi_asset`, `external_streaming_asset` (its driver is launched
elsewhere), `declare_stream` (in an asset or op of your own), `StreamsComponent` (in YAML), or `run_stream` (a program
without Dagster). `stream_definitions` adds the jobs, sensors and checks. Operate it with `Client`, from any process.

`dagster_ckpt.flink` has PyFlink's programming interface, `dagster_ckpt.orchestration` the parts of
`stream_definitions`, and `dagster_ckpt.policies` rules for retention and triggers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dagster_ckpt.client.client import Client
    from dagster_ckpt.client.health import HealthCheck
    from dagster_ckpt.client.health_facts import HealthSettings
    from dagster_ckpt.client.launching import DriverLaunch
    from dagster_ckpt.config.checkpoint_config import CheckpointConfig
    from dagster_ckpt.driver import run_stream
    from dagster_ckpt.orchestration.component import StreamsComponent
    from dagster_ckpt.orchestration.definitions import stream_definitions
    from dagster_ckpt.orchestration.downstream import reading_checkpoint
    from dagster_ckpt.orchestration.external_asset import external_streaming_asset
    from dagster_ckpt.orchestration.jobs.schedules import PeriodicSavepoints
    from dagster_ckpt.orchestration.resources import (
        CheckpointCatalogResource,
        CheckpointStorageResource,
        SparkSessionResource,
        StateBackendResource,
    )
    from dagster_ckpt.orchestration.settings import (
        CheckpointSettings,
        RestartSettings,
        StreamRunConfig,
        UpgradeSettings,
    )
    from dagster_ckpt.orchestration.stream import StreamSpec
    from dagster_ckpt.orchestration.streaming_asset import (
        StreamResource,
        declare_stream,
        streaming_asset,
        streaming_multi_asset,
    )
    from dagster_ckpt.orchestration.translator import StreamTranslator
    from dagster_ckpt.policies.restart import RestartStrategies
    from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
    from dagster_ckpt.sinks.delta import delta_transaction
    from dagster_ckpt.sinks.registry import register_sink
    from dagster_ckpt.spark.query.output import to_table
    from dagster_ckpt.spark.versions import spark_packages
    from dagster_ckpt.stream.start_from import StartFrom
    from dagster_ckpt.values.modes import DesiredState

# Names are imported on first use, so that reading a catalog needs neither Dagster nor Spark.
_MODULES = {
    "Client": "client.client",
    "CheckpointConfig": "config.checkpoint_config",
    "DesiredState": "values.modes",
    "run_stream": "driver",
    "HealthCheck": "client.health",
    "HealthSettings": "client.health_facts",
    "DriverLaunch": "client.launching",
    "reading_checkpoint": "orchestration.downstream",
    "external_streaming_asset": "orchestration.external_asset",
    "StreamSpec": "orchestration.stream",
    "streaming_asset": "orchestration.streaming_asset",
    "streaming_multi_asset": "orchestration.streaming_asset",
    "StreamsComponent": "orchestration.component",
    "stream_definitions": "orchestration.definitions",
    "PeriodicSavepoints": "orchestration.jobs.schedules",
    "CheckpointCatalogResource": "orchestration.resources",
    "CheckpointStorageResource": "orchestration.resources",
    "SparkSessionResource": "orchestration.resources",
    "StateBackendResource": "orchestration.resources",
    "CheckpointSettings": "orchestration.settings",
    "RestartSettings": "orchestration.settings",
    "StreamRunConfig": "orchestration.settings",
    "UpgradeSettings": "orchestration.settings",
    "StreamResource": "orchestration.streaming_asset",
    "declare_stream": "orchestration.streaming_asset",
    "StreamTranslator": "orchestration.translator",
    "RestartStrategies": "policies.restart",
    "UpgradeMode": "policies.upgrade",
    "UpgradePolicy": "policies.upgrade",
    "register_sink": "sinks.registry",
    "delta_transaction": "sinks.delta",
    "StartFrom": "stream.start_from",
    "to_table": "spark.query.output",
    "spark_packages": "spark.versions",
}

__all__ = [
    "CheckpointCatalogResource",
    "CheckpointConfig",
    "CheckpointSettings",
    "CheckpointStorageResource",
    "Client",
    "DesiredState",
    "DriverLaunch",
    "HealthCheck",
    "HealthSettings",
    "PeriodicSavepoints",
    "RestartSettings",
    "RestartStrategies",
    "SparkSessionResource",
    "StartFrom",
    "StateBackendResource",
    "StreamResource",
    "StreamRunConfig",
    "StreamSpec",
    "StreamTranslator",
    "StreamsComponent",
    "UpgradeMode",
    "UpgradePolicy",
    "UpgradeSettings",
    "declare_stream",
    "delta_transaction",
    "external_streaming_asset",
    "reading_checkpoint",
    "register_sink",
    "run_stream",
    "spark_packages",
    "stream_definitions",
    "streaming_asset",
    "streaming_multi_asset",
    "to_table",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
