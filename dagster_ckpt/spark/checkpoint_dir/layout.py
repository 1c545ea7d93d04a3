"""Spark's live checkpoint directory: where it is and what its parts are called.

Names follow Spark 4.3's `StreamingCheckpointConstants` and `StateStore`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster_ckpt.foreign import number_in
from dagster_ckpt.io.folder import Folder, local_path
from dagster_ckpt.io.remote_folder import open_folder
from dagster_ckpt.spark.checkpoint_dir.fence import fenced_at, planned

METADATA = "metadata"
OFFSETS = "offsets"
COMMITS = "commits"
SOURCES = "sources"
STATE = "state"
DEFAULT_STORE = "default"


@dataclass(frozen=True)
class Positions:
    """How far a query is.

    Attributes:
        commit: Newest committed batch, or None before the first one.
        offset: Newest planned batch, or None. Above `commit` it is in flight.
    """

    commit: int | None
    offset: int | None


@dataclass(frozen=True)
class LiveDirectory:
    """A `checkpointLocation`.

    Attributes:
        url: Where it is: a URL of any file system that Spark and fsspec both know, or a local path.
        storage_options: Arguments of the fsspec file system.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def folder(self) -> Folder:
        """The directory tree.

        Raises:
            StorageAccessError: No driver for this URL is installed.
        """
        return open_folder(self.url, self.storage_options)

    @property
    def local_path(self) -> Path | None:
        """Its path on this machine, None where it is elsewhere."""
        return local_path(self.url)

    @property
    def spark_location(self) -> str:
        """The URL as Spark is given it. Local paths get their scheme: Spark's default may be HDFS."""
        path = self.local_path
        return self.url.rstrip("/") if path is None else f"file://{path}"

    def exists(self) -> bool:
        """Whether the directory is there."""
        return self.folder.exists()

    def delete(self) -> None:
        """Delete the directory; one that is not there is no error."""
        self.folder.delete_all()

    def positions(self) -> Positions:
        """How far the query is, from the names in the two logs."""
        # Commits first: a batch that commits between the two listings then still counts as in flight.
        commits = batch_ids(self.folder, COMMITS)
        offsets = batch_ids(self.folder, OFFSETS)
        return Positions(max(commits, default=None), max(offsets, default=None))

    def fenced_at(self) -> int | None:
        """The batch that its query can no longer plan, because a successor has fenced it off; or None."""
        return fenced_at(self.folder)

    def sibling(self, suffix: str) -> LiveDirectory:
        """A directory beside this one, on the same file system."""
        return LiveDirectory(self.url.rstrip("/") + suffix, self.storage_options)


def batch_ids(folder: Folder, log: str) -> list[int]:
    """Batches that have an entry in a log; junk, unfinished files and a fence are passed over."""
    if log == OFFSETS:
        return planned(folder)
    return sorted(number for name in folder.listing(log).names if (number := number_in(name)) is not None)


def store_directory(operator: int, partition: int, store: str) -> str:
    """Directory of one state store: the default store has none of its own below its partition."""
    path = f"{STATE}/{operator}/{partition}"
    return path if store == DEFAULT_STORE else f"{path}/{store}"
