"""Lines of a manifest that are kept packed, of which any one is found while few are unpacked.

A snapshot lists its files in the order of the one before. So whoever looks for its lines there goes through them once,
and a few neighbours at a time are all that has to be unpacked.
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

# zlib's way to ask for a gzip header.
GZIP = 31
_PACKED_AT_A_TIME = 128 * 1024
# A piece of any honest writer is shorter unpacked, so it is unpacked at once.
_UNPACKED_AT_A_TIME = 8 * 1024 * 1024
_PIECES_KEPT = 4
# Each piece was unpacked so often on the average: nobody goes through them in order.
_TOO_OFTEN = 16
_DIGEST_BYTES = AFTER_DIGEST - 1
_HASH_MASK = 0xFFFFFFFF
_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def unpacked(packed: bytes | memoryview) -> Iterator[list[bytes]]:
    """All lines, some thousands at a time.

    Raises:
        zlib.error: They are not packed with gzip.
        EOFError: They break off.
        ValueError: They are longer than those that a writer makes.
    """
    whole, place = memoryview(packed), _Place()
    while not place.is_at_end(whole):
        yield place.read_on(whole)


def path_in(line: bytes) -> bytes:
    """Path of a line as the line has it; cut off where it holds a quote, so it may be that of several."""
    return line.split(b'"', 4)[3]


def path_of_start(start: bytes) -> bytes:
    """The same, of what a line has after its digest."""
    return start.split(b'"', 2)[1]


class PackedLines:
    """Finds lines among packed ones. For several threads.

    Args:
        packed: The lines, packed with gzip.
    """

    def __init__(self, packed: bytes | memoryview) -> None:
        self._packed = memoryview(packed)
        self._lock = threading.Lock()
        self._index: _Index | None = None
        self._pieces: OrderedDict[int, list[bytes]] = OrderedDict()
        self._pieces_unpacked = 0

    def find(self, start: bytes) -> bytes | None:
        """The line that goes on so after its digest.

        Args:
            start: At least the whole path.
        """
        with self._lock:
            return self._first(self._looked_through.by_path, path_of_start(start), start, AFTER_DIGEST)

    def with_digest(self, digest: str) -> bytes | None:
        """A line of a file with this content."""
        start = f'["{digest}"'.encode()
        with self._lock:
            return self._first(self._looked_through.by_digest, start, start, 0)

    def moved_to(self, packed: bytes | memoryview) -> None:
        """Use the same bytes at another place from now on, and forget what was unpacked."""
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
    """Where each line is.

    Attributes:
        places: Where each piece begins.
        firsts: Number of the first line of each.
        by_path: Hash and number of each line, in order, by its path; a dict would be ten times as large.
        by_digest: The same, by its digest.
    """

    places: list[_Place]
    firsts: list[int]
    by_path: array[int]
    by_digest: array[int]

    @staticmethod
    def of(packed: memoryview) -> _Index:
        """Look through packed lines."""
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
    """How far lines are unpacked.

    Attributes:
        position: So many packed bytes.
        stream: What unpacks the next; None where a member of gzip begins.
        begun: The line that broke off there.
        unpacked: So many bytes came of those.
    """

    position: int = 0
    stream: zlib._Decompress | None = None
    begun: bytes = b""
    unpacked: int = 0

    def copy(self) -> _Place:
        """The same place, to go on from once more."""
        stream = self.stream.copy() if self.stream is not None else None
        return _Place(self.position, stream, self.begun, self.unpacked)

    def is_at_end(self, packed: memoryview) -> bool:
        """Whether no line follows."""
        return self.stream is None and self.position >= len(packed)

    def read_on(self, packed: memoryview) -> list[bytes]:
        """The lines that end in the next piece."""
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
