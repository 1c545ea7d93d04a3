"""The manifest of a snapshot: its header, and where each of its bytes is stored (docs/snapshot-format.md, section 3).

A snapshot may have a hundred thousand files, so a manifest keeps each as its encoded line. A
snapshot that shares a file with the previous one reuses the line without parsing or encoding it
again.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dagster_ckpt.foreign import LARGEST_LONG
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import FileEntry, parse_line, quoted
from dagster_ckpt.snapshot.packed_lines import path_of_start
from dagster_ckpt.snapshot.segment import ObjectUse, Segment, merged_uses


def object_name(directory: str, reference: str) -> str:
    """Name in the space of a data object that the snapshot in `directory` refers to."""
    return posixpath.normpath(posixpath.join(directory, reference))


_Long = Annotated[int, Field(ge=-LARGEST_LONG, le=LARGEST_LONG)]


class SnapshotKind(StrEnum):
    """Who owns a snapshot: the system, or the user who requested it."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"


class SnapshotHeader(BaseModel):
    """Header of a snapshot.

    Attributes:
        snapshot_id: Unique id.
        stream_id: The stream.
        kind: Checkpoint or savepoint.
        number: Number of the attempt that took it.
        created_at_ms: When the attempt began, ms since the epoch.
        batch_id: The batch after which a restored query resumes.
        query_id: Id of the query.
        properties: Data for the caller; nothing in this package layer reads it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_id: str
    stream_id: str
    kind: SnapshotKind
    number: _Long | None
    created_at_ms: _Long
    batch_id: _Long
    query_id: str
    properties: dict[str, Any] = Field(default_factory=dict)


@dataclass
class Manifest:
    """Header and files of a snapshot.

    Attributes:
        header: The header.
        stable: Segments of files that the next snapshots will probably share, oldest first.
        rest: The other files.
    """

    header: SnapshotHeader
    stable: tuple[Segment, ...] = ()
    rest: Segment = field(default_factory=Segment)

    @classmethod
    def of(cls, header: SnapshotHeader, entries: Iterable[FileEntry]) -> Manifest:
        """A manifest of the given entries, none of them stable."""
        manifest = cls(header)
        for entry in entries:
            manifest.rest.add(entry)
        return manifest

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments."""
        return (*self.stable, self.rest)

    @property
    def uses(self) -> dict[str, ObjectUse]:
        """The data objects that it uses, relative to its directory."""
        return merged_uses(self.segments)

    @property
    def objects(self) -> frozenset[str]:
        """Names of the data objects that it refers to, relative to its directory."""
        return frozenset(name for segment in self.segments for name in segment.uses)

    def unusable_objects(self, space: FileIO, directory: str) -> list[str]:
        """Problems with its data objects, from one listing: missing ones and truncated ones.

        Args:
            space: Their space.
            directory: The snapshot's directory there.
        """
        uses = {object_name(directory, name): use for name, use in self.uses.items()}
        sizes = space.sizes(list(uses))
        problems = []
        for name, use in sorted(uses.items()):
            found = sizes.get(name)
            if found is None:
                problems.append(f"{space.url}/{name} is missing")
            elif found < use.length:
                problems.append(f"{space.url}/{name} has {found} bytes, {use.length} are needed")
        return problems

    @property
    def file_count(self) -> int:
        """Number of files."""
        return sum(segment.file_count for segment in self.segments)

    @property
    def full_bytes(self) -> int:
        """Number of bytes that a restore writes."""
        return sum(segment.full_bytes for segment in self.segments)

    @property
    def inline_length(self) -> int:
        """End offset of the last inlined file."""
        return max(segment.inline_length for segment in self.segments)

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files."""
        return chain.from_iterable(segment.files for segment in self.segments)

    @property
    def lines(self) -> Iterator[bytes]:
        """All files, as lines."""
        for segment in self.segments:
            yield from segment.lines

    def find(self, path: str, *, stable: bool = True) -> FileEntry | None:
        """The entry of a file. Files that are not `stable` are searched in a small set only."""
        line = self.find_line(path, stable=stable)
        return parse_line(line) if line is not None else None

    def find_line(self, path: str, *, stable: bool = True) -> bytes | None:
        """Like `find`, as a line."""
        begin = f"{quoted(path)},".encode()
        directory = path_of_start(begin).rpartition(b"/")[0]
        for segment in reversed(self.segments if stable else (self.rest,)):
            line = segment.find(begin, directory)
            if line is not None:
                return line
        return None
