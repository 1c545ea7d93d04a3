"""The manifest of an image: what it is, and where each of its bytes lies (docs/image-format.md, section 3).

An image may have a hundred thousand files. So a manifest keeps each as the line of text it has in the container, and
an image that shares a file with the one before it shares the line: neither is parsed nor built anew.
"""

from __future__ import annotations

import gzip
import json
import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

_REFERENCE = re.compile(r"(\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*")
_DIGEST = re.compile("[0-9a-f]{64}")
# What nearly every line looks like; any other is read slowly and checked in full.
_SEGMENT = rb'(?!\.{1,2}[/"])[^"/\\\0-\x1f]+'
_TEXT = rb'(?:null|"([^"\\\0-\x1f]*)")'
_PLAIN_LINE = re.compile(
    rb'\["[0-9a-f]{64}","((?:'
    + _SEGMENT
    + rb"/)*"
    + _SEGMENT
    + rb')",([0-9]{1,18}),'
    + _TEXT
    + rb","
    + _TEXT
    + rb',(?:null|"((?:\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*)"),([0-9]{1,18})\]'
)
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
# zlib's way to ask for a gzip header.
_GZIP = 31
_LINES_AT_A_TIME = 2_000
# Lines of a segment of more files are kept packed only, and unpacked where they are looked at.
_LARGE = 20_000
# A line begins with the digest, which is of fixed length: `["<64>",`.
_AFTER_DIGEST = 68


class ImageKind(StrEnum):
    """Who owns an image: the system, or the person who asked for it."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"


class ImageHeader(BaseModel):
    """What an image says of itself.

    Attributes:
        image_id: Unique id.
        job_id: The streaming job it was taken of.
        kind: Checkpoint or savepoint.
        number: Number of the attempt that took it.
        created_at_ms: When it was begun, ms since the epoch.
        batch_id: The batch after which a restored query resumes.
        query_id: Id of the query.
        properties: What those who took it want to find again; nothing here reads them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_id: str
    job_id: str
    kind: ImageKind
    number: int | None
    created_at_ms: int
    batch_id: int
    query_id: str
    properties: dict[str, Any] = Field(default_factory=dict)


class FileEntry(NamedTuple):
    """One file of an image.

    Attributes:
        digest: BLAKE3 of its content, hexadecimal.
        path: Its name.
        size: Its length in bytes.
        identity: See `Source.identity`.
        token: See `Source.token`.
        object: The data object it lies in, relative to the image's directory; None: in the metadata itself.
        offset: Where it begins there.
    """

    digest: str
    path: str
    size: int
    identity: str | None
    token: str | None
    object: str | None
    offset: int

    def line(self) -> bytes:
        """The entry as a line of the manifest."""
        names = f"{_quoted(self.path)},{self.size},{_quoted_or_null(self.identity)},{_quoted_or_null(self.token)}"
        return f'["{self.digest}",{names},{_quoted_or_null(self.object)},{self.offset}]'.encode()


@dataclass(slots=True)
class ObjectUse:
    """How an image uses a data object.

    Attributes:
        length: The object must have at least so many bytes.
        used: Bytes of it that belong to files of the image.
    """

    length: int = 0
    used: int = 0


