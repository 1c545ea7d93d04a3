"""`ObjectSnapshotStore`: snapshots as files, with their folders, sharing and garbage collection."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

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
    NOTES_NAME,
    SAVEPOINT,
    SET_NAME,
    SHARED,
    VERIFIED_NAME,
    Garbage,
    Sweep,
    checkpoint_directories,
    delete_snapshot,
    logging_failure,
    probe_name,
    read_if_there,
    savepoint_directories,
    storage_time_ms,
)
from dagster_ckpt.snapshot.manifest import (
    Manifest,
    Metadata,
    SnapshotHeader,
    checkpoint_directory,
    checkpoint_number,
)
from dagster_ckpt.snapshot.packs import PackRunner, Threads
from dagster_ckpt.snapshot.reader import WriteEntry, copy_snapshot, extract, read_metadata, verify_snapshot
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Source
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.snapshot.writer import (
    INLINE_LIMIT_BYTES,
    METADATA_NAME,
    PACK_TARGET_BYTES,
    Progress,
    Stage,
    WriteOptions,
    WrittenSnapshot,
    write_snapshot,
)

SHARED_PREFIX = f"../{SHARED}/"
# Metadata kept in memory, because each snapshot is written incrementally to the previous one.
_REMEMBERED = 2

OpenFileIO = Callable[[str], FileIO]


@dataclass(frozen=True)
class StoreLayout:
    stream_id: str
    stream_root: str
    savepoint_root: str | None
    inline_threshold: int | None
    max_bytes: int | None = None
    transfer_threads: int = 1
    pack_least_bytes: int = PACK_TARGET_BYTES


class ObjectSnapshotStore:
    def __init__(self, layout: StoreLayout, open_file_io: OpenFileIO) -> None:
        self._layout = layout
        self._open_file_io = open_file_io
        self._stream_io = open_file_io(layout.stream_root)
        self._threads = Threads(layout.transfer_threads)
        self._remembered: OrderedDict[str, tuple[Metadata, Mapping[str, int] | None]] = OrderedDict()
        self._lock = threading.Lock()

    def check_access(self) -> None:
        folders = [self._stream_io]
        if self._layout.savepoint_root is not None:
            folders.append(self._open_file_io(self._layout.savepoint_root))
        for file_io in folders:
            name = probe_name()
            file_io.write(name, [b"dagster_ckpt"])
            file_io.delete(name)

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
        if header.number is None:
            raise OptionError(f"The checkpoint of stream {header.stream_id!r} has no number. Give it one.")
        shared = base if isinstance(base, BaseSnapshot) else self.base(base)
        if self._layout.max_bytes is not None:
            files = list(files)
            extended = shared.manifest.stable_blocks if shared is not None and extends else ()
            size = sum(file.size for file in files) + sum(block.full_bytes for block in extended)
            self._check_size(header, size, self._layout.max_bytes)
        directory = checkpoint_directory(header.number)
        location = f"{self._stream_io.url}/{directory}"
        try:
            written = write_snapshot(
                self._stream_io,
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
        except CkptError:
            if shared is not None:
                self._remember(f"{shared.file_io.url}/{shared.directory}", shared.metadata)
            raise
        # Without sizes of a disk, because listing it costs nothing.
        self._remember(location, written.metadata, written.sizes if self._stream_io.width > 1 else None)
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
        progress: Progress = lambda _done, _total: None,
    ) -> StoredSnapshot:
        root = normalised(target_directory) if target_directory else self._layout.savepoint_root
        if root is None:
            raise StorageAccessError(
                f"No folder for savepoints of stream {header.stream_id!r} is configured. Set savepoint_path of the "
                "checkpoint storage, or give a target directory."
            )
        file_io = self._open_file_io(root)
        # Flink: savepoint-<first six characters of the `JobID`>-<random>.
        name = re.sub("[^A-Za-z0-9]", "", header.stream_id)[:6] or "stream"
        directory = f"{SAVEPOINT}{name}-{uuid.uuid4().hex[:12]}"
        mark = f"{directory}/{INCOMPLETE_NAME}"
        file_io.write(mark, [header.stream_id.encode()])
        try:
            written = write_snapshot(
                file_io,
                directory,
                header,
                files,
                options=self._options(""),
                base=self._base_to_adopt(base),
                stage=stage,
                should_abort=should_abort,
                runner=runner or self._threads,
                progress=progress,
            )
        except CkptError:
            # If the marker cannot be deleted either, garbage collection finds it.
            with contextlib.suppress(StorageAccessError):
                file_io.delete(mark)
                file_io.delete_if_empty(directory)
            raise
        location = f"{file_io.url}/{directory}"
        try:
            with contextlib.suppress(StorageAccessError):
                file_io.delete(mark)
        except BaseException:
            # A rebuild must not find a whole savepoint of a failed attempt.
            self.discard(location)
            raise
        return self._stored(location, written)

    def base(self, location: str | None) -> BaseSnapshot | None:
        if location is None:
            return None
        folder = _folder(location)
        file_io, directory = self._at(folder)
        try:
            metadata, sizes = self._remembered.get(folder) or (read_metadata(file_io, directory), None)
        except (SnapshotNotFoundError, SnapshotCorruptError):
            return None
        self._remember(folder, metadata, sizes)
        return BaseSnapshot(metadata, file_io, directory, file_io.url == self._stream_io.url, sizes)

    def manifest(self, location: str) -> Manifest:
        file_io, directory = self._at(location)
        return read_metadata(file_io, directory).manifest

    def extract(
        self,
        location: str,
        write: WriteEntry,
        *,
        only: Callable[[str], bool] = lambda _path: True,
        missing: Callable[[Iterable[FileEntry]], Iterable[FileEntry]] = iter,
    ) -> None:
        file_io, directory = self._at(location)
        extract(file_io, directory, write, only=only, missing=missing, threads=self._layout.transfer_threads)

    def verify(self, location: str, *, deep: bool = True) -> list[str]:
        file_io, directory = self._at(location)
        return verify_snapshot(file_io, directory, deep=deep)

    def copy(
        self,
        location: str,
        source: ObjectSnapshotStore,
        *,
        progress: Progress = lambda _done, _total: None,
        again: bool = False,
    ) -> StoredSnapshot:
        """Copy a snapshot of another storage byte for byte. For `again` see `copy_snapshot`."""
        source_io, directory = source._at(location)
        is_checkpoint = checkpoint_number(directory) is not None
        root = self._layout.stream_root if is_checkpoint else self._layout.savepoint_root
        if root is None:
            raise StorageAccessError(f"{location} is a savepoint, and no folder for savepoints is configured there.")
        file_io = self._open_file_io(root)
        width, mark = self._layout.transfer_threads, f"{directory}/{INCOMPLETE_NAME}"
        is_new = not is_checkpoint and file_io.size(f"{directory}/{METADATA_NAME}") is None

        def begin() -> None:
            if is_new:
                file_io.write(mark, [self._layout.stream_id.encode()])

        copied = copy_snapshot(
            source_io, file_io, directory, width=width, progress=progress, again=again, before_write=begin
        )
        if is_new:
            with contextlib.suppress(StorageAccessError):
                file_io.delete(mark)
        notes = read_notes(source.companion(location, NOTES_NAME)).of_a_copy()
        copy = f"{file_io.url}/{directory}"
        self.put_companion(copy, SET_NAME, source.companion(location, SET_NAME))
        self.put_companion(copy, NOTES_NAME, notes.encoded())
        manifest = read_metadata(file_io, directory).manifest
        return StoredSnapshot(copy, manifest.full_bytes, copied, manifest.file_count)

    def companion(self, location: str, name: str) -> bytes | None:
        """Read a file in a snapshot's folder that is no part of it: `SET_NAME` or `NOTES_NAME`."""
        file_io, directory = self._at(location)
        return read_if_there(file_io, f"{directory}/{name}")

    def put_companion(self, location: str, name: str, content: bytes | None) -> None:
        file_io, directory = self._at(location)
        if content is not None:
            # A user may have deleted the folder.
            if file_io.size(f"{directory}/{METADATA_NAME}") is not None:
                file_io.write(f"{directory}/{name}", [content])
        elif file_io.size(f"{directory}/{name}") is not None:
            file_io.delete(f"{directory}/{name}")
            file_io.flush(directory)

    def has(self, location: str) -> bool:
        file_io, directory = self._at(location)
        return file_io.size(f"{directory}/{METADATA_NAME}") is not None

    def is_verified(self, location: str) -> bool:
        file_io, directory = self._at(location)
        return file_io.size(f"{directory}/{VERIFIED_NAME}") is not None

    def note_verified(self, location: str) -> None:
        file_io, directory = self._at(location)
        file_io.write(f"{directory}/{VERIFIED_NAME}", [b""])

    def checkpoints(self) -> list[str]:
        return [f"{self._stream_io.url}/{directory}" for directory in checkpoint_directories(self._stream_io)]

    def savepoints(self, folder: str | None = None) -> list[str]:
        root = normalised(folder) if folder is not None else self._layout.savepoint_root
        if root is None:
            return []
        file_io = self._open_file_io(root)
        return [f"{file_io.url}/{directory}" for directory in savepoint_directories(file_io)]

    def is_own(self, location: str) -> bool:
        root = _folder(location).rpartition("/")[0]
        savepoints = self._layout.savepoint_root
        return root == self._stream_io.url or (savepoints is not None and root == self._open_file_io(savepoints).url)

    def discard(self, location: str, *, protected: Iterable[str] = ()) -> int:
        kept = {_folder(other) for other in protected}
        if _folder(location) in kept:
            raise StorageAccessError(
                f"{location} is not deleted: an attempt in progress shares its objects. Try again when that attempt "
                "has ended."
            )
        file_io, directory = self._at(location)
        with self._lock:
            self._remembered.pop(_folder(location), None)
        return delete_snapshot(file_io, directory, _directories_in(file_io, kept))

    def sweep(
        self,
        *,
        older_than_ms: int,
        under_way: Collection[int] = (),
        dry_run: bool = False,
        savepoint_folders: Collection[str] = (),
    ) -> list[Garbage]:
        swept: list[Garbage] = []
        now_ms = storage_time_ms(self._stream_io)
        if now_ms is not None:
            sweep = Sweep(self._stream_io, now_ms, older_than_ms, dry_run, frozenset(under_way))
            swept += sweep.stream()
        own = self._layout.savepoint_root
        for root in dict.fromkeys([*([own] if own is not None else []), *map(normalised, savepoint_folders)]):
            # A folder that a user once gave for a savepoint may be out of reach by now.
            with contextlib.nullcontext() if root == own else logging_failure(root):
                file_io = self._open_file_io(root)
                now_ms = storage_time_ms(file_io)
                if now_ms is not None:
                    sweep = Sweep(file_io, now_ms, older_than_ms, dry_run, frozenset(under_way))
                    swept += sweep.savepoints(self._layout.stream_id)
        return swept

    def _check_size(self, header: SnapshotHeader, size: int, limit: int) -> None:
        if size > limit:
            raise SnapshotTooLargeError(
                f"The checkpoint of stream {header.stream_id!r} has {size} bytes; this storage takes at most {limit}, "
                "because it keeps them in memory. Raise max_state_size, or use a FileSystemCheckpointStorage."
            )

    def _base_to_adopt(self, location: str | None) -> BaseSnapshot | None:
        base = self.base(location)
        return replace(base, same_folder=False) if base is not None else None

    def _remember(self, folder: str, metadata: Metadata, sizes: Mapping[str, int] | None = None) -> None:
        with self._lock:
            self._remembered[folder] = metadata, sizes
            self._remembered.move_to_end(folder)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)

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
        return (self._stream_io if root == self._stream_io.url else self._open_file_io(root)), directory


def _folder(location: str) -> str:
    return normalised(location).removesuffix(f"/{METADATA_NAME}")


def _directories_in(file_io: FileIO, locations: Iterable[str]) -> list[str]:
    return [directory for root, _, directory in (where.rpartition("/") for where in locations) if root == file_io.url]


class SnapshotNotes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`_notes` in the folder of a snapshot: what only the catalog knows of it, for a catalog that is rebuilt."""

    tagged_by: str | None = None
    label: str | None = None
    problem: str | None = None
    problem_in_state: bool | None = None
    broken_since_ms: int | None = None
    proven_at_ms: int | None = None

    def of_a_copy(self) -> SnapshotNotes:
        """Leave out damage, which is of the original's bytes."""
        return msgspec.structs.replace(self, problem=None, problem_in_state=None, broken_since_ms=None)

    def encoded(self) -> bytes | None:
        return msgspec.json.encode(self) if self != SnapshotNotes() else None


def read_notes(content: bytes | None) -> SnapshotNotes:
    """Parse notes; empty if missing or damaged, because a snapshot is judged without them."""
    try:
        return msgspec.json.decode(content or b"{}", type=SnapshotNotes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SnapshotNotes()
