"""Checksum files that Hadoop writes beside each file on a local disk (`ChecksumFileSystem`)."""

from __future__ import annotations

import struct
import zlib

from dagster_ckpt.io.file_io import FileIO

# Four bytes, the chunk length, then a CRC32 per chunk.
_HADOOP_MAGIC = b"crc\0"


class HadoopCheck:
    """Compares a small file with Hadoop's checksum file, if there is one.

    Args:
        folder: Its directory tree.
        path: Its path there.
    """

    def __init__(self, folder: FileIO, path: str) -> None:
        self.folder = folder
        self.path = path
        self.data = b""

    def update(self, chunk: bytes) -> None:
        """Pass the next piece of the file."""
        self.data += chunk

    def trouble(self) -> str | None:
        """What is wrong with it."""
        if fits_hadoop(self.folder, self.path, self.data) is not False:
            return None
        return f"its content does not match Hadoop's checksum {checksum_file(self.path)}"


def checksum_file(path: str) -> str:
    """The checksum file of a file."""
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.crc"


def fits_hadoop(folder: FileIO, path: str, data: bytes) -> bool | None:
    """Whether a file matches Hadoop's checksum file; None if there is none."""
    try:
        sums = folder.read(checksum_file(path))
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
