"""Whether files hold what was written: their own checksums, Spark's and Hadoop's.

A file whose content does not fit Hadoop's `.crc` beside it is damaged, unless checksums of its own prove it sound:
then another one was put in its place, and only the `.crc` is stale.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import from_json, reading
from dagster_ckpt.spark.doctor.crc32c import crc32c
from dagster_ckpt.spark.doctor.finding import Code, Finding, error, note
from dagster_ckpt.spark.doctor.lz4_blocks import is_lz4, lz4_trouble
from dagster_ckpt.spark.folder import Folder
from dagster_ckpt.spark.needed import NeededFile

# The last bytes of RocksDB's block-based tables (`kBlockBasedTableMagicNumber`), little-endian.
_SST_MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
# Hadoop's `ChecksumFileSystem`: four bytes, the length of a chunk, then a CRC32 a chunk.
_HADOOP_MAGIC = b"crc\0"
_FRAMED = (".delta", ".snapshot", ".changelog")


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
    data = folder.read(path)
    fits = _fits_hadoop(folder, path, data)
    # What fits Hadoop's checksum need not be unpacked to see that it is sound.
    trouble = _own_trouble(path, data, checksums=fits is not True)
    if trouble is not None:
        yield trouble
    elif fits is False:
        yield _stale(path) if _proves_itself(path, data) else _differs(path)
    if path.startswith("state/") and path.endswith((".zip", *_FRAMED)):
        yield from _spark_checksum(folder, path, data)


def _own_trouble(path: str, data: bytes, *, checksums: bool) -> Finding | None:
    """What a file's own framing and checksums say."""
    if path.startswith("state/") and path.endswith(_FRAMED):
        trouble = lz4_trouble(data, checksums=checksums)
        return error(Code.STATE_FILE_DAMAGED, path, f"{trouble}: Spark fails to load the state.") if trouble else None
    if path.endswith(".zip"):
        try:
            with reading(LiveDirectoryError), zipfile.ZipFile(io.BytesIO(data)) as archive:
                bad = archive.testzip()
        except LiveDirectoryError as reason:
            return error(Code.SNAPSHOT_UNREADABLE, path, f"The snapshot's zip cannot be read: {reason}.")
        return error(Code.SNAPSHOT_UNREADABLE, path, f"In the snapshot's zip {bad} is altered.") if bad else None
    if path.endswith(".sst") and not data.endswith(_SST_MAGIC):
        return error(
            Code.STATE_FILE_DAMAGED,
            path,
            "It has the right size but not the end of a RocksDB table: its last blocks never reached the disk.",
        )
    return None


def _proves_itself(path: str, data: bytes) -> bool:
    """Whether a file in which no trouble was found has checksums of its own over all of its content."""
    return path.endswith(".zip") or (path.endswith(_FRAMED) and is_lz4(data))


def _stale(path: str) -> Finding:
    what = f"Its own checksums are right, but its content does not fit Hadoop's checksum {_hidden(path)}"
    if path.endswith(".zip"):
        return error(
            Code.HADOOP_CHECKSUM_STALE,
            path,
            f"{what}: another file was put in its place. Spark reads this kind of file with the check on, and fails "
            "with ChecksumException.",
        )
    return note(
        Code.HADOOP_CHECKSUM_STALE,
        path,
        f"{what}: another file was put in its place. Spark does not look at it for this kind of file.",
    )


def _differs(path: str) -> Finding:
    return error(
        Code.CHECKSUM_DIFFERS,
        path,
        f"Its content does not fit Hadoop's checksum {_hidden(path)}: it was altered since it was written. Spark may "
        "not notice, and go on with wrong values.",
    )


def _spark_checksum(folder: Folder, path: str, data: bytes) -> Iterator[Finding]:
    """Compare with what `ChecksumCheckpointFileManager` noted beside the file, if it did."""
    try:
        text = folder.read(f"{path}.crc")
    except FileNotFoundError:
        return
    try:
        with reading(LiveDirectoryError):
            noted = from_json(text)
            # A signed number where Java's int is.
            algorithm, value, size = noted["algorithm"], int(noted["value"]), noted["mainFileSize"]
    except LiveDirectoryError as reason:
        yield error(
            Code.CHECKSUM_DIFFERS, f"{path}.crc", f"Spark's checksum cannot be read ({reason}): Spark fails on it."
        )
        return
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


def _hidden(path: str) -> str:
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.crc"


def _fits_hadoop(folder: Folder, path: str, data: bytes) -> bool | None:
    """Whether a file has the checksums that Hadoop noted beside it; None where it noted none."""
    try:
        sums = folder.read(_hidden(path))
    except FileNotFoundError:
        return None
    if not sums.startswith(_HADOOP_MAGIC) or len(sums) < len(_HADOOP_MAGIC) + 4:
        return None
    (length,) = struct.unpack_from(">i", sums, len(_HADOOP_MAGIC))
    noted = sums[len(_HADOOP_MAGIC) + 4 :]
    if length <= 0:
        return False
    chunks = range(0, len(data), length)
    return len(noted) == 4 * len(chunks) and noted == b"".join(
        struct.pack(">I", zlib.crc32(data[at : at + length])) for at in chunks
    )
