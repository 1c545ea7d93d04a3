"""Layout of Spark's live checkpoint directory: its location and the names of its parts.

Names follow Spark 4.3's `StreamingCheckpointConstants` and `StateStore`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster_ckpt.config.storage_path import local_path
from dagster_ckpt.foreign import number_in
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.fence import fenced_at, planned

METADATA = "metadata"
OFFSETS = "offsets"
COMMITS = "commits"
SOURCES = "sources"
STATE = "state"
DEFAULT_STORE = "default"
# Ours, and unknown to Spark: a fork or an import made the directory, and no query has started in it.
FORK_NOT_STARTED = "fork-not-started"


@dataclass(frozen=True)
class Positions:
    """Positions of a query.

    Attributes:
        commit: Newest committed batch, or None before the first one.
        offset: Newest planned batch, or None. If it is greater than `commit`, it is in flight.
    """

    commit: int | None
    offset: int | None


@dataclass(frozen=True)
class LiveDirectory:
    """A `checkpointLocation`.

    Attributes:
        url: A URL of any file system that both Spark and fsspec support, or a local path.
        storage_options: Arguments for the fsspec file system.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def folder(self) -> FileIO:
        """The directory tree.

        Raises:
            StorageAccessError: No driver for this URL is installed.
        """
        return open_file_io(self.url, self.storage_options)

    @property
    def local_path(self) -> Path | None:
        """Its path on this machine, or None if it is remote."""
        return local_path(self.url)

    @property
    def spark_location(self) -> str:
        """The URL as passed to Spark. Local paths get a scheme, because Spark's default file system may be HDFS."""
        path = self.local_path
        return self.url.rstrip("/") if path is None else f"file://{path}"

    def exists(self) -> bool:
        """Whether the directory exists."""
        return self.folder.exists()

    def awaits_first_start(self) -> bool:
        """Whether a fork or an import made the directory, and no query has started in it yet."""
        return FORK_NOT_STARTED in self.folder.list()

    def note_first_start(self) -> None:
        """Note that a query has started in a directory that a fork or an import made."""
        self.folder.delete(FORK_NOT_STARTED)

    def delete(self) -> None:
        """Delete the directory; a missing one is not an error."""
        self.folder.delete_all()

    def positions(self) -> Positions:
        """Positions of the query, from the names in the two logs."""
        # Commits first: a batch that commits between the two listings still counts as in flight.
        commits = batch_ids(self.folder, COMMITS)
        offsets = batch_ids(self.folder, OFFSETS)
        return Positions(max(commits, default=None), max(offsets, default=None))

    def fenced_at(self) -> int | None:
        """The batch that its query can no longer plan because a successor has fenced it; or None."""
        return fenced_at(self.folder)

    def sibling(self, suffix: str) -> LiveDirectory:
        """A directory next to this one, on the same file system."""
        return LiveDirectory(self.url.rstrip("/") + suffix, self.storage_options)


def batch_ids(folder: FileIO, log: str) -> list[int]:
    """Batches that have an entry in a log; unknown names, unfinished files and fences are skipped."""
    if log == OFFSETS:
        return planned(folder)
    return sorted(number for name in folder.listing(log).names if (number := number_in(name)) is not None)


def store_directory(operator: int, partition: int, store: str) -> str:
    """Directory of a state store; the default store is directly in the directory of its partition."""
    path = f"{STATE}/{operator}/{partition}"
    return path if store == DEFAULT_STORE else f"{path}/{store}"
