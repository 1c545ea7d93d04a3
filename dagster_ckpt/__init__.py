"""Flink-grade checkpoints and savepoints for Spark Structured Streaming queries that run as Dagster assets.

Start with `streaming_asset` and `stream_definitions`, or with `StreamExecutionEnvironment` if you
do not use Dagster. Most users need only the names below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.client.client import (
        Client,
    )
    from dagster_ckpt.config.checkpoint_config import (
        CheckpointConfig,
    )
    from dagster_ckpt.config.checkpoint_storage import (
        CheckpointStorage,
        CustomCheckpointStorage,
        FileSystemCheckpointStorage,
        JobManagerCheckpointStorage,
    )
    from dagster_ckpt.config.durations import (
        Duration,
    )
    from dagster_ckpt.config.execution_config import (
        ExecutionConfig,
    )
    from dagster_ckpt.config.modes import (
        CheckpointingMode,
        DesiredState,
        ExternalizedCheckpointCleanup,
        ExternalizedCheckpointRetention,
        KafkaDelivery,
        Semantic,
        TimeCharacteristic,
        kafka_delivery,
    )
    from dagster_ckpt.config.rocksdb_options import (
        PredefinedOptions,
        RocksDBOptionsFactory,
    )
    from dagster_ckpt.config.rocksdb_state_backends import (
        EmbeddedRocksDBStateBackend,
        RocksDBStateBackend,
    )
    from dagster_ckpt.config.state_backend import (
        CustomStateBackend,
        FsStateBackend,
        HashMapStateBackend,
        MemoryStateBackend,
        StateBackend,
    )
    from dagster_ckpt.driver.driver import (
        run_stream,
    )
    from dagster_ckpt.flink.environment import (
        StreamExecutionEnvironment,
    )
    from dagster_ckpt.flink.program import (
        JobExecutionResult,
        StreamExecution,
    )
    from dagster_ckpt.operations.health import (
        HealthCheck,
    )
    from dagster_ckpt.operations.health_settings import (
        HealthSettings,
    )
    from dagster_ckpt.operations.launch import (
        DriverLaunch,
    )
    from dagster_ckpt.orchestration.assets.downstream import (
        reading_checkpoint,
    )
    from dagster_ckpt.orchestration.assets.external_asset import (
        external_streaming_asset,
    )
    from dagster_ckpt.orchestration.assets.stream import (
        Stream,
        StreamingAsset,
        StreamSpec,
    )
    from dagster_ckpt.orchestration.assets.streaming_asset import (
        streaming_asset,
        streaming_multi_asset,
    )
    from dagster_ckpt.orchestration.checks import (
        build_health_sensor,
    )
    from dagster_ckpt.orchestration.component.component import (
        StreamsComponent,
    )
    from dagster_ckpt.orchestration.definitions import (
        stream_definitions,
    )
    from dagster_ckpt.orchestration.jobs.operator_jobs import (
        build_desired_state_jobs,
        build_operator_jobs,
    )
    from dagster_ckpt.orchestration.jobs.schedules import (
        PeriodicSavepoints,
        build_savepoint_schedule,
    )
    from dagster_ckpt.orchestration.resources.resources import (
        CheckpointCatalogResource,
        CheckpointStorageResource,
        SparkSessionResource,
        StateBackendResource,
    )
    from dagster_ckpt.orchestration.resources.settings import (
        CheckpointSettings,
        RestartSettings,
        StreamRunConfig,
        UpgradeSettings,
    )
    from dagster_ckpt.orchestration.resources.stream_resource import (
        StreamResource,
        declare_stream,
    )
    from dagster_ckpt.orchestration.sensors.catalog_sensor import (
        build_catalog_sensor,
    )
    from dagster_ckpt.orchestration.sensors.supervisor_sensor import (
        build_supervisor_sensor,
    )
    from dagster_ckpt.orchestration.translator import (
        StreamTranslator,
    )
    from dagster_ckpt.policies.restart_strategies import (
        RestartStrategies,
        RestartStrategyConfiguration,
    )
    from dagster_ckpt.policies.retention import (
        SavepointHistory,
    )
    from dagster_ckpt.policies.trigger import (
        Blackout,
    )
    from dagster_ckpt.policies.upgrade import (
        UpgradeMode,
        UpgradePolicy,
    )
    from dagster_ckpt.sinks.registry import (
        register_sink,
    )
    from dagster_ckpt.sinks.sink import (
        OnRepeat,
        Sink,
    )

# The module of each public name. Names are imported on first use, so that reading a catalog needs
# neither Dagster nor Spark.
_MODULES = {
    "client.client": ("Client",),
    "config.checkpoint_config": ("CheckpointConfig",),
    "config.checkpoint_storage": (
        "CheckpointStorage",
        "CustomCheckpointStorage",
        "FileSystemCheckpointStorage",
        "JobManagerCheckpointStorage",
    ),
    "config.durations": ("Duration",),
    "config.execution_config": ("ExecutionConfig",),
    "config.modes": (
        "CheckpointingMode",
        "DesiredState",
        "ExternalizedCheckpointCleanup",
        "ExternalizedCheckpointRetention",
        "KafkaDelivery",
        "Semantic",
        "TimeCharacteristic",
        "kafka_delivery",
    ),
    "config.rocksdb_options": (
        "PredefinedOptions",
        "RocksDBOptionsFactory",
    ),
    "config.rocksdb_state_backends": (
        "EmbeddedRocksDBStateBackend",
        "RocksDBStateBackend",
    ),
    "config.state_backend": (
        "CustomStateBackend",
        "FsStateBackend",
        "HashMapStateBackend",
        "MemoryStateBackend",
        "StateBackend",
    ),
    "driver.driver": ("run_stream",),
    "flink.environment": ("StreamExecutionEnvironment",),
    "flink.program": (
        "JobExecutionResult",
        "StreamExecution",
    ),
    "operations.health": ("HealthCheck",),
    "operations.health_settings": ("HealthSettings",),
    "operations.launch": ("DriverLaunch",),
    "orchestration.assets.downstream": ("reading_checkpoint",),
    "orchestration.assets.external_asset": ("external_streaming_asset",),
    "orchestration.assets.stream": (
        "Stream",
        "StreamSpec",
        "StreamingAsset",
    ),
    "orchestration.assets.streaming_asset": (
        "streaming_asset",
        "streaming_multi_asset",
    ),
    "orchestration.checks": ("build_health_sensor",),
    "orchestration.component.component": ("StreamsComponent",),
    "orchestration.definitions": ("stream_definitions",),
    "orchestration.jobs.operator_jobs": (
        "build_desired_state_jobs",
        "build_operator_jobs",
    ),
    "orchestration.jobs.schedules": (
        "PeriodicSavepoints",
        "build_savepoint_schedule",
    ),
    "orchestration.resources.resources": (
        "CheckpointCatalogResource",
        "CheckpointStorageResource",
        "SparkSessionResource",
        "StateBackendResource",
    ),
    "orchestration.resources.settings": (
        "CheckpointSettings",
        "RestartSettings",
        "StreamRunConfig",
        "UpgradeSettings",
    ),
    "orchestration.resources.stream_resource": (
        "StreamResource",
        "declare_stream",
    ),
    "orchestration.sensors.catalog_sensor": ("build_catalog_sensor",),
    "orchestration.sensors.supervisor_sensor": ("build_supervisor_sensor",),
    "orchestration.translator": ("StreamTranslator",),
    "policies.restart_strategies": (
        "RestartStrategies",
        "RestartStrategyConfiguration",
    ),
    "policies.retention": ("SavepointHistory",),
    "policies.trigger": ("Blackout",),
    "policies.upgrade": (
        "UpgradeMode",
        "UpgradePolicy",
    ),
    "sinks.registry": ("register_sink",),
    "sinks.sink": (
        "OnRepeat",
        "Sink",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Blackout",
    "CheckpointCatalogResource",
    "CheckpointConfig",
    "CheckpointSettings",
    "CheckpointStorage",
    "CheckpointStorageResource",
    "CheckpointingMode",
    "Client",
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
    "OnRepeat",
    "PeriodicSavepoints",
    "PredefinedOptions",
    "RestartSettings",
    "RestartStrategies",
    "RestartStrategyConfiguration",
    "RocksDBOptionsFactory",
    "RocksDBStateBackend",
    "SavepointHistory",
    "Semantic",
    "Sink",
    "SparkSessionResource",
    "StateBackend",
    "StateBackendResource",
    "Stream",
    "StreamExecution",
    "StreamExecutionEnvironment",
    "StreamResource",
    "StreamRunConfig",
    "StreamSpec",
    "StreamTranslator",
    "StreamingAsset",
    "StreamsComponent",
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
    "register_sink",
    "run_stream",
    "stream_definitions",
    "streaming_asset",
    "streaming_multi_asset",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
