"""Where snapshots are stored, as values. The stores are in `dagster_ckpt.snapshot`.

Names, defaults and limits follow Flink's `CheckpointStorage` classes
(https://nightlies.apache.org/flink/flink-docs-release-1.20/docs/ops/state/checkpoints/).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import IMPORT_PATH, Effect, OptionDescription, WholeNumber

DEFAULT_FILE_STATE_THRESHOLD = 20 * 1024
DEFAULT_WRITE_BUFFER_SIZE = 4096
_MAX_FILE_STATE_THRESHOLD = 1024 * 1024

_MAX_STATE_SIZE = WholeNumber("max_state_size", minimum=1, unit="of bytes")
_THRESHOLD = WholeNumber("file_state_size_threshold", minimum=-1, maximum=_MAX_FILE_STATE_THRESHOLD, unit="of bytes")
_WRITE_BUFFER = WholeNumber("write_buffer_size", minimum=-1, unit="of bytes")
EXECUTOR_COPY_BYTES = WholeNumber("executor_copy_bytes", minimum=0, maximum=2**63 - 1, unit="of bytes")

_SAVEPOINTS = "Savepoints are stored there and are never deleted automatically."
_FILE_SYSTEM = "Arguments of the fsspec file system, such as credentials."

Settings = Mapping[str, Any] | Iterable[tuple[str, Any]]


def _optional_path(option: str, value: object) -> StoragePath | None:
    return None if value is None else StoragePath.parse(option, value)


def _settings(option: str, value: Settings) -> dict[str, Any]:
    settings = dict(value)
    for key in settings:
        if not isinstance(key, str):
            raise OptionTypeError(f"{option} has the key {key!r}, but its keys must be strings.")
    return settings


@dataclass(frozen=True)
class DeploymentStorage:
    """The deployment's storage settings, used where code sets none (Flink's cluster options).

    Sizes are bytes; None or -1 leaves the default.
    """

    checkpoint_path: str | None = field(default=None, repr=False)
    savepoint_path: str | None = field(default=None, repr=False)
    file_state_size_threshold: int | None = None
    write_buffer_size: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)


class CheckpointStorage(ABC):
    """Where snapshots are stored; immutable, so that threads can share it."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        if cls is CheckpointStorage:
            raise OptionTypeError(
                "CheckpointStorage() is abstract and cannot be instantiated; it must be one of "
                "JobManagerCheckpointStorage, FileSystemCheckpointStorage or CustomCheckpointStorage."
            )
        return super().__new__(cls)

    @abstractmethod
    def configure(self, deployment: DeploymentStorage) -> "CheckpointStorage":
        """Take unset options from the deployment."""

    @abstractmethod
    def describe(self) -> list[OptionDescription]:
        """Return each option and its effect, without possible secrets."""


class _StorageWithPaths(CheckpointStorage):
    savepoint_location: StoragePath | None
    storage_options: Mapping[str, Any]

    def get_savepoint_path(self) -> str | None:
        """Return the directory of savepoints, if set, as PyFlink writes it."""
        return None if self.savepoint_location is None else str(self.savepoint_location)

    def _described_with(self, *options: OptionDescription) -> list[OptionDescription]:
        return [
            *options,
            _real("savepoint_path", self.get_savepoint_path(), _SAVEPOINTS),
            _real("storage_options", sorted(self.storage_options), _FILE_SYSTEM),
        ]

    def _inherited(self, deployment: DeploymentStorage) -> dict[str, Any]:
        savepoint = self.savepoint_location
        return {
            "savepoint_path": deployment.savepoint_path if savepoint is None else savepoint.url_to_open,
            "storage_options": {**deployment.storage_options, **self.storage_options},
        }


