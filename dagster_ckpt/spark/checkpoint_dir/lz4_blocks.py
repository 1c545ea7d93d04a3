"""The blocks of lz4-java (`LZ4BlockOutputStream`) in which Spark writes state; this is not the LZ4 frame format.

A block has a header (magic, method and size class, packed length, plain length, checksum of the plain content) and its
content. An empty block ends a stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

import lz4.block
import xxhash

MAGIC = b"LZ4Block"
HEADER_BYTES = 21
# The largest block that lz4-java writes.
LARGEST_BLOCK = 1 << 25

_HEADER = struct.Struct("<8sBiiI")
_STORED, _PACKED = 0x10, 0x20
# The token's low half: block size above 2 ** 10.
_SMALLEST_LEVEL = 10
_OUR_LEVEL = 6
# lz4-java's checksum: 28 bits of xxHash32.
_SEED, _CHECKSUM_BITS = 0x9747B28C, 0x0FFFFFFF


class BlockHeader(NamedTuple):
    is_stored: bool
    packed: int
    plain: int
    checksum: int

    @staticmethod
    def parse(data: bytes | bytearray) -> BlockHeader | None:
        """None if lz4-java would not read a block after it (`LZ4BlockInputStream.refill`)."""
        if len(data) < HEADER_BYTES:
            return None
        magic, token, packed, plain, checksum = _HEADER.unpack_from(data)
        method, largest = token & 0xF0, 1 << (_SMALLEST_LEVEL + (token & 0x0F))
        if magic != MAGIC or method not in (_STORED, _PACKED):
            return None
        if not (0 <= packed <= LARGEST_BLOCK and 0 <= plain <= min(largest, LARGEST_BLOCK)):
            return None
        if plain == 0 and not packed == checksum == 0:
            return None
        if plain and not (packed == plain if method == _STORED else packed):
            return None
        return BlockHeader(method == _STORED, packed, plain, checksum)

    def unpack(self, data: bytes, *, verify: bool = True) -> bytes:
        """Raises ValueError if that is not what was written."""
        try:
            plain = data if self.is_stored else lz4.block.decompress(data, uncompressed_size=self.plain)
        except lz4.block.LZ4BlockError as error:
            raise ValueError("an LZ4 block is damaged") from error
        if len(plain) != self.plain or (verify and _checksum(plain) != self.checksum):
            raise ValueError("a block does not have the checksum it was written with")
        return bytes(plain)


class Pieces:
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._data = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """Exactly this many bytes, or EOFError."""
        if self._at + count > len(self._data):
            parts = [self._data[self._at :]]
            held = len(parts[0])
            while held < count:
                piece = next(self._pieces, None)
                if piece is None:
                    raise EOFError("it ends too early")
                parts.append(piece)
                held += len(piece)
            self._data, self._at = b"".join(parts), 0
        self._at += count
        return self._data[self._at - count : self._at]


def read_blocks(stream: BinaryIO, *, verify: bool = True) -> Iterator[bytes]:
    """The plain content of each non-empty block; as in Spark, concatenated streams are one.

    Raises ValueError or EOFError for bytes that lz4-java did not write. Without `verify`, checksums are not compared.
    """
    while head := stream.read(HEADER_BYTES):
        header = BlockHeader.parse(head)
        if header is None:
            raise ValueError(f"a block begins with {head[: len(MAGIC)]!r} and not with a header of LZ4")
        data = stream.read(header.packed)
        if len(data) != header.packed:
            raise EOFError("it ends within a block")
        if header.plain:
            yield header.unpack(data, verify=verify)


def write_blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The last block is empty."""
    size, pending = 1 << (_SMALLEST_LEVEL + _OUR_LEVEL), bytearray()
    for chunk in chunks:
        pending += chunk
        while len(pending) >= size:
            yield _block(bytes(pending[:size]))
            del pending[:size]
    if pending:
        yield _block(bytes(pending))
    yield _HEADER.pack(MAGIC, _STORED | _OUR_LEVEL, 0, 0, 0)


def _block(plain: bytes) -> bytes:
    data, method = bytes(lz4.block.compress(plain, store_size=False)), _PACKED
    if len(data) >= len(plain):
        data, method = plain, _STORED
    return _HEADER.pack(MAGIC, method | _OUR_LEVEL, len(data), len(plain), _checksum(plain)) + data


def _checksum(plain: bytes) -> int:
    return xxhash.xxh32_intdigest(plain, _SEED) & _CHECKSUM_BITS
