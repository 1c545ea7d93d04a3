"""Files that make up one version of a state store, for each of Spark's formats.

- Heap (`HDFSBackedStateStoreProvider`): the newest `<S>.snapshot` up to the version, and every later `.delta`.
- RocksDB in checkpoint format v1 (`RocksDBFileManager`): the newest `<S>.zip` up to it, the SST and log files that it
  lists, and every later `.changelog`.
- RocksDB in checkpoint format v2: file names contain the unique id of the attempt that wrote them, so leftovers of
  failed attempts do not count. The commit log has the newest id, the head of the changelog earlier ones.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Set
from functools import cached_property
from typing import Annotated, BinaryIO, cast

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter

from dagster_ckpt.errors import ChecksumDiffersError, IncompleteCutError, LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO, Listing
from dagster_ckpt.spark.checkpoint_dir.checksums import Pieces, read_blocks
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile, read_needed
from dagster_ckpt.spark.versions import SparkFile
from dagster_ckpt.values.safe_parsing import LARGEST_LONG, from_json, inflated, inflation_limit, number_in, reading

_SSTS = "SSTs"
_LOGS = "logs"


_Named = tuple[str, str, int]


_Size = Annotated[int, Field(ge=0, le=LARGEST_LONG)]


class _File(BaseModel):
    name: str = Field(validation_alias=AliasChoices("dfsSstFileName", "dfsLogFileName"))
    size: _Size = Field(validation_alias="sizeBytes")


class _Snapshot(BaseModel):
    ssts: list[_File] = Field(default=[], alias="sstFiles")
    logs: list[_File] | None = Field(default=None, alias="logFiles")


def rocksdb_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    base = store.newest(".zip", version)
    files = snapshot_files(store, f"{base}.zip") if base else []
    since = f"{base}.zip" if base else "the empty database"
    why = f"there is no {version}.zip, so version {version} is {since} and every changelog after it"
    changelogs = [store.need(f"{number}.changelog", why) for number in range(base + 1, version + 1)]
    # One partition is enough: all have the same version.
    if changelogs and store.is_first_partition:
        with changelogs[-1].open() as stream:
            check_version(stream, f"{store.folder.url}/{changelogs[-1].source}")
    return files + changelogs


def snapshot_files(store: StoreDirectory, name: str) -> list[NeededFile]:
    """List a snapshot's files, the zip first, because Spark deletes an old snapshot's SSTs before it."""
    zip_file = store.need(name, "it is the snapshot of the database")
    files = [zip_file]
    stores = {directory: StoreDirectory(store.folder, f"{store.path}/{directory}") for directory in (_SSTS, _LOGS)}
    for directory, item, size in _named_files(zip_file):
        # Names contain a uuid: equal names mean equal content.
        file = stores[directory].need(item, f"{name} is built on it", identity=item)
        if file.size != size:
            raise stores[directory].incomplete(item, f"{name} needs {size} bytes of it, but it has {file.size}")
        files.append(file)
    return files


def _named_files(file: NeededFile) -> tuple[_Named, ...]:
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
            f"{where} is not a readable RocksDB snapshot: {why}. The live directory is damaged: restore a snapshot."
        )
    ):
        line, _, text = read_member(data, "metadata").decode("utf-8").partition("\n")
        SparkFile.ROCKSDB_SNAPSHOT.version_in(line, where)
        return _Snapshot.model_validate_json(text)


_CHECKSUM = ".crc"


def format_v2_files(store: StoreDirectory, version: int, unique_id: str) -> list[NeededFile]:
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
    if f"{name}{_CHECKSUM}" not in store.names:
        return []
    file = store.need_read(f"{name}{_CHECKSUM}", "it is Spark's checksum")
    with reading(
        lambda why: LiveDirectoryError(
            f"{store.folder.url}/{file.source} is not a readable checksum: {why}. The live directory is damaged: "
            "restore a snapshot."
        )
    ):
        noted = from_json(file.data or b"")["mainFileSize"]
    if noted != main.size:
        raise ChecksumDiffersError(
            f"{store.folder.url}/{store.path}/{name} has {main.size} bytes, but Spark's checksum is of {noted}. If "
            "the query runs, the next attempt reads a newer commit. If it stays so, the live directory is damaged: "
            "restore a snapshot."
        )
    return [file]


def heap_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    base = store.newest(".snapshot", version)
    files = [store.need(f"{base}.snapshot", "it holds the state")] if base else []
    since = f"{base}.snapshot" if base else "the empty state"
    why = f"version {version} is {since} and every delta after it"
    return files + [store.need(f"{delta}.delta", why) for delta in range(base + 1, version + 1)]


_COUNTED_DOWN = 10_000


class StoreDirectory:
    def __init__(self, folder: FileIO, path: str) -> None:
        self.folder = folder
        self.path = path

    @property
    def is_first_partition(self) -> bool:
        return self.path.split("/")[2] == "0"

    @property
    def names(self) -> Set[str]:
        return self._listing.names

    def newest(self, suffix: str, at_most: int) -> int:
        names = self.names
        # Counting down is faster than checking every name.
        near = range(at_most, max(at_most - _COUNTED_DOWN, 0), -1)
        found = next((version for version in near if f"{version}{suffix}" in names), None)
        if found is not None or at_most <= _COUNTED_DOWN:
            return found or 0
        numbers = (number_in(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
        return max((number for number in numbers if number is not None and number <= at_most), default=0)

    def need(self, name: str, why: str, *, identity: str | None = None) -> NeededFile:
        try:
            size, token = self._listing.version(name)
        except FileNotFoundError as error:
            if name in self.names:
                # Purged since the listing: the next attempt lists again.
                raise
            raise self.incomplete(name, why) from error
        path = f"{self.path}/{name}"
        return NeededFile(self.folder, path, path, size, token, identity, stable=True)

    def need_read(self, name: str, why: str) -> NeededFile:
        if name not in self.names:
            raise self.incomplete(name, why)
        file = read_needed(self.folder, f"{self.path}/{name}")
        file.stable = True
        return file

    def incomplete(self, name: str, why: str) -> IncompleteCutError:
        return IncompleteCutError(
            f"{self.folder.url}/{self.path}/{name} is missing: {why}. If the query runs, the next attempt reads a "
            "newer commit. If it stays missing, the live directory is damaged: restore a snapshot."
        )

    @cached_property
    def _listing(self) -> Listing:
        return self.folder.listing(self.path)


_END = struct.Struct("<4s4xxxHLL2x")
_END_SIGNATURE = b"PK\5\6"
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")
_ENTRY_SIGNATURE = b"PK\1\2"
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\3\4"
_DEFLATED = 8
_RAW = -zlib.MAX_WBITS
# Names in UTF-8, and sizes that follow the content.
_HARMLESS_FLAGS = 0x0808


def read_member(archive: bytes, name: str) -> bytes:
    try:
        content = _read_plain(archive, name.encode())
    except (struct.error, zlib.error, EOFError, ValueError):
        content = None
    if content is not None:
        return content
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as slow, slow.open(name) as member:
            content = member.read(inflation_limit(len(archive)))
            if member.read(1):
                raise ValueError(f"its member {name} is longer than {len(archive)} compressed bytes can expand to")
            return content
    except (zlib.error, RuntimeError, OSError, EOFError, ValueError) as error:
        # A damaged byte can look like another compression method or a password.
        raise zipfile.BadZipFile(str(error)) from error


def _read_plain(archive: bytes, name: bytes) -> bytes | None:
    begin = len(archive) - _END.size
    # Without a comment, the end record is at the very end.
    signature, count, length, begin_of_entries = _END.unpack_from(archive, begin)
    if signature != _END_SIGNATURE or begin_of_entries + length != begin:
        return None
    at = begin_of_entries
    for _ in range(count):
        entry = _ENTRY.unpack_from(archive, at)
        signature, flags, method, crc, packed, size, name_length, extra, comment, local = entry
        at += _ENTRY.size
        if signature != _ENTRY_SIGNATURE:
            return None
        if archive[at : at + name_length] == name:
            if method != _DEFLATED or flags & ~_HARMLESS_FLAGS:
                return None
            signature, local_name, local_extra = _LOCAL.unpack_from(archive, local)
            data = local + _LOCAL.size + local_name + local_extra
            content = inflated(archive[data : data + packed], _RAW)
            is_sound = signature == _LOCAL_SIGNATURE and len(content) == size and zlib.crc32(content) == crc
            return content if is_sound else None
        at += name_length + extra + comment
    return None


_WITH_LINEAGE = {3, 4}


class _Item(BaseModel):
    version: int
    # It is part of file names.
    unique_id: str = Field(alias="checkpointUniqueId", pattern=r"^[\w-]+$")


_LINEAGE = TypeAdapter(list[_Item])


def read_lineage(stream: BinaryIO, where: str) -> dict[int, str]:
    """Return the version-to-id mapping in the head of a changelog of checkpoint format v2.

    Format: `StateStoreChangelogWriterV3`/`V4` of Spark 4.3.
    """
    with reading(
        lambda why: LiveDirectoryError(
            f"{where} has no readable lineage: {why}. Set spark.sql.streaming.stateStore.compression.codec "
            "to lz4 (Spark's default) before the query's first batch; if it is, the file is damaged: restore "
            "a snapshot."
        )
    ):
        # Only the head is read; other checks verify the whole file.
        plain = Pieces(read_blocks(stream, verify=False))
        version = _text(plain)
        if SparkFile.CHANGELOG.version_in(version, where) not in _WITH_LINEAGE:
            raise ValueError(f"its version is {version!r}, but v3 and v4 carry a lineage")
        return {item.version: item.unique_id for item in _LINEAGE.validate_json(_text(plain))}


def check_version(stream: BinaryIO, where: str) -> None:
    try:
        version = _text(Pieces(read_blocks(stream, verify=False)), at_most=8)
    except (ValueError, EOFError):
        # Another codec, or no header: it begins with the length of a key.
        return
    SparkFile.CHANGELOG.version_in(version, where)


def _text(plain: Pieces, *, at_most: int = 0xFFFF) -> str:
    # Java's DataOutput.writeUTF: length, then text.
    (length,) = struct.unpack(">H", plain.take(2))
    if length > at_most:
        raise ValueError(f"it begins with a text of {length} bytes")
    return plain.take(length).decode("utf-8")
