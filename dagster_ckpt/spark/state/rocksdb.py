"""State in RocksDB, checkpoint format v1: `RocksDBStateStoreProvider`, with and without changelogs.

A version is the newest `<S>.zip` at or below it, the SST and log files that the zip names, and every
`.changelog` after. Without changelog checkpointing every version has its zip (`RocksDBFileManager`).
"""

from __future__ import annotations

import io
import zipfile

from pydantic import BaseModel, Field, ValidationError

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.needed import NeededFile
from dagster_ckpt.spark.state.store import StoreDirectory

_SSTS = "SSTs"
_LOGS = "logs"


class _SstFile(BaseModel):
    name: str = Field(alias="dfsSstFileName")
    size: int = Field(alias="sizeBytes")


class _LogFile(BaseModel):
    name: str = Field(alias="dfsLogFileName")
    size: int = Field(alias="sizeBytes")


class _Snapshot(BaseModel):
    ssts: list[_SstFile] = Field(default=[], alias="sstFiles")
    logs: list[_LogFile] | None = Field(default=None, alias="logFiles")


def version_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    """Files that hold a version of a store.

    Raises:
        IncompleteCutError: One of them is missing, or has another size than noted.
        LiveDirectoryError: The snapshot's zip cannot be read.
    """
    snapshots = store.versions(".zip", version)
    base = snapshots[-1] if snapshots else 0
    files = snapshot_files(store, f"{base}.zip") if base else []
    since = f"{base}.zip" if base else "the empty database"
    why = f"there is no {version}.zip, so version {version} is {since} and every changelog after it"
    return files + [store.need(f"{number}.changelog", why) for number in range(base + 1, version + 1)]


def snapshot_files(store: StoreDirectory, name: str) -> list[NeededFile]:
    """A snapshot's zip and the files it names.

    The zip is read before they are looked for: Spark deletes an old snapshot's SSTs before its zip.

    Raises:
        IncompleteCutError: One of them is missing, or has another size than noted.
        LiveDirectoryError: The zip cannot be read.
    """
    zip_file = store.need_read(name, "it is the snapshot of the database")
    snapshot = _read_snapshot(zip_file)
    files = [zip_file]
    for directory, named in ((_SSTS, snapshot.ssts), (_LOGS, snapshot.logs or [])):
        if not named:
            continue
        below = StoreDirectory(store.folder, f"{store.path}/{directory}")
        for item in named:
            # Names hold a uuid made for one upload, so equal names are equal bytes, in any image.
            file = below.need(item.name, f"{name} is built on it", identity=item.name)
            if file.version.size != item.size:
                raise below.incomplete(
                    item.name, f"{name} needs {item.size} bytes of it, but {file.version.size} are there"
                )
            files.append(file)
    return files


def _read_snapshot(file: NeededFile) -> _Snapshot:
    try:
        with zipfile.ZipFile(io.BytesIO(file.data or b"")) as archive:
            text = archive.read("metadata").decode("utf-8")
        return _Snapshot.model_validate_json(text.partition("\n")[2])
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, ValidationError) as error:
        raise LiveDirectoryError(
            f"{file.folder.url}/{file.source} is not a RocksDB snapshot that can be read: {error}. "
            "The live directory is damaged: restore an image."
        ) from error
