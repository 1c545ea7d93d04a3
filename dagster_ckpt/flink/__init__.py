"""PyFlink's programming interface: its classes under their names, for programs without Dagster.

Start with `environment.py`; `program.py` runs the queries.
"""

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    CustomCheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.rocksdb import (
    EmbeddedRocksDBStateBackend,
    PredefinedOptions,
    RocksDBOptionsFactory,
    RocksDBStateBackend,
)
from dagster_ckpt.config.state_backend import (
    CustomStateBackend,
    FsStateBackend,
    HashMapStateBackend,
    MemoryStateBackend,
    StateBackend,
)
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.flink.execution_config import ExecutionConfig, ExecutionMode
from dagster_ckpt.flink.program import JobExecutionResult, StreamExecution
from dagster_ckpt.policies.restart import RestartStrategies, RestartStrategyConfiguration
from dagster_ckpt.values.durations import Duration
from dagster_ckpt.values.modes import (
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    ExternalizedCheckpointRetention,
    KafkaDelivery,
    Semantic,
    TimeCharacteristic,
    kafka_delivery,
)

__all__ = [
    "CheckpointConfig",
    "CheckpointStorage",
    "CheckpointingMode",
    "CustomCheckpointStorage",
    "CustomStateBackend",
    "Duration",
    "EmbeddedRocksDBStateBackend",
    "ExecutionConfig",
    "ExecutionMode",
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
    "RestartStrategies",
    "RestartStrategyConfiguration",
    "RocksDBOptionsFactory",
    "RocksDBStateBackend",
    "Semantic",
    "StateBackend",
    "StreamExecution",
    "StreamExecutionEnvironment",
    "TimeCharacteristic",
    "kafka_delivery",
]
