"""State in RocksDB, checkpoint format v2: each file name contains the unique id of the attempt that wrote it.

The commit log contains the id of the newest version; the head of the changelog those of earlier
versions, back to the last snapshot. Leftovers of failed or duplicate attempts are therefore never
mistaken for committed state.
"""

from __future__ import annotations

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import from_json, reading
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.state.lineage import read_lineage
from dagster_ckpt.spark.checkpoint_dir.state.rocksdb import snapshot_files
from dagster_ckpt.spark.checkpoint_dir.state.store import StoreDirectory

_CHECKSUM = ".crc"


def version_files(store: StoreDirectory, version: int, unique_id: str) -> list[NeededFile]:
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
        raise store.incomplete(name, f"its checksum is of {noted} bytes, but {main.size} are there")
    return [file]
