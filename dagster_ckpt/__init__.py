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
        RestartSettings,
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
        build_operator_jobs,
        build_savepoint_schedule,
        build_supervisor_sensor,
        declare_stream,
        external_streaming_asset,
        stream_definitions,
        streaming_asset,
        streaming_multi_asset,
    )

__all__ = [
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
    "JobExecutionResult",
    "JobManagerCheckpointStorage",
    "KafkaDelivery",
    "MemoryStateBackend",
    "PredefinedOptions",
    "RestartSettings",
    "RestartStrategies",
    "RestartStrategyConfiguration",
    "RocksDBOptionsFactory",
    "RocksDBStateBackend",
    "Semantic",
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
    "build_operator_jobs",
    "build_savepoint_schedule",
    "build_supervisor_sensor",
    "declare_stream",
    "external_streaming_asset",
    "kafka_delivery",
    "run_streaming_job",
    "stream_definitions",
    "streaming_asset",
    "streaming_multi_asset",
]

_OPTIONS = frozenset(
    {
        "CheckpointConfig",
        "CheckpointStorage",
        "CheckpointingMode",
        "CustomCheckpointStorage",
        "CustomStateBackend",
        "DesiredState",
        "Duration",
        "EmbeddedRocksDBStateBackend",
        "ExecutionConfig",
        "ExternalizedCheckpointCleanup",
        "ExternalizedCheckpointRetention",
        "FileSystemCheckpointStorage",
        "FsStateBackend",
        "HashMapStateBackend",
        "JobManagerCheckpointStorage",
        "KafkaDelivery",
        "MemoryStateBackend",
        "PredefinedOptions",
        "RestartStrategies",
        "RestartStrategyConfiguration",
        "RocksDBOptionsFactory",
        "RocksDBStateBackend",
        "Semantic",
        "StateBackend",
        "TimeCharacteristic",
        "UpgradeMode",
        "UpgradePolicy",
        "kafka_delivery",
    }
)
_ENVIRONMENT = frozenset({"JobExecutionResult", "StreamExecution", "StreamExecutionEnvironment", "run_streaming_job"})


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: reading a live directory or a catalog needs no Dagster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "options" if name in _OPTIONS else "environment" if name in _ENVIRONMENT else "orchestration"
    return getattr(import_module(f"{__name__}.{room}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
