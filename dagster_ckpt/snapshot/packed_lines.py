"""Find single lines in the compressed file list of a snapshot while decompressing only a small part of it.

A snapshot lists its files in the order of the previous one. Lookups therefore go through the lines
once, in order, and only a few neighboring blocks need to be decompressed at a time.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dagster_ckpt.foreign import inflation_limit
from dagster_ckpt.snapshot.entries import AFTER_DIGEST

# The zlib `wbits` value for a gzip header.
GZIP = 31
_PACKED_AT_A_TIME = 128 * 1024
# A valid piece is smaller than this when decompressed, so it is decompressed in one step.
_UNPACKED_AT_A_TIME = 8 * 1024 * 1024
_PIECES_KEPT = 4
# If each piece has been decompressed this many times on average, access is not in order.
_TOO_OFTEN = 16
_DIGEST_BYTES = AFTER_DIGEST - 1
_HASH_MASK = 0xFFFFFFFF
_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def unpacked(packed: bytes | memoryview) -> Iterator[list[bytes]]:
    """All lines, in batches of several thousand.

    Raises:
        zlib.error: The data is not gzip.
        EOFError: The data is truncated.
        ValueError: A line exceeds the format's limits.
    """
    whole, place = memoryview(packed), _Place()
    while not place.is_at_end(whole):
        yield place.read_on(whole)


def path_in(line: bytes) -> bytes:
    """The path in a line, as encoded; truncated at a quote, so different paths may give the same result."""
    return line.split(b'"', 4)[3]


def path_of_start(start: bytes) -> bytes:
    """Like `path_in`, given the part of a line after its digest."""
    return start.split(b'"', 2)[1]


class PackedLines:
    """Finds lines in compressed data. Thread-safe.

    Args:
        packed: The lines, compressed with gzip.
    """

    def __init__(self, packed: bytes | memoryview) -> None:
        self._packed = memoryview(packed)
        self._lock = threading.Lock()
        self._index: _Index | None = None
        self._pieces: OrderedDict[int, list[bytes]] = OrderedDict()
        self._pieces_unpacked = 0

    def find(self, start: bytes) -> bytes | None:
        """The line that continues with `start` after its digest.

        Args:
            start: At least the complete path.
        """
        with self._lock:
            return self._first(self._looked_through.by_path, path_of_start(start), start, AFTER_DIGEST)

    def with_digest(self, digest: str) -> bytes | None:
        """A line of a file with this content."""
        start = f'["{digest}"'.encode()
        with self._lock:
            return self._first(self._looked_through.by_digest, start, start, 0)

    def moved_to(self, packed: bytes | memoryview) -> None:
        """Use a copy of the same bytes from now on, and drop decompressed pieces."""
        with self._lock:
            self._packed = memoryview(packed)
            self._pieces.clear()

    @property
    def _looked_through(self) -> _Index:
        if self._index is None:
            self._index = _Index.of(self._packed)
        return self._index

    def _first(self, numbers: array[int], key: bytes, start: bytes, begin: int) -> bytes | None:
        hashed = hash(key) & _HASH_MASK
        at = bisect_left(numbers, hashed << _NUMBER_BITS)
        while at < len(numbers) and numbers[at] >> _NUMBER_BITS == hashed:
            line = self._line(numbers[at] & _NUMBER_MASK)
            if line.startswith(start, begin):
                return line
            at += 1
        return None

    def _line(self, number: int) -> bytes:
        places, firsts = self._looked_through.places, self._looked_through.firsts
        index = bisect_right(firsts, number) - 1
        piece = self._pieces.get(index)
        if piece is None:
            piece = self._pieces[index] = places[index].copy().read_on(self._packed)
            self._pieces_unpacked += 1
            in_order = self._pieces_unpacked < _TOO_OFTEN * len(places)
            while in_order and len(self._pieces) > _PIECES_KEPT:
                self._pieces.popitem(last=False)
        self._pieces.move_to_end(index)
        return piece[number - firsts[index]]


@dataclass(frozen=True)
class _Index:
    """Index of the lines.

    Attributes:
        places: Start of each piece.
        firsts: Number of the first line of each piece.
        by_path: Sorted hashes of the paths with line numbers; a dict would be ten times as large.
        by_digest: The same for the digests.
    """

    places: list[_Place]
    firsts: list[int]
    by_path: array[int]
    by_digest: array[int]

    @staticmethod
    def of(packed: memoryview) -> _Index:
        """Index compressed lines."""
        places, firsts, by_path, by_digest = list[_Place](), list[int](), array("Q"), array("Q")
        count, place = 0, _Place()
        while not place.is_at_end(packed):
            places.append(place.copy())
            firsts.append(count)
            lines = place.read_on(packed)
            by_path.extend(_numbers(map(path_in, lines), count))
            by_digest.extend(_numbers((line[:_DIGEST_BYTES] for line in lines), count))
            count += len(lines)
        return _Index(places, firsts, array("Q", sorted(by_path)), array("Q", sorted(by_digest)))


def _numbers(keys: Iterable[bytes], first: int) -> list[int]:
    return [(hash(key) & _HASH_MASK) << _NUMBER_BITS | number for number, key in enumerate(keys, first)]


@dataclass
class _Place:
    """A position in the compressed data.

    Attributes:
        position: Number of compressed bytes consumed.
        stream: Decompressor for what follows; None at the start of a gzip member.
        begun: The incomplete line at this position.
        unpacked: Number of decompressed bytes so far.
    """

    position: int = 0
    stream: zlib._Decompress | None = None
    begun: bytes = b""
    unpacked: int = 0

    def copy(self) -> _Place:
        """A copy of the position, from which reading can resume again."""
        stream = self.stream.copy() if self.stream is not None else None
        return _Place(self.position, stream, self.begun, self.unpacked)

    def is_at_end(self, packed: memoryview) -> bool:
        """Whether no more lines follow."""
        return self.stream is None and self.position >= len(packed)

    def read_on(self, packed: memoryview) -> list[bytes]:
        """Decompress the next piece and return the lines that end in it."""
        stream = self.stream or zlib.decompressobj(GZIP)
        piece = packed[self.position : self.position + _PACKED_AT_A_TIME]
        added = stream.decompress(piece, _UNPACKED_AT_A_TIME)
        if not (piece or added or stream.eof):
            raise EOFError("the list of files breaks off")
        self.position += len(piece) - len(stream.unused_data) - len(stream.unconsumed_tail)
        self.unpacked += len(added)
        if self.unpacked > inflation_limit(len(packed)):
            raise ValueError(f"its list of files is longer than {len(packed)} packed bytes of any writer are")
        plain = self.begun + added
        self.stream = None if stream.eof else stream
        if not self.is_at_end(packed):
            whole, newline, self.begun = plain.rpartition(b"\n")
            return (whole + newline).splitlines()
        self.begun = b""
        return plain.splitlines()
