"""State in RocksDB, checkpoint format v1: `RocksDBStateStoreProvider`, with and without changelogs.

A version is the newest `<S>.zip` at or below it, the SST and log files that the zip names, and every
`.changelog` after. Without changelog checkpointing every version has its zip (`RocksDBFileManager`).
"""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import BaseModel, Field

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import LARGEST_LONG, reading
from dagster_ckpt.spark.checkpoint_dir.needed import NeededFile
from dagster_ckpt.spark.checkpoint_dir.state.lineage import check_version
from dagster_ckpt.spark.checkpoint_dir.state.store import StoreDirectory
from dagster_ckpt.spark.checkpoint_dir.state.zip_member import read_member
from dagster_ckpt.spark.versions import known_version

_SSTS = "SSTs"
_LOGS = "logs"


# Directory, name and size of a file that a zip names.
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
    """Files that hold a version of a store.

    Raises:
        IncompleteCutError: One of them is missing, or has another size than noted.
        UnknownLayoutError: A snapshot or changelog is of a version that is not known.
        LiveDirectoryError: The snapshot's zip cannot be read.
    """
    base = store.newest(".zip", version)
    files = snapshot_files(store, f"{base}.zip") if base else []
    since = f"{base}.zip" if base else "the empty database"
    why = f"there is no {version}.zip, so version {version} is {since} and every changelog after it"
    changelogs = [store.need(f"{number}.changelog", why) for number in range(base + 1, version + 1)]
    # One speaks for all: a query's settings choose the version, and they are the same in every partition.
    if changelogs and store.is_first_partition:
        with changelogs[-1].open() as stream:
            check_version(stream, f"{store.folder.url}/{changelogs[-1].source}")
    return files + changelogs


def snapshot_files(store: StoreDirectory, name: str) -> list[NeededFile]:
    """A snapshot's zip and the files it names.

    The zip is read before they are looked for: Spark deletes an old snapshot's SSTs before its zip.

    Raises:
        IncompleteCutError: One of them is missing, or has another size than noted.
        LiveDirectoryError: The zip cannot be read.
    """
    zip_file = store.need(name, "it is the snapshot of the database")
    files = [zip_file]
    stores = {directory: StoreDirectory(store.folder, f"{store.path}/{directory}") for directory in (_SSTS, _LOGS)}
    for directory, item, size in _named_files(zip_file):
        # Names hold a uuid made for one upload, so equal names are equal bytes, in any snapshot.
        file = stores[directory].need(item, f"{name} is built on it", identity=item)
        if file.size != size:
            raise stores[directory].incomplete(item, f"{name} needs {size} bytes of it, but {file.size} are there")
        files.append(file)
    return files


def _named_files(file: NeededFile) -> tuple[_Named, ...]:
    """What a zip names; one that has not changed since the last look is not read again."""
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
        known_version(line, {1}, where, "a RocksDB snapshot")
        return _Snapshot.model_validate_json(text)
