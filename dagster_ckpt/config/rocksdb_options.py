"""RocksDB's options as Spark settings: Flink's predefined sets, and factories of a user."""

import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dagster_ckpt.config.state_backend import (
    DEFAULT_TRANSFER_THREADS,
    PROVIDER_CLASS,
    SettingValue,
    as_text,
    checked_settings,
)
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.validation import INT_MAX, Choice, Effect, OptionDescription, Switch, WholeNumber, imported

ROCKSDB_SETTINGS = "spark.sql.streaming.stateStore.rocksdb."


class PredefinedOptions(Enum):
    """Predefined RocksDB options for kinds of disks, as in PyFlink.

    Attributes:
        DEFAULT: Spark's defaults, which do not force writes to the disk either.
        SPINNING_DISK_OPTIMIZED: For spinning disks.
        SPINNING_DISK_OPTIMIZED_HIGH_MEM: For spinning disks, with much more memory for caches and
            buffers.
        FLASH_SSD_OPTIMIZED: For solid state disks.
    """

    DEFAULT = 0
    SPINNING_DISK_OPTIMIZED = 1
    SPINNING_DISK_OPTIMIZED_HIGH_MEM = 2
    FLASH_SSD_OPTIMIZED = 3


@dataclass(frozen=True)
class RocksDBOption:
    """One call that predefined options make on RocksDB in Flink.

    Attributes:
        call: The call, as Flink's documentation writes it.
        effect: MAPPED to a setting, REAL if RocksDB under Spark does so anyway, NONE if Spark
            cannot do it.
        reason: Why, as a sentence.
        setting: Spark's setting, by full name, or None.
        value: The value of that setting.
    """

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
    """Return the Spark settings of predefined options; empty for the default."""
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
        incremental: Whether Spark writes only the changes of each batch; None is the default,
            False.
        predefined: Predefined RocksDB options.
        factory: Import path of a `RocksDBOptionsFactory`, applied on top of the predefined options.
        db_storage_paths: Local directories of the working state; None uses Spark's.
        transfer_threads: Threads that move files; None is the default, 4 for our copies and Spark's
            own choice for its uploads.
        ttl_compaction_filter: Flink's filter of expired state.
        settings: Additional Spark settings, by full name, applied last.

    Raises:
        OptionError: A value is out of range, or the factory cannot be used.
        OptionTypeError: A value has the wrong type.
    """

    incremental: bool | None = None
    predefined: PredefinedOptions = PredefinedOptions.DEFAULT
    factory: str | None = None
    db_storage_paths: tuple[str, ...] | None = None
    transfer_threads: int | None = None
    ttl_compaction_filter: bool = True
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Validate each value."""
        if self.incremental is not None:
            INCREMENTAL.checked(self.incremental)
        PREDEFINED.checked(self.predefined)
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
        """Return the Spark session settings for the query.

        Raises:
            OptionError: The factory returned a setting that Spark does not accept.
            OptionTypeError: The factory returned a setting of the wrong type.
        """
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
        """Return each option with its value and its effect on Spark."""
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
            OptionDescription("settings", dict(self.settings), Effect.REAL, "Set on the session before the start."),
        ]

    def _incremental(self) -> str:
        if self.incremental:
            return "Spark writes each batch's changes, and snapshots in the background."
        return "Spark writes a snapshot of the database with each batch; snapshots here are incremental either way."


def _upload_threads(number: int) -> dict[str, str]:
    # Spark splits its maintenance threads between uploads and clean-up by a ratio; one thread is
    # left for clean-up.
    total = min(number + 1, INT_MAX)
    return {MAINTENANCE_THREADS: str(total), SNAPSHOT_SHARE: repr((total - 1) / total)}


def local_directory(path: object) -> str:
    """Return a local directory as PyFlink's getter returns it: a normalised absolute path.

    Raises:
        OptionTypeError: It is not a string.
        OptionError: It is None, relative, on another file system, or contains the separator of the
            list.
    """
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
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[.:]([A-Za-z_]\w*)")


class RocksDBOptionsFactory(ABC):
    """Creates Spark settings for the RocksDB state store, where Flink's interface of this name creates RocksDB options.

    A factory has a constructor without arguments. It is imported and called in the process that
    starts the query.

    Example:
        >>> class SmallCaches(RocksDBOptionsFactory):
        ...     def create_settings(self, current):
        ...         return {"spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": 4}
    """

    @abstractmethod
    def create_settings(self, current: Mapping[str, str]) -> Mapping[str, SettingValue]:
        """Return settings to apply on top of the current ones.

        Args:
            current: The settings of the predefined options, by full name.
        """


def options_factory(name: object) -> type[RocksDBOptionsFactory]:
    """Import a factory.

    Args:
        name: "package.module.Name" or "package.module:Name".

    Raises:
        OptionTypeError: The name is not a string.
        OptionError: It cannot be imported, or it is not a factory.
    """
    if not isinstance(name, str):
        kind = OptionError if name is None else OptionTypeError
        raise kind(f"options factory is {name!r} ({type(name).__name__}), but must be {_ALLOWED}.")
    parts = _IMPORT_PATH.fullmatch(name)
    if parts is None:
        raise OptionError(f"options factory is {name!r}, but must be {_ALLOWED}.")
    found = imported(name, "options factory", "a RocksDBOptionsFactory")
    if not (isinstance(found, type) and issubclass(found, RocksDBOptionsFactory)):
        raise OptionError(f"options factory is {name!r}, which is {found!r}; it must be {_ALLOWED}.")
    return found
