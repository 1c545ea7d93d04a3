"""Write snapshots: share unchanged files, inline small ones, pack the rest into few large objects."""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from operator import attrgetter
from typing import BinaryIO

from blake3 import blake3

from dagster_ckpt.errors import CkptError, CutOvertakenError, SnapshotAbortedError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO, start_in_thread
from dagster_ckpt.snapshot.entries import BlockBuilder, FileEntry
from dagster_ckpt.snapshot.manifest import Manifest, Metadata, SnapshotHeader, encode_metadata, object_name
from dagster_ckpt.snapshot.packs import PackCallbacks, PackRunner, PackTask, Threads, check_content, read_small
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Reuse, Source

METADATA_NAME = "_metadata"
Stage = Callable[[list[Source]], Sequence[Source]]
# Called now and then, from any thread, with the numbers of files done and of all.
Progress = Callable[[int, int], None]
PACK_TARGET_BYTES = 64 * 1024 * 1024
PACKS_PER_SNAPSHOT = 64
# Inlined bytes are written again with every snapshot: beyond this size a shared object is cheaper.
INLINE_LIMIT_BYTES = 256 * 1024
ONE_THREAD = Threads(1)
_path_of = attrgetter("path")


@dataclass(frozen=True)
class WriteOptions:
    """How to write a snapshot.

    Attributes:
        inline_threshold: Files smaller than this many bytes are stored in the metadata; None: all files.
        pack_target_bytes: See `PackTask`.
        pack_least_bytes: The same for small snapshots, because object stores write small objects faster: up to
            `PACKS_PER_SNAPSHOT` data objects of this size are created before they grow.
    """

    inline_threshold: int | None = 20_480
    inline_limit_bytes: int = INLINE_LIMIT_BYTES
    pack_target_bytes: int = PACK_TARGET_BYTES
    pack_least_bytes: int = PACK_TARGET_BYTES
    object_prefix: str = ""


@dataclass(frozen=True)
class WrittenSnapshot:
    """`incremental_bytes` include metadata; `sizes` are of its data objects, as listed before it became visible."""

    metadata: Metadata
    incremental_bytes: int
    new_objects: tuple[str, ...]
    sizes: Mapping[str, int]


def write_snapshot(
    file_io: FileIO,
    directory: str,
    header: SnapshotHeader,
    files: Iterable[Source],
    *,
    options: WriteOptions,
    base: BaseSnapshot | None = None,
    extends: bool = False,
    stage: Stage = list,
    should_abort: Callable[[], bool] = lambda: False,
    runner: PackRunner = ONE_THREAD,
    progress: Progress = lambda _done, _total: None,
) -> WrittenSnapshot:
    """Write a snapshot: data objects first, then `_metadata` atomically (docs/snapshot-format.md, section 4).

    A crash leaves either unreferenced data objects or a complete snapshot; after an error the written objects are
    removed, unless `_metadata` may be visible. Parameters: `SnapshotStore.write_checkpoint`.
    """
    writer = _Writer(file_io, directory, header, options, base, extends=extends)

    def check_aborted() -> None:
        if should_abort():
            raise SnapshotAbortedError(f"{file_io.url}/{directory} was aborted before it was complete.")

    try:
        # A snapshot may have a hundred thousand files: free the list before the next step.
        inline, packed = writer.split(stage(writer.share(files)))
        small, total = len(inline), len(inline) + len(packed)
        for number, file in enumerate(inline):
            check_aborted()
            progress(number, total)
            writer.inline(file)
        writer.pack(packed, runner, check_aborted, lambda done: progress(small + done, total))
        progress(total, total)
        return writer.publish()
    except BaseException:
        writer.remove()
        raise


def _exists(file_io: FileIO, directory: str) -> StorageAccessError:
    return StorageAccessError(
        f"{file_io.url}/{directory} contains a snapshot already, and a snapshot is never overwritten. Check whether "
        "another deployment writes to this folder, and give each deployment its own; otherwise give the new snapshot "
        "another number, or delete that one first."
    )