@dataclass(eq=False)
class Segment:
    """Files of an image that are kept together.

    Attributes:
        uses: The data objects they lie in, relative to the image's directory.
        file_count: How many they are.
        full_bytes: Their bytes.
        inline_length: Where the last of those ends that lie in the metadata itself.
    """

    uses: dict[str, ObjectUse] = field(default_factory=dict)
    file_count: int = 0
    full_bytes: int = 0
    inline_length: int = 0
    # By directory, so that a directory is found at once. None while only the packed lines are kept.
    _lines: dict[str, list[bytes]] | None = field(default_factory=dict, repr=False, compare=False)
    _packed: bytes | memoryview | None = field(default=None, repr=False, compare=False)

    @classmethod
    def read(cls, packed: bytes) -> Segment:
        """A segment of its packed lines, each checked.

        Raises:
            ValueError: A line is none that a writer of this format makes.
            OSError: It is not packed with gzip.
        """
        segment = cls()
        is_ours = True
        for line in gzip.decompress(packed).splitlines():
            plain = _PLAIN_LINE.fullmatch(line)
            if plain is not None:
                path, size, _, _, reference, offset = plain.groups()
                place = None if reference is None else reference.decode()
                segment.add_line(path.decode(), int(size), place, int(offset), line)
            else:
                entry = parse_line(line)
                segment.add(entry)
                is_ours = is_ours and entry.line() == line
        # Another program may write the same values in other words: those lines are packed anew, as ours.
        segment._packed = packed if is_ours else None
        return segment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and list(self.lines) == list(other.lines)

    __hash__ = None  # type: ignore[assignment]  # it grows

    @property
    def lines(self) -> Iterator[bytes]:
        """Its files as lines, in the order they were added."""
        for lines in self._by_directory.values():
            yield from lines

    @property
    def _by_directory(self) -> dict[str, list[bytes]]:
        lines = self._lines
        if lines is None:
            # Lines that were checked when they were made or read. Images written at the same time share segments, so
            # nobody may see half of them.
            lines = {}
            for line in gzip.decompress(self._packed or b"").splitlines():
                directory = str(json.loads(_quoted_path(line))).rpartition("/")[0]
                lines.setdefault(directory, []).append(line)
            self._lines = lines
        return lines

    @property
    def files(self) -> Iterator[FileEntry]:
        """Its files."""
        # Lines are checked when they are read, or our own.
        return map(_entry_of, self.lines)

    def pack_into(self, write: Callable[[bytes | memoryview], object]) -> None:
        """Write its lines, packed with gzip; those of a segment that an earlier image had were packed then."""
        if self._packed is not None:
            write(self._packed)
            return
        # Most of it are digests, which no level shrinks; level 1 takes a third of the time.
        packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        for some in _batched(self._by_directory, empty_it=self._is_large):
            write(packer.compress(some))
        write(packer.flush())

    def remember_packed(self, packed: memoryview) -> None:
        """Keep the packed lines for the images that will have the segment too; of a large one nothing else."""
        self._packed = packed
        if self._is_large:
            self._lines = None

    @property
    def _is_large(self) -> bool:
        return self.file_count > _LARGE

    def add(self, entry: FileEntry) -> None:
        """Add a file."""
        self.add_line(entry.path, entry.size, entry.object, entry.offset, entry.line())

    def add_line(self, path: str, size: int, reference: str | None, offset: int, line: bytes) -> None:
        """Add a file whose line exists already."""
        self._packed = None
        self._by_directory.setdefault(path.rpartition("/")[0], []).append(line)
        self.file_count += 1
        self.full_bytes += size
        end = offset + size
        if reference is None:
            self.inline_length = max(self.inline_length, end)
            return
        use = self.uses.get(reference)
        if use is None:
            use = self.uses[reference] = ObjectUse()
        use.used += size
        use.length = max(use.length, end)

    def find(self, start: bytes, directory: str) -> bytes | None:
        """The line in a directory that begins so after its digest."""
        for line in self._by_directory.get(directory, ()):
            if line.startswith(start, _AFTER_DIGEST):
                return line
        return None

    def paths(self) -> Iterator[bytes]:
        """The paths as the lines have them."""
        return map(_quoted_path, self.lines)


