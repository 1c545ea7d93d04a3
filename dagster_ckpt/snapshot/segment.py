"""Segments: groups of files that consecutive snapshots share, as manifest lines or as compressed lines.

Consecutive snapshots share segments, so the lines of a segment are compressed only once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from mmap import MAP_PRIVATE, mmap
from operator import attrgetter

from dagster_ckpt.snapshot.entries import AFTER_DIGEST, FileEntry, Paths, parse_line, plain_entries, read_entries
from dagster_ckpt.snapshot.packed_lines import GZIP, PackedLines, path_in, unpacked

_object_of = attrgetter("object")
_LINES_AT_A_TIME = 2_000
# Larger segments keep only their compressed lines, which are decompressed on access.
_LARGE = 20_000


@dataclass(slots=True)
class ObjectUse:
    """How a snapshot uses a data object.

    Attributes:
        length: The object must have at least this many bytes.
        used: Number of its bytes that belong to files of the snapshot.
    """

    length: int = 0
    used: int = 0


class _Packer:
    """Compresses lines incrementally, so that at most a few thousand lines of a large segment are in memory."""

    def __init__(self) -> None:
        # Most of a line is its digest, which does not compress; level 1 takes a third of the time.
        self._packer = zlib.compressobj(1, zlib.DEFLATED, GZIP)
        self._waiting: list[bytes] = []
        # Anonymous memory maps, which are returned to the system when they are consumed: heap
        # memory for this many pieces would stay with the process.
        self._packed: deque[mmap] = deque()

    def add(self, lines: Iterable[bytes]) -> None:
        self._waiting += lines
        if len(self._waiting) >= _LINES_AT_A_TIME:
            self._pack()

    def take(self) -> Iterator[bytes]:
        """Yield everything that was added, compressed, piece by piece, and forget it."""
        self._pack()
        while self._packed:
            with self._packed.popleft() as piece:
                yield piece[:]
        yield self._packer.flush()

    def _pack(self) -> None:
        packed = self._packer.compress(b"\n".join([*self._waiting, b""])) if self._waiting else b""
        self._waiting.clear()
        if packed:
            piece = mmap(-1, len(packed), flags=MAP_PRIVATE)
            piece.write(packed)
            self._packed.append(piece)


@dataclass(eq=False)
class Segment:
    """A group of files of a snapshot.

    Attributes:
        uses: The data objects that contain them, relative to the snapshot's directory.
        file_count: Number of files.
        full_bytes: Total size.
        inline_length: End offset of the last inlined file.
    """

    uses: dict[str, ObjectUse] = field(default_factory=dict)
    file_count: int = 0
    full_bytes: int = 0
    inline_length: int = 0
    # None if only the compressed lines are kept.
    _lines: list[bytes] | None = field(default_factory=list, repr=False)
    # The lines by directory, for fast lookups; built on the first lookup.
    _directories: dict[bytes, list[bytes]] | None = field(default=None, repr=False)
    # Finds lines when only the compressed lines are kept.
    _finder: PackedLines | None = field(default=None, repr=False)
    # Compressor of a large segment that still grows.
    _packer: _Packer | None = field(default=None, repr=False)
    _packed: bytes | memoryview | None = field(default=None, repr=False)

    @classmethod
    def read(cls, packed: bytes, paths: Paths) -> Segment:
        """Parse and validate the compressed lines of a segment.

        Args:
            packed: The compressed lines.
            paths: Paths of the other segments of the snapshot; those of this one are added.

        Raises:
            ValueError: A line is invalid, or two paths conflict.
            zlib.error: The data is not gzip.
            EOFError: The data is truncated.
        """
        found: list[str] = []
        segment = cls._read_plain(packed, found)
        if segment is None:
            found.clear()
            segment = cls._read_any(packed, found)
        paths.add(found)
        return segment

    @classmethod
    def _read_plain(cls, packed: bytes, paths: list[str]) -> Segment | None:
        segment = cls()
        kept: list[bytes] = []
        for lines in unpacked(packed):
            entries = plain_entries(lines)
            if entries is None:
                return None
            segment._count_all(entries)
            paths += [entry.path for entry in entries]
            kept = [] if segment._is_large else kept + lines
        segment._lines = kept
        segment.remember_packed(packed)
        return segment

    @classmethod
    def _read_any(cls, packed: bytes, paths: list[str]) -> Segment:
        segment, is_ours = cls(), True
        for lines in unpacked(packed):
            for line in lines:
                entry = parse_line(line)
                segment.add(entry)
                paths.append(entry.path)
                is_ours = is_ours and entry.line() == line
        # Another program may have encoded the same values differently: such lines are encoded and
        # compressed again.
        if is_ours:
            segment.remember_packed(packed)
        return segment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and list(self.lines) == list(other.lines)

    __hash__ = None  # type: ignore[assignment]  # it grows

    @property
    def lines(self) -> Iterator[bytes]:
        """Its files, as lines."""
        for lines in self._batches():
            yield from lines

    @property
    def files(self) -> Iterator[FileEntry]:
        """Its files."""
        for lines in self._batches():
            yield from read_entries(lines)

    def pack_into(self, write: Callable[[bytes | memoryview], object]) -> None:
        """Write its lines, compressed with gzip; a segment of an earlier snapshot is already compressed.

        A large segment does not keep what it writes, so `remember_packed` must give it back.
        """
        if self._packed is not None:
            write(self._packed)
            return
        packer = self._packer
        if packer is None:
            packer = self._packed_so_far()
        for piece in packer.take():
            write(piece)

    def remember_packed(self, packed: bytes | memoryview) -> None:
        """Keep the compressed lines for later snapshots with this segment; a large segment keeps nothing else."""
        self._packed, self._packer = packed, None
        if self._is_large:
            self._lines = self._directories = None
            if self._finder is not None:
                self._finder.moved_to(packed)

    def add(self, entry: FileEntry) -> None:
        """Add a file."""
        self.add_line(entry.size, entry.object, entry.offset, entry.line())

    def add_all(self, entries: Sequence[FileEntry]) -> None:
        """Add many files at once, which is cheaper per file."""
        self._count_all(entries)
        self._add_lines([entry.line() for entry in entries])

    def add_line(self, size: int, reference: str | None, offset: int, line: bytes) -> None:
        """Add a file with an existing line."""
        self._count(size, reference, offset)
        self._add_lines([line])

    def _add_lines(self, lines: list[bytes]) -> None:
        if self._packer is not None:
            self._packer.add(lines)
            return
        if self._lines is None:
            self._lines = list(self.lines)
        self._lines += lines
        self._packed = self._directories = self._finder = None
        if self._is_large:
            self._packer, self._lines = self._packed_so_far(), None

    def find(self, start: bytes, directory: bytes) -> bytes | None:
        """The line of a file.

        Args:
            start: What follows its digest, at least the complete path.
            directory: The part of that path before its last slash.
        """
        if self.is_packed:
            return self._packed_lines.find(start)
        for line in self._by_directory.get(directory, ()):
            if line.startswith(start, AFTER_DIGEST):
                return line
        return None

    def with_digest(self, digest: str) -> bytes | None:
        """A line of a file with this content, if `is_packed`."""
        return self._packed_lines.with_digest(digest)

    @property
    def is_packed(self) -> bool:
        """Whether only the compressed lines are kept."""
        return self._lines is None

    @property
    def _packed_lines(self) -> PackedLines:
        self._settle()
        finder = self._finder
        if finder is None:
            # Snapshots that are written concurrently share segments; any of their finders gives the
            # same results.
            finder = self._finder = PackedLines(self._packed or b"")
        return finder

    @property
    def _is_large(self) -> bool:
        return self.file_count > _LARGE

    def _count_all(self, entries: Sequence[FileEntry]) -> None:
        """Count many entries at once; entries of one data object are mostly adjacent."""
        for reference, group in groupby(entries, key=_object_of):
            sizes, ends = zip(*((entry.size, entry.offset + entry.size) for entry in group), strict=True)
            self.file_count += len(sizes)
            self._use(reference, sum(sizes), max(ends))

    def _count(self, size: int, reference: str | None, offset: int) -> None:
        self.file_count += 1
        self._use(reference, size, offset + size)

    def _use(self, reference: str | None, size: int, end: int) -> None:
        self.full_bytes += size
        if reference is None:
            self.inline_length = max(self.inline_length, end)
            return
        use = self.uses.get(reference)
        if use is None:
            use = self.uses[reference] = ObjectUse()
        use.used += size
        use.length = max(use.length, end)

    @property
    def _by_directory(self) -> dict[bytes, list[bytes]]:
        directories = self._directories
        if directories is None:
            # Snapshots that are written concurrently share segments, so the index must appear
            # complete.
            directories = {}
            for lines in self._batches():
                for line in lines:
                    directories.setdefault(path_in(line).rpartition(b"/")[0], []).append(line)
            self._directories = directories
        return directories

    def _batches(self) -> Iterator[list[bytes]]:
        """Its lines, in batches of several thousand."""
        self._settle()
        if self._lines is None:
            yield from unpacked(self._packed or b"")
            return
        for begin in range(0, len(self._lines), _LINES_AT_A_TIME):
            yield self._lines[begin : begin + _LINES_AT_A_TIME]

    def _packed_so_far(self) -> _Packer:
        packer = _Packer()
        for lines in self._batches():
            packer.add(lines)
        return packer

    def _settle(self) -> None:
        if self._packer is not None:
            self._packed, self._packer = b"".join(self._packer.take()), None


def read_files(packed: bytes, paths: Paths) -> Iterator[list[FileEntry]]:
    """Like `Segment.read`, with the same validation, in batches of several thousand files; for a single pass."""
    for lines in unpacked(packed):
        entries = plain_entries(lines)
        if entries is None:
            entries = [parse_line(line) for line in lines]
        paths.add(entry.path for entry in entries)
        yield entries


def merged_uses(segments: Iterable[Segment]) -> dict[str, ObjectUse]:
    """Combined use of data objects by several segments."""
    merged: dict[str, ObjectUse] = {}
    for segment in segments:
        for name, use in segment.uses.items():
            known = merged.setdefault(name, ObjectUse())
            known.used += use.used
            known.length = max(known.length, use.length)
    return merged
