"""RocksDB under Spark: options, Flink's predefined sets, and the state backends."""

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.config.state_backend import (
    DEFAULT_TRANSFER_THREADS,
    PROVIDER_CLASS,
    FsStateBackend,
    SettingValue,
    StateBackend,
    as_text,
    checked_settings,
)
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.redaction import shown_settings
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import (
    INT_MAX,
    Choice,
    Effect,
    OptionDescription,
    Switch,
    WholeNumber,
    imported,
)

ROCKSDB_SETTINGS = "spark.sql.streaming.stateStore.rocksdb."


class PredefinedOptions(Enum):
    """Predefined RocksDB options for kinds of disks, as in PyFlink.

    Attributes:
        DEFAULT: Spark's defaults, which do not force writes to the disk either.
        SPINNING_DISK_OPTIMIZED: For spinning disks.
        SPINNING_DISK_OPTIMIZED_HIGH_MEM: For spinning disks, with much more memory for caches and buffers.
        FLASH_SSD_OPTIMIZED: For solid state disks.
    """

    DEFAULT = 0
    SPINNING_DISK_OPTIMIZED = 1
    SPINNING_DISK_OPTIMIZED_HIGH_MEM = 2
    FLASH_SSD_OPTIMIZED = 3


@dataclass(frozen=True)
class RocksDBOption:
    """One call of Flink's predefined options: MAPPED to a Spark `setting`, REAL anyway, or impossible (NONE)."""

    call: str
    effect: Effect
    reason: str
    setting: str | None = None
    value: str = ""


def _mapped(call: str, name: str, value: int) -> RocksDBOption:
    setting = ROCKSDB_SETTINGS + name
    return RocksDBOption(call, Effect.MAPPED, "Spark has the same option.", setting, str(value))


def _anyway(call: str, reason: str) -> RocksDBOption:
    return RocksDBOption(call, Effect.REAL, reason)


def _absent(call: str, reason: str) -> RocksDBOption:
    return RocksDBOption(call, Effect.NONE, reason)


_NO_FSYNC = _anyway("setUseFsync(false)", "RocksDB's default; Spark does not sync either, it uploads.")
_NO_DATA_SYNC = _anyway(
    "setDisableDataSync(true)", "RocksDB has no such option any more; Spark turns off the write-ahead log instead."
)
_LEVEL_COMPACTION = _anyway("setCompactionStyle(CompactionStyle.LEVEL)", "RocksDB's default, which Spark keeps.")
_DYNAMIC_LEVELS = _anyway("setLevelCompactionDynamicLevelBytes(true)", "RocksDB's default, which Spark keeps.")
_PARALLELISM = _absent(
    "setIncreaseParallelism(4)", "Spark has no setting for the background threads of one RocksDB: it keeps two."
)
_OPEN_FILES = _mapped("setMaxOpenFiles(-1)", "maxOpenFiles", -1)

OPTIONS_SET: dict[PredefinedOptions, tuple[RocksDBOption, ...]] = {
    PredefinedOptions.DEFAULT: (_NO_FSYNC, _NO_DATA_SYNC),
    PredefinedOptions.SPINNING_DISK_OPTIMIZED: (
        _LEVEL_COMPACTION,
        _DYNAMIC_LEVELS,
        _PARALLELISM,
        _NO_FSYNC,
        _NO_DATA_SYNC,
        _OPEN_FILES,
    ),
    PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM: (
        _DYNAMIC_LEVELS,
        _absent(
            "setTargetFileSizeBase(256 MBytes)", "Spark has no setting for the size of SST files: RocksDB's 64 MB."
        ),
        _absent("setMaxBytesForLevelBase(1 GByte)", "Spark has no setting for the size of a level: RocksDB's 256 MB."),
        _mapped("setWriteBufferSize(64 MBytes)", "writeBufferSizeMB", 64),
        _PARALLELISM,
        _absent(
            "setMinWriteBufferNumberToMerge(3)",
            "Spark has no setting for it, and flushes at each snapshot: RocksDB's 1.",
        ),
        _mapped("setMaxWriteBufferNumber(4)", "maxWriteBufferNumber", 4),
        _NO_FSYNC,
        _OPEN_FILES,
        _mapped("BlockBasedTableConfig.setBlockCacheSize(256 MBytes)", "blockCacheSizeMB", 256),
        _mapped("BlockBasedTableConfig.setBlockSize(128 KBytes)", "blockSizeKB", 128),
    ),
    PredefinedOptions.FLASH_SSD_OPTIMIZED: (_PARALLELISM, _NO_FSYNC, _NO_DATA_SYNC, _OPEN_FILES),
}


