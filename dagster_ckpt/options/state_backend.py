"""How Spark keeps the state of a query while it runs, as configuration of the session.

A backend is a value; `dagster_ckpt.spark` applies its settings. Setting names are those of the Structured
Streaming guide (https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#state-store).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.options.checkpoint_storage import CheckpointStorage
from dagster_ckpt.options.option_description import Effect, OptionDescription
from dagster_ckpt.options.redaction import shown_settings
from dagster_ckpt.options.spark_setting_values import SettingValue, as_text, checked_settings

PROVIDER_CLASS = "spark.sql.streaming.stateStore.providerClass"
# Flink's `state.backend.rocksdb.checkpoint.transfer.thread.num`.
DEFAULT_TRANSFER_THREADS = 4


class StateBackend(ABC):
    """How working state is kept. Backends are configuration only: they pickle, and are safe to share."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        """Refuse the abstract class itself, in words a user of PyFlink understands."""
        if cls is StateBackend:
            raise OptionTypeError(
                "StateBackend() is abstract, so it cannot be made; it must be one of HashMapStateBackend, "
                "EmbeddedRocksDBStateBackend, MemoryStateBackend, FsStateBackend, RocksDBStateBackend or "
                "CustomStateBackend."
            )
        return super().__new__(cls)

    @abstractmethod
    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings that select and tune this backend."""

    @abstractmethod
    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""

    @property
    def transfer_threads(self) -> int:
        """How many threads of ours copy files while an image is taken or restored."""
        return DEFAULT_TRANSFER_THREADS

    def checkpoint_storage(self) -> CheckpointStorage | None:
        """Return where this backend says that images live; None where it says nothing, as the newer ones."""
        return None


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

    # The default is refused with our message instead of Python's.
    provider_class: str = ""
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        """Check the class name and the settings."""
        allowed = "the full name of a Java class such as com.example.MyStateStoreProvider"
        if not self.provider_class or not isinstance(self.provider_class, str):
            raise OptionTypeError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        if not all(part.isidentifier() for part in self.provider_class.replace("$", "_").split(".")):
            raise OptionError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        object.__setattr__(self, "settings", checked_settings("settings", self.settings, own=[PROVIDER_CLASS]))

    def spark_settings(self) -> dict[str, str]:
        """Return the provider and the further settings."""
        return {PROVIDER_CLASS: self.provider_class} | as_text(self.settings)

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        provider = "The running query keeps its state in a provider of this class."
        return [
            OptionDescription("provider_class", self.provider_class, Effect.REAL, provider),
            OptionDescription(
                "settings", shown_settings(self.settings), Effect.REAL, "Set on the session before the start."
            ),
        ]


def storage_of_job(
    configured: CheckpointStorage | None, backend: StateBackend | None, deployment: CheckpointStorage
) -> CheckpointStorage:
    """Return where a job's images live.

    A backend that names a place itself (Memory, Fs, RocksDB) comes first, as in Flink's `CheckpointStorageLoader`,
    then the job's own storage, then the deployment's.

    Args:
        configured: The storage of the job's `CheckpointConfig`, if any.
        backend: The job's state backend; None where it is left to the session.
        deployment: The deployment's storage.
    """
    return (backend and backend.checkpoint_storage()) or configured or deployment
