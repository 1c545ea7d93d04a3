"""Verify the block checksums of RocksDB's tables (SST files).

Format: https://github.com/facebook/rocksdb/wiki/Rocksdb-BlockBasedTable-Format, format versions 2 to 5
(Spark writes 5), with a binary index. A block is followed by a byte for its compression and by four
bytes of checksum. Of another version or index only the end of the file is verified.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import BinaryIO

import google_crc32c
import lz4.block
import xxhash

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.values.untrusted import reading

# The last bytes of a table (`kBlockBasedTableMagicNumber`), little-endian.
SST_MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
NO_END = "It has the right size but not the end of a RocksDB table: its last blocks never reached the disk"
DAMAGED = "It is damaged: a block of the table does not have the checksum it was written with"

_FOOTER = 53
_TRAILER = 5
_VERSIONS = range(2, 6)
# From this version on, the values of an index have no length.
_WITHOUT_LENGTHS = 4
_NO_COMPRESSION, _LZ4 = 0, (4, 5)
_CRC32C, _XXHASH, _XXHASH64, _XXH3 = 1, 2, 3, 4
_BITS = 0xFFFFFFFF

# Offset and size of a block.
_Handle = tuple[int, int]


def sst_trouble(data: bytes) -> str | None:
    """What is wrong with a table; None if all its blocks have their checksums."""
    check = SstCheck(len(data), lambda: BytesIO(data))
    check.update(data)
    return check.trouble()


class SstCheck:
    """Verifies a table while it is read from its beginning.

    Args:
        size: Its length.
        open_file: Opens it another time: its end says where its blocks are.
    """

    def __init__(self, size: int, open_file: Callable[[], BinaryIO]) -> None:
        self._at = 0
        self._buffer = bytearray()
        self._trouble: str | None = None
        self._checksum = _XXH3
        self._blocks: list[_Handle] = []
        try:
            with open_file() as file, reading(LiveDirectoryError):
                self._read_end(file, size)
        except LiveDirectoryError:
            self._trouble = DAMAGED
        # In descending order: the next one is at the end.
        self._blocks.sort(reverse=True)

    def update(self, chunk: bytes) -> None:
        """Verify the blocks that end in the next piece."""
        if not self._blocks or self._trouble is not None:
            return
        self._buffer += chunk
        view = memoryview(self._buffer)
        used = 0
        while self._blocks:
            offset, size = self._blocks[-1]
            begin = offset - self._at
            end = begin + size + _TRAILER
            if end > len(view):
                break
            if begin < 0 or not _is_sound(view[begin:end], self._checksum):
                self._trouble = DAMAGED
                break
            self._blocks.pop()
            used = end
        view.release()
        del self._buffer[:used]
        self._at += used

    def trouble(self) -> str | None:
        """What is wrong, once all of it was passed to `update`."""
        return self._trouble or (DAMAGED if self._blocks else None)

    def _read_end(self, file: BinaryIO, size: int) -> None:
        file.seek(max(size - _FOOTER, 0))
        footer = file.read(_FOOTER)
        if not footer.endswith(SST_MAGIC):
            self._trouble = NO_END
            return
        (version,) = struct.unpack_from("<I", footer, len(footer) - 12) if len(footer) == _FOOTER else (0,)
        if version not in _VERSIONS:
            return
        self._checksum = footer[0]
        meta, at = _handle(footer, 1)
        index, _ = _handle(footer, at)
        # The whole end of the file in one request: the index is behind the data.
        first = min(meta[0], index[0])
        file.seek(first)
        tail = file.read(size - first)

        def block(handle: _Handle) -> bytes | None:
            begin = handle[0] - first
            raw = memoryview(tail)[begin : begin + handle[1] + _TRAILER]
            if len(raw) != handle[1] + _TRAILER or not _is_sound(raw, self._checksum):
                raise ValueError("a block of its index is damaged")
            return _plain(raw)

        self._blocks = [meta, index, *(_handle(value, 0)[0] for _key, value in _entries(block(meta) or b""))]
        self._blocks += _data_blocks(block(index) or b"", has_lengths=version < _WITHOUT_LENGTHS)


def _data_blocks(index: bytes, *, has_lengths: bool) -> Iterator[_Handle]:
    """Handles of the data blocks, from the entries of the index; each is complete, because Spark shares no prefixes."""
    if not index:
        return
    end = len(index) - 4
    # The highest bit says that a hash of the keys follows the entries.
    restarts = struct.unpack_from("<I", index, end)[0] & 0x7FFFFFFF
    for number in range(restarts):
        (at,) = struct.unpack_from("<I", index, end - 4 * (restarts - number))
        _shared, at = _varint(index, at)
        length, at = _varint(index, at)
        if has_lengths:
            _size, at = _varint(index, at)
        handle, _ = _handle(index, at + length)
        yield handle


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block whose keys are encoded as differences."""
    if not block:
        return
    end = len(block) - 4
    end -= 4 * struct.unpack_from("<I", block, end)[0]
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        length, at = _varint(block, at)
        size, at = _varint(block, at)
        key = key[:shared] + block[at : at + length]
        at += length
        yield key, block[at : at + size]
        at += size


def _handle(data: bytes, at: int) -> tuple[_Handle, int]:
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _plain(raw: memoryview) -> bytes | None:
    """The content of a block whose checksum is right; None if it is compressed with another codec than Spark's."""
    kind, content = raw[-_TRAILER], bytes(raw[:-_TRAILER])
    if kind == _NO_COMPRESSION:
        return content
    if kind not in _LZ4:
        return None
    length, at = _varint(content, 0)
    try:
        return bytes(lz4.block.decompress(content[at:], uncompressed_size=length))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from error


def _is_sound(raw: memoryview, checksum: int) -> bool:
    """Whether a block with its trailer has its checksum; an unknown kind of checksum is not compared."""
    (noted,) = struct.unpack_from("<I", raw, len(raw) - 4)
    summed = raw[:-4]
    if checksum == _XXH3:
        # The byte of the compression is mixed in at the end (`ModifyChecksumForLastByte`).
        low = xxhash.xxh3_64_intdigest(summed[:-1]) & _BITS
        return bool(noted == low ^ (summed[-1] * 0x6B9083D9 & _BITS))
    if checksum == _CRC32C:
        crc = google_crc32c.value(bytes(summed))
        return bool(noted == ((crc >> 15 | crc << 17) + 0xA282EAD8) & _BITS)
    if checksum == _XXHASH:
        return bool(noted == xxhash.xxh32_intdigest(summed))
    if checksum == _XXHASH64:
        return bool(noted == xxhash.xxh64_intdigest(summed) & _BITS)
    return True
