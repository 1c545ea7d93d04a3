"""`ObjectSnapshotStore`: snapshots in an object space, with their folders, sharing and garbage collection."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from dagster_ckpt.errors import (
    CkptError,
    OptionError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    SnapshotTooLargeError,
    StorageAccessError,
)
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import normalised
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.garbage_collection import (
    INCOMPLETE_NAME,
    SAVEPOINT,
    SHARED,
    Garbage,
    Sweep,
    checkpoint_directories,
    delete_snapshot,
    probe_name,
    savepoint_directories,
    storage_time_ms,
)
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader
from dagster_ckpt.snapshot.metadata_file import Metadata
from dagster_ckpt.snapshot.packs import PackRunner, Threads
from dagster_ckpt.snapshot.reader import WriteEntry, extract, read_metadata, verify_snapshot
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Source
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.snapshot.writer import (
    INLINE_LIMIT_BYTES,
    METADATA_NAME,
    PACK_TARGET_BYTES,
    Stage,
    WriteOptions,
    WrittenSnapshot,
    write_snapshot,
)

SHARED_PREFIX = f"../{SHARED}/"
# Number of metadata kept in memory: each snapshot is written incrementally to the previous one.
_REMEMBERED = 2

OpenSpace = Callable[[str], FileIO]


@dataclass(frozen=True)
class StoreLayout:
    """Where and how a stream's snapshots are written.

    Attributes:
        stream_id: The stream.
        stream_root: URL of the stream's folder: `chk-<n>/_metadata` and `shared/` are below it.
        savepoint_root: URL of the savepoint folder, or None if none is configured.
        inline_threshold: See `WriteOptions`.
        max_bytes: Size limit of a checkpoint; None means no limit.
        transfer_threads: Maximum number of data objects written or read concurrently.
        pack_least_bytes: See `WriteOptions`.
    """

    stream_id: str
    stream_root: str
    savepoint_root: str | None
    inline_threshold: int | None
    max_bytes: int | None = None
    transfer_threads: int = 1
    pack_least_bytes: int = PACK_TARGET_BYTES


class ObjectSnapshotStore:
    """A snapshot store over object spaces.

    Args:
        layout: Where and how.
        open_space: Opens the space of a URL.
    """

    def __init__(self, layout: StoreLayout, open_space: OpenSpace) -> None:
        self._layout = layout
        self._open_space = open_space
        self._stream_space = open_space(layout.stream_root)
        self._threads = Threads(layout.transfer_threads)
        self._remembered: OrderedDict[str, Metadata] = OrderedDict()
        self._lock = threading.Lock()

    def check_access(self) -> None:
        """Check that snapshots can be written, by writing and deleting a probe object."""
        spaces = [self._stream_space]
        if self._layout.savepoint_root is not None:
            spaces.append(self._open_space(self._layout.savepoint_root))
        for space in spaces:
            name = probe_name()
            space.write(name, [b"dagster_ckpt"])
            space.delete(name)

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
        """Write a checkpoint as `chk-<n>`, sharing bytes with the snapshot at `base`."""
        if header.number is None:
            raise OptionError(f"The checkpoint of stream {header.stream_id!r} has no number. Give it one.")
        shared = base if isinstance(base, BaseSnapshot) else self.base(base)
        if self._layout.max_bytes is not None:
            files = list(files)
            extended = shared.manifest.stable_blocks if shared is not None and extends else ()
            size = sum(file.size for file in files) + sum(block.full_bytes for block in extended)
            self._check_size(header, size, self._layout.max_bytes)
        directory = f"chk-{header.number}"
        location = f"{self._stream_space.url}/{directory}"
        written = write_snapshot(
            self._stream_space,
            directory,
            header,
            files,
            options=self._options(SHARED_PREFIX),
            base=shared,
            extends=extends,
            stage=stage,
            should_abort=should_abort,
            runner=runner or self._threads,
        )
        self._remember(location, written.metadata)
        return self._stored(location, written)

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
    ) -> StoredSnapshot:
        """Write a self-contained savepoint into a new folder.

        Data objects of the snapshot at `base` are hard-linked on the same disk, or copied by the
        object store itself: the savepoint depends on no other snapshot, and its bytes do not pass
        through this process.
        """
        root = normalised(target_directory) if target_directory else self._layout.savepoint_root
        if root is None:
            raise StorageAccessError(
                f"No folder for savepoints of stream {header.stream_id!r} is configured. Set savepoint_path of the "
                "checkpoint storage, or give a target directory."
            )
        space = self._open_space(root)
        # Flink: savepoint-<first six characters of the `JobID`>-<random>.
        name = re.sub("[^A-Za-z0-9]", "", header.stream_id)[:6] or "stream"
        directory = f"{SAVEPOINT}{name}-{uuid.uuid4().hex[:12]}"
        mark = f"{directory}/{INCOMPLETE_NAME}"
        space.write(mark, [header.stream_id.encode()])
        try:
            written = write_snapshot(
                space,
                directory,
                header,
                files,
                options=self._options(""),
                base=self._foreign(base),
                stage=stage,
                should_abort=should_abort,
                runner=runner or self._threads,
            )
        except CkptError:
            # If the marker cannot be deleted either, garbage collection finds it.
            with contextlib.suppress(StorageAccessError):
                space.delete(mark)
                space.delete_if_empty(directory)
            raise
        with contextlib.suppress(StorageAccessError):
            space.delete(mark)
        return self._stored(f"{space.url}/{directory}", written)

    def base(self, location: str | None) -> BaseSnapshot | None:
        """An earlier snapshot to share with, of this stream or another; None if it is missing or broken."""
        if location is None:
            return None
        folder = _folder(location)
        space, directory = self._at(folder)
        try:
            metadata = self._remember(folder, self._remembered.get(folder) or read_metadata(space, directory))
        except (SnapshotNotFoundError, SnapshotCorruptError):
            # The snapshot is then written in full, which is always correct.
            return None
        return BaseSnapshot(metadata, space, directory, same_folder=space.url == self._stream_space.url)

    def manifest(self, location: str) -> Manifest:
        """The manifest of a snapshot."""
        space, directory = self._at(location)
        return read_metadata(space, directory).manifest

    def extract(
        self,
        location: str,
        write: WriteEntry,
        *,
        only: Callable[[str], bool] = lambda _path: True,
        missing: Callable[[Iterable[FileEntry]], Iterable[FileEntry]] = iter,
    ) -> None:
        """Pass the files of a snapshot to `write`, each checked against its digest."""
        space, directory = self._at(location)
        extract(space, directory, write, only=only, missing=missing, threads=self._layout.transfer_threads)

    def verify(self, location: str, *, deep: bool = True) -> list[str]:
        """Problems of a snapshot; an empty list means that it is intact."""
        space, directory = self._at(location)
        return verify_snapshot(space, directory, deep=deep)

    def checkpoints(self) -> list[str]:
        """Locations of all checkpoints of the stream, including broken ones, oldest first."""
        return [f"{self._stream_space.url}/{directory}" for directory in checkpoint_directories(self._stream_space)]

    def savepoints(self) -> list[str]:
        """Locations of all complete savepoints in the configured folder, including other streams', by name."""
        if self._layout.savepoint_root is None:
            return []
        space = self._open_space(self._layout.savepoint_root)
        return [f"{space.url}/{directory}" for directory in savepoint_directories(space)]

    def is_own(self, location: str) -> bool:
        """Whether a location is in this store's folders: the stream's, or the configured savepoint folder."""
        root = _folder(location).rpartition("/")[0]
        savepoints = self._layout.savepoint_root
        return root == self._stream_space.url or (savepoints is not None and root == self._open_space(savepoints).url)

    def discard(self, location: str, *, protected: Iterable[str] = ()) -> None:
        """Delete a snapshot: its metadata first, so that it is no longer found, then bytes that only it refers to.

        If another checkpoint of the stream cannot be read, shared bytes are kept and a warning is
        logged.
        """
        held = {_folder(other) for other in protected}
        if _folder(location) in held:
            raise StorageAccessError(
                f"{location} is not deleted: an attempt under way builds on it. Try again when that has ended."
            )
        space, directory = self._at(location)
        with self._lock:
            self._remembered.pop(_folder(location), None)
        delete_snapshot(space, directory, _beside(space, held))

    def sweep(
        self,
        *,
        older_than_ms: int,
        under_way: Collection[int] = (),
        protected: Iterable[str] = (),
        dry_run: bool = False,
    ) -> list[Garbage]:
        """Delete remains of crashed attempts older than the limit.

        No shared object is deleted if a checkpoint is broken.
        """
        held = {_folder(other) for other in protected}
        swept: list[Garbage] = []
        now_ms = storage_time_ms(self._stream_space)
        if now_ms is not None:
            sweep = Sweep(self._stream_space, now_ms, older_than_ms, dry_run, frozenset(under_way))
            swept += sweep.stream(_beside(self._stream_space, held))
        if self._layout.savepoint_root is not None:
            space = self._open_space(self._layout.savepoint_root)
            now_ms = storage_time_ms(space)
            if now_ms is not None:
                sweep = Sweep(space, now_ms, older_than_ms, dry_run, frozenset(under_way))
                swept += sweep.savepoints(self._layout.stream_id)
        return swept

    def _check_size(self, header: SnapshotHeader, size: int, limit: int) -> None:
        if size > limit:
            raise SnapshotTooLargeError(
                f"The checkpoint of stream {header.stream_id!r} has {size} bytes; this storage takes at most {limit}, "
                "because it keeps them in memory. Raise max_state_size, or use a FileSystemCheckpointStorage."
            )

    def _foreign(self, location: str | None) -> BaseSnapshot | None:
        base = self.base(location)
        return replace(base, same_folder=False) if base is not None else None

    def _remember(self, folder: str, metadata: Metadata) -> Metadata:
        with self._lock:
            self._remembered[folder] = metadata
            self._remembered.move_to_end(folder)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return metadata

    def _options(self, object_prefix: str) -> WriteOptions:
        return WriteOptions(
            inline_threshold=self._layout.inline_threshold,
            inline_limit_bytes=max(INLINE_LIMIT_BYTES, self._layout.inline_threshold or 0),
            object_prefix=object_prefix,
            pack_least_bytes=self._layout.pack_least_bytes,
        )

    def _stored(self, location: str, written: WrittenSnapshot) -> StoredSnapshot:
        return StoredSnapshot(
            location,
            full_bytes=written.metadata.manifest.full_bytes,
            incremental_bytes=written.incremental_bytes,
            file_count=written.metadata.manifest.file_count,
        )

    def _at(self, location: str) -> tuple[FileIO, str]:
        root, _, directory = _folder(location).rpartition("/")
        return (self._stream_space if root == self._stream_space.url else self._open_space(root)), directory


def _folder(location: str) -> str:
    """URL of a snapshot's folder, given that or the path of its metadata."""
    return normalised(location).removesuffix(f"/{METADATA_NAME}")


def _beside(space: FileIO, locations: Iterable[str]) -> list[str]:
    """Directories, within a space, of the snapshots that are in it."""
    return [directory for root, _, directory in (where.rpartition("/") for where in locations) if root == space.url]
