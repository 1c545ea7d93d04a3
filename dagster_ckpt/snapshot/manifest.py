"""The manifest of a snapshot: its header and its files (docs/snapshot-format.md, section 3)."""

from __future__ import annotations

import posixpath
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import Block, FileEntry, ObjectUse, merge_uses
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.untrusted import LARGEST_LONG

_last_of = attrgetter("last")


def object_name(directory: str, reference: str) -> str:
    """Name in the parent folder of a data object that the snapshot in `directory` refers to."""
    return posixpath.normpath(posixpath.join(directory, reference))


_Long = Annotated[int, Field(ge=-LARGEST_LONG, le=LARGEST_LONG)]


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


@dataclass(frozen=True)
class Manifest:
    """Header and files of a snapshot.

    Attributes:
        header: The header.
        blocks: The files, the oldest blocks first.
    """

    header: SnapshotHeader
    blocks: tuple[Block, ...] = ()

    @property
    def stable_blocks(self) -> tuple[Block, ...]:
        """Blocks of files that the next snapshot will probably contain too."""
        return tuple(block for block in self.blocks if block.stable)

    @property
    def other_blocks(self) -> tuple[Block, ...]:
        """The other blocks."""
        return tuple(block for block in self.blocks if not block.stable)

    @property
    def uses(self) -> dict[str, ObjectUse]:
        """The data objects that it uses, relative to its directory."""
        return merge_uses(self.blocks)

    @property
    def objects(self) -> frozenset[str]:
        """Names of the data objects that it refers to, relative to its directory."""
        return frozenset(name for block in self.blocks for name in block.uses)

    def unusable_objects(self, file_io: FileIO, directory: str) -> list[str]:
        """Problems with its data objects, from one listing: missing ones and truncated ones.

        Args:
            file_io: The parent folder of the snapshot.
            directory: The snapshot's directory there.
        """
        uses = {object_name(directory, name): use for name, use in self.uses.items()}
        sizes = file_io.sizes(list(uses))
        problems = []
        for name, use in sorted(uses.items()):
            found = sizes.get(name)
            if found is None:
                problems.append(f"{file_io.url}/{name} is missing")
            elif found < use.length:
                problems.append(f"{file_io.url}/{name} has {found} bytes, {use.length} are needed")
        return problems

    @property
    def file_count(self) -> int:
        """Number of files."""
        return sum(block.file_count for block in self.blocks)

    @property
    def full_bytes(self) -> int:
        """Number of bytes that a restore writes."""
        return sum(block.full_bytes for block in self.blocks)

    @property
    def inline_length(self) -> int:
        """End offset of the last inlined file."""
        return max((block.inline_length for block in self.blocks), default=0)

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files."""
        for block in self.blocks:
            yield from block.entries.values()

    def find(self, path: str, *, stable: bool = True) -> FileEntry | None:
        """The entry of a file.

        Args:
            path: Its path.
            stable: Search the stable files too, not only the others, which are few.
        """
        for run in self._other_runs + (self._stable_runs if stable else []):
            at = bisect_left(run, path, key=_last_of)
            entry = run[at].entries.get(path) if at < len(run) and run[at].first <= path else None
            if entry is not None:
                return entry
        return None

    @cached_property
    def _stable_runs(self) -> list[list[Block]]:
        return _runs(self.stable_blocks)

    @cached_property
    def _other_runs(self) -> list[list[Block]]:
        return _runs(self.other_blocks)


def _runs(blocks: Iterable[Block]) -> list[list[Block]]:
    """Group blocks into runs of ascending paths, newest first: a path is in at most one block of each."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and runs[-1][-1].last < block.first:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs[::-1]