@dataclass(frozen=True, init=False)
class JobManagerCheckpointStorage(_StorageWithPaths):
    """Snapshots in the memory of the coordinating process, for experiments and small state.

    Savepoints and externalized checkpoints are written to a path.

    Args:
        checkpoint_path: URL for externalized checkpoints; None: the deployment's.
        max_state_size: Largest snapshot in bytes; None: 5 MiB.
        savepoint_path: URL for savepoints; None: the deployment's.
        storage_options: fsspec's arguments. Never shown.
    """

    DEFAULT_MAX_STATE_SIZE: ClassVar[int] = 5 * 1024 * 1024

    checkpoint_location: StoragePath | None
    savepoint_location: StoragePath | None
    max_state_size: int
    storage_options: Mapping[str, Any] = field(hash=False, repr=False)

    def __init__(
        self,
        checkpoint_path: str | None = None,
        max_state_size: int | None = None,
        *,
        savepoint_path: str | None = None,
        storage_options: Settings = (),
    ) -> None:
        size = self.DEFAULT_MAX_STATE_SIZE if max_state_size is None else max_state_size
        _set(self, "checkpoint_location", _optional_path("checkpoint_path", checkpoint_path))
        _set(self, "savepoint_location", _optional_path("savepoint_path", savepoint_path))
        _set(self, "max_state_size", _MAX_STATE_SIZE.checked(size))
        _set(self, "storage_options", _settings("storage_options", storage_options))

    def get_checkpoint_path(self) -> str | None:
        """Return the URL as PyFlink writes it."""
        return None if self.checkpoint_location is None else str(self.checkpoint_location)

    def __str__(self) -> str:
        return f"JobManagerCheckpointStorage (checkpoints to JobManager) ( maxStateSize: {self.max_state_size})"

    def get_max_state_size(self) -> int:
        """Return the size in bytes above which a snapshot is declined."""
        return self.max_state_size

    def describe(self) -> list[OptionDescription]:
        return self._described_with(
            _real(
                "checkpoint_path",
                self.get_checkpoint_path(),
                "Checkpoints that must outlive the stream are kept there.",
            ),
            _real("max_state_size", self.max_state_size, "A larger snapshot is declined, with its size and the limit."),
        )

    def configure(self, deployment: DeploymentStorage) -> "JobManagerCheckpointStorage":
        checkpoint = self.checkpoint_location
        return JobManagerCheckpointStorage(
            deployment.checkpoint_path if checkpoint is None else checkpoint.url_to_open,
            self.max_state_size,
            **self._inherited(deployment),
        )


