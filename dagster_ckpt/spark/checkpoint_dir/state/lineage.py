"""Parse the head of a RocksDB changelog: its version, and the unique ids of earlier versions of the state.

Format: `StateStoreChangelogWriterV3`/`V4` of Spark 4.3 inside the LZ4 block stream of lz4-java
(`LZ4BlockOutputStream`).
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import lz4.block
import xxhash
from pydantic import BaseModel, Field, TypeAdapter

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.versions import SparkFile
from dagster_ckpt.values.untrusted import reading

_MAGIC = b"LZ4Block"
_HEADER = struct.Struct("<8sBiii")
_RAW = 0x10
# The largest block that lz4-java writes.
LARGEST_BLOCK = 1 << 25
_WITH_LINEAGE = {3, 4}
# Seed and mask of lz4-java's checksums.
_SEED, _CHECKSUM_BITS = 0x9747B28C, 0x0FFFFFFF


def block_checksum(plain: bytes) -> int:
    """The checksum that lz4-java writes of the plain content of a block: 28 bits of xxHash32."""
    return xxhash.xxh32_intdigest(plain, _SEED) & _CHECKSUM_BITS


class _Item(BaseModel):
    version: int
    # Part of file names.
    unique_id: str = Field(alias="checkpointUniqueId", pattern=r"^[\w-]+$")


_LINEAGE = TypeAdapter(list[_Item])


def read_lineage(stream: BinaryIO, where: str) -> dict[int, str]:
    """Parse the mapping of version to unique id in the head of a changelog of checkpoint format v2.

    Raises:
        UnknownLayoutError: It has an unsupported version.
        LiveDirectoryError: It is not such a changelog, or is compressed with a codec other than
            LZ4.
    """
    with reading(
        lambda why: LiveDirectoryError(
            f"{where} has no readable lineage: {why}. Set spark.sql.streaming.stateStore.compression.codec "
            "to lz4 (Spark's default) before the query's first batch; if it is, the file is damaged: restore "
            "a snapshot."
        )
    ):
        plain = _Plain(stream)
        version = plain.text()
        if SparkFile.CHANGELOG.version_in(version, where) not in _WITH_LINEAGE:
            raise ValueError(f"its version is {version!r}, but v3 and v4 carry a lineage")
        return {item.version: item.unique_id for item in _LINEAGE.validate_json(plain.text())}


def check_version(stream: BinaryIO, where: str) -> None:
    """Reject a changelog of checkpoint format v1 with an unsupported version; nothing else of it is needed.

    Raises:
        UnknownLayoutError: It has an unsupported version.
    """
    try:
        version = _Plain(stream).text(at_most=8)
    except (ValueError, struct.error, IndexError):
        # Either a codec other than LZ4, whose head cannot be parsed here, or a changelog without a
        # header: then it begins with the length of a key.
        return
    SparkFile.CHANGELOG.version_in(version, where)


class _Plain:
    """The decompressed head of a stream, as far as needed."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._data = bytearray()
        self._at = 0

    def text(self, *, at_most: int = 0xFFFF) -> str:
        # Java's DataOutput.writeUTF: two bytes of length, then the text.
        (length,) = struct.unpack(">H", self._take(2))
        if length > at_most:
            raise ValueError(f"it begins with a text of {length} bytes")
        return self._take(length).decode("utf-8")

    def _take(self, count: int) -> bytes:
        while len(self._data) < self._at + count:
            self._data += self._block()
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def _block(self) -> bytes:
        magic, token, compressed, plain, _checksum = _HEADER.unpack(self._stream.read(_HEADER.size))
        if magic != _MAGIC:
            raise ValueError(f"it begins with {bytes(magic)!r} and not with an LZ4 block")
        if plain == 0:
            raise ValueError("it ends before its lineage does")
        if not (0 <= compressed <= LARGEST_BLOCK and 0 <= plain <= LARGEST_BLOCK):
            raise ValueError(f"it has a block of {compressed} bytes that are {plain}")
        data = self._stream.read(compressed)
        try:
            return data if token & 0xF0 == _RAW else lz4.block.decompress(data, uncompressed_size=plain)
        except lz4.block.LZ4BlockError as error:
            raise ValueError("its LZ4 block is damaged") from error
