"""Whether state files hold what was written: their own framing, Spark's checksums and Hadoop's."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from dagster_ckpt.spark.doctor.crc32c import crc32c
from dagster_ckpt.spark.doctor.finding import Code, Finding, error, note
from dagster_ckpt.spark.folder import Folder
from dagster_ckpt.spark.needed import NeededFile

# Header of a block of lz4-java's `LZ4BlockOutputStream`; the last block has no bytes.
_LZ4_MAGIC = b"LZ4Block"
_LZ4_HEADER = struct.Struct("<8sBiii")
# The last bytes of RocksDB's block-based tables (`kBlockBasedTableMagicNumber`), little-endian.
_SST_MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
# Hadoop's `ChecksumFileSystem`: four bytes, the length of a chunk, then a CRC32 a chunk.
_HADOOP_MAGIC = b"crc\0"
_FRAMED = (".delta", ".snapshot", ".changelog")
_TABLES = ("/SSTs/", "/logs/")


def examine_contents(files: Sequence[NeededFile]) -> Iterator[Finding]:
    """Read files that a resume needs, and compare them with all that is known of their content."""
    for file in files:
        try:
            yield from examine_content(file.folder, file.source)
        except FileNotFoundError:
            # Purged since it was listed: the next look is at a newer batch.
            continue


def examine_content(folder: Folder, path: str) -> Iterator[Finding]:
    """Read one file.

    Raises:
        FileNotFoundError: It is gone.
    """
    framing = _framing(folder, path)
    if framing is not None:
        yield framing
    if path.startswith("state/") and path.endswith((".zip", ".changelog", ".delta", ".snapshot")):
        yield from _spark_checksum(folder, path)
    yield from _hadoop_checksum(folder, path)


def _framing(folder: Folder, path: str) -> Finding | None:
    if path.startswith("state/") and path.endswith(_FRAMED):
        with folder.open(path) as stream:
            trouble = lz4_trouble(stream)
        return error(Code.STATE_FILE_DAMAGED, path, f"{trouble}: Spark fails to load the state.") if trouble else None
    if path.endswith(".zip"):
        try:
            with folder.open(path) as stream, zipfile.ZipFile(stream) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, zlib.error) as reason:
            return error(Code.SNAPSHOT_UNREADABLE, path, f"The snapshot's zip cannot be read: {reason}.")
        return error(Code.SNAPSHOT_UNREADABLE, path, f"In the snapshot's zip {bad} is altered.") if bad else None
    if path.endswith(".sst"):
        with folder.open(path) as stream:
            data = stream.read()
        if not data.endswith(_SST_MAGIC):
            return error(
                Code.STATE_FILE_DAMAGED,
                path,
                "It has the right size but not the end of a RocksDB table: its last blocks never reached the disk.",
            )
    return None


def lz4_trouble(stream: BinaryIO) -> str | None:
    """What is wrong with the blocks of a state file; None where all are there, or it uses another codec."""
    first = True
    while True:
        header = stream.read(_LZ4_HEADER.size)
        if first and not header:
            return "It is empty"
        if first and not header.startswith(_LZ4_MAGIC):
            # Another codec than Spark's default; its framing is not known here.
            return None
        first = False
        if len(header) < _LZ4_HEADER.size:
            return "It is cut off: the block that ends it is missing"
        magic, _token, compressed, plain, _checksum = _LZ4_HEADER.unpack(header)
        if magic != _LZ4_MAGIC or compressed < 0:
            return "It is damaged: where a block should begin there is something else"
        if plain == 0:
            return None
        if len(stream.read(compressed)) < compressed:
            return "It is cut off in the middle of a block"


def _spark_checksum(folder: Folder, path: str) -> Iterator[Finding]:
    """Compare with what `ChecksumCheckpointFileManager` noted beside the file, if it did."""
    try:
        noted = json.loads(folder.read(f"{path}.crc"))
        # A signed number where Java's int is.
        algorithm, value, size = noted["algorithm"], int(noted["value"]), noted["mainFileSize"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as reason:
        yield error(
            Code.CHECKSUM_DIFFERS, f"{path}.crc", f"Spark's checksum cannot be read ({reason}): Spark fails on it."
        )
        return
    data = folder.read(path)
    if size != len(data):
        yield error(
            Code.CHECKSUM_DIFFERS,
            path,
            f"Spark's checksum is of {size} bytes, but {len(data)} are there: it was altered.",
        )
    elif algorithm == "CRC32C" and value & 0xFFFFFFFF != crc32c(data):
        yield error(
            Code.CHECKSUM_DIFFERS, path, "Its content does not have the CRC32C that Spark noted: it was altered."
        )


def _hadoop_checksum(folder: Folder, path: str) -> Iterator[Finding]:
    directory, _, name = path.rpartition("/")
    hidden = f"{directory}/.{name}.crc" if directory else f".{name}.crc"
    try:
        sums = folder.read(hidden)
    except FileNotFoundError:
        return
    if not sums.startswith(_HADOOP_MAGIC) or _has_sums(folder.read(path), sums):
        return
    if name.endswith(".zip") or any(part in f"{path}/" for part in _TABLES):
        yield error(
            Code.HADOOP_CHECKSUM_STALE,
            path,
            f"Its content does not fit Hadoop's checksum {hidden}: Spark reads this kind of file with the check "
            "on, and fails "
            "with ChecksumException. Either the file was altered, or another one was put in its place.",
        )
    else:
        yield note(
            Code.HADOOP_CHECKSUM_STALE,
            path,
            f"Its content does not fit Hadoop's checksum {hidden}; Spark does not look at it for this kind of file.",
        )


def _has_sums(data: bytes, sums: bytes) -> bool:
    (length,) = struct.unpack_from(">i", sums, len(_HADOOP_MAGIC))
    noted = sums[len(_HADOOP_MAGIC) + 4 :]
    chunks = range(0, len(data), length)
    return noted == b"".join(struct.pack(">I", zlib.crc32(data[at : at + length])) for at in chunks)
