"""The configuration of a program: PyFlink's setters and getters. Needs no session."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Self

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import MODE
from dagster_ckpt.config.state_backend import MAX_PARALLELISM, OnStateChange, StateBackend
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.flink import execution_config as allowed
from dagster_ckpt.flink.execution_config import ExecutionConfig
from dagster_ckpt.policies.restart import (
    RestartPolicy,
    RestartStrategies,
    RestartStrategyConfiguration,
    checked_restart,
)
from dagster_ckpt.values.modes import CheckpointingMode, TimeCharacteristic
from dagster_ckpt.values.storage_path import StoragePath


class ConfiguredProgram:
    """The settings of one program. Every setter validates its value; on an error nothing is changed."""

    def __init__(self) -> None:
        self._config = ExecutionConfig()
        self._checkpoint_config = CheckpointConfig()
        self._backend: StateBackend | None = None
        self._on_backend_change = OnStateChange.REFUSE
        self._on_other_partitions = OnStateChange.REFUSE
        self._restart: RestartStrategyConfiguration | RestartPolicy = RestartStrategies.fall_back_restart()
        # The URL, and the value that the getter returns.
        self._savepoints: tuple[str, str] | None = None

    def set_max_parallelism(self, max_parallelism: int, *, allow_state_rewrite: bool = False) -> Self:
        """Set the number of state partitions, 1 to 32768.

        Spark fixes the number at the first batch.

        Args:
            max_parallelism: The number.
            allow_state_rewrite: Let `execute` rewrite state of another number before the query starts; it
                refuses to start otherwise. Needs Spark 4.2 or later.
        """
        number = MAX_PARALLELISM.checked(max_parallelism)
        may_rewrite = allowed.STATE_REWRITE.checked(allow_state_rewrite)
        self._config = replace(self._config, max_parallelism=number)
        self._on_other_partitions = OnStateChange.CONVERT if may_rewrite else OnStateChange.REFUSE
        return self

    def get_max_parallelism(self) -> int:
        """Return the number of state partitions; -1 if it was not set: then it equals the parallelism."""
        return self._config.max_parallelism

    def set_buffer_timeout(self, timeout_millis: int | timedelta) -> Self:
        """Set the trigger interval of writers without their own trigger, in ms; 0 and -1: as fast as batches allow.

        Flink's 0 (lowest latency) and -1 (highest throughput) are the same for micro-batches.
        Real-time mode is chosen on the writer, `trigger(realTime=...)`, because only some sources,
        sinks and operators support it.
        """
        self._config = replace(self._config, buffer_timeout_ms=allowed.BUFFER_TIMEOUT.checked(timeout_millis))
        return self

    def get_buffer_timeout(self) -> int:
        """Return the trigger interval in ms of writers without their own trigger."""
        return self._config.buffer_timeout_ms

    def disable_operator_chaining(self) -> Self:
        """Execute every operator separately: turns off whole-stage code generation."""
        self._config = replace(self._config, operator_chaining=False)
        return self

    def is_chaining_enabled(self) -> bool:
        """Return whether the operators of a stage are compiled into one function."""
        return self._config.operator_chaining

    def set_stream_time_characteristic(self, characteristic: TimeCharacteristic) -> None:
        """Set the notion of time that `assign_timestamps_and_watermarks` uses."""
        checked = allowed.TIME_CHARACTERISTIC.member(characteristic)
        self._config = replace(self._config, time_characteristic=checked)

    def get_stream_time_characteristic(self) -> TimeCharacteristic:
        """Return the notion of time that `assign_timestamps_and_watermarks` uses."""
        return self._config.time_characteristic

    def enable_checkpointing(self, interval: int | timedelta, mode: CheckpointingMode | None = None) -> Self:
        """Take checkpoints periodically.

        Args:
            interval: Time between them, ms or timedelta, from 10 ms.
            mode: The guarantee after a restore; None leaves it unchanged.
        """
        if mode is not None:
            MODE.member(mode)
        self._checkpoint_config.set_checkpoint_interval(interval)
        if mode is not None:
            self._checkpoint_config.set_checkpointing_mode(mode)
        return self

    def get_checkpoint_config(self) -> CheckpointConfig:
        """Return the checkpointing options, which can be modified."""
        return self._checkpoint_config

    def get_checkpoint_interval(self) -> int:
        """Return the time between periodic checkpoints in ms, or -1 if they are off."""
        return self._checkpoint_config.get_checkpoint_interval()

    def get_checkpointing_mode(self) -> CheckpointingMode:
        """Return the guarantee after a restore."""
        return self.get_checkpointing_consistency_mode()

    def get_checkpointing_consistency_mode(self) -> CheckpointingMode:
        """Return the guarantee after a restore; Flink's name for it since 1.20."""
        return self._checkpoint_config.get_checkpointing_mode()

    def is_unaligned_checkpoints_enabled(self) -> bool:
        """Return whether unaligned checkpoints are turned on. They have no effect under AT_LEAST_ONCE."""
        return self._checkpoint_config.is_unaligned_checkpoints_enabled()

    def is_force_unaligned_checkpoints(self) -> bool:
        """Return whether unaligned snapshots are taken with every kind of sink."""
        return self._checkpoint_config.is_force_unaligned_checkpoints()

    def set_state_backend(self, state_backend: StateBackend, *, allow_state_rewrite: bool = False) -> Self:
        """Set how queries keep their state. The backend's settings apply while queries are started.

        Args:
            state_backend: The backend.
            allow_state_rewrite: Let `execute` convert state of another backend before the query starts; it
                refuses to start otherwise. Needs Spark 4.2 or later.
        """
        may_rewrite = allowed.STATE_REWRITE.checked(allow_state_rewrite)
        if not isinstance(state_backend, StateBackend):
            raise OptionTypeError(
                f"state backend is {state_backend!r} ({type(state_backend).__name__}), but must be a StateBackend such "
                "as EmbeddedRocksDBStateBackend()."
            )
        self._backend = state_backend
        self._on_backend_change = OnStateChange.CONVERT if may_rewrite else OnStateChange.REFUSE
        return self

    def get_state_backend(self) -> StateBackend | None:
        """Return how queries keep their state; None uses the session's settings."""
        return self._backend

    def enable_changelog_state_backend(self, enabled: bool) -> Self:
        """Set whether RocksDB uploads changelogs instead of snapshots, overriding the state backend."""
        self._config = replace(self._config, changelog_state_backend=allowed.CHANGELOG.checked(enabled))
        return self

    def is_changelog_state_backend_enabled(self) -> bool | None:
        """Return what was set, or None if the state backend decides."""
        return self._config.changelog_state_backend

    def set_default_savepoint_directory(self, directory: str) -> Self:
        """Set the default folder of savepoints: a URL, or an absolute local path."""
        option = "default savepoint directory"
        if directory is None:
            raise OptionError(f"{option} is None, but must be the URL of a directory, for example file:///data/sp.")
        is_path = isinstance(directory, str) and directory.startswith("/")
        parsed = StoragePath.parse(option, f"file://{directory}" if is_path else directory)
        # PyFlink returns a path as a path.
        self._savepoints = (parsed.url, parsed.path if is_path else str(parsed))
        return self

    def get_default_savepoint_directory(self) -> str | None:
        """Return the default folder of savepoints, or None if it was not set."""
        return None if self._savepoints is None else self._savepoints[1]

    def set_restart_strategy(
        self, restart_strategy_configuration: RestartStrategyConfiguration | RestartPolicy
    ) -> None:
        """Set what happens after a failure: one of `RestartStrategies`, or a policy of your own."""
        if not isinstance(restart_strategy_configuration, RestartStrategyConfiguration):
            checked_restart("restart strategy", restart_strategy_configuration)
        self._restart = restart_strategy_configuration

    def get_restart_strategy(self) -> RestartStrategyConfiguration | RestartPolicy:
        """Return what happens after a failure."""
        return self._restart
