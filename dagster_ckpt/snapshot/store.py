"""`SnapshotStore`: the interface of every snapshot store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Protocol

from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader
from dagster_ckpt.snapshot.packs import PackRunner
from dagster_ckpt.snapshot.reader import WriteEntry
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Source, SourceFile
from dagster_ckpt.snapshot.writer import Progress, Stage


@dataclass(frozen=True)
class StoredSnapshot:
    location: str
    full_bytes: int
    incremental_bytes: int
    file_count: int


class SnapshotStore(Protocol):
    """The snapshots of one stream. Thread-safe.

    A location is the URL of a snapshot's folder, or the path of its `_metadata`. Every method raises StorageAccessError
    if the storage cannot be used.
    """

    def check_access(self) -> None:
        """Check that the storage can be used, so that problems show before the first checkpoint."""

    def write_checkpoint(
        self,
        header: SnapshotHeader,
        files: Iterable[Source],
        *,
        base: str | BaseSnapshot | None = None,
        extends: bool = False,
        stage: Stage = list,
        should_abort: Callable[[], bool] = lambda: False,
        runner: PackRunner | None = None,
    ) -> StoredSnapshot:
        """Write a checkpoint, sharing bytes with the snapshot at `base`.

        Args:
            files: Iterated once.
            base: A snapshot or its location, which must exist until this returns.
            extends: The checkpoint also contains all stable files of the base, which `can_be_extended`.
            stage: Called with the files before any is read; returns them protected from deletion, in the form to read.
            runner: Writes the data objects; None: threads of this process.

        Raises:
            SnapshotTooLargeError: The snapshot exceeds the store's size limit.
        """

    def write_savepoint(
        self,
        header: SnapshotHeader,
        files: Iterable[Source],
        *,
        target_directory: str | None = None,
        base: str | None = None,
        stage: Stage = list,
        should_abort: Callable[[], bool] = lambda: False,
        runner: PackRunner | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> StoredSnapshot:
        """Write a savepoint, which depends on no other snapshot.

        Args:
            base: Location of a snapshot whose bytes the storage can link or copy.
        """

    def base(self, location: str | None) -> BaseSnapshot | None:
        """The snapshot to share bytes with; None if it is missing or broken, or if this store does not share."""

    def manifest(self, location: str) -> Manifest:
        """Read a manifest.

        Raises:
            SnapshotNotFoundError: There is no snapshot.
            SnapshotCorruptError: The metadata is truncated or modified.
        """

    def extract(
        self,
        location: str,
        write: WriteEntry,
        *,
        only: Callable[[str], bool] = lambda _path: True,
        missing: Callable[[Iterable[FileEntry]], Iterable[FileEntry]] = iter,
    ) -> None:
        """Pass the files of a snapshot to `write`, each checked against its digest.

        Args:
            write: Called with an entry and its bytes, perhaps from several threads. It must consume them: the last
                piece raises if the content is wrong.
            missing: Called with the files; returns those whose bytes the caller needs.

        Raises:
            SnapshotCorruptError: Data is missing or was modified.
        """

    def verify(self, location: str, *, deep: bool = True) -> list[str]:
        """The problems of a snapshot; none if it is intact."""

    def checkpoints(self) -> list[str]:
        """Locations of checkpoints, including broken ones, oldest first."""

    def savepoints(self, folder: str | None = None) -> list[str]:
        """Complete savepoints in a folder (default: the configured one), also of other streams, by name."""

    def is_own(self, location: str) -> bool:
        """Whether it is in the stream's folder or the configured savepoint folder."""

    def discard(self, location: str, *, protected: Iterable[str] = ()) -> int | None:
        """Delete a snapshot, and those of its shared bytes that no other snapshot refers to.

        Returns the freed bytes, if known. A missing snapshot is not an error.

        Args:
            protected: Snapshots whose bytes must be kept, besides those that `checkpoints` lists.

        Raises:
            StorageAccessError: It is protected itself, or something could not be deleted; another call resumes.
        """

    def sweep(
        self,
        *,
        older_than_ms: int,
        under_way: Collection[int] = (),
        dry_run: bool = False,
        savepoint_folders: Collection[str] = (),
    ) -> list[Garbage]:
        """Delete old objects that no snapshot refers to; returns each with the reason. Parameters: `Sweep`.

        Args:
            savepoint_folders: Besides the configured one.
        """


def read_files(store: SnapshotStore, location: str, only: Callable[[str], bool]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}

    def keep(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        files[entry.path] = b"".join(chunks)

    store.extract(location, keep, only=only)
    return files


def sources_in(store: SnapshotStore, location: str, entries: Iterable[FileEntry]) -> list[Source]:
    """Files of a snapshot as sources of another. Bytes that the store can link or copy are never read."""

    def read(path: str) -> BytesIO:
        return BytesIO(read_files(store, location, path.__eq__).get(path, b""))

    return [
        SourceFile(entry.path, entry.size, entry.identity, partial(read, entry.path), entry.token) for entry in entries
    ]
