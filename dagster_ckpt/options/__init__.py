"""The options of a streaming job as pure values: checked, immutable inside, each with its effect on Spark.

Nothing here opens a file, starts a session, reads a clock or knows Dagster: the other rooms do what it says.
Start at `checkpoint_config.CheckpointConfig`, then `restart_strategies.RestartStrategies` and `retention`.
"""

from dagster_ckpt.options.backend_change import BackendChange, PinnedState, backend_change
from dagster_ckpt.options.blackout import Blackout, blackout_ends_at_ms
from dagster_ckpt.options.checkpoint_config import CheckpointConfig
from dagster_ckpt.options.checkpoint_options import CheckpointOptions
from dagster_ckpt.options.checkpoint_storage import (
    CheckpointStorage,
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.options.desired_state import DesiredState
from dagster_ckpt.options.durations import Duration
from dagster_ckpt.options.execution_config import ExecutionConfig
from dagster_ckpt.options.heap_backends import FsStateBackend, HashMapStateBackend, MemoryStateBackend
from dagster_ckpt.options.kafka_semantic import KafkaDelivery, Semantic, kafka_delivery
from dagster_ckpt.options.kryo import KryoRegistrations
from dagster_ckpt.options.modes import (
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    ExternalizedCheckpointRetention,
    RecoveryClaimMode,
    TerminalState,
    TimeCharacteristic,
)
from dagster_ckpt.options.option_description import Effect, OptionDescription
from dagster_ckpt.options.options_factory import RocksDBOptionsFactory
from dagster_ckpt.options.predefined_options import PredefinedOptions
from dagster_ckpt.options.restart_decision import (
    DecidingRestartStrategy,
    FailureHistory,
    GiveUp,
    RestartAt,
    RestartStrategyConfiguration,
)
from dagster_ckpt.options.restart_strategies import RestartStrategies, effective_restart_strategy
from dagster_ckpt.options.retention import (
    Retained,
    RetainedKind,
    deletes_live_directory,
    image_to_recover_from,
    images_to_keep_at,
    subsumed,
)
from dagster_ckpt.options.rocksdb_backends import EmbeddedRocksDBStateBackend, RocksDBStateBackend
from dagster_ckpt.options.rocksdb_options import RocksDBOptions
from dagster_ckpt.options.savepoint_history import (
    Leaving,
    SavepointHistory,
    ScheduledSavepoint,
    leaving_history,
)
from dagster_ckpt.options.state_backend import CustomStateBackend, StateBackend, storage_of_job
from dagster_ckpt.options.upgrade_policy import UpgradeMode, UpgradePolicy

__all__ = [
    "BackendChange",
    "Blackout",
    "CheckpointConfig",
    "CheckpointOptions",
    "CheckpointStorage",
    "CheckpointingMode",
    "CustomCheckpointStorage",
    "CustomStateBackend",
    "DecidingRestartStrategy",
    "DeploymentStorage",
    "DesiredState",
    "Duration",
    "Effect",
    "EmbeddedRocksDBStateBackend",
    "ExecutionConfig",
    "ExternalizedCheckpointCleanup",
    "ExternalizedCheckpointRetention",
    "FailureHistory",
    "FileSystemCheckpointStorage",
    "FsStateBackend",
    "GiveUp",
    "HashMapStateBackend",
    "JobManagerCheckpointStorage",
    "KafkaDelivery",
    "KryoRegistrations",
    "Leaving",
    "MemoryStateBackend",
    "OptionDescription",
    "PinnedState",
    "PredefinedOptions",
    "RecoveryClaimMode",
    "RestartAt",
    "RestartStrategies",
    "RestartStrategyConfiguration",
    "Retained",
    "RetainedKind",
    "RocksDBOptions",
    "RocksDBOptionsFactory",
    "RocksDBStateBackend",
    "SavepointHistory",
    "ScheduledSavepoint",
    "Semantic",
    "StateBackend",
    "TerminalState",
    "TimeCharacteristic",
    "UpgradeMode",
    "UpgradePolicy",
    "backend_change",
    "blackout_ends_at_ms",
    "deletes_live_directory",
    "effective_restart_strategy",
    "image_to_recover_from",
    "images_to_keep_at",
    "kafka_delivery",
    "leaving_history",
    "storage_of_job",
    "subsumed",
]