@dataclass
class Manifest:
    """Header and files of an image.

    Attributes:
        header: What the image says of itself.
        stable: Segments of the files that the next images will most likely have too, oldest first.
        rest: The other files.
    """

    header: ImageHeader
    stable: tuple[Segment, ...] = ()
    rest: Segment = field(default_factory=Segment)

    @classmethod
    def of(cls, header: ImageHeader, entries: Iterable[FileEntry]) -> Manifest:
        """A manifest of entries, none of them stable."""
        manifest = cls(header)
        for entry in entries:
            manifest.rest.add(entry)
        return manifest

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All its segments."""
        return (*self.stable, self.rest)

    @property
    def uses(self) -> dict[str, ObjectUse]:
        """The data objects it refers to, relative to its directory."""
        return merged_uses(self.segments)

    @property
    def objects(self) -> frozenset[str]:
        """Names of the data objects it refers to, relative to its directory."""
        return frozenset(name for segment in self.segments for name in segment.uses)

    @property
    def file_count(self) -> int:
        """Number of its files."""
        return sum(segment.file_count for segment in self.segments)

    @property
    def full_bytes(self) -> int:
        """Bytes that a restore writes."""
        return sum(segment.full_bytes for segment in self.segments)

    @property
    def inline_length(self) -> int:
        """Where the last of those files ends that lie in the metadata itself."""
        return max(segment.inline_length for segment in self.segments)

    @property
    def files(self) -> Iterator[FileEntry]:
        """Its files."""
        return chain.from_iterable(segment.files for segment in self.segments)

    @property
    def lines(self) -> Iterator[bytes]:
        """Its files as lines."""
        for segment in self.segments:
            yield from segment.lines

    def check(self) -> None:
        """Refuse two files of one path.

        Raises:
            ValueError: There are two.
        """
        if len({path for segment in self.segments for path in segment.paths()}) < self.file_count:
            raise ValueError("two files of the image have the same path")

    def find(self, path: str) -> FileEntry | None:
        """The entry of a file."""
        line = self._find(f"{_quoted(path)},", path)
        return parse_line(line) if line is not None else None

    def find_unchanged(self, path: str, size: int, identity: str | None, token: str | None) -> bytes | None:
        """The line of a file that is the same for certain, by its path, size, identity and token."""
        return self._find(f"{_quoted(path)},{size},{_quoted_or_null(identity)},{_quoted_or_null(token)},", path)

    def _find(self, start: str, path: str) -> bytes | None:
        directory = path.rpartition("/")[0]
        begin = start.encode()
        for segment in reversed(self.segments):
            line = segment.find(begin, directory)
            if line is not None:
                return line
        return None


def _batched(groups: dict[str, list[bytes]], *, empty_it: bool) -> Iterator[bytes]:
    """Lines, some thousands at a time; taken out as they are given where so much memory counts."""
    some: list[bytes] = []
    for directory in list(groups):
        some += groups.pop(directory) if empty_it else groups[directory]
        if len(some) > _LINES_AT_A_TIME:
            yield b"\n".join([*some, b""])
            some.clear()
    if some:
        yield b"\n".join([*some, b""])


def merged_uses(segments: Iterable[Segment]) -> dict[str, ObjectUse]:
    """How segments together use data objects."""
    merged: dict[str, ObjectUse] = {}
    for segment in segments:
        for name, use in segment.uses.items():
            known = merged.setdefault(name, ObjectUse())
            known.used += use.used
            known.length = max(known.length, use.length)
    return merged


def parse_line(line: bytes) -> FileEntry:
    """Read one line of a manifest.

    Raises:
        ValueError: It is none that a writer of this format makes (section 3.2 to 3.4).
    """
    values = json.loads(line)
    if not isinstance(values, list) or len(values) != len(FileEntry._fields):
        raise ValueError(f"{line[:120]!r} is not an entry of a file")
    entry = FileEntry(*values)
    check_entry(entry)
    return entry


def _entry_of(line: bytes) -> FileEntry:
    plain = _PLAIN_LINE.fullmatch(line)
    if plain is None:
        return FileEntry(*json.loads(line))
    path, size, identity, token, reference, offset = plain.groups()
    return FileEntry(
        line[2:66].decode(), path.decode(), int(size), _text(identity), _text(token), _text(reference), int(offset)
    )


def _text(found: bytes | None) -> str | None:
    return None if found is None else found.decode()


def check_entry(entry: FileEntry) -> None:
    """Refuse an entry that no writer of this format makes, before it does harm.

    Raises:
        ValueError: A restore would write outside its directory, or read from another place.
    """
    path, reference = entry.path, entry.object
    if not isinstance(path, str) or posixpath.normpath(path) != path or path.startswith(("/", "../")):
        raise ValueError(f"{path!r} is not a plain relative path")
    if path in (".", "..") or "\0" in path:
        raise ValueError(f"{path!r} is not a plain relative path")
    if not all(isinstance(number, int) and number >= 0 for number in (entry.size, entry.offset)):
        raise ValueError(f"{path} has size {entry.size!r} and offset {entry.offset!r}")
    if not isinstance(entry.digest, str) or not _DIGEST.fullmatch(entry.digest):
        raise ValueError(f"{path} has the digest {entry.digest!r}")
    if reference is not None and not is_reference(reference):
        raise ValueError(f"{path} lies in {reference!r}, which is no data object of an image")


def is_reference(reference: object) -> bool:
    """Whether a name is beside the manifest, or in the folder that the checkpoints of a job share (section 3.3)."""
    return isinstance(reference, str) and _REFERENCE.fullmatch(reference) is not None


def place_of(line: bytes) -> tuple[str | None, int]:
    """Data object and offset of a line, without reading all of it."""
    _, reference, offset = line.rsplit(b",", 2)
    return None if reference == b"null" else reference[1:-1].decode(), int(offset[:-1])


def _quoted_path(line: bytes) -> bytes:
    """The path of one of our lines, in its quotes."""
    found = _QUOTED.match(line, _AFTER_DIGEST)
    if found is None:
        raise ValueError(f"{line[:120]!r} is not an entry of a file")
    return found[0]


def _quoted(text: str) -> str:
    # Spark's names need no escapes; for others the detour through JSON is right and slower.
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else json.dumps(text)


def _quoted_or_null(text: str | None) -> str:
    return "null" if text is None else _quoted(text)
