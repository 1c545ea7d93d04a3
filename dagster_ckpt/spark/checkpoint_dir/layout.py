"""Spark's live checkpoint directory: its location, its parts, and the files that a restore needs.

Names follow Spark 4.3's `StreamingCheckpointConstants` and `StateStore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from dagster_ckpt.io.file_io import FileIO, FileVersion
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.snapshot.reuse import ContentCheck
from dagster_ckpt.spark.checkpoint_dir.checksums import HadoopCheck, check_of
from dagster_ckpt.values.safe_parsing import number_in
from dagster_ckpt.values.storage_path import local_path

METADATA = "metadata"
OFFSETS = "offsets"
COMMITS = "commits"
SOURCES = "sources"
STATE = "state"
DEFAULT_STORE = "default"
BEFORE_THE_FIRST_BATCH = -1
_OF_SPARK = (METADATA, OFFSETS, COMMITS, SOURCES, STATE)
# Marks a directory built for a fork or an import, in which no stream has started yet.
NOT_IN_USE = "not-in-use"
# The marker and the entry of a fence begin with these (see `planned_batches.py`).
FENCE_MARK = "fenced-at-"
FENCE_HEADER = b"dagster_ckpt fence 1\n"

# Up to these limits, files of a cut are read at once.
HELD_IN_MEMORY_BYTES = 32 * 1024 * 1024
HELD_IN_MEMORY_FILES = 5_000
READ_WHOLE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Positions:
    """The newest batch of each log; `offset` is in flight if greater than `commit`."""

    commit: int | None
    offset: int | None


@dataclass(frozen=True)
class LiveDirectory:
    """A `checkpointLocation`: a URL of a file system that both Spark and fsspec support, or a local path."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def folder(self) -> FileIO:
        return open_file_io(self.url, self.storage_options)

    @property
    def local_path(self) -> Path | None:
        return local_path(self.url)

    @property
    def spark_location(self) -> str:
        """The URL, with a scheme even for a local path: Spark's default file system may be HDFS."""
        path = self.local_path
        return self.url.rstrip("/") if path is None else f"file://{path}"

    def exists(self) -> bool:
        return self.folder.exists()

    def is_not_in_use(self) -> bool:
        return NOT_IN_USE in self.folder.list()

    def note_in_use(self) -> None:
        self.folder.delete(NOT_IN_USE)

    def delete(self) -> None:
        """Delete the directory, if it exists.

        The not-in-use mark goes last: without it, the rest of a killed deletion would count as in use.
        """
        path = self.local_path
        # Of a link, only the link itself is deleted.
        marked = {} if path is not None and path.is_symlink() else self.folder.list(hidden=True)
        if NOT_IN_USE in marked:
            for name, entry in marked.items():
                if entry.is_directory:
                    self.sibling(f"/{name}").folder.delete_all()
                elif name != NOT_IN_USE:
                    self.folder.delete(name)
        self.folder.delete_all()

    def positions(self) -> Positions:
        # In this order, a batch that commits in between counts as in flight.
        commits = batch_ids(self.folder, COMMITS)
        offsets = batch_ids(self.folder, OFFSETS)
        return Positions(max(commits, default=None), max(offsets, default=None))

    def fenced_at(self) -> int | None:
        return fenced_at(self.folder)

    def sibling(self, suffix: str) -> LiveDirectory:
        return LiveDirectory(self.url.rstrip("/") + suffix, self.storage_options)


def batch_ids(folder: FileIO, log: str) -> list[int]:
    """List the batches of a log, ascending, without unfinished files and fences."""
    names = folder.listing(log).names
    numbers = _numbers(names)
    return [batch for batch in numbers if not _is_fenced(folder, batch, names)] if log == OFFSETS else numbers


def fenced_at(folder: FileIO) -> int | None:
    names = folder.listing(OFFSETS).names
    return next((batch for batch in reversed(_numbers(names)) if _is_fenced(folder, batch, names)), None)


def _numbers(names: Set[str]) -> list[int]:
    return sorted(number for name in names if (number := number_in(name)) is not None)


def _is_fenced(folder: FileIO, batch: int, names: Set[str]) -> bool:
    if f"{FENCE_MARK}{batch}" not in names:
        return False
    try:
        data = folder.read(f"{OFFSETS}/{batch}", len(FENCE_HEADER))
    except FileNotFoundError:
        return False
    # A partial fence counts: Spark's entries appear atomically and begin differently.
    return FENCE_HEADER.startswith(data)


def store_directory(operator: int, partition: int, store: str) -> str:
    path = f"{STATE}/{operator}/{partition}"
    return path if store == DEFAULT_STORE else f"{path}/{store}"


@dataclass(slots=True)
class NeededFile:
    """One file of a cut, and a `Source` of a snapshot.

    Attributes:
        source: Its path in `folder`; `path` is that in the snapshot.
    """

    folder: FileIO
    source: str
    path: str
    size: int
    token: str | None = None
    identity: str | None = None
    data: bytes | None = None
    stable: bool = False

    @property
    def version(self) -> FileVersion:
        return FileVersion(self.size, self.token)

    def open(self) -> BinaryIO:
        return self.folder.open(self.source) if self.data is None else BytesIO(self.data)

    def read(self) -> bytes:
        """Return the content, which is longer than `size` if the file has grown."""
        return self.folder.read(self.source, self.size + 1) if self.data is None else self.data

    def check(self) -> ContentCheck | None:
        own = check_of(self.path, self.size, self.open)
        is_in_place = self.data is not None and isinstance(self.folder, LocalFileIO)
        if own is not None or not is_in_place or self.path.partition("/")[0] not in _OF_SPARK:
            return own
        return HadoopCheck(self.folder, self.source)


def read_versioned(folder: FileIO, path: str) -> NeededFile:
    # The version is never newer than the content: a replaced file counts as changed.
    data, version = folder.read_version(path)
    return NeededFile(folder, path, path, len(data), version.token, data=data)


def read_needed(folder: FileIO, path: str) -> NeededFile:
    data = folder.read(path)
    return NeededFile(folder, path, path, len(data), data=data)
