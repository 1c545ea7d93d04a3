"""Files that make up one version of a state store, for each of Spark's formats.

- Heap (`HDFSBackedStateStoreProvider`): the newest `<S>.snapshot` at or below the version, and every
  later `.delta`; version 0 is empty.
- RocksDB in checkpoint format v1 (`RocksDBFileManager`): the newest `<S>.zip` at or below it, the SST
  and log files that the zip lists, and every later `.changelog`. Without changelog checkpointing
  every version has a zip.
- RocksDB in checkpoint format v2: each file name contains the unique id of the attempt that wrote
  it. The commit log contains the id of the newest version; the head of the changelog those of
  earlier versions, back to the last snapshot. Leftovers of failed or duplicate attempts are
  therefore never mistaken for committed state.
"""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import BaseModel, Field

from dagster_ckpt.errors import ChecksumDiffersError, LiveDirectoryError
from dagster_ckpt.foreign import LARGEST_LONG, from_json, reading
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.state.lineage import check_version, read_lineage
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


def rocksdb_files(store: StoreDirectory, version: int) -> list[NeededFile]:
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


_CHECKSUM = ".crc"


def format_v2_files(store: StoreDirectory, version: int, unique_id: str) -> list[NeededFile]:
    """Files that make up a version of a store.

    Args:
        store: The store.
        version: The version.
        unique_id: Its unique id, from the commit log.

    Raises:
        IncompleteCutError: A file is missing.
        LiveDirectoryError: A changelog or zip cannot be read.
    """
    newest = f"{version}_{unique_id}"
    if f"{newest}.zip" in store.names:
        return _snapshot(store, newest)
    why = f"there is no {newest}.zip"
    store.need(f"{newest}.changelog", why)
    path = f"{store.path}/{newest}.changelog"
    with store.folder.open(path) as stream:
        lineage = {**read_lineage(stream, f"{store.folder.url}/{path}"), version: unique_id}
    base = max((v for v, uid in lineage.items() if v <= version and f"{v}_{uid}.zip" in store.names), default=0)
    files = _snapshot(store, f"{base}_{lineage[base]}") if base else []
    why = f"version {version} is built on {f'the snapshot {base}' if base else 'the empty database'} and it"
    for number in range(base + 1, version + 1):
        if number not in lineage:
            raise store.incomplete(f"{number}_<unique id>.changelog", why + ", but the lineage does not name it")
        name = f"{number}_{lineage[number]}.changelog"
        files.append(store.need(name, why, identity=name))
        files += _checksum(store, files[-1], name)
    return files


def _snapshot(store: StoreDirectory, name: str) -> list[NeededFile]:
    files = snapshot_files(store, f"{name}.zip")
    return files + _checksum(store, files[0], f"{name}.zip")


def _checksum(store: StoreDirectory, main: NeededFile, name: str) -> list[NeededFile]:
    """Spark's checksum file for a file (`ChecksumCheckpointFileManager`), if there is one."""
    if f"{name}{_CHECKSUM}" not in store.names:
        return []
    file = store.need_read(f"{name}{_CHECKSUM}", "it is Spark's checksum")
    with reading(
        lambda why: LiveDirectoryError(
            f"{store.folder.url}/{file.source} is not a checksum that can be read: {why}. "
            "The live directory is damaged: restore a snapshot."
        )
    ):
        noted = from_json(file.data or b"")["mainFileSize"]
    if noted != main.size:
        raise ChecksumDiffersError(
            f"{store.folder.url}/{store.path}/{name} has {main.size} bytes, but Spark's checksum is of {noted}. If the "
            "query runs, the next attempt reads a newer commit. Where it stays so, the live directory is damaged: "
            "restore a snapshot."
        )
    return [file]


def heap_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    """Files that make up a version of a store.

    Raises:
        IncompleteCutError: A file is missing.
    """
    base = store.newest(".snapshot", version)
    files = [store.need(f"{base}.snapshot", "it holds the state")] if base else []
    since = f"{base}.snapshot" if base else "the empty state"
    why = f"version {version} is {since} and every delta after it"
    return files + [store.need(f"{delta}.delta", why) for delta in range(base + 1, version + 1)]
