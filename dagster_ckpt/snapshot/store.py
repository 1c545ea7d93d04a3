"""What a place for snapshots offers: the interface of every store, and of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader
from dagster_ckpt.snapshot.packs import PackRunner
from dagster_ckpt.snapshot.reader import WriteEntry
from dagster_ckpt.snapshot.reuse import Base, Source
from dagster_ckpt.snapshot.writer import Hold


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot that is whole in storage.

    Attributes:
        location: URL of its folder.
        full_bytes: Bytes that a restore writes.
        incremental_bytes: Bytes that were written for it.
        file_count: Files in it.
    """

    location: str
    full_bytes: int
    incremental_bytes: int
    file_count: int


class SnapshotStore(Protocol):
    """Where the snapshots of one stream live. Safe for several threads at once.

    A location is the URL of a snapshot's folder; the path of its `_metadata` is accepted too. Every method raises
    StorageAccessError where the storage cannot be used.
    """

    def check_access(self) -> None:
        """Make sure now that snapshots can be written, rather than at the first checkpoint."""
        ...

    def write_checkpoint(
        self,
        header: SnapshotHeader,
        files: Iterable[Source],
        *,
        base: str | Base | None = None,
        extends: bool = False,
        hold: Hold = list,
        should_abort: Callable[[], bool] = lambda: False,
        runner: PackRunner | None = None,
    ) -> StoredSnapshot:
        """Write a checkpoint; bytes that the snapshot at `base` has are shared with it.

        Args:
            header: What the snapshot says of itself.
            files: Its files; asked for once.
            base: A snapshot, or its location, that still has to be there when this returns; or None.
            extends: The checkpoint has all stable files of the base besides `files`; only where the base
                `can_be_extended`.
            hold: Given the files that will be read, before any is; gives them as they are to be read.
            should_abort: Asked before every few files.
            runner: Who writes the data objects; None: threads of this process.

        Raises:
            SnapshotTooLargeError: The store does not take snapshots of this size.
            SnapshotAbortedError: `should_abort` said so.
        """
        ...

    def write_savepoint(
        self,
        header: SnapshotHeader,
        files: Iterable[Source],
        *,
        target_directory: str | None = None,
        base: str | None = None,
        hold: Hold = list,
        should_abort: Callable[[], bool] = lambda: False,
        runner: PackRunner | None = None,
    ) -> StoredSnapshot:
        """Write a self-contained savepoint: it needs no other snapshot, whatever it was made from.

        Args:
            header: What the snapshot says of itself.
            files: Its files; asked for once.
            target_directory: Where to, if not to the configured folder.
            base: Location of a snapshot whose bytes need not pass through this process again, or None.
            hold: Given the files that will be read, before any is; gives them as they are to be read.
            should_abort: Asked before every few files.
            runner: Who writes the data objects; None: threads of this process.

        Raises:
            SnapshotAbortedError: `should_abort` said so.
        """
        ...

    def base(self, location: str | None) -> Base | None:
        """An earlier snapshot to share with; None where there is none, or where this store shares nothing."""
        ...

    def manifest(self, location: str) -> Manifest:
        """The manifest of a snapshot.

        Raises:
            SnapshotNotFoundError: There is no snapshot.
            SnapshotCorruptError: Its metadata is truncated or altered.
        """
        ...

    def extract(
        self,
        location: str,
        write: WriteEntry,
        *,
        only: Callable[[str], bool] = lambda _path: True,
        missing: Callable[[Iterable[FileEntry]], Iterable[FileEntry]] = iter,
    ) -> None:
        """Hand out the files of a snapshot, each checked against its digest.

        Args:
            location: The snapshot.
            write: Takes an entry and its bytes, and must use them up; called from several threads where it is worth it.
            only: Which paths to hand out.
            missing: Given these files, those that the caller does not have already: only their bytes are read.

        Raises:
            SnapshotNotFoundError: There is no snapshot.
            SnapshotCorruptError: Data is missing or was altered.
        """
        ...

    def verify(self, location: str, *, deep: bool = True) -> list[str]:
        """What is wrong with a snapshot; an empty list is a good one."""
        ...

    def checkpoints(self) -> list[str]:
        """Locations of all checkpoints of the stream, broken ones too, oldest first."""
        ...

    def savepoints(self) -> list[str]:
        """Locations of all whole savepoints in the configured folder, of other streams too, by name."""
        ...

    def is_own(self, location: str) -> bool:
        """Whether a location lies in this store's own folders: the stream's, or the configured one of savepoints."""
        ...

    def discard(self, location: str, *, protected: Iterable[str] = ()) -> None:
        """Delete a snapshot, and of the bytes it shares those that no other snapshot refers to.

        Args:
            location: The snapshot; one that is gone already is no error.
            protected: Snapshots whose bytes must stay, beyond all that `checkpoints` lists.

        Raises:
            StorageAccessError: It is protected itself, or something could not be deleted; another call goes on.
        """
        ...

    def sweep(
        self,
        *,
        older_than_ms: int,
        under_way: Collection[int] = (),
        protected: Iterable[str] = (),
        dry_run: bool = False,
    ) -> list[Garbage]:
        """Delete objects that no snapshot refers to and that are older; returns each with the reason.

        Ages are those that the storage's own clock tells: that of this machine decides nothing.

        Args:
            older_than_ms: Younger ones may belong to an attempt under way.
            under_way: Numbers of attempts whose process lives: what they have written stays, whatever its age.
            protected: Snapshots whose bytes must stay, beyond all that `checkpoints` lists.
            dry_run: Say what would be deleted, and delete nothing.
        """
        ...
