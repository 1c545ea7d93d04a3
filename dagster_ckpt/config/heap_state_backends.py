"""State backends on the executors' heap: Spark's HDFS-backed provider under Flink's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.option_description import Effect, OptionDescription
from dagster_ckpt.config.state_backend import PROVIDER_CLASS, StateBackend
from dagster_ckpt.config.storage_path import StoragePath
from dagster_ckpt.config.validation import Switch
from dagster_ckpt.errors import OptionError

HDFS_BACKED = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
_ASYNCHRONOUS = Switch("using_asynchronous_snapshots")
_PROVIDER = "State is kept in maps on the executors' heap, and each batch's changes in files of the live directory."


@dataclass(frozen=True)
class HashMapStateBackend(StateBackend):
    """State on the heap of the executors: Spark's HDFS-backed provider, its default."""

    def spark_settings(self) -> dict[str, str]:
        """Return the provider setting."""
        return {PROVIDER_CLASS: HDFS_BACKED}

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        return [OptionDescription("provider", HDFS_BACKED, Effect.REAL, _PROVIDER)]


@dataclass(frozen=True, init=False)
class MemoryStateBackend(HashMapStateBackend):
    """State on the heap, snapshots in the memory of the process that coordinates the query.

    The older spelling of a HashMapStateBackend with a JobManagerCheckpointStorage.

    Args:
        checkpoint_path: URL of a directory for externalized checkpoints. None takes the
            deployment's.
        savepoint_path: URL of a directory for savepoints. None uses the deployment's.
        max_state_size: Largest snapshot in bytes; a larger one is declined. None means 5 MiB.
        using_asynchronous_snapshots: Accepted without effect, as in Flink since 1.13. Snapshots are
            always asynchronous: they are taken from committed files while the query runs.

    Raises:
        OptionError: A path has no scheme or is the root, or the size is below 1.
        OptionTypeError: A value has the wrong type.
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
        """Return the storage in memory."""
        return self.storage

    def get_max_state_size(self) -> int:
        """Return the size in bytes above which a snapshot is declined."""
        return self.storage.get_max_state_size()

    def is_using_asynchronous_snapshots(self) -> bool:
        """Return True: a query continues while its snapshot is stored."""
        return True

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        return [
            *super().describe(),
            *_describe_storage(self.storage, ("checkpoint_path", "savepoint_path", "max_state_size")),
            _describe_asynchronous(self.asked_asynchronous),
        ]


@dataclass(frozen=True, init=False)
class FsStateBackend(HashMapStateBackend):
    """State on the heap, snapshots in a directory.

    The older spelling of a HashMapStateBackend with a FileSystemCheckpointStorage.

    Args:
        checkpoint_directory_uri: URL of the directory of checkpoints. Required.
        default_savepoint_directory_uri: URL of the directory of savepoints. None uses the deployment's.
        file_state_size_threshold: Bytes; smaller files are stored inside the snapshot's metadata. None or -1 takes
            the deployment's value, else 20 KiB. At most 1 MiB.
        write_buffer_size: Bytes written at a time. None or -1 takes the deployment's value, else 4096.
        using_asynchronous_snapshots: As for `MemoryStateBackend`.

    Raises:
        OptionError: A path is missing, has no scheme or is the root, or a number is out of range.
        OptionTypeError: A value has the wrong type.
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
        # Validated under the names used here, before the storage validates them under its names.
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
        """Return the directory as a storage."""
        return self.storage

    def get_checkpoint_path(self) -> str:
        """Return the directory of checkpoints as PyFlink writes it."""
        return self.storage.get_checkpoint_path()

    def get_min_file_size_threshold(self) -> int:
        """Return the size in bytes below which a file is stored inside the metadata."""
        return self.storage.get_min_file_size_threshold()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are written at a time."""
        return self.storage.get_write_buffer_size()

    def is_using_asynchronous_snapshots(self) -> bool:
        """Return True: a query continues while its snapshot is stored."""
        return True

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
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
    """Describe a storage's options under the names that the backend uses for them."""
    told = {line.option: line for line in storage.describe()}
    return [told[option]._replace(option=names.get(option, option)) for option in options]


def _describe_asynchronous(asked: bool | None) -> OptionDescription:
    if asked is False:
        effect, explanation = Effect.NONE, "Snapshots are always asynchronous, as in Flink since 1.13."
    else:
        effect, explanation = Effect.REAL, "The query continues while its snapshot is stored."
    return OptionDescription("using_asynchronous_snapshots", asked, effect, explanation)
