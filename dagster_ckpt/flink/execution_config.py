"""Execution options of a `StreamExecutionEnvironment` as a frozen value, with their effect on Spark."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dagster_ckpt.config.rocksdb import CHANGELOG_CHECKPOINTING
from dagster_ckpt.config.state_backend import MAX_PARALLELISM
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.modes import TimeCharacteristic
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
    """Classes to register with Spark's Kryo serializer when the application starts.

    Spark does not accept a pair of type and serializer names. It takes serializers only from a user
    class that implements its `KryoRegistrator`, so name such a class here where Flink takes a
    serializer.

    Attributes:
        types: Full names of Java classes to register.
        registrators: Full names of classes that implement
            `org.apache.spark.serializer.KryoRegistrator`.
    """

    types: tuple[str, ...] = ()
    registrators: tuple[str, ...] = ()

    def with_type(self, type_class_name: object) -> "KryoRegistrations":
        """Return a copy with one more type.

        Raises:
            OptionError: The value is not a valid name of a Java class.
            OptionTypeError: The value is not a string.
        """
        name = _class_name("type class name", type_class_name)
        return replace(self, types=tuple(dict.fromkeys([*self.types, name])))

    def with_registrator(self, type_class_name: object, serializer_class_name: object) -> "KryoRegistrations":
        """Return a copy with one more type and one more registrator.

        Raises:
            OptionError: A value is not a valid name of a Java class.
            OptionTypeError: A value is not a string.
        """
        both = self.with_type(type_class_name)
        name = _class_name("serializer class name", serializer_class_name)
        return replace(both, registrators=tuple(dict.fromkeys([*self.registrators, name])))

    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings that register these classes; empty if there are none."""
        if not self.types:
            return {}
        settings = {SERIALIZER: KRYO_SERIALIZER, KRYO_TYPES: ",".join(self.types)}
        return settings | ({KRYO_REGISTRATORS: ",".join(self.registrators)} if self.registrators else {})

    def missing_in(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return the required settings that a running application lacks.

        Args:
            application: Its settings, by full name.
        """
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
STATE_REWRITE = Switch("allow_state_rewrite")
CHAINING = Switch("operator chaining")
CHANGELOG = Switch("changelog state backend")
TIME_CHARACTERISTIC = Choice("time characteristic", TimeCharacteristic)

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
LEAF_PARALLELISM = "spark.sql.leafNodeDefaultParallelism"
WHOLE_STAGE = "spark.sql.codegen.wholeStage"


@dataclass(frozen=True)
class ExecutionConfig:
    """Execution options of the queries of one environment, with Flink's defaults and ranges.

    Attributes:
        parallelism: Number of tasks that read and shuffle, from 1; -1 uses the session's.
        max_parallelism: Number of state partitions, 1 to 32768; -1 uses the parallelism.
        buffer_timeout_ms: Trigger interval of writers that set no trigger; 0 and -1 start the next
            batch at once.
        operator_chaining: Whether operators are compiled into one function per stage.
        time_characteristic: Which time `assign_timestamps_and_watermarks` uses.
        changelog_state_backend: Whether RocksDB uploads changelogs; None means the state backend
            decides.
        kryo: Types and registrators of Spark's Kryo serializer.
    """

    parallelism: int = PARALLELISM_DEFAULT
    max_parallelism: int = PARALLELISM_DEFAULT
    buffer_timeout_ms: int = DEFAULT_BUFFER_TIMEOUT_MS
    operator_chaining: bool = True
    time_characteristic: TimeCharacteristic = TimeCharacteristic.EventTime
    changelog_state_backend: bool | None = None
    kryo: KryoRegistrations = field(default_factory=KryoRegistrations)

    def __post_init__(self) -> None:
        """Validate each value separately."""
        if self.parallelism != PARALLELISM_DEFAULT:
            PARALLELISM.checked(self.parallelism)
        if self.max_parallelism != PARALLELISM_DEFAULT:
            MAX_PARALLELISM.checked(self.max_parallelism)
        BUFFER_TIMEOUT.checked(self.buffer_timeout_ms)
        CHAINING.checked(self.operator_chaining)
        TIME_CHARACTERISTIC.member(self.time_characteristic)
        if self.changelog_state_backend is not None:
            CHANGELOG.checked(self.changelog_state_backend)

    def get_parallelism(self) -> int:
        """Return the number of tasks that read and shuffle, or -1 if the session decides."""
        return self.parallelism

    def get_max_parallelism(self) -> int:
        """Return the number of state partitions, or -1 if it is not set."""
        return self.max_parallelism

    @property
    def trigger_interval_ms(self) -> int:
        """Trigger interval of writers that set no trigger; 0 starts the next batch at once."""
        return max(0, self.buffer_timeout_ms)

    def spark_settings(self) -> dict[str, str]:
        """Return the Spark session settings for these options, without those that the session decides.

        Raises:
            OptionError: The parallelism is above the max parallelism.
        """
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
        """Return each option with its value and its effect on Spark."""
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
