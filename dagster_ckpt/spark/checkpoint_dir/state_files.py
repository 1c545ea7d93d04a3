"""Detect the format of a query's state, and list its files: those of one version, or those since a snapshot.

After batch N, the state has version N+1 (`IncrementalExecution`). Heap deltas and RocksDB changelogs add one file per
store and batch, so a snapshot that extends an earlier one inspects no older file. An occasional full one finds newer
state snapshots, which shorten the chain.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.io.file_io import CancelCheck, FileIO, in_threads
from dagster_ckpt.snapshot.reuse import BaseSnapshot
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    HELD_IN_MEMORY_BYTES,
    HELD_IN_MEMORY_FILES,
    READ_WHOLE_BYTES,
    NeededFile,
    store_directory,
)
from dagster_ckpt.spark.checkpoint_dir.logs import CommitEntry, OffsetEntry
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import (
    StoreDirectory,
    format_v2_files,
    heap_files,
    read_lineage,
    rocksdb_files,
)

_SPARKS_OWN = re.compile(r"\..*|_metadata|SSTs|logs|\d+(_[0-9a-f-]+)?\.(delta|snapshot|zip|changelog)(\.crc)?")

VersionFiles = Callable[[StoreDirectory, int], list[NeededFile]]

_STATE = "org.apache.spark.sql.execution.streaming.state."
HEAP = f"{_STATE}HDFSBackedStateStoreProvider"
ROCKSDB = f"{_STATE}RocksDBStateStoreProvider"
_FORMATS: dict[str, VersionFiles] = {HEAP: heap_files, ROCKSDB: rocksdb_files}
CHANGES = (".delta", ".changelog")


@dataclass(frozen=True)
class CommittedState:
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
    """Files of a state; `chain` is the largest number of changes that Spark replays for one store."""

    files: list[NeededFile]
    chain: int


def state_files(state: CommittedState) -> StateFiles:
    def files_of(place: StorePlace, check_canceled: CancelCheck) -> list[NeededFile]:
        check_canceled()
        return files_of_store(state, place)

    stores = in_threads(state.folder.width, store_places(state), files_of)
    chain = max((sum(file.source.endswith(CHANGES) for file in files) for files in stores), default=0)
    files: list[NeededFile] = []
    # One list shrinks as the other grows, to save memory.
    stores.reverse()
    while stores:
        files += stores.pop()
    return StateFiles(files, chain)


def files_of_store(state: CommittedState, place: StorePlace) -> list[NeededFile]:
    store, version = StoreDirectory(state.folder, place.path), state.commit.batch_id + 1
    if place.unique_id is not None:
        return format_v2_files(store, version, place.unique_id)
    return _version_files(state.offsets)(store, version)


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
    """Treat a provider of a third party as the one of Spark's that it extends, by the files that it writes."""
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


# Above `minDeltasForSnapshot` (10), since Spark uploads snapshots later.
LONGEST_CHAIN = 12
CHAIN = "state_chain"
LAYOUT = "state_layout"

_SUFFIXES = {HEAP: ".delta", ROCKSDB: ".changelog"}


@dataclass(frozen=True)
class _Look:
    folder: FileIO
    at_most: int

    def at(self, paths: Sequence[str]) -> list[NeededFile]:
        looks = zip(paths, self.folder.look_at(paths, self.at_most), strict=True)
        return [NeededFile(self.folder, path, path, *version, None, data, True) for path, (version, data) in looks]


def layout_of(state: CommittedState) -> list[list[object]]:
    """Return what must be equal for one state to extend another."""
    offsets = state.offsets
    layout: list[list[object]] = [
        [operator.number, operator.name, list(operator.stores), offsets.provider_class, offsets.partitions]
        for operator in state.operators
    ]
    return layout if state.rewrite_id is None else [*layout, [state.rewrite_id]]


def rewrite_of(properties: Mapping[str, Any]) -> str | None:
    """Return the `QueryMetadata.rewrite_id` of a snapshot's state."""
    layout: list[list[object]] = properties.get(LAYOUT) or [[]]
    return str(layout[-1][0]) if len(layout[-1]) == 1 else None


