"""How Spark keeps the state of a query while it runs, as configuration of the session.

A backend is a value; `dagster_ckpt.spark` applies its settings. Setting names are those of the Structured
Streaming guide (https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#state-store).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_ckpt.errors import OptionError, OptionTypeError

PROVIDER_CLASS = "spark.sql.streaming.stateStore.providerClass"
CHANGELOG_CHECKPOINTING = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
_HDFS_BACKED = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

SettingValue = str | int | float | bool


class StateBackend(ABC):
    """How working state is kept. Values are immutable and pickle."""

    @abstractmethod
    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings that select and tune this backend."""


@dataclass(frozen=True)
class HashMapStateBackend(StateBackend):
    """State on the heap of the executors: Spark's HDFS-backed provider, its default."""

    def spark_settings(self) -> dict[str, str]:
        """Return the provider setting."""
        return {PROVIDER_CLASS: _HDFS_BACKED}


@dataclass(frozen=True, kw_only=True)
class RocksDBStateBackend(StateBackend):
    """State in RocksDB on the executors' disks, for state larger than memory.

    Attributes:
        enable_incremental_checkpointing: Whether Spark writes each batch's changes only (changelog
            checkpointing) and the whole database in the background.
        settings: More Spark settings, by full name. The two above cannot be among them.

    Raises:
        OptionError: A setting is not Spark's, or is one that this backend sets itself.
        OptionTypeError: A value has the wrong type.
    """

    enable_incremental_checkpointing: bool = True
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.enable_incremental_checkpointing, bool):
            raise OptionTypeError(
                "enable_incremental_checkpointing is "
                f"{self.enable_incremental_checkpointing!r}, but must be True or False."
            )
        own = {PROVIDER_CLASS, CHANGELOG_CHECKPOINTING}
        object.__setattr__(self, "settings", _spark_settings(self.settings, own))

    def spark_settings(self) -> dict[str, str]:
        """Return the provider, the changelog switch and the further settings."""
        incremental = _text(self.enable_incremental_checkpointing)
        own = {PROVIDER_CLASS: _ROCKSDB, CHANGELOG_CHECKPOINTING: incremental}
        return own | {name: _text(value) for name, value in self.settings.items()}


@dataclass(frozen=True)
class CustomStateBackend(StateBackend):
    """Any state store provider that is on Spark's class path.

    Attributes:
        provider_class: Full name of the Java class; it must extend Spark's `StateStoreProvider`.
        settings: More Spark settings, by full name.

    Raises:
        OptionError: The class name is empty, or a setting is not Spark's.
        OptionTypeError: A value has the wrong type.
    """

    provider_class: str
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check the class name and the settings."""
        allowed = "the full name of a Java class such as com.example.MyStateStoreProvider"
        if not isinstance(self.provider_class, str):
            raise OptionTypeError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        if not all(part.isidentifier() for part in self.provider_class.replace("$", "_").split(".")):
            raise OptionError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        object.__setattr__(self, "settings", _spark_settings(self.settings, {PROVIDER_CLASS}))

    def spark_settings(self) -> dict[str, str]:
        """Return the provider and the further settings."""
        return {PROVIDER_CLASS: self.provider_class} | {name: _text(value) for name, value in self.settings.items()}


def _spark_settings(settings: Mapping[str, SettingValue], own: set[str]) -> dict[str, SettingValue]:
    # Spark reads the RocksDB names without regard to case, so a second spelling would silently win or lose.
    reserved = {name.lower() for name in own}
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise OptionTypeError(
                f"settings has {name!r}: {value!r}, but must map names to strings, numbers or booleans."
            )
        if not name.startswith("spark."):
            raise OptionError(f"settings has {name!r}, but must hold full Spark names: they begin with 'spark.'.")
        if name.lower() in reserved:
            raise OptionError(
                f"settings has {name!r}: {value!r}, but the state backend sets that itself; "
                "settings must hold other names: use the backend's own arguments instead."
            )
    return dict(settings)


def _text(value: SettingValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