def spark_settings_of(choice: PredefinedOptions) -> dict[str, str]:
    return {option.setting: option.value for option in OPTIONS_SET[choice] if option.setting is not None}


ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CHANGELOG_CHECKPOINTING = f"{ROCKSDB_SETTINGS}changelogCheckpointing.enabled"
MAINTENANCE_THREADS = "spark.sql.streaming.stateStore.numStateStoreMaintenanceThreads"
SNAPSHOT_SHARE = "spark.sql.streaming.stateStore.snapshotToCleanupThreadRatio"
LOCAL_DIRECTORIES = "spark.local.dir"

INCREMENTAL = Switch("enable_incremental_checkpointing")
PREDEFINED = Choice("predefined options", PredefinedOptions)
TRANSFER_THREADS = WholeNumber("number of transfer threads", minimum=1)
_PATH_ALLOWED = "an absolute path of a local directory, for example '/mnt/ssd' or 'file:///mnt/ssd'"


@dataclass(frozen=True)
class RocksDBOptions:
    """The options of one RocksDB backend.

    Attributes:
        incremental: Whether Spark writes only the changes of each batch; None: the default, False.
            Snapshots of a stream are incremental either way.
        predefined: Predefined RocksDB options.
        factory: Import path of a `RocksDBOptionsFactory`.
        db_storage_paths: Local directories of the working state.
        transfer_threads: Threads that move files; None: 4 for our copies, Spark's choice for its uploads.
        ttl_compaction_filter: Flink's filter of expired state.
        settings: Additional Spark settings, by full name, applied last.
    """

    incremental: bool | None = None
    predefined: PredefinedOptions = PredefinedOptions.DEFAULT
    factory: str | None = None
    db_storage_paths: tuple[str, ...] | None = None
    transfer_threads: int | None = None
    ttl_compaction_filter: bool = True
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.incremental is not None:
            INCREMENTAL.checked(self.incremental)
        PREDEFINED.member(self.predefined)
        if self.factory is not None:
            options_factory(self.factory)
        if self.db_storage_paths is not None:
            paths = tuple(local_directory(path) for path in self.db_storage_paths)
            object.__setattr__(self, "db_storage_paths", paths)
        if self.transfer_threads is not None:
            TRANSFER_THREADS.checked(self.transfer_threads)
        own = [PROVIDER_CLASS, CHANGELOG_CHECKPOINTING, LOCAL_DIRECTORIES, MAINTENANCE_THREADS, SNAPSHOT_SHARE]
        object.__setattr__(self, "settings", checked_settings("settings", self.settings, own=own))

    def spark_settings(self) -> dict[str, str]:
        predefined = spark_settings_of(self.predefined)
        own = as_text({PROVIDER_CLASS: ROCKSDB, CHANGELOG_CHECKPOINTING: bool(self.incremental)})
        if self.transfer_threads is not None:
            own |= _upload_threads(self.transfer_threads)
        if self.db_storage_paths:
            own[LOCAL_DIRECTORIES] = ",".join(self.db_storage_paths)
        made: Mapping[str, SettingValue] = {}
        if self.factory is not None:
            current = dict(predefined)
            made = checked_settings(
                f"options factory {self.factory}", options_factory(self.factory)().create_settings(current), own=own
            )
        return own | predefined | as_text(made) | as_text(self.settings)

    def describe(self) -> list[OptionDescription]:
        return [
            OptionDescription("enable_incremental_checkpointing", self.incremental, Effect.REAL, self._incremental()),
            OptionDescription(
                "predefined_options",
                self.predefined,
                Effect.MAPPED,
                f"The nearest Spark settings: {spark_settings_of(self.predefined) or 'none needed'}.",
            ),
            OptionDescription(
                "options", self.factory, Effect.MAPPED, "Its settings are applied on top of the predefined ones."
            ),
            OptionDescription(
                "db_storage_paths",
                None if self.db_storage_paths is None else list(self.db_storage_paths),
                Effect.MAPPED,
                f"{LOCAL_DIRECTORIES}, which Spark reads once, when the application starts.",
            ),
            OptionDescription(
                "number_of_transfer_threads",
                self.transfer_threads,
                Effect.MAPPED,
                f"If set, Spark uploads snapshots with this many of its {MAINTENANCE_THREADS} threads. "
                f"{self.transfer_threads or DEFAULT_TRANSFER_THREADS} threads of dagster_ckpt copy snapshots.",
            ),
            OptionDescription(
                "ttl_compaction_filter",
                self.ttl_compaction_filter,
                Effect.NONE,
                "Spark removes expired state itself, batch by batch; it has no compaction filter.",
            ),
            OptionDescription(
                "settings", shown_settings(self.settings), Effect.REAL, "Set on the session before the start."
            ),
        ]

    def _incremental(self) -> str:
        if self.incremental:
            return "Spark writes each batch's changes, and snapshots in the background."
        return "Spark writes a snapshot of the database with each batch; snapshots here are incremental either way."