class _Writer:
    def __init__(
        self,
        file_io: FileIO,
        directory: str,
        header: SnapshotHeader,
        options: WriteOptions,
        base: BaseSnapshot | None,
        *,
        extends: bool,
    ) -> None:
        self._file_io = file_io
        self._directory = directory
        self._header = header
        self._options = options
        self._base = base
        self._extends = extends
        self._reuse = Reuse(base, self._share_object, extends=extends)
        self._entries = BlockBuilder()
        extended = base.metadata if base is not None and extends else None
        self._stable_blocks = extended.manifest.stable_blocks if extended is not None else ()
        # Bytes of files that no longer exist stay until a snapshot does not extend its base.
        self._inline = bytearray(extended.inline if extended is not None else b"")
        # By digest, so that logs that are read again need not be written again.
        others = extended.manifest.other_blocks if extended is not None else ()
        self._inlined = {
            entry.digest: entry.offset for block in others for entry in block.entries.values() if entry.object is None
        }
        # A retry of the same snapshot must not touch the objects of an earlier attempt.
        self._write_id = f"{header.number or 0}-{uuid.uuid4().hex[:16]}"
        self._created: list[str] = []
        # Last objects, whose completion overlaps with encoding the metadata.
        self._completing: list[Future[None]] = []
        self._adopted = 0
        self._written = 0
        self._sizes: dict[str, int] = {}
        self._publishing = False

    def share(self, files: Iterable[Source]) -> list[Source]:
        rest = []
        # From the end, so that each file is released at once.
        left = sorted(files, key=_path_of, reverse=True)
        while left:
            file = left.pop()
            entry = self._reuse.unchanged(file)
            if entry is None:
                rest.append(file)
            # An extended base's inlined bytes keep their offsets.
            elif entry.object is not None or self._extends:
                self._entries.add(entry, stable=file.stable)
            elif self._may_inline(file.size, len(self._inline)) and self._base is not None:
                data = self._base.metadata.inline[entry.offset : entry.offset + file.size]
                self._entries.add(entry._replace(offset=len(self._inline)), stable=file.stable)
                self._inline += data
            else:
                rest.append(file)
        return rest

    def split(self, files: Sequence[Source]) -> tuple[list[Source], list[Source]]:
        """Split files into those to inline and those to pack.

        If a data object is written anyway, small files that the next snapshots will share go there too.
        """
        inline, packed = [], []
        size = len(self._inline)
        is_enough = self._may_inline(max((file.size for file in files), default=0), size)
        makes_none = is_enough and self._fits(size + sum(file.size for file in files))
        for file in files:
            if (makes_none or not file.stable or not file.size) and self._may_inline(file.size, size):
                size += file.size
                inline.append(file)
            else:
                packed.append(file)
        return inline, packed

    def inline(self, file: Source) -> None:
        data = read_small(file)
        digest = blake3(data).hexdigest()
        if digest not in self._inlined:
            check_content(file, data)
            self._inlined[digest] = len(self._inline)
            self._inline += data
        offset = self._inlined[digest]
        entry = FileEntry(digest, file.path, file.size, file.identity, file.token, None, offset)
        self._entries.add(entry, stable=file.stable)

    def pack(
        self,
        files: list[Source],
        runner: PackRunner,
        check_aborted: Callable[[], None],
        packed_so_far: Callable[[int], None],
    ) -> None:
        if not files:
            return
        tasks, total = self._tasks(files, runner), len(files)
        files.clear()

        def check() -> None:
            check_aborted()
            # A task forgets the files that it has written.
            packed_so_far(total - sum(len(task.files) for task in tasks))

        callbacks = PackCallbacks(
            self._reuse.stored_at,
            self._reuse.is_likely_unchanged,
            check,
            self._created.append,
            self._complete_in_thread,
        )
        packed = runner.run(tasks, _Objects(self._file_io, self._directory), callbacks)
        self._entries.add_all(packed.entries)
        self._written += packed.written

    def publish(self) -> WrittenSnapshot:
        manifest = Manifest(self._header, (*self._stable_blocks, *self._entries.finish()))
        metadata = Metadata(manifest, bytes(self._inline))
        encoded = encode_metadata(metadata)
        name = posixpath.join(self._directory, METADATA_NAME)
        try:
            # Two deployments with one folder may give one number at the same moment.
            self._file_io.write(name, [encoded], replace=False, before_visible=lambda: self._complete(manifest))
        except FileExistsError as error:
            self._publishing = False
            raise _exists(self._file_io, self._directory) from error
        return WrittenSnapshot(metadata, self._written + len(encoded), tuple(self._created), self._sizes)

    def _complete_in_thread(self, work: Callable[[], None]) -> None:
        try:
            self._completing.append(start_in_thread(work))
        except RuntimeError:
            # The system cannot start another thread.
            work()

    def _complete(self, manifest: Manifest) -> None:
        """Complete the data objects, and check them before the snapshot may become visible."""
        for completing in self._completing:
            completing.result()
        if self._adopted:
            self._file_io.flush(posixpath.normpath(posixpath.join(self._directory, self._options.object_prefix)))
        # Another process may have deleted an older object.
        self._sizes = manifest.object_sizes(self._file_io, self._directory) if manifest.objects else {}
        problems = manifest.unusable_objects(self._file_io, self._directory, self._sizes)
        if problems:
            # With a remembered base the cut is taken again, and the base is then listed.
            is_remembered = self._base is not None and self._base.sizes is not None
            raise (CutOvertakenError if is_remembered else StorageAccessError)(
                f"{self._file_io.url}/{self._directory} was not completed: data objects that it needs were deleted "
                f"while it was written: {'; '.join(problems[:3])}. Check whether another program deletes files there; "
                "the next snapshot is written without these objects."
            )
        self._publishing = True

    def remove(self) -> None:
        if self._may_be_published():
            return
        wait(self._completing)
        for name in self._created:
            # Garbage collection removes the rest; raise the original error.
            with contextlib.suppress(CkptError, OSError):
                self._file_io.delete(object_name(self._directory, name))
        self._file_io.delete_if_empty(self._directory)

    def _may_be_published(self) -> bool:
        """Whether the metadata may exist: a put can fail here and succeed in the store."""
        if not self._publishing:
            return False
        try:
            return self._file_io.size(posixpath.join(self._directory, METADATA_NAME)) is not None
        except (CkptError, OSError):
            return True

    def _share_object(self, reference: str) -> str | None:
        base = self._base
        if base is None or base.same_folder:
            return reference
        # Unique names: another snapshot that adopted the same object may be deleted concurrently.
        self._adopted += 1
        name = f"{self._options.object_prefix}{self._write_id}-adopted-{self._adopted}.pack"
        self._created.append(name)
        source = object_name(base.directory, reference)
        return name if self._file_io.adopt(object_name(self._directory, name), base.file_io, source) else None

    def _may_inline(self, size: int, inlined: int) -> bool:
        threshold = self._options.inline_threshold
        if threshold is None or size == 0:
            return True
        return size < threshold and self._fits(inlined + size)

    def _fits(self, inlined: int) -> bool:
        return self._options.inline_threshold is None or inlined <= self._options.inline_limit_bytes

    def _tasks(self, files: Sequence[Source], runner: PackRunner) -> list[PackTask]:
        total = sum(file.size for file in files)
        least, most = self._options.pack_least_bytes, self._options.pack_target_bytes
        target = min(max(total // PACKS_PER_SNAPSHOT, least), most)
        shares = runner.width(total, target)
        share = total // shares + 1
        groups: list[deque[Source]] = [deque() for _ in range(shares)]
        before = 0
        for file in files:
            groups[before // share].append(file)
            before += file.size
        name = f"{self._options.object_prefix}{self._write_id}"
        return [
            PackTask(f"{name}-{index}" if shares > 1 else name, group, target)
            for index, group in enumerate(groups)
            if group
        ]


@dataclass(frozen=True)
class _Objects:
    file_io: FileIO
    directory: str

    def __call__(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return self.file_io.create(object_name(self.directory, name))
