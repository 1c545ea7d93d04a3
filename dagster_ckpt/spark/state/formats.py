"""The format in which a query keeps its state, and all files of one version of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError
from dagster_ckpt.spark.folder import Folder
from dagster_ckpt.spark.layout import store_directory
from dagster_ckpt.spark.logs import CommitEntry, OffsetEntry
from dagster_ckpt.spark.needed import NeededFile
from dagster_ckpt.spark.operators import Operator
from dagster_ckpt.spark.state import hdfs, rocksdb, rocksdb_v2
from dagster_ckpt.spark.state.store import StoreDirectory

VersionFiles = Callable[[StoreDirectory, int], list[NeededFile]]

_STATE = "org.apache.spark.sql.execution.streaming.state."
_FORMATS: dict[str, VersionFiles] = {
    f"{_STATE}HDFSBackedStateStoreProvider": hdfs.version_files,
    f"{_STATE}RocksDBStateStoreProvider": rocksdb.version_files,
}


def state_files(
    folder: Folder, operators: list[Operator], offsets: OffsetEntry, commit: CommitEntry
) -> list[NeededFile]:
    """Every state file that a resume after a committed batch needs, and no file of a later version.

    Args:
        folder: The live directory.
        operators: The stateful operators.
        offsets: Offsets of the committed batch; its settings name provider and partitions.
        commit: Its commit.

    Raises:
        IncompleteCutError: A file is missing.
        LiveDirectoryError: The state cannot be understood.
    """
    version = commit.batch_id + 1
    of_version = _version_files(offsets)
    files: list[NeededFile] = []
    for operator in operators:
        ids = None if commit.state_ids is None else _ids(folder, commit, operator)
        # An offline repartition leaves old partition directories behind, so the log counts, not the listing.
        partitions = len(ids) if ids is not None else _partitions(folder, offsets, operator)
        for partition in range(partitions):
            for index, name in enumerate(operator.stores):
                store = StoreDirectory(folder, store_directory(operator.number, partition, name))
                if ids is not None:
                    files += rocksdb_v2.version_files(store, version, ids[partition][index])
                else:
                    files += of_version(store, version)
    return files


def _version_files(offsets: OffsetEntry) -> VersionFiles:
    provider = offsets.provider_class
    return _FORMATS.get(provider or "", partial(_by_file_names, provider))


def _by_file_names(provider: str | None, store: StoreDirectory, version: int) -> list[NeededFile]:
    """Files of a provider that is not Spark's own: those that extend one of Spark's write as it does."""
    suffixes = {name.rpartition(".")[2] for name in store.names}
    if suffixes & {"delta", "snapshot"}:
        return hdfs.version_files(store, version)
    if suffixes & {"zip", "changelog"}:
        return rocksdb.version_files(store, version)
    raise LiveDirectoryError(
        f"{store.folder.url}/{store.path} holds no state in a format of Spark's own providers (provider: "
        f"{provider}). "
        "Images can be taken of HDFSBackedStateStoreProvider, RocksDBStateStoreProvider and classes that "
        "extend them."
    )


def _ids(folder: Folder, commit: CommitEntry, operator: Operator) -> tuple[tuple[str, ...], ...]:
    ids = (commit.state_ids or {}).get(operator.number)
    if not ids or any(len(stores) != len(operator.stores) for stores in ids):
        raise IncompleteCutError(
            f"{folder.url}/commits/{commit.batch_id} does not name the state of operator {operator.number} "
            f"({operator.name}: {len(operator.stores)} stores a partition). Restore an image."
        )
    return ids


def _partitions(folder: Folder, offsets: OffsetEntry, operator: Operator) -> int:
    if operator.single_partition:
        return 1
    if offsets.partitions is None:
        raise LiveDirectoryError(
            f"{folder.url}/offsets/{offsets.batch_id} does not say how many state partitions the query has, "
            "but it has "
            f"the stateful operator {operator.name}. Start the query once with this version of Spark, then "
            "try again."
        )
    return offsets.partitions