def _upload_threads(number: int) -> dict[str, str]:
    # Spark splits its maintenance threads by a ratio; one is left for clean-up.
    total = min(number + 1, INT_MAX)
    return {MAINTENANCE_THREADS: str(total), SNAPSHOT_SHARE: repr((total - 1) / total)}


def local_directory(path: object) -> str:
    if path is None:
        raise OptionError(
            f"db storage path is None, but must be {_PATH_ALLOWED}; set none to use the deployment's directories."
        )
    if not isinstance(path, str):
        raise OptionTypeError(f"db storage path is {path!r} ({type(path).__name__}), but must be {_PATH_ALLOWED}.")
    scheme, colon, rest = path.partition(":")
    local = path
    if colon and "/" not in scheme:
        if scheme.lower() != "file":
            raise OptionError(
                f"db storage path is {path!r}, of a file system that is not local; it must be {_PATH_ALLOWED}."
            )
        local = "/" + rest[2:].partition("/")[2] if rest.startswith("//") else rest
    if not local.startswith("/"):
        raise OptionError(f"db storage path is {path!r}, a relative path; it must be {_PATH_ALLOWED}.")
    if "," in local:
        raise OptionError(f"db storage path is {path!r}, but Spark separates directories by commas; it must have none.")
    return posixpath.normpath("/" + local.lstrip("/"))


_ALLOWED = "the import path of a RocksDBOptionsFactory, for example 'package.module.Name'"


class RocksDBOptionsFactory(ABC):
    """Creates Spark settings, where Flink's interface creates RocksDB options. Constructed without arguments.

    Example:
        >>> class SmallCaches(RocksDBOptionsFactory):
        ...     def create_settings(self, current):
        ...         return {"spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": 4}
    """

    @abstractmethod
    def create_settings(self, current: Mapping[str, str]) -> Mapping[str, SettingValue]:
        """Return settings by full name, on top of the predefined ones."""


def options_factory(name: object) -> type[RocksDBOptionsFactory]:
    if not isinstance(name, str):
        kind = OptionError if name is None else OptionTypeError
        raise kind(f"options factory is {name!r} ({type(name).__name__}), but must be {_ALLOWED}.")
    found = imported("options factory", name, _ALLOWED)
    if not (isinstance(found, type) and issubclass(found, RocksDBOptionsFactory)):
        raise OptionError(f"options factory is {name!r}, which is {found!r}; it must be {_ALLOWED}.")
    return found


