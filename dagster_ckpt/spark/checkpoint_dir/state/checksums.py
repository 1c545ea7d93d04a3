"""Verify files with the checksums that they carry: blocks of state files, zips and RocksDB's tables."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import BinaryIO

import google_crc32c
import lz4.block

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.snapshot.reuse import ContentCheck
from dagster_ckpt.spark.checkpoint_dir.state.lineage import LARGEST_BLOCK, block_checksum
from dagster_ckpt.spark.checkpoint_dir.state.sst_blocks import SstCheck
from dagster_ckpt.values.untrusted import reading

MAGIC = b"LZ4Block"
# Magic, token, compressed length, plain length, checksum; the last block is empty.
_HEADER = struct.Struct("<8sBiiI")
_RAW, _LZ4 = 0x10, 0x20
_SMALLEST_LEVEL = 10
_FRAMED = (".delta", ".snapshot", ".changelog")


def crc32c(data: bytes) -> int:
    """CRC32C of some bytes (RFC 3720, appendix B.4)."""
    return int(google_crc32c.value(data))


def check_of(path: str, size: int, open_file: Callable[[], BinaryIO]) -> ContentCheck | None:
    """The check of a file that carries checksums; None for any other file.

    Args:
        path: Its path in a live directory.
        size: Its length.
        open_file: Opens it, if the check must know its end first.
    """
    if path.endswith(".sst"):
        return SstCheck(size, open_file)
    if path.startswith("state/") and path.endswith(_FRAMED):
        return Lz4Check()
    return _ZipCheck() if path.endswith(".zip") else None


def content_trouble(path: str, data: bytes) -> str | None:
    """What is wrong with a file by its own checksums; None if it is intact or carries none.

    Args:
        path: Its path in a live directory.
        data: The whole file.
    """
    check = check_of(path, len(data), lambda: io.BytesIO(data))
    if check is None:
        return None
    check.update(data)
    return check.trouble()


def lz4_trouble(data: bytes, *, checksums: bool = True) -> str | None:
    """What is wrong with the blocks of a state file; None if they are complete, or it uses another codec.

    Args:
        data: The whole file.
        checksums: Also decompress each block, and compare it with its checksum.
    """
    check = Lz4Check(checksums=checksums)
    check.update(data)
    return check.trouble()


def is_lz4(data: bytes) -> bool:
    """Whether a file is a stream of lz4-java, which has its own checksums."""
    return data.startswith(MAGIC)


class Lz4Check:
    """Verifies a stream of blocks that lz4-java wrote (`LZ4BlockOutputStream`), piece by piece.

    A file that begins like the output of another codec is not examined.

    Args:
        checksums: Also decompress each block, and compare it with its checksum.
    """

    def __init__(self, *, checksums: bool = True) -> None:
        self._checksums = checksums
        self._buffer = bytearray()
        self._is_empty = True
        self._is_over = False
        self._trouble: str | None = None

    def update(self, chunk: bytes) -> None:
        """Verify the blocks that end in the next piece."""
        if self._is_over:
            return
        self._buffer += chunk
        if self._is_empty and len(self._buffer) >= len(MAGIC):
            self._is_empty = False
            if not self._buffer.startswith(MAGIC):
                self._end("It is damaged at its beginning" if _is_nearly_magic(self._buffer) else None)
        while not self._is_over and self._next_block():
            pass

    def trouble(self) -> str | None:
        """What is wrong, once all of it was passed to `update`."""
        if self._is_over:
            return self._trouble
        if not self._buffer and self._is_empty:
            return "It is empty"
        if self._is_empty:
            # Shorter than the magic bytes.
            return "It is damaged at its beginning" if _is_nearly_magic(self._buffer) else None
        if len(self._buffer) < _HEADER.size:
            return "It is truncated: its last block is missing"
        return "It is truncated in the middle of a block"

    def _next_block(self) -> bool:
        """Verify one block; returns whether there was one."""
        if len(self._buffer) < _HEADER.size:
            return False
        magic, token, packed, plain, checksum = _HEADER.unpack_from(self._buffer)
        if magic != MAGIC or not _is_a_header(token, packed, plain, checksum):
            self._end("It is damaged: no block begins where one should")
            return False
        if plain == 0:
            self._end(None)
            return False
        end = _HEADER.size + packed
        if len(self._buffer) < end:
            return False
        if self._checksums and not _is_sound(
            bytes(self._buffer[_HEADER.size : end]), plain, checksum, is_raw=token & 0xF0 == _RAW
        ):
            self._end("It is damaged: a block does not have the checksum it was written with")
        del self._buffer[:end]
        return True

    def _end(self, trouble: str | None) -> None:
        self._is_over, self._trouble = True, trouble


def _is_a_header(token: int, packed: int, plain: int, checksum: int) -> bool:
    """Whether lz4-java reads a block after this header (`LZ4BlockInputStream.refill`)."""
    method, largest = token & 0xF0, 1 << (_SMALLEST_LEVEL + (token & 0x0F))
    if method not in (_RAW, _LZ4) or not (0 <= packed <= LARGEST_BLOCK and 0 <= plain <= largest):
        return False
    if plain == 0:
        return packed == 0 and checksum == 0
    return packed == plain if method == _RAW else packed > 0


def _is_nearly_magic(data: bytes | bytearray) -> bool:
    """Whether a file begins as no codec's output does: with zeros, or with most of the magic bytes of this one."""
    begin = data[: len(MAGIC)]
    alike = sum(one == other for one, other in zip(begin, MAGIC, strict=False))
    return not any(begin) or alike > len(MAGIC) // 2


def _is_sound(block: bytes, length: int, checksum: int, *, is_raw: bool) -> bool:
    try:
        plain = block if is_raw else lz4.block.decompress(block, uncompressed_size=length)
    except lz4.block.LZ4BlockError:
        return False
    return len(plain) == length and block_checksum(plain) == checksum


class _ZipCheck:
    """Verifies a zip, which is small, as a whole."""

    def __init__(self) -> None:
        self._data = io.BytesIO()

    def update(self, chunk: bytes) -> None:
        self._data.write(chunk)

    def trouble(self) -> str | None:
        try:
            with reading(LiveDirectoryError), zipfile.ZipFile(self._data) as archive:
                bad = archive.testzip()
        except LiveDirectoryError as reason:
            return f"The snapshot's zip cannot be read: {reason}"
        return f"In the snapshot's zip {bad} is altered" if bad else None
