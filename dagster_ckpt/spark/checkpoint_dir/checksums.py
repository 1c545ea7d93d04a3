"""Verify files with the checksums that they carry, or that Hadoop wrote next to them.

LZ4 blocks of state files, zips and RocksDB's tables carry checksums. Of a table without a binary index, or of another
version than 2 to 5 (Spark writes 5), only the end is verified
(https://github.com/facebook/rocksdb/wiki/Rocksdb-BlockBasedTable-Format).

State is written in blocks of lz4-java (`LZ4BlockOutputStream`), not in the LZ4 frame format.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

import google_crc32c
import lz4.block
import xxhash

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.reuse import ContentCheck
from dagster_ckpt.values.safe_parsing import reading

FRAMED = (".delta", ".snapshot", ".changelog")


def check_of(path: str, size: int, open_file: Callable[[], BinaryIO], *, checksums: bool = True) -> ContentCheck | None:
    if path.endswith(".sst"):
        return SstCheck(size, open_file)
    if path.startswith("state/") and path.endswith(FRAMED):
        return Lz4Check(checksums=checksums)
    return _ZipCheck() if path.endswith(".zip") else None


def content_trouble(path: str, data: bytes, *, checksums: bool = True) -> str | None:
    check = check_of(path, len(data), lambda: io.BytesIO(data), checksums=checksums)
    if check is None:
        return None
    check.update(data)
    return check.trouble()


def is_lz4(data: bytes) -> bool:
    return data.startswith(MAGIC)


class Lz4Check:
    """Verifies blocks of lz4-java, or without `checksums` only their headers; ignores output of other codecs."""

    def __init__(self, *, checksums: bool = True) -> None:
        self._checksums = checksums
        self._buffer = bytearray()
        self._is_empty = True
        self._is_over = False
        self._trouble: str | None = None

    def update(self, chunk: bytes) -> None:
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
        if self._is_over:
            return self._trouble
        if not self._buffer and self._is_empty:
            return "It is empty"
        if self._is_empty:
            return "It is damaged at its beginning" if _is_nearly_magic(self._buffer) else None
        if len(self._buffer) < HEADER_BYTES:
            return "It is truncated: its last block is missing"
        return "It is truncated in the middle of a block"

    def _next_block(self) -> bool:
        if len(self._buffer) < HEADER_BYTES:
            return False
        header = BlockHeader.parse(self._buffer)
        if header is None:
            self._end("It is damaged: no block begins where one should")
            return False
        if header.plain == 0:
            self._end(None)
            return False
        end = HEADER_BYTES + header.packed
        if len(self._buffer) < end:
            return False
        if self._checksums:
            try:
                header.unpack(bytes(self._buffer[HEADER_BYTES:end]))
            except ValueError:
                self._end("It is damaged: a block does not have the checksum it was written with")
        del self._buffer[:end]
        return True

    def _end(self, trouble: str | None) -> None:
        self._is_over, self._trouble = True, trouble


def _is_nearly_magic(data: bytes | bytearray) -> bool:
    """Whether it begins with zeros or most of the magic bytes, as no codec's output does."""
    begin = data[: len(MAGIC)]
    alike = sum(one == other for one, other in zip(begin, MAGIC, strict=False))
    return not any(begin) or alike > len(MAGIC) // 2


class _ZipCheck:
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


# The chunk length and a CRC32 per chunk follow.
_HADOOP_MAGIC = b"crc\0"


class HadoopCheck:
    def __init__(self, folder: FileIO, path: str) -> None:
        self.folder = folder
        self.path = path
        self.data = b""

    def update(self, chunk: bytes) -> None:
        self.data += chunk

    def trouble(self) -> str | None:
        if fits_hadoop(self.folder, self.path, self.data) is not False:
            return None
        return f"its content does not match Hadoop's checksum {checksum_file(self.path)}"


def checksum_file(path: str) -> str:
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.crc"


def fits_hadoop(folder: FileIO, path: str, data: bytes) -> bool | None:
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


# End of a table (`kBlockBasedTableMagicNumber`).
SST_MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
NO_END = "It has the right size but not the end of a RocksDB table: its last blocks never reached the disk"
DAMAGED = "It is damaged: a block of the table does not have the checksum it was written with"