# Removed from Flink after 1.10: not advertised.
_DEPRECATED = {"enable_ttl_compaction_filter", "disable_ttl_compaction_filter", "is_ttl_compaction_filter_enabled"}


class RocksDBBackend(StateBackend):
    """PyFlink's setters over one `RocksDBOptions`. As in PyFlink, setters return None."""

    # Mutable and compared by value, so not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, options: RocksDBOptions) -> None:
        self._options = options

    @property
    def options(self) -> RocksDBOptions:
        return self._options

    @property
    def transfer_threads(self) -> int:
        return self._options.transfer_threads or DEFAULT_TRANSFER_THREADS

    def spark_settings(self) -> dict[str, str]:
        return self._options.spark_settings()

    def describe(self) -> list[OptionDescription]:
        return self._options.describe()

    def is_incremental_checkpoints_enabled(self) -> bool:
        return bool(self._options.incremental)

    def get_db_storage_paths(self) -> list[str] | None:
        """Return the local directories of the working state; None: Spark's."""
        return None if self._options.db_storage_paths is None else list(self._options.db_storage_paths)

    def set_db_storage_paths(self, *paths: str) -> None:
        """Set the local directories of the working state; no argument restores Spark's."""
        self._set(db_storage_paths=paths or None)

    def get_predefined_options(self) -> PredefinedOptions:
        return self._options.predefined

    def set_predefined_options(self, options: PredefinedOptions) -> None:
        self._set(predefined=PREDEFINED.member(options))

    def get_options(self) -> str | None:
        return self._options.factory

    def set_options(self, options_factory_class_name: str) -> None:
        """Set the import path of a factory, whose settings come on top of the predefined ones."""
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
        enable_incremental_checkpointing: Whether Spark writes only the changes of each batch (changelog checkpointing).
            None: False, as in Flink.
        settings: Additional Spark settings, by full name, except those that the other options set.
    """

    def __init__(
        self,
        enable_incremental_checkpointing: bool | None = None,
        *,
        settings: Mapping[str, SettingValue] | None = None,
    ) -> None:
        super().__init__(RocksDBOptions(incremental=enable_incremental_checkpointing, settings=settings or {}))

    def get_number_of_transfer_threads(self) -> int:
        return self.transfer_threads

    def set_number_of_transfer_threads(self, number_of_transfering_threads: int) -> None:
        """Set how many threads copy snapshots, from 1."""
        self._set(transfer_threads=TRANSFER_THREADS.checked(number_of_transfering_threads))


class RocksDBStateBackend(RocksDBBackend):
    """The older spelling: RocksDB, with snapshots in a directory of the backend.

    Args:
        checkpoint_data_uri: URL for checkpoints.
        checkpoint_stream_backend: A Memory, Fs or RocksDB backend, instead of the URL.
        enable_incremental_checkpointing: As for `EmbeddedRocksDBStateBackend`, like `settings`.
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
        return self._checkpoint_backend

    def checkpoint_storage(self) -> CheckpointStorage | None:
        return self._checkpoint_backend.checkpoint_storage()

    def get_number_of_transfering_threads(self) -> int:
        return self.transfer_threads

    def set_number_of_transfering_threads(self, number_of_transfering_threads: int) -> None:
        """Set how many threads copy snapshots, from 1."""
        self._set(transfer_threads=TRANSFER_THREADS.checked(number_of_transfering_threads))

    def is_ttl_compaction_filter_enabled(self) -> bool:
        return self._options.ttl_compaction_filter

    def enable_ttl_compaction_filter(self) -> None:
        """Without effect: Spark has no such filter."""
        self._set(ttl_compaction_filter=True)

    def disable_ttl_compaction_filter(self) -> None:
        self._set(ttl_compaction_filter=False)

    def describe(self) -> list[OptionDescription]:
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
