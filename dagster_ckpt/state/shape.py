"""How a query's state is stored, and whether a rewrite can store it in another way. Pure.

Spark fixes a shape (provider, partitions, checkpoint format) at the first batch of a query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.logs import COMPRESSION_CODEC, DEFAULT_CODEC, JOIN_FORMAT, ROW_CHECKSUM
from dagster_ckpt.spark.checkpoint_dir.operators import JOIN, LIMIT
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB

MOST_PARTITIONS = 32_768
# Spark's names; LZF blocks cannot be read here.
READABLE_CODECS = ("lz4", "zstd", "snappy")
# Spark 4.3's reader of all column families knows several values only of transformWithState lists.
_NEWEST_OF_JOINS = 3
TRANSFORM = "transformWithState"
# Pinned since Spark 3.3, as false for older queries.
_STRICT = "spark.sql.streaming.statefulOperator.useStrictDistribution"
_NAMES = {HEAP: "heap state (HDFSBackedStateStoreProvider)", ROCKSDB: "RocksDB"}


@dataclass(frozen=True)
class StateShape:
    provider: str
    partitions: int
    checkpoint_format: int = 1

    def __str__(self) -> str:
        provider = _NAMES.get(self.provider, self.provider)
        return f"{self.partitions} partitions of {provider}, checkpoint format v{self.checkpoint_format}"


@dataclass(frozen=True)
class StoredState:
    shape: StateShape
    operators: tuple[str, ...]
    settings: Mapping[str, str]

    @staticmethod
    def of_properties(properties: Mapping[str, Any]) -> StoredState | None:
        operators = properties.get("state_operators") or ()
        provider, partitions = properties.get("state_store_provider"), properties.get("state_partitions")
        if not operators or not provider or not partitions:
            return None
        version = (properties.get("formats") or {}).get("state_checkpoint") or 1
        return StoredState(
            StateShape(str(provider), int(partitions), int(version)),
            tuple(str(operator["name"]) for operator in operators),
            properties.get("conf") or {},
        )


@dataclass(frozen=True)
class WantedShape:
    """How state is to be stored; None leaves that as it is."""

    partitions: int | None = None
    provider: str | None = None
    checkpoint_format: int | None = None

    def of(self, shape: StateShape) -> StateShape:
        wanted = {name: value for name, value in vars(self).items() if value is not None}
        changed = replace(shape, **wanted)
        # Only RocksDB has format v2.
        return replace(changed, checkpoint_format=1) if changed.provider == HEAP else changed


def check_rewrite(stored: StoredState, wanted: StateShape, *, changes_rows: bool = False) -> None:
    why = _why_not(stored, wanted, moves=changes_rows or wanted.partitions != stored.shape.partitions)
    if why is not None:
        raise StateRewriteError(
            f"The state ({stored.shape}) cannot be rewritten as {wanted}: {why} Nothing was changed. Keep the shape "
            "that the state has, or begin a new stream."
        )


def _why_not(stored: StoredState, wanted: StateShape, *, moves: bool) -> str | None:
    if not 0 < wanted.partitions <= MOST_PARTITIONS:
        return f"the number of state partitions must be from 1 to {MOST_PARTITIONS}."
    for shape in (stored.shape, wanted):
        if shape.provider not in _NAMES:
            return f"the files of {shape.provider} are not known, only those of Spark's own providers."
    if moves and stored.settings.get(_STRICT) != "true":
        # A conversion keeps each row in its partition.
        return (
            f"the query began on Spark 3.2 or older ({_STRICT} is not true), which may place a key by some of its "
            "columns, so the partition of a row is not known. Its backend and checkpoint format can be changed, "
            "not the number of its partitions or its rows."
        )
    if JOIN in stored.operators and int(stored.settings.get(JOIN_FORMAT, "2")) > _NEWEST_OF_JOINS:
        return (
            f"Spark's StateRewriter damages join state of format v{stored.settings[JOIN_FORMAT]}: it treats "
            "several values of a key as one."
        )
    if replace(stored.shape, partitions=wanted.partitions) != wanted and LIMIT in stored.operators:
        return "Spark cannot read the counter of a limit, so its state is only copied as it is."
    if HEAP in (stored.shape.provider, wanted.provider):
        return _why_not_on_the_heap(stored, wanted)
    return None


def _why_not_on_the_heap(stored: StoredState, wanted: StateShape) -> str | None:
    if stored.settings.get(ROW_CHECKSUM) == "true":
        return f"{ROW_CHECKSUM} is on, and heap state and RocksDB keep these checksums differently."
    codec = stored.settings.get(COMPRESSION_CODEC, DEFAULT_CODEC)
    if stored.shape.provider == HEAP and codec not in READABLE_CODECS:
        return f"it is compressed with {codec}, and only {', '.join(READABLE_CODECS)} can be read."
    if LIMIT in stored.operators and set(stored.operators) != {LIMIT}:
        return "Spark cannot read the counter of a limit, and heap state is rewritten by way of RocksDB."
    if wanted.provider != HEAP:
        return None
    for name in stored.operators:
        if name.startswith(TRANSFORM):
            return f"Spark keeps the state of {name} in RocksDB only."
        if name == JOIN and int(stored.settings.get(JOIN_FORMAT, "2")) > 2:
            return f"Spark keeps join state of format v{stored.settings[JOIN_FORMAT]} in RocksDB only."
    return None
