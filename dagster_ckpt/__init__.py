"""Flink-grade checkpoints and savepoints for Spark Structured Streaming queries that run as Dagster assets.

Start with `streaming_asset` and `stream_definitions`, or without Dagster with `StreamExecutionEnvironment`; the names
below are the whole of what most users need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.environment import (
        JobExecutionResult,
        StreamExecution,
        StreamExecutionEnvironment,
        run_streaming_job,
    )
    from dagster_ckpt.options import (
        Blackout,
        CheckpointConfig,
        CheckpointingMode,
        CheckpointStorage,
        CustomCheckpointStorage,
        CustomStateBackend,
        DesiredState,
        Duration,
        EmbeddedRocksDBStateBackend,
        ExecutionConfig,
        ExternalizedCheckpointCleanup,
        ExternalizedCheckpointRetention,
        FileSystemCheckpointStorage,
        FsStateBackend,
        HashMapStateBackend,
        JobManagerCheckpointStorage,
        KafkaDelivery,
        MemoryStateBackend,
        PredefinedOptions,
        RestartStrategies,
        RestartStrategyConfiguration,
        RocksDBOptionsFactory,
        RocksDBStateBackend,
        SavepointHistory,
        Semantic,
        StateBackend,
        TimeCharacteristic,
        UpgradeMode,
        UpgradePolicy,
        kafka_delivery,
    )
    from dagster_ckpt.orchestration import (
        CheckpointCatalogResource,
        CheckpointSettings,
        CheckpointStorageResource,
        DriverLaunch,
        HealthCheck,
        HealthSettings,
        PeriodicSavepoints,
        RestartSettings,
        SparkSessionResource,
        StateBackendResource,
        Stream,
        StreamingAsset,
        StreamingJobsComponent,
        StreamResource,
        StreamRunConfig,
        StreamSpec,
        UpgradeSettings,
        build_catalog_sensor,
        build_desired_state_jobs,
        build_health_sensor,
        build_operator_jobs,
        build_savepoint_schedule,
        build_supervisor_sensor,
        declare_stream,
        external_streaming_asset,
        reading_checkpoint,
        stream_definitions,
        streaming_asset,
        streaming_multi_asset,
    )

__all__ = [
    "Blackout",
    "CheckpointCatalogResource",
    "CheckpointConfig",
    "CheckpointSettings",
    "CheckpointStorage",
    "CheckpointStorageResource",
    "CheckpointingMode",
    "CustomCheckpointStorage",
    "CustomStateBackend",
    "DesiredState",
    "DriverLaunch",
    "Duration",
    "EmbeddedRocksDBStateBackend",
    "ExecutionConfig",
    "ExternalizedCheckpointCleanup",
    "ExternalizedCheckpointRetention",
    "FileSystemCheckpointStorage",
    "FsStateBackend",
    "HashMapStateBackend",
    "HealthCheck",
    "HealthSettings",
    "JobExecutionResult",
    "JobManagerCheckpointStorage",
    "KafkaDelivery",
    "MemoryStateBackend",
    "PeriodicSavepoints",
    "PredefinedOptions",
    "RestartSettings",
    "RestartStrategies",
    "RestartStrategyConfiguration",
    "RocksDBOptionsFactory",
    "RocksDBStateBackend",
    "SavepointHistory",
    "Semantic",
    "SparkSessionResource",
    "StateBackend",
    "StateBackendResource",
    "Stream",
    "StreamExecution",
    "StreamExecutionEnvironment",
    "StreamResource",
    "StreamRunConfig",
    "StreamSpec",
    "StreamingAsset",
    "StreamingJobsComponent",
    "TimeCharacteristic",
    "UpgradeMode",
    "UpgradePolicy",
    "UpgradeSettings",
    "build_catalog_sensor",
    "build_desired_state_jobs",
    "build_health_sensor",
    "build_operator_jobs",
    "build_savepoint_schedule",
    "build_supervisor_sensor",
    "declare_stream",
    "external_streaming_asset",
    "kafka_delivery",
    "reading_checkpoint",
    "run_streaming_job",
    "stream_definitions",
    "streaming_asset",
    "streaming_multi_asset",
]

_ENVIRONMENT = frozenset({"JobExecutionResult", "StreamExecution", "StreamExecutionEnvironment", "run_streaming_job"})


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: reading a live directory or a catalog needs no Dagster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options = import_module(f"{__name__}.options")
    if name in options.__all__:
        return getattr(options, name)
    room = "environment" if name in _ENVIRONMENT else "orchestration"
    return getattr(import_module(f"{__name__}.{room}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