_FOOTER = 53
_TRAILER = 5
_VERSIONS = range(2, 6)
# From this version on, values of an index have no length.
_WITHOUT_LENGTHS = 4
_NO_COMPRESSION, _LZ4 = 0, (4, 5)
_CRC32C, _XXHASH, _XXHASH64, _XXH3 = 1, 2, 3, 4
_BITS = 0xFFFFFFFF

_Handle = tuple[int, int]


class SstCheck:
    """Verifies a RocksDB table. `open_file` is called once, to read from its end where the blocks are."""

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
        self._blocks.sort(reverse=True)

    def update(self, chunk: bytes) -> None:
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
            if begin < 0 or not _is_summed(view[begin:end], self._checksum):
                self._trouble = DAMAGED
                break
            self._blocks.pop()
            used = end
        view.release()
        del self._buffer[:used]
        self._at += used

    def trouble(self) -> str | None:
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
        # The index is behind the data: one request.
        first = min(meta[0], index[0])
        file.seek(first)
        tail = file.read(size - first)

        def block(handle: _Handle) -> bytes | None:
            begin = handle[0] - first
            raw = memoryview(tail)[begin : begin + handle[1] + _TRAILER]
            if len(raw) != handle[1] + _TRAILER or not _is_summed(raw, self._checksum):
                raise ValueError("a block of its index is damaged")
            return _plain(raw)

        self._blocks = [meta, index, *(_handle(value, 0)[0] for _key, value in _entries(block(meta) or b""))]
        self._blocks += _data_blocks(block(index) or b"", has_lengths=version < _WITHOUT_LENGTHS)


def _data_blocks(index: bytes, *, has_lengths: bool) -> Iterator[_Handle]:
    if not index:
        return
    end = len(index) - 4
    # The highest bit says that a hash of the keys follows.
    restarts = struct.unpack_from("<I", index, end)[0] & 0x7FFFFFFF
    # Every entry is complete, because Spark shares no prefixes.
    for number in range(restarts):
        (at,) = struct.unpack_from("<I", index, end - 4 * (restarts - number))
        _shared, at = varint(index, at)
        length, at = varint(index, at)
        if has_lengths:
            _size, at = varint(index, at)
        handle, _ = _handle(index, at + length)
        yield handle


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not block:
        return
    end = len(block) - 4
    end -= 4 * struct.unpack_from("<I", block, end)[0]
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at)
        length, at = varint(block, at)
        size, at = varint(block, at)
        key = key[:shared] + block[at : at + length]
        at += length
        yield key, block[at : at + size]
        at += size


def _handle(data: bytes, at: int) -> tuple[_Handle, int]:
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return (offset, size), at


_LONGEST_VARINT = 10


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a length of seven bits a byte, lowest first, as in RocksDB and Snappy."""
    value = 0
    for place, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("it has a length that does not end")


def _plain(raw: memoryview) -> bytes | None:
    kind, content = raw[-_TRAILER], bytes(raw[:-_TRAILER])
    if kind == _NO_COMPRESSION:
        return content
    if kind not in _LZ4:
        return None
    length, at = varint(content, 0)
    try:
        return bytes(lz4.block.decompress(content[at:], uncompressed_size=length))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from error


def _is_summed(raw: memoryview, checksum: int) -> bool:
    (noted,) = struct.unpack_from("<I", raw, len(raw) - 4)
    summed = raw[:-4]
    if checksum == _XXH3:
        # The compression byte is mixed in (`ModifyChecksumForLastByte`).
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


MAGIC = b"LZ4Block"
HEADER_BYTES = 21
# The largest block that lz4-java writes.
LARGEST_BLOCK = 1 << 25

_HEADER = struct.Struct("<8sBiiI")
_STORED, _PACKED = 0x10, 0x20
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
        """Return None if lz4-java would not read a block after it (`LZ4BlockInputStream.refill`)."""
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
    """Yield the plain content of each non-empty block; as in Spark, concatenated streams are one.

    Raises ValueError or EOFError for bytes that lz4-java did not write.
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
