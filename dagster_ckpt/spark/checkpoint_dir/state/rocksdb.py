"""State of `RocksDBStateStoreProvider` in checkpoint format v1, with and without changelogs.

A version consists of the newest `<S>.zip` at or below it, the SST and log files that the zip lists,
and every later `.changelog`. Without changelog checkpointing every version has a zip
(`RocksDBFileManager`).
"""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import BaseModel, Field

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import LARGEST_LONG, reading
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.state.lineage import check_version
from dagster_ckpt.spark.checkpoint_dir.state.store import StoreDirectory
from dagster_ckpt.spark.checkpoint_dir.state.zip_member import read_member
from dagster_ckpt.spark.versions import SparkFile

_SSTS = "SSTs"
_LOGS = "logs"


# Directory, name and size of a file that a zip lists.
_Named = tuple[str, str, int]


_Size = Annotated[int, Field(ge=0, le=LARGEST_LONG)]


class _SstFile(BaseModel):
    name: str = Field(alias="dfsSstFileName")
    size: _Size = Field(alias="sizeBytes")


class _LogFile(BaseModel):
    name: str = Field(alias="dfsLogFileName")
    size: _Size = Field(alias="sizeBytes")


class _Snapshot(BaseModel):
    ssts: list[_SstFile] = Field(default=[], alias="sstFiles")
    logs: list[_LogFile] | None = Field(default=None, alias="logFiles")


def version_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    """Files that make up a version of a store.

    Raises:
        IncompleteCutError: A file is missing, or its size differs from the recorded one.
        UnknownLayoutError: A snapshot or changelog has an unsupported version.
        LiveDirectoryError: The snapshot's zip cannot be read.
    """
    base = store.newest(".zip", version)
    files = snapshot_files(store, f"{base}.zip") if base else []
    since = f"{base}.zip" if base else "the empty database"
    why = f"there is no {version}.zip, so version {version} is {since} and every changelog after it"
    changelogs = [store.need(f"{number}.changelog", why) for number in range(base + 1, version + 1)]
    # One is enough: the query's settings determine the version, which is the same in every
    # partition.
    if changelogs and store.is_first_partition:
        with changelogs[-1].open() as stream:
            check_version(stream, f"{store.folder.url}/{changelogs[-1].source}")
    return files + changelogs


def snapshot_files(store: StoreDirectory, name: str) -> list[NeededFile]:
    """A snapshot's zip and the files that it lists.

    The zip is read before the files are looked up: Spark deletes an old snapshot's SSTs before its
    zip.

    Raises:
        IncompleteCutError: A file is missing, or its size differs from the recorded one.
        LiveDirectoryError: The zip cannot be read.
    """
    zip_file = store.need(name, "it is the snapshot of the database")
    files = [zip_file]
    stores = {directory: StoreDirectory(store.folder, f"{store.path}/{directory}") for directory in (_SSTS, _LOGS)}
    for directory, item, size in _named_files(zip_file):
        # Names contain a uuid created for one upload, so equal names mean equal content in any
        # snapshot.
        file = stores[directory].need(item, f"{name} is built on it", identity=item)
        if file.size != size:
            raise stores[directory].incomplete(item, f"{name} needs {size} bytes of it, but {file.size} are there")
        files.append(file)
    return files


def _named_files(file: NeededFile) -> tuple[_Named, ...]:
    """Files that a zip lists; a zip that has not changed since the last call is not read again."""
    seen = file.folder.seen.get(file.source)
    if seen is not None and seen[0] == file.token:
        return cast("tuple[_Named, ...]", seen[1])
    data = file.folder.read(file.source)
    if len(data) == file.size:
        file.data = data
    snapshot = _read_snapshot(file, data)
    named = tuple((_SSTS, item.name, item.size) for item in snapshot.ssts)
    named += tuple((_LOGS, item.name, item.size) for item in snapshot.logs or [])
    if file.token is not None:
        file.folder.seen[file.source] = (file.token, named)
    return named


def _read_snapshot(file: NeededFile, data: bytes) -> _Snapshot:
    where = f"{file.folder.url}/{file.source}"
    with reading(
        lambda why: LiveDirectoryError(
            f"{where} is not a RocksDB snapshot that can be read: {why}. "
            "The live directory is damaged: restore a snapshot."
        )
    ):
        line, _, text = read_member(data, "metadata").decode("utf-8").partition("\n")
        SparkFile.ROCKSDB_SNAPSHOT.version_in(line, where)
        return _Snapshot.model_validate_json(text)