def grown_since(base: BaseSnapshot, state: CommittedState) -> list[NeededFile] | None:
    folder, offsets, commit = state.folder, state.offsets, state.commit
    header = base.manifest.header
    chain = header.properties.get(CHAIN)
    grown = commit.batch_id - header.batch_id
    suffix = _SUFFIXES.get(offsets.provider_class or "")
    is_short = isinstance(chain, int) and 0 < grown <= LONGEST_CHAIN - chain
    if grown != 0 and (suffix is None or not is_short):
        return None
    if header.query_id != state.query_id or header.properties.get(LAYOUT) != layout_of(state):
        return None
    if not _is_ancestor(base, folder):
        return None
    if grown == 0:
        return []
    versions = range(header.batch_id + 2, commit.batch_id + 2)
    look = _Look(folder, _max_inline_read(len(versions), state))

    # In the order in which the base lists their files.
    places = sorted(store_places(state), key=lambda place: place.path)

    def changelogs_of(place: StorePlace, check_canceled: CancelCheck) -> list[NeededFile]:
        check_canceled()
        return list(_changelogs_v2(base, look, place.path, versions, place.unique_id or ""))

    try:
        if commit.state_ids is None:
            return look.at([f"{place.path}/{version}{suffix}" for place in places for version in versions])
        return list(itertools.chain.from_iterable(in_threads(folder.width, places, changelogs_of)))
    except FileNotFoundError:
        return None


def _is_ancestor(base: BaseSnapshot, folder: FileIO) -> bool:
    """Whether the snapshot's commit is still the same file, so that nothing before it was undone."""
    path = f"{COMMITS}/{base.manifest.header.batch_id}"
    entry = base.manifest.find(path)
    try:
        return entry is not None and entry.token is not None and folder.version(path).token == entry.token
    except FileNotFoundError:
        return False


def _max_inline_read(versions: int, state: CommittedState) -> int:
    stores = sum(len(operator.stores) for operator in state.operators) * (state.offsets.partitions or 1)
    files = versions * max(1, stores)
    return min(HELD_IN_MEMORY_BYTES // files, READ_WHOLE_BYTES) if files <= HELD_IN_MEMORY_FILES else 0


def _changelogs_v2(base: BaseSnapshot, look: _Look, path: str, versions: range, newest_id: str) -> Iterator[NeededFile]:
    """Yield changelogs of checkpoint format v2; the newest names the others and must descend from the base."""
    folder = look.folder
    newest = f"{path}/{versions[-1]}_{newest_id}.changelog"
    with folder.open(newest) as stream:
        lineage = {**read_lineage(stream, f"{folder.url}/{newest}"), versions[-1]: newest_id}
    before = versions[0] - 1
    known = f"{path}/{before}_{lineage.get(before)}"
    if not any(base.manifest.find(f"{known}{suffix}") for suffix in (".changelog", ".zip")):
        raise FileNotFoundError(known)
    _check_anchor(base, path, {version: lineage[version] for version in lineage if version <= before})
    for version in versions:
        if version not in lineage:
            raise LiveDirectoryError(
                f"{folder.url}/{newest} does not name the version {version} that it is built on. If the query runs, "
                "the next attempt reads a newer commit. If it stays so, the live directory is damaged: restore a "
                "snapshot."
            )
        name = f"{version}_{lineage[version]}.changelog"
        [file] = look.at([f"{path}/{name}"])
        file.identity = name
        yield file
        try:
            yield from look.at([f"{path}/{name}.crc"])
        except FileNotFoundError:
            continue


def _check_anchor(base: BaseSnapshot, path: str, lineage: Mapping[int, str]) -> None:
    """Check that the base has the state snapshot with which a lineage begins."""
    if 1 in lineage:
        return
    snapshots = [f"{path}/{version}_{lineage[version]}.zip" for version in sorted(lineage, reverse=True)]
    if not any(map(base.manifest.find, snapshots)):
        raise FileNotFoundError(snapshots[-1])
