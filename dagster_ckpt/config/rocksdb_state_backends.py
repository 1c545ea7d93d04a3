"""State backends in RocksDB on the executors' disks, for state larger than memory, under Flink's names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.config.rocksdb_options import (
    PREDEFINED,
    TRANSFER_THREADS,
    PredefinedOptions,
    RocksDBOptions,
    options_factory,
)
from dagster_ckpt.config.state_backend import DEFAULT_TRANSFER_THREADS, FsStateBackend, SettingValue, StateBackend
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import Effect, OptionDescription

# Flink removed these after 1.10. They still work here but are not advertised.
_DEPRECATED = {"enable_ttl_compaction_filter", "disable_ttl_compaction_filter", "is_ttl_compaction_filter_enabled"}


class RocksDBBackend(StateBackend):
    """PyFlink's setters over one `RocksDBOptions`, shared by both RocksDB backends.

    Each setter validates its value; if validation fails, the object is unchanged. As in PyFlink,
    setters return None.

    Args:
        options: The options.
    """

    # Backends are mutable and compared by value, so they are not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, options: RocksDBOptions) -> None:
        self._options = options

    @property
    def options(self) -> RocksDBOptions:
        """The options as a frozen value."""
        return self._options

    @property
    def transfer_threads(self) -> int:
        """Number of threads of this package that copy files while a snapshot is taken or restored."""
        return self._options.transfer_threads or DEFAULT_TRANSFER_THREADS

    def spark_settings(self) -> dict[str, str]:
        """Return the provider, the settings of the options, and the additional settings on top."""
        return self._options.spark_settings()

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        return self._options.describe()

    def is_incremental_checkpoints_enabled(self) -> bool:
        """Return whether Spark writes only the changes of each batch."""
        return bool(self._options.incremental)

    def get_db_storage_paths(self) -> list[str] | None:
        """Return the local directories of the working state, or None if Spark's are used."""
        return None if self._options.db_storage_paths is None else list(self._options.db_storage_paths)

    def set_db_storage_paths(self, *paths: str) -> None:
        """Set the local directories of the working state; no argument restores Spark's."""
        self._set(db_storage_paths=paths or None)

    def get_predefined_options(self) -> PredefinedOptions:
        """Return the predefined RocksDB options."""
        return self._options.predefined

    def set_predefined_options(self, options: PredefinedOptions) -> None:
        """Set the predefined RocksDB options."""
        self._set(predefined=PREDEFINED.member(options))

    def get_options(self) -> str | None:
        """Return the import path of the options factory, or None."""
        return self._options.factory

    def set_options(self, options_factory_class_name: str) -> None:
        """Set a `RocksDBOptionsFactory` by import path; its settings are applied on top of the predefined options."""
        options_factory(options_factory_class_name)
        self._set(factory=options_factory_class_name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.__dict__.values()))})"

    def _set(self, **changes: Any) -> None:
        self._options = replace(self._options, **changes)


class EmbeddedRocksDBStateBackend(RocksDBBackend):
    """RocksDB, with snapshots in the stream's checkpoint storage.

    Args:
        enable_incremental_checkpointing: Whether Spark writes only the changes of each batch
            (changelog checkpointing) and the whole database in the background. None is False, as in
            Flink.
        settings: Additional Spark settings, by full name, except those that the other options set.

    Raises:
        OptionError: A setting is not Spark's, or is one that this backend sets itself.
        OptionTypeError: A value has the wrong type.
    """

    def __init__(
        self,
        enable_incremental_checkpointing: bool | None = None,
        *,
        settings: Mapping[str, SettingValue] | None = None,
    ) -> None:
        super().__init__(RocksDBOptions(incremental=enable_incremental_checkpointing, settings=settings or {}))

    def get_number_of_transfer_threads(self) -> int:
        """Return the number of threads that copy files while a snapshot is taken or restored."""
        return self.transfer_threads

    def set_number_of_transfer_threads(self, number_of_transfering_threads: int) -> None:
        """Set the number of threads that copy files while a snapshot is taken or restored, from 1."""
        self._set(transfer_threads=TRANSFER_THREADS.checked(number_of_transfering_threads))


