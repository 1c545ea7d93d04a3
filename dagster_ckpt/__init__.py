"""Flink-grade checkpoints and savepoints for Spark Structured Streaming queries that run as Dagster assets.

Start with `streaming_asset` and `stream_definitions`; the names below are the whole of what most users need.
"""

from dagster_ckpt.options import (
    CheckpointConfig,
    CheckpointingMode,
    CustomCheckpointStorage,
    ExternalizedCheckpointCleanup,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
    RestartStrategies,
)
from dagster_ckpt.orchestration import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
    StreamingAsset,
    build_catalog_sensor,
    build_operator_jobs,
    build_savepoint_schedule,
    build_supervisor_sensor,
    stream_definitions,
    streaming_asset,
)

__all__ = [
    "CheckpointCatalogResource",
    "CheckpointConfig",
    "CheckpointStorageResource",
    "CheckpointingMode",
    "CustomCheckpointStorage",
    "ExternalizedCheckpointCleanup",
    "FileSystemCheckpointStorage",
    "JobManagerCheckpointStorage",
    "RestartStrategies",
    "StateBackendResource",
    "StreamingAsset",
    "build_catalog_sensor",
    "build_operator_jobs",
    "build_savepoint_schedule",
    "build_supervisor_sensor",
    "stream_definitions",
    "streaming_asset",
]
