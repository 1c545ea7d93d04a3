"""The files of a snapshot, listed in compressed blocks (docs/snapshot-format.md, sections 2.1 and 3).

A block is encoded once: later snapshots that still have all its files contain the same bytes. A hundred thousand files
take 45 MB as `FileEntry` objects and 6 MB as blocks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec

from dagster_ckpt.errors import LiveDirectoryError, SnapshotTooLargeError
from dagster_ckpt.values.safe_parsing import LARGEST_LONG

# These bound the memory of a reader for any input.
BLOCK_FILES = 1024
BLOCK_BYTES = 1024 * 1024
# At most 0.6 MB each. Lookups in the order of paths need one of each snapshot that contributed blocks.
_DECODED_BLOCKS = 16
# Digests hardly compress; level 1 takes a third of the time of 6.
_COMPRESSION_LEVEL = 1
_GZIP = 31
_REFERENCE = re.compile(r"(\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*")
_PLAIN_PATH = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+")
_PATH_BYTES = 4096
_NAME_BYTES = 255

_Length = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_LONG)]


class FileEntry(NamedTuple):
    """One file of a snapshot.

    Attributes:
        digest: BLAKE3 of its content.
        object: Its data object, relative to the snapshot's directory; None: the metadata.
    """

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    path: str
    size: _Length
    identity: str | None
    token: str | None
    object: str | None
    offset: _Length


class ObjectUse(NamedTuple):
    """What a snapshot needs of a data object: its least `length`, and bytes `used` by files."""

    length: int = 0
    used: int = 0


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(FileEntry)
_path_of = attrgetter("path")


@dataclass(frozen=True)
class Block:
    """Some files of a snapshot, in the order of their paths; `packed` is JSON lines in gzip.

    Attributes:
        stable: Whether the next snapshot will probably contain all of them.
    """

    packed: bytes
    stable: bool
    first: str
    last: str
    file_count: int
    full_bytes: int
    inline_length: int
    uses: Mapping[str, ObjectUse]

    @classmethod
    def read(cls, packed: bytes, *, stable: bool) -> Block:
        """Read a block; ValueError if it is damaged or an entry is invalid (sections 3.2 to 3.4)."""
        entries = _decoded(packed)
        if not entries:
            raise ValueError("a block of its list of files is empty")
        for path in entries:
            _check_path(path)
        if list(entries) != sorted(entries):
            raise ValueError("a block of its list of files is not in the order of the paths")
        block = cls._of(packed, list(entries.values()), stable=stable)
        wrong = [name for name in block.uses if not is_reference(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a data object of a snapshot")
        if max([block.inline_length, *(use.length for use in block.uses.values())]) > LARGEST_LONG:
            raise ValueError("a file ends at an offset that no file has")
        return block

    @classmethod
    def pack(cls, entries: Iterable[FileEntry], *, stable: bool) -> Iterator[Block]:
        in_order = sorted(entries, key=_path_of)
        for first in range(0, len(in_order), BLOCK_FILES):
            yield from cls._pack(in_order[first : first + BLOCK_FILES], stable=stable)

    @classmethod
    def _pack(cls, entries: Sequence[FileEntry], *, stable: bool) -> Iterator[Block]:
        try:
            lines = _encoder.encode_lines(entries)
        except UnicodeEncodeError as error:
            raise LiveDirectoryError(
                f"A file of the live directory has the name {error.object!r}, which is not UTF-8. Rename it, or delete "
                "it if the query does not need it."
            ) from error
        if len(lines) <= BLOCK_BYTES:
            yield cls._of(zlib.compress(lines, _COMPRESSION_LEVEL, _GZIP), entries, stable=stable)
            return
        if len(entries) == 1:
            raise SnapshotTooLargeError(
                f"The entry of {entries[0].path[:120]} has {len(lines)} bytes; a snapshot takes at most {BLOCK_BYTES} "
                "for one file. Use a storage whose entity tags are shorter."
            )
        middle = len(entries) // 2
        for part in (entries[:middle], entries[middle:]):
            yield from cls._pack(part, stable=stable)

    @classmethod
    def _of(cls, packed: bytes, entries: Sequence[FileEntry], *, stable: bool) -> Block:
        lengths: dict[str | None, int] = {}
        used: dict[str | None, int] = {}
        for _, _, size, _, _, name, offset in entries:
            lengths[name] = max(lengths.get(name, 0), offset + size)
            used[name] = used.get(name, 0) + size
        return cls(
            packed,
            stable,
            entries[0].path,
            entries[-1].path,
            file_count=len(entries),
            full_bytes=sum(used.values()),
            inline_length=lengths.get(None, 0),
            uses={name: ObjectUse(lengths[name], used[name]) for name in lengths if name is not None},
        )

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        return _decoded(self.packed)


@lru_cache(_DECODED_BLOCKS)
def _decoded(packed: bytes) -> Mapping[str, FileEntry]:
    stream = zlib.decompressobj(_GZIP)
    lines = stream.decompress(packed, BLOCK_BYTES + 1)
    if len(lines) > BLOCK_BYTES:
        raise ValueError(f"a block of its list of files has more than {BLOCK_BYTES} bytes")
    if not stream.eof or stream.unused_data:
        raise ValueError("a block of its list of files does not end where it should")
    count = lines.count(b"\n")
    if count > BLOCK_FILES or (lines and not lines.endswith(b"\n")):
        raise ValueError(f"a block of its list of files has {count} lines, or an incomplete one")
    entries = {entry.path: entry for entry in _decoder.decode_lines(lines)}
    if len(entries) != count:
        raise ValueError("two files of the snapshot have the same path, or a line is not one file")
    return entries


class BlockBuilder:
    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._pending: dict[bool, list[FileEntry]] = {True: [], False: []}

    def add(self, entry: FileEntry, *, stable: bool) -> None:
        """Add an entry; lookups are fastest if paths come in order."""
        pending = self._pending[stable]
        pending.append(entry)
        if len(pending) == BLOCK_FILES:
            self._blocks += Block.pack(pending, stable=stable)
            pending.clear()

    def add_all(self, other: BlockBuilder) -> None:
        self._blocks += other._blocks
        for stable, pending in other._pending.items():
            for entry in pending:
                self.add(entry, stable=stable)

    def finish(self) -> list[Block]:
        for stable, pending in self._pending.items():
            self._blocks += Block.pack(pending, stable=stable)
            pending.clear()
        return self._blocks


class Paths:
    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, paths: Collection[str]) -> None:
        """Add paths; ValueError if two are the same, or one lies in another."""
        if not self._files.isdisjoint(paths):
            raise ValueError("two files of the snapshot have the same path")
        self._files.update(paths)
        found: set[str] = set()
        folders = {path.rpartition("/")[0] for path in paths} - self._folders
        while folders:
            found |= folders
            folders = {folder.rpartition("/")[0] for folder in folders} - self._folders - found
        self._folders |= found
        if not self._folders.isdisjoint(paths) or not self._files.isdisjoint(found):
            raise ValueError("a file of the snapshot lies in another file")


def _check_path(path: str) -> None:
    """Raise ValueError for a path that a restore could not write below its directory (section 3.2)."""
    if _PLAIN_PATH.fullmatch(path) is None:
        raise ValueError(f"{path[:120]!r} is not a plain relative path")
    if path.isascii() and len(path) <= _NAME_BYTES:
        return
    encoded = path.encode()
    if len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > _NAME_BYTES:
        raise ValueError(f"{path[:120]!r}... is longer than a file system takes")


def is_reference(reference: str) -> bool:
    """Whether it names an object in the snapshot's directory or the stream's shared folder (section 3.3)."""
    return _REFERENCE.fullmatch(reference) is not None


def merge_uses(blocks: Iterable[Block]) -> dict[str, ObjectUse]:
    merged: dict[str, ObjectUse] = {}
    for block in blocks:
        for name, use in block.uses.items():
            length, used = merged.get(name, ObjectUse())
            merged[name] = ObjectUse(max(length, use.length), used + use.used)
    return merged