class RocksDBStateBackend(RocksDBBackend):
    """RocksDB, with snapshots in a directory that the backend names: the older spelling.

    Args:
        checkpoint_data_uri: URL of the directory of checkpoints.
        enable_incremental_checkpointing: As for `EmbeddedRocksDBStateBackend`.
        checkpoint_stream_backend: A backend that names a directory (Memory, Fs, RocksDB), instead
            of the URL.
        settings: Additional Spark settings, by full name, except those that the other options set.

    Raises:
        OptionError: The backend names no directory, or a value is out of range.
        OptionTypeError: Neither URL nor backend is given, or a value has the wrong type.
    """

    def __init__(
        self,
        checkpoint_data_uri: str | None = None,
        enable_incremental_checkpointing: bool | None = None,
        checkpoint_stream_backend: StateBackend | None = None,
        *,
        settings: Mapping[str, SettingValue] | None = None,
    ) -> None:
        super().__init__(RocksDBOptions(incremental=enable_incremental_checkpointing, settings=settings or {}))
        self._checkpoint_backend = _checkpoint_backend(checkpoint_data_uri, checkpoint_stream_backend)

    def get_checkpoint_backend(self) -> StateBackend:
        """Return the backend that names where snapshots are stored."""
        return self._checkpoint_backend

    def checkpoint_storage(self) -> CheckpointStorage | None:
        """Return the storage of the checkpoint backend."""
        return self._checkpoint_backend.checkpoint_storage()

    def get_number_of_transfering_threads(self) -> int:
        """Return the number of threads that copy files while a snapshot is taken or restored."""
        return self.transfer_threads

    def set_number_of_transfering_threads(self, number_of_transfering_threads: int) -> None:
        """Set the number of threads that copy files while a snapshot is taken or restored, from 1."""
        self._set(transfer_threads=TRANSFER_THREADS.checked(number_of_transfering_threads))

    def is_ttl_compaction_filter_enabled(self) -> bool:
        """Return the value that was set; Spark has no such filter."""
        return self._options.ttl_compaction_filter

    def enable_ttl_compaction_filter(self) -> None:
        """Turn on Flink's filter of expired state, which Spark does not have. Deprecated since Flink 1.10."""
        self._set(ttl_compaction_filter=True)

    def disable_ttl_compaction_filter(self) -> None:
        """Turn off Flink's filter of expired state, which Spark does not have. Deprecated since Flink 1.10."""
        self._set(ttl_compaction_filter=False)

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        where = f"Snapshots are kept where the {type(self._checkpoint_backend).__name__} says."
        return [
            OptionDescription("checkpoint_backend", self._checkpoint_backend, Effect.REAL, where),
            *super().describe(),
        ]

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _DEPRECATED)


def _checkpoint_backend(uri: object, backend: object) -> StateBackend:
    if uri is not None:
        StoragePath.parse("checkpoint_data_uri", uri)
        return FsStateBackend(str(uri))
    allowed = (
        "the URL of a directory, or checkpoint_stream_backend must be a MemoryStateBackend, FsStateBackend or "
        "RocksDBStateBackend"
    )
    if backend is None:
        raise OptionTypeError(
            f"checkpoint_data_uri is None, but must be {allowed}. "
            "To keep snapshots where the stream's storage says, use EmbeddedRocksDBStateBackend."
        )
    if not isinstance(backend, StateBackend):
        raise OptionTypeError(
            f"checkpoint_stream_backend is {backend!r} ({type(backend).__name__}), "
            f"but checkpoint_data_uri must be {allowed}."
        )
    if backend.checkpoint_storage() is None:
        raise OptionError(
            f"checkpoint_stream_backend is {backend!r}, which does not define where snapshots are stored; "
            f"checkpoint_data_uri must be {allowed}."
        )
    return backend
