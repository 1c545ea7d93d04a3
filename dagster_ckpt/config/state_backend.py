"""How Spark keeps working state, and which backends can continue existing state."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Self

from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.redaction import shown_settings
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import Effect, OptionDescription, Switch, WholeNumber

SettingValue = str | int | float | bool


def checked_settings(
    source: str, settings: Mapping[str, SettingValue], *, own: Iterable[str] = ()
) -> dict[str, SettingValue]:
    # Spark ignores the case of RocksDB names: a second spelling might win.
    reserved = {name.lower() for name in own}
    if not isinstance(settings, Mapping):
        raise OptionTypeError(f"{source} is {settings!r}, but must map names to strings, numbers or booleans.")
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise OptionTypeError(
                f"{source} has {name!r}: {value!r}, but must map names to strings, numbers or booleans."
            )
        if not name.startswith("spark."):
            raise OptionError(f"{source} has {name!r}, but must hold full Spark names: they begin with 'spark.'.")
        if name.lower() in reserved:
            raise OptionError(
                f"{source} has {name!r}: {value!r}, but the state backend sets that itself; "
                f"{source} must hold other names: use the backend's own arguments instead."
            )
    return dict(settings)


def as_text(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


PROVIDER_CLASS = "spark.sql.streaming.stateStore.providerClass"
# Flink's `state.backend.rocksdb.checkpoint.transfer.thread.num`.
DEFAULT_TRANSFER_THREADS = 4


class StateBackend(ABC):
    """How working state is kept; configuration only."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        if cls is StateBackend:
            raise OptionTypeError(
                "StateBackend() is abstract and cannot be instantiated; it must be one of HashMapStateBackend, "
                "EmbeddedRocksDBStateBackend, MemoryStateBackend, FsStateBackend, RocksDBStateBackend or "
                "CustomStateBackend."
            )
        return super().__new__(cls)

    @abstractmethod
    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings of this backend."""

    @abstractmethod
    def describe(self) -> list[OptionDescription]:
        """Return each option and its effect on Spark."""

    @property
    def transfer_threads(self) -> int:
        """Threads that copy files while a snapshot is taken or restored."""
        return DEFAULT_TRANSFER_THREADS

    def checkpoint_storage(self) -> CheckpointStorage | None:
        """The storage that an older backend brings; newer ones bring none."""
        return None


@dataclass(frozen=True)
class CustomStateBackend(StateBackend):
    """Any state store provider on Spark's class path.

    Attributes:
        provider_class: Full name of a Java class that extends Spark's `StateStoreProvider`.
        settings: Additional Spark settings, by full name.
    """

    provider_class: str = ""
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        allowed = "the full name of a Java class such as com.example.MyStateStoreProvider"
        if not self.provider_class or not isinstance(self.provider_class, str):
            raise OptionTypeError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        if not all(part.isidentifier() for part in self.provider_class.replace("$", "_").split(".")):
            raise OptionError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        object.__setattr__(self, "settings", checked_settings("settings", self.settings, own=[PROVIDER_CLASS]))

    def spark_settings(self) -> dict[str, str]:
        return {PROVIDER_CLASS: self.provider_class} | as_text(self.settings)

    def describe(self) -> list[OptionDescription]:
        provider = "The running query keeps its state in a provider of this class."
        return [
            OptionDescription("provider_class", self.provider_class, Effect.REAL, provider),
            OptionDescription(
                "settings", shown_settings(self.settings), Effect.REAL, "Set on the session before the start."
            ),
        ]


def storage_of_stream(
    configured: CheckpointStorage | None, backend: StateBackend | None, deployment: CheckpointStorage
) -> CheckpointStorage:
    """Backend's, else stream's, else deployment's storage, as in Flink's `CheckpointStorageLoader`."""
    return (backend and backend.checkpoint_storage()) or configured or deployment


class OnStateChange(StrEnum):
    """What a start does with state of another kind; a rewrite proves that every row was kept."""

    REFUSE = "REFUSE"
    CONVERT = "CONVERT"


# Flink's `KeyGroupRangeAssignment.UPPER_BOUND_MAX_PARALLELISM`; its documentation says 32767, its code 32768.
MAX_PARALLELISM = WholeNumber("max parallelism", minimum=1, maximum=32768)


@dataclass(frozen=True)
class StatePartitions:
    number: int
    on_change: OnStateChange = OnStateChange.REFUSE


@dataclass(frozen=True)
class PinnedState:
    """What existing state was written with, from Spark's offset log or a snapshot.

    `provider` None: no state; `settings`: those that Spark pins for the query's life.
    """

    provider: str | None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendChange:
    """Whether a query can continue with another backend: why not, and the settings that keep their old value."""

    refused: str | None = None
    kept: tuple[str, ...] = ()


def backend_change(pinned: PinnedState, wanted: StateBackend) -> BackendChange:
    """Whether a query can continue with another backend.

    No provider of Spark reads the files of another, and Spark would silently use the pinned one
    (`OffsetSeqMetadata.setSessionConf`).
    """
    if pinned.provider is None:
        return BackendChange()
    settings = wanted.spark_settings()
    provider = settings[PROVIDER_CLASS]
    if provider != pinned.provider:
        return BackendChange(
            f"Its state was written with {pinned.provider}, but the state backend is {type(wanted).__name__} with "
            f"{provider}, which cannot read it. Configure the backend that wrote the state, let the start convert the "
            "state (on_change: CONVERT of the state backend), or discard the state with start_from: empty."
        )
    kept = tuple(
        f"{name} stays {pinned.settings[name]}, not {value}: Spark pins it at the query's first batch"
        for name, value in settings.items()
        if pinned.settings.get(name, value) != value
    )
    return BackendChange(kept=kept)


HDFS_BACKED = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
_ASYNCHRONOUS = Switch("using_asynchronous_snapshots")
_PROVIDER = "State is kept in maps on the executors' heap, and each batch's changes in files of the live directory."


@dataclass(frozen=True)
class HashMapStateBackend(StateBackend):
    """State on the executors' heap: Spark's default, HDFS-backed provider."""

    def spark_settings(self) -> dict[str, str]:
        return {PROVIDER_CLASS: HDFS_BACKED}

    def describe(self) -> list[OptionDescription]:
        return [OptionDescription("provider", HDFS_BACKED, Effect.REAL, _PROVIDER)]


class _NamedStorage(HashMapStateBackend):
    """An older spelling, which brings the storage of snapshots."""

    def is_using_asynchronous_snapshots(self) -> bool:
        return True


@dataclass(frozen=True, init=False)
class MemoryStateBackend(_NamedStorage):
    """The older spelling of HashMapStateBackend with JobManagerCheckpointStorage.

    Args:
        checkpoint_path: URL for externalized checkpoints; None: the deployment's.
        savepoint_path: URL for savepoints; None: the deployment's.
        max_state_size: Largest snapshot in bytes; None: 5 MiB.
        using_asynchronous_snapshots: Without effect, as in Flink since 1.13: snapshots are always asynchronous.
    """

    DEFAULT_MAX_STATE_SIZE: ClassVar[int] = JobManagerCheckpointStorage.DEFAULT_MAX_STATE_SIZE

    storage: JobManagerCheckpointStorage
    asked_asynchronous: bool | None

    def __init__(
        self,
        checkpoint_path: str | None = None,
        savepoint_path: str | None = None,
        max_state_size: int | None = None,
        using_asynchronous_snapshots: bool | None = None,
    ) -> None:
        storage = JobManagerCheckpointStorage(checkpoint_path, max_state_size, savepoint_path=savepoint_path)
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "asked_asynchronous", _asynchronous(using_asynchronous_snapshots))

    def checkpoint_storage(self) -> JobManagerCheckpointStorage:
        return self.storage

    def get_max_state_size(self) -> int:
        return self.storage.get_max_state_size()

    def describe(self) -> list[OptionDescription]:
        return [
            *super().describe(),
            *_describe_storage(self.storage, ("checkpoint_path", "savepoint_path", "max_state_size")),
            _describe_asynchronous(self.asked_asynchronous),
        ]


@dataclass(frozen=True, init=False)
class FsStateBackend(_NamedStorage):
    """The older spelling of HashMapStateBackend with FileSystemCheckpointStorage.

    Args:
        checkpoint_directory_uri: URL for checkpoints. Required.
        default_savepoint_directory_uri: URL for savepoints; None: the deployment's.
        file_state_size_threshold: As for `FileSystemCheckpointStorage`.
        write_buffer_size: As for `FileSystemCheckpointStorage`; None is -1.
        using_asynchronous_snapshots: As for `MemoryStateBackend`.
    """

    storage: FileSystemCheckpointStorage
    asked_asynchronous: bool | None

    def __init__(
        self,
        checkpoint_directory_uri: str | None = None,
        default_savepoint_directory_uri: str | None = None,
        file_state_size_threshold: int | None = None,
        write_buffer_size: int | None = None,
        using_asynchronous_snapshots: bool | None = None,
    ) -> None:
        if checkpoint_directory_uri is None:
            raise OptionError(
                "checkpoint_directory_uri is None, but must be the URL of a directory, "
                "for example file:///data/checkpoints."
            )
        StoragePath.parse("checkpoint_directory_uri", checkpoint_directory_uri)
        if default_savepoint_directory_uri is not None:
            StoragePath.parse("default_savepoint_directory_uri", default_savepoint_directory_uri)
        storage = FileSystemCheckpointStorage(
            checkpoint_directory_uri,
            file_state_size_threshold,
            -1 if write_buffer_size is None else write_buffer_size,
            savepoint_path=default_savepoint_directory_uri,
        )
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "asked_asynchronous", _asynchronous(using_asynchronous_snapshots))

    def checkpoint_storage(self) -> FileSystemCheckpointStorage:
        return self.storage

    def get_checkpoint_path(self) -> str:
        return self.storage.get_checkpoint_path()

    def get_min_file_size_threshold(self) -> int:
        return self.storage.get_min_file_size_threshold()

    def get_write_buffer_size(self) -> int:
        return self.storage.get_write_buffer_size()

    def describe(self) -> list[OptionDescription]:
        return [
            *super().describe(),
            *_describe_storage(
                self.storage,
                ("checkpoint_path", "savepoint_path", "file_state_size_threshold", "write_buffer_size"),
                checkpoint_path="checkpoint_directory_uri",
                savepoint_path="default_savepoint_directory_uri",
            ),
            _describe_asynchronous(self.asked_asynchronous),
        ]


def _asynchronous(value: bool | None) -> bool | None:
    return None if value is None else _ASYNCHRONOUS.checked(value)


def _describe_storage(storage: CheckpointStorage, options: Sequence[str], **names: str) -> list[OptionDescription]:
    described = {line.option: line for line in storage.describe()}
    return [described[option]._replace(option=names.get(option, option)) for option in options]


def _describe_asynchronous(requested: bool | None) -> OptionDescription:
    if requested is False:
        effect, explanation = Effect.NONE, "Snapshots are always asynchronous, as in Flink since 1.13."
    else:
        effect, explanation = Effect.REAL, "The query continues while its snapshot is stored."
    return OptionDescription("using_asynchronous_snapshots", requested, effect, explanation)
