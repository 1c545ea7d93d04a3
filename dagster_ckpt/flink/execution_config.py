"""A program's execution options, and PyFlink's setters and getters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Self

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import MODE
from dagster_ckpt.config.rocksdb import CHANGELOG_CHECKPOINTING
from dagster_ckpt.config.state_backend import MAX_PARALLELISM, OnStateChange, StateBackend
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.restart import (
    RestartPolicy,
    RestartStrategies,
    RestartStrategyConfiguration,
    checked_restart,
)
from dagster_ckpt.values.modes import CheckpointingMode, TimeCharacteristic
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import (
    LONG_MAX,
    Choice,
    Effect,
    Milliseconds,
    OptionDescription,
    Switch,
    WholeNumber,
)

SERIALIZER = "spark.serializer"
KRYO_SERIALIZER = "org.apache.spark.serializer.KryoSerializer"
KRYO_TYPES = "spark.kryo.classesToRegister"
KRYO_REGISTRATORS = "spark.kryo.registrator"

_CLASS_NAME = re.compile(r"[A-Za-z_]\w*([.$][A-Za-z_]\w*)*")


@dataclass(frozen=True)
class KryoRegistrations:
    """Classes to register with Spark's Kryo serializer when the application starts, by full name."""

    types: tuple[str, ...] = ()
    registrators: tuple[str, ...] = ()

    def with_type(self, type_class_name: object) -> KryoRegistrations:
        """Return a copy with one more type."""
        name = _class_name("type class name", type_class_name)
        return replace(self, types=tuple(dict.fromkeys([*self.types, name])))

    def with_registrator(self, type_class_name: object, serializer_class_name: object) -> KryoRegistrations:
        """Return a copy with one more type and one more registrator."""
        both = self.with_type(type_class_name)
        name = _class_name("serializer class name", serializer_class_name)
        return replace(both, registrators=tuple(dict.fromkeys([*self.registrators, name])))

    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings that register these classes."""
        if not self.types:
            return {}
        settings = {SERIALIZER: KRYO_SERIALIZER, KRYO_TYPES: ",".join(self.types)}
        return settings | ({KRYO_REGISTRATORS: ",".join(self.registrators)} if self.registrators else {})

    def refuse_unknown(self, cannot_load: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Refuse classes that Spark's JVM cannot load, as PyFlink does."""
        unknown = cannot_load([*self.types, *self.registrators])
        if unknown:
            raise OptionError(
                f"Kryo registrations name {', '.join(unknown)}, but must name classes that Spark's JVM can load. "
                "Correct the name, or add the jar of the class (spark.jars)."
            )

    def missing_in(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return the required settings that a running application lacks."""
        return {
            name: value
            for name, value in self.spark_settings().items()
            if not set(value.split(",")) <= set(application.get(name, "").split(","))
        }


def _class_name(option: str, value: object) -> str:
    allowed = "the full name of a Java class, such as com.example.Event"
    if not isinstance(value, str):
        raise OptionTypeError(f"{option} is {value!r} ({type(value).__name__}), but must be {allowed}.")
    if not _CLASS_NAME.fullmatch(value):
        raise OptionError(f"{option} is {value!r}, but must be {allowed}.")
    return value


# Flink's `ExecutionConfig.PARALLELISM_DEFAULT`: the system decides.
PARALLELISM_DEFAULT = -1
# Flink's `ExecutionOptions.BUFFER_TIMEOUT`.
DEFAULT_BUFFER_TIMEOUT_MS = 100

PARALLELISM = WholeNumber("parallelism", minimum=1)
LOCAL_PARALLELISM = WholeNumber("default local parallelism", minimum=1)
# Spark stores a trigger's interval in microseconds.
BUFFER_TIMEOUT = Milliseconds("buffer timeout", minimum=-1, maximum=LONG_MAX // 1000)
AUTO_WATERMARK_INTERVAL = Milliseconds("auto watermark interval", minimum=0, maximum=LONG_MAX)
# Flink's `PipelineOptions.AUTO_WATERMARK_INTERVAL`.
DEFAULT_AUTO_WATERMARK_INTERVAL_MS = 200
STATE_REWRITE = Switch("allow_state_rewrite")
CHAINING = Switch("operator chaining")
CHANGELOG = Switch("changelog state backend")
TIME_CHARACTERISTIC = Choice("time characteristic", TimeCharacteristic)

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
LEAF_PARALLELISM = "spark.sql.leafNodeDefaultParallelism"
WHOLE_STAGE = "spark.sql.codegen.wholeStage"


class ExecutionMode(Enum):
    """How Flink exchanges the data of a bounded program; here always PIPELINED: Spark plans that itself."""

    PIPELINED = 0
    PIPELINED_FORCED = 1
    BATCH = 2
    BATCH_FORCED = 3


@dataclass
class ExecutionConfig:
    """Execution options of one environment, with Flink's defaults and ranges.

    Attributes:
        parallelism: Number of tasks that read and shuffle; -1 uses the session's.
        max_parallelism: Number of state partitions; -1 uses the parallelism.
        buffer_timeout_ms: Trigger interval of writers without one; 0 and -1 start the next batch at once.
        operator_chaining: Whether operators are compiled into one function per stage.
        time_characteristic: For `assign_timestamps_and_watermarks`.
        changelog_state_backend: Whether RocksDB uploads changelogs; None lets the state backend decide.
        program: The environment that it was read from.
    """

    parallelism: int = PARALLELISM_DEFAULT
    max_parallelism: int = PARALLELISM_DEFAULT
    buffer_timeout_ms: int = DEFAULT_BUFFER_TIMEOUT_MS
    operator_chaining: bool = True
    time_characteristic: TimeCharacteristic = TimeCharacteristic.EventTime
    changelog_state_backend: bool | None = None
    kryo: KryoRegistrations = field(default_factory=KryoRegistrations)
    auto_watermark_interval_ms: int = DEFAULT_AUTO_WATERMARK_INTERVAL_MS
    closure_cleaner: bool = True
    global_job_parameters: Mapping[str, str] = field(default_factory=dict)
    program: ConfiguredProgram | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.parallelism != PARALLELISM_DEFAULT:
            PARALLELISM.checked(self.parallelism)
        if self.max_parallelism != PARALLELISM_DEFAULT:
            MAX_PARALLELISM.checked(self.max_parallelism)
        BUFFER_TIMEOUT.checked(self.buffer_timeout_ms)
        CHAINING.checked(self.operator_chaining)
        TIME_CHARACTERISTIC.member(self.time_characteristic)
        AUTO_WATERMARK_INTERVAL.checked(self.auto_watermark_interval_ms)
        if self.changelog_state_backend is not None:
            CHANGELOG.checked(self.changelog_state_backend)

    def get_parallelism(self) -> int:
        """Return the parallelism, or -1 if the session decides."""
        return self.parallelism

    def get_max_parallelism(self) -> int:
        """Return the number of state partitions, or -1 if it is not set."""
        return self.max_parallelism

    def get_execution_mode(self) -> ExecutionMode:
        """Return PIPELINED."""
        return ExecutionMode.PIPELINED

    def set_auto_watermark_interval(self, interval: int | timedelta) -> Self:
        """Set the time between two watermarks, in ms, from 0; Spark computes one in each batch."""
        return self._set(auto_watermark_interval_ms=AUTO_WATERMARK_INTERVAL.checked(interval))

    def get_auto_watermark_interval(self) -> int:
        """Return the time between two watermarks, in ms."""
        return self.auto_watermark_interval_ms

    def enable_closure_cleaner(self) -> Self:
        """Ask for cleaned closures, which Spark always has."""
        return self._set(closure_cleaner=True)

    def disable_closure_cleaner(self) -> Self:
        """Ask for closures as they are; Spark cleans them all the same."""
        return self._set(closure_cleaner=False)

    def is_closure_cleaner_enabled(self) -> bool:
        """Return what was set."""
        return self.closure_cleaner

    def set_global_job_parameters(self, global_job_parameters_dict: Mapping[str, str]) -> Self:
        """Keep parameters of the program, text by name."""
        given, allowed = global_job_parameters_dict, "a dict of text by name, such as {'region': 'eu'}"
        is_text = isinstance(given, Mapping) and all(isinstance(text, str) for item in given.items() for text in item)
        if not is_text:
            raise OptionTypeError(
                f"global job parameters are {given!r} ({type(given).__name__}), but must be {allowed}."
            )
        return self._set(global_job_parameters=dict(given))

    def get_global_job_parameters(self) -> dict[str, str]:
        """Return the parameters of the program."""
        return dict(self.global_job_parameters)

    def _set(self, **values: Any) -> Self:
        if self.program is not None:
            self.program._change(**values)
        for name, value in values.items():
            setattr(self, name, value)
        return self

    @property
    def trigger_interval_ms(self) -> int:
        """Trigger interval of writers without one."""
        return max(0, self.buffer_timeout_ms)

    def spark_settings(self) -> dict[str, str]:
        """Return Spark settings, without those that the session decides."""
        settings = {}
        if self.parallelism > self.max_parallelism != PARALLELISM_DEFAULT:
            raise OptionError(
                f"parallelism is {self.parallelism}, but must be at most the max parallelism, which is "
                f"{self.max_parallelism}: lower the one or raise the other."
            )
        if self.parallelism != PARALLELISM_DEFAULT:
            settings[LEAF_PARALLELISM] = str(self.parallelism)
            settings[SHUFFLE_PARTITIONS] = str(self.parallelism)
        if self.max_parallelism != PARALLELISM_DEFAULT:
            settings[SHUFFLE_PARTITIONS] = str(self.max_parallelism)
        if not self.operator_chaining:
            settings[WHOLE_STAGE] = "false"
        if self.changelog_state_backend is not None:
            settings[CHANGELOG_CHECKPOINTING] = str(self.changelog_state_backend).lower()
        return settings

    def describe(self) -> list[OptionDescription]:
        """Return each option and its effect on Spark."""
        mapped = Effect.MAPPED
        return [
            OptionDescription("parallelism", self.parallelism, mapped, self._of_parallelism()),
            OptionDescription(
                "max_parallelism",
                self.max_parallelism,
                Effect.REAL,
                f"Partitions of state ({SHUFFLE_PARTITIONS} while a query is started). Spark freezes them at the "
                "first batch; a start with another number is refused, or rewrites the state if you allow that.",
            ),
            OptionDescription("buffer_timeout", self.buffer_timeout_ms, mapped, self._of_buffer_timeout()),
            OptionDescription(
                "operator_chaining", self.operator_chaining, mapped, f"Whole-stage code generation ({WHOLE_STAGE})."
            ),
            OptionDescription(
                "time_characteristic", self.time_characteristic, mapped, _TIMES[self.time_characteristic]
            ),
            OptionDescription(
                "changelog_state_backend",
                self.changelog_state_backend,
                mapped,
                f"RocksDB uploads changelogs instead of snapshots ({CHANGELOG_CHECKPOINTING}); overrides the state "
                "backend's own setting.",
            ),
            OptionDescription(
                "kryo",
                list(self.kryo.types),
                mapped,
                "Spark's Kryo serializer with these types registered; it serializes what is not in a DataFrame's own "
                "rows. Spark reads it when the application starts.",
            ),
            OptionDescription(
                "auto_watermark_interval",
                self.auto_watermark_interval_ms,
                Effect.NONE,
                "Spark computes the watermark once in each batch.",
            ),
            OptionDescription("closure_cleaner", self.closure_cleaner, Effect.NONE, "Spark cleans closures itself."),
            OptionDescription(
                "global_job_parameters",
                dict(self.global_job_parameters),
                Effect.NONE,
                "Flink's functions read them from their context; a function of Spark takes them as arguments.",
            ),
        ]

    def _of_parallelism(self) -> str:
        if self.parallelism == PARALLELISM_DEFAULT:
            return "The session's own."
        return (
            f"Number of tasks that read an unpartitioned input ({LEAF_PARALLELISM}), and of shuffle "
            f"partitions if no max parallelism is set ({SHUFFLE_PARTITIONS}). "
            "The cores of the cluster limit how many run at once."
        )

    def _of_buffer_timeout(self) -> str:
        if self.buffer_timeout_ms <= 0:
            return "A micro-batch starts as soon as the previous one has ended and there is input."
        return f"A micro-batch starts every {self.buffer_timeout_ms} ms, for writers without a trigger."


_TIMES = {
    TimeCharacteristic.EventTime: "The given column, with a watermark.",
    TimeCharacteristic.IngestionTime: "The time of the batch that reads a row, with a watermark.",
    TimeCharacteristic.ProcessingTime: "The time of the batch that processes a row, without a watermark.",
}


class ConfiguredProgram:
    """The settings of one program. An invalid value changes nothing."""

    def __init__(self) -> None:
        self._config = ExecutionConfig()
        self._checkpoint_config = CheckpointConfig()
        self._backend: StateBackend | None = None
        self._on_backend_change = OnStateChange.REFUSE
        self._on_other_partitions = OnStateChange.REFUSE
        self._restart: RestartStrategyConfiguration | RestartPolicy = RestartStrategies.fall_back_restart()
        self._savepoints: tuple[str, str] | None = None

    def _change(self, **values: Any) -> None:
        self._config = replace(self._config, **values)

    def set_max_parallelism(self, max_parallelism: int, *, allow_state_rewrite: bool = False) -> Self:
        """Set the number of state partitions, 1 to 32768, which Spark fixes at the first batch.

        With `allow_state_rewrite`, `execute` rewrites state of another number (Spark 4.2 or later); otherwise it
        refuses to start.
        """
        number = MAX_PARALLELISM.checked(max_parallelism)
        may_rewrite = STATE_REWRITE.checked(allow_state_rewrite)
        self._change(max_parallelism=number)
        self._on_other_partitions = OnStateChange.CONVERT if may_rewrite else OnStateChange.REFUSE
        return self

    def get_max_parallelism(self) -> int:
        """Return the number of state partitions; -1: it equals the parallelism."""
        return self._config.max_parallelism

    def set_buffer_timeout(self, timeout_millis: int | timedelta) -> Self:
        """Set the trigger interval of writers without their own trigger, in ms; 0 and -1: as fast as batches allow.

        Real-time mode is chosen on the writer, `trigger(realTime=...)`.
        """
        self._change(buffer_timeout_ms=BUFFER_TIMEOUT.checked(timeout_millis))
        return self

    def get_buffer_timeout(self) -> int:
        """Return the trigger interval of writers without their own, in ms."""
        return self._config.buffer_timeout_ms

    def disable_operator_chaining(self) -> Self:
        """Execute every operator separately: turns off whole-stage code generation."""
        self._change(operator_chaining=False)
        return self

    def is_chaining_enabled(self) -> bool:
        """Return whether operators are compiled into one function per stage."""
        return self._config.operator_chaining

    def set_stream_time_characteristic(self, characteristic: TimeCharacteristic) -> None:
        """Set the notion of time of `assign_timestamps_and_watermarks`.

        As in Flink, the auto watermark interval becomes 0 for processing time, otherwise 200 ms.
        """
        checked = TIME_CHARACTERISTIC.member(characteristic)
        is_processing = checked is TimeCharacteristic.ProcessingTime
        interval_ms = 0 if is_processing else DEFAULT_AUTO_WATERMARK_INTERVAL_MS
        self._change(time_characteristic=checked, auto_watermark_interval_ms=interval_ms)

    def get_stream_time_characteristic(self) -> TimeCharacteristic:
        """Return the notion of time of `assign_timestamps_and_watermarks`."""
        return self._config.time_characteristic

    def enable_checkpointing(self, interval: int | timedelta, mode: CheckpointingMode | None = None) -> Self:
        """Take checkpoints at an interval, ms or timedelta, from 10 ms; mode None leaves the guarantee unchanged."""
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
        """Return the guarantee after a restore (Flink's name since 1.20)."""
        return self._checkpoint_config.get_checkpointing_mode()

    def is_unaligned_checkpoints_enabled(self) -> bool:
        """Return whether unaligned checkpoints are on, without effect under AT_LEAST_ONCE."""
        return self._checkpoint_config.is_unaligned_checkpoints_enabled()

    def is_force_unaligned_checkpoints(self) -> bool:
        """Return whether unaligned checkpoints are allowed with every kind of sink."""
        return self._checkpoint_config.is_force_unaligned_checkpoints()

    def set_state_backend(self, state_backend: StateBackend, *, allow_state_rewrite: bool = False) -> Self:
        """Set how queries keep their state. The backend's settings apply while queries are started.

        With `allow_state_rewrite`, `execute` converts state of another backend (Spark 4.2 or later); otherwise it
        refuses to start.
        """
        may_rewrite = STATE_REWRITE.checked(allow_state_rewrite)
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
        self._change(changelog_state_backend=CHANGELOG.checked(enabled))
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
        """Return the default folder of savepoints, if set."""
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