@dataclass(frozen=True, init=False)
class FileSystemCheckpointStorage(_StorageWithPaths):
    """Snapshots in a directory of any file system of fsspec: file, s3, gs, abfs, webhdfs, memory.

    Args:
        checkpoint_path: URL; each stream gets a subdirectory.
        file_state_size_threshold: Bytes, at most 1 MiB; smaller files, except state files, are stored inside the
            snapshot's metadata. None or -1: the deployment's value, else 20 KiB.
        write_buffer_size: Bytes written at a time; 0: unbuffered; -1: the deployment's value, else 4096.
        savepoint_path: URL for savepoints; None: the deployment's.
        storage_options: fsspec's arguments (credentials, endpoint). Never shown.
    """

    MAX_FILE_STATE_THRESHOLD: ClassVar[int] = _MAX_FILE_STATE_THRESHOLD

    checkpoint_location: StoragePath
    savepoint_location: StoragePath | None
    file_state_size_threshold: int
    write_buffer_size: int
    storage_options: Mapping[str, Any] = field(hash=False, repr=False)

    def __init__(
        self,
        checkpoint_path: str | None = None,
        file_state_size_threshold: int | None = None,
        write_buffer_size: int = -1,
        *,
        savepoint_path: str | None = None,
        storage_options: Settings = (),
    ) -> None:
        if checkpoint_path is None:
            raise OptionError(
                "checkpoint_path must not be None: give the URL of a directory, for example file:///data/checkpoints."
            )
        threshold = -1 if file_state_size_threshold is None else file_state_size_threshold
        _set(self, "checkpoint_location", StoragePath.parse("checkpoint_path", checkpoint_path))
        _set(self, "savepoint_location", _optional_path("savepoint_path", savepoint_path))
        _set(self, "file_state_size_threshold", _THRESHOLD.checked(threshold))
        _set(self, "write_buffer_size", _WRITE_BUFFER.checked(write_buffer_size))
        _set(self, "storage_options", _settings("storage_options", storage_options))

    def get_checkpoint_path(self) -> str:
        """Return the URL as PyFlink writes it."""
        return str(self.checkpoint_location)

    def __str__(self) -> str:
        # PyFlink's class has no text of its own: it prints a Java address.
        return (
            f"FileSystemCheckpointStorage (checkpoints: '{self.checkpoint_location}', fileStateThreshold: "
            f"{self.get_min_file_size_threshold()}, writeBufferSize: {self.get_write_buffer_size()})"
        )

    def get_min_file_size_threshold(self) -> int:
        """Return the size in bytes below which a file is stored in the metadata."""
        threshold = self.file_state_size_threshold
        return DEFAULT_FILE_STATE_THRESHOLD if threshold < 0 else threshold

    def get_write_buffer_size(self) -> int:
        return DEFAULT_WRITE_BUFFER_SIZE if self.write_buffer_size < 0 else self.write_buffer_size

    def describe(self) -> list[OptionDescription]:
        return self._described_with(
            _real(
                "checkpoint_path",
                self.get_checkpoint_path(),
                "Each stream stores its snapshots in a subdirectory named by its stream id.",
            ),
            _real(
                "file_state_size_threshold",
                self.get_min_file_size_threshold(),
                "Smaller files are stored in the snapshot's metadata, except state files. All other files are stored "
                "in objects that snapshots share.",
            ),
            _real(
                "write_buffer_size",
                self.get_write_buffer_size(),
                "Bytes written at a time on local and mounted disks; object stores take parts of a fixed size.",
            ),
        )

    def configure(self, deployment: DeploymentStorage) -> "FileSystemCheckpointStorage":
        return FileSystemCheckpointStorage(
            self.checkpoint_location.url_to_open,
            _set_or(self.file_state_size_threshold, deployment.file_state_size_threshold),
            _set_or(self.write_buffer_size, deployment.write_buffer_size),
            **self._inherited(deployment),
        )


@dataclass(frozen=True, init=False)
class CustomCheckpointStorage(CheckpointStorage):
    """A storage class of yours, named by the import path of its factory (docs/custom-storage.md).

    Args:
        factory: "package.module:Name" or "package.module.Name", imported when the store is opened.
        settings: Its keyword arguments, never shown. A parameter named like an unset field of `DeploymentStorage` gets
            the deployment's value.
    """

    factory: str
    settings: Mapping[str, Any] = field(hash=False, repr=False)
    deployment: DeploymentStorage = field(hash=False, repr=False)

    def __init__(self, factory: str | None = None, settings: Settings = ()) -> None:
        allowed = "an import path such as 'package.module:Name'"
        if not isinstance(factory, str):
            raise OptionTypeError(f"factory is {factory!r} ({type(factory).__name__}), but must be {allowed}.")
        if not IMPORT_PATH.fullmatch(factory):
            raise OptionError(f"factory is {factory!r}, but must be {allowed}.")
        _set(self, "factory", factory)
        _set(self, "settings", _settings("settings", settings))
        _set(self, "deployment", DeploymentStorage())

    def describe(self) -> list[OptionDescription]:
        return [
            _real("factory", self.factory, "Imported and called where the store is opened."),
            _real("settings", sorted(self.settings), "Keyword arguments of the factory."),
        ]

    def configure(self, deployment: DeploymentStorage) -> "CustomCheckpointStorage":
        configured = CustomCheckpointStorage(self.factory, self.settings)
        _set(configured, "deployment", deployment)
        return configured


def _real(option: str, value: object, explanation: str) -> OptionDescription:
    return OptionDescription(option, value, Effect.REAL, explanation)


def _set(storage: CheckpointStorage, name: str, value: object) -> None:
    object.__setattr__(storage, name, value)


def _set_or(value: int, deployment: int | None) -> int:
    if value >= 0 or deployment is None:
        return value
    return deployment
