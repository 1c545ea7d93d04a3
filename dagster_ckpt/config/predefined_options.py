"""Flink's predefined RocksDB options, and the Spark setting that each of them maps to.

The lists are those of Flink's `PredefinedOptions`; the settings are those that Spark's
`RocksDBConf` reads.
"""

from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.config.option_description import Effect

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
