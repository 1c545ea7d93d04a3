"""Detect the state format of a query, and list all state files of one version."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.parallel import CancelCheck, in_threads
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile, store_directory
from dagster_ckpt.spark.checkpoint_dir.logs import CommitEntry, OffsetEntry
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.checkpoint_dir.state.version_files import (
    StoreDirectory,
    format_v2_files,
    heap_files,
    rocksdb_files,
)

# Names in a store's directory; named stores lie below that of their partition.
_SPARKS_OWN = re.compile(r"\..*|_metadata|SSTs|logs|\d+(_[0-9a-f-]+)?\.(delta|snapshot|zip|changelog)(\.crc)?")

VersionFiles = Callable[[StoreDirectory, int], list[NeededFile]]

_STATE = "org.apache.spark.sql.execution.streaming.state."
HEAP = f"{_STATE}HDFSBackedStateStoreProvider"
ROCKSDB = f"{_STATE}RocksDBStateStoreProvider"
_FORMATS: dict[str, VersionFiles] = {HEAP: heap_files, ROCKSDB: rocksdb_files}
_CHANGES = (".delta", ".changelog")


@dataclass(frozen=True)
class CommittedState:
    """By the logs; `rewrite_id` if a rewrite wrote it."""

    folder: FileIO
    query_id: str
    operators: list[Operator]
    offsets: OffsetEntry
    commit: CommitEntry
    rewrite_id: str | None = None


class StorePlace(NamedTuple):
    path: str
    unique_id: str | None


@dataclass(frozen=True)
class StateFiles:
    """`chain` counts the changes that Spark replays onto the oldest snapshot among them."""

    files: list[NeededFile]
    chain: int


def state_files(state: CommittedState) -> StateFiles:
    """What a resume needs, and no file of a later version."""
    version = state.commit.batch_id + 1
    of_version = _version_files(state.offsets)

    def files_of(place: StorePlace, check_canceled: CancelCheck) -> list[NeededFile]:
        check_canceled()
        store = StoreDirectory(state.folder, place.path)
        if place.unique_id is not None:
            return format_v2_files(store, version, place.unique_id)
        return of_version(store, version)

    stores = in_threads(state.folder.width, store_places(state), files_of)
    chain = max((sum(file.source.endswith(_CHANGES) for file in files) for files in stores), default=0)
    files: list[NeededFile] = []
    # One list shrinks as the other grows.
    stores.reverse()
    while stores:
        files += stores.pop()
    return StateFiles(files, chain)


def store_places(state: CommittedState) -> list[StorePlace]:
    folder, offsets, commit = state.folder, state.offsets, state.commit
    places: list[StorePlace] = []
    for operator in state.operators:
        ids = None if commit.state_ids is None else unique_ids(folder, commit, operator)
        # An offline repartition leaves old directories behind.
        partitions = len(ids) if ids is not None else partitions_of(folder, offsets, operator)
        for partition in range(partitions):
            for index, name in enumerate(operator.stores):
                path = store_directory(operator.number, partition, name)
                places.append(StorePlace(path, ids[partition][index] if ids is not None else None))
    return places


def _version_files(offsets: OffsetEntry) -> VersionFiles:
    provider = offsets.provider_class
    return _FORMATS.get(provider or "", partial(_by_file_names, provider))


def _by_file_names(provider: str | None, store: StoreDirectory, version: int) -> list[NeededFile]:
    """Third-party providers: those that extend Spark's write the same files."""
    odd = sorted(name for name in store.names if not _SPARKS_OWN.fullmatch(name))
    if odd:
        raise UnknownLayoutError(
            f"{store.folder.url}/{store.path} contains {odd[0]!r}, which none of Spark's own providers writes, and "
            f"the provider {provider} is unknown. Nothing was copied: a restore might lack files that only this "
            "provider needs. Use HDFSBackedStateStoreProvider or RocksDBStateStoreProvider."
        )
    suffixes = {name.rpartition(".")[2] for name in store.names}
    if suffixes & {"delta", "snapshot"}:
        return heap_files(store, version)
    if suffixes & {"zip", "changelog"}:
        return rocksdb_files(store, version)
    raise LiveDirectoryError(
        f"{store.folder.url}/{store.path} contains no state in a format of Spark's own providers (provider: "
        f"{provider}). Snapshots can be taken of HDFSBackedStateStoreProvider, RocksDBStateStoreProvider and classes "
        "that extend them."
    )


def unique_ids(folder: FileIO, commit: CommitEntry, operator: Operator) -> tuple[tuple[str, ...], ...]:
    """Of checkpoint format v2, by partition, then by store."""
    ids = (commit.state_ids or {}).get(operator.number)
    if not ids or any(len(stores) != len(operator.stores) for stores in ids):
        raise IncompleteCutError(
            f"{folder.url}/commits/{commit.batch_id} does not name the state of operator {operator.number} "
            f"({operator.name}: {len(operator.stores)} stores a partition). Restore a snapshot."
        )
    return ids


def partitions_of(folder: FileIO, offsets: OffsetEntry, operator: Operator) -> int:
    if operator.single_partition:
        return 1
    if offsets.partitions is None:
        raise LiveDirectoryError(
            f"{folder.url}/offsets/{offsets.batch_id} does not say how many state partitions the query has, but it "
            f"has the stateful operator {operator.name}. Start the query once with this version of Spark, then try "
            "again."
        )
    return offsets.partitions
