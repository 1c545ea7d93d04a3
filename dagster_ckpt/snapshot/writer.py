"""Writing a snapshot: what an earlier one has is shared, small files go inline, the rest into few large objects."""

from __future__ import annotations

import contextlib
import posixpath
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from dagster_ckpt.errors import CkptError, SnapshotAbortedError, StorageAccessError
from dagster_ckpt.io.objects import ObjectSpace
from dagster_ckpt.io.parallel import begin
from dagster_ckpt.snapshot.container import pack_metadata
from dagster_ckpt.snapshot.entries import FileEntry, parse_line, place_of
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader, object_name
from dagster_ckpt.snapshot.packs import Checks, PackRunner, PackTask, Threads, read_small
from dagster_ckpt.snapshot.reuse import Base, Reusable, Source
from dagster_ckpt.snapshot.segment import Segment

METADATA_NAME = "_metadata"
# Takes the files that will be read, gives them as they are to be read.
Hold = Callable[[list[Source]], Sequence[Source]]
PACK_TARGET_BYTES = 64 * 1024 * 1024
PACKS_OF_AN_SNAPSHOT = 64
# What is inlined is written again with every snapshot: beyond this it is cheaper in an object that snapshots share.
INLINE_LIMIT_BYTES = 256 * 1024
ONE_THREAD = Threads(1)


@dataclass(frozen=True)
class WriteOptions:
    """How a snapshot is written.

    Attributes:
        inline_threshold: Files smaller than this many bytes go into the metadata; None puts every file there.
        inline_limit_bytes: All inlined files together; further small files go into a data object.
        pack_target_bytes: A data object of this size takes no further file. A file is never split.
        pack_least_bytes: The same where the snapshot is small, as object stores take small objects faster; up to
            `PACKS_OF_AN_SNAPSHOT` data objects of this size are made before they become larger.
        object_prefix: What goes before the name of a data object, relative to the snapshot's directory.
    """

    inline_threshold: int | None = 20_480
    inline_limit_bytes: int = INLINE_LIMIT_BYTES
    pack_target_bytes: int = PACK_TARGET_BYTES
    pack_least_bytes: int = PACK_TARGET_BYTES
    object_prefix: str = ""


@dataclass(frozen=True)
class WrittenSnapshot:
    """A written snapshot.

    Attributes:
        manifest: Its manifest.
        inline: The bytes of the files that lie in its metadata.
        incremental_bytes: Bytes that were written for it, metadata included.
        new_objects: Names of the data objects that were made for it, relative to its directory.
    """

    manifest: Manifest
    inline: bytes
    incremental_bytes: int
    new_objects: tuple[str, ...]


def write_snapshot(
    space: ObjectSpace,
    directory: str,
    header: SnapshotHeader,
    files: Iterable[Source],
    *,
    options: WriteOptions,
    base: Base | None = None,
    extends: bool = False,
    hold: Hold = list,
    should_abort: Callable[[], bool] = lambda: False,
    runner: PackRunner = ONE_THREAD,
) -> WrittenSnapshot:
    """Write a snapshot: data objects first, `_metadata` last and at once (docs/snapshot-format.md, section 4).

    A crash leaves data objects that nothing refers to, or a whole snapshot. An error removes what was written,
    except where `_metadata` may have become visible: then nothing is removed.

    Args:
        space: Where to.
        directory: The snapshot's directory in the space.
        header: What the snapshot says of itself.
        files: Its files; asked for once.
        options: How.
        base: An earlier snapshot whose data objects may be shared.
        extends: The snapshot has all stable files of the base, which `can_be_extended`, besides `files`. So it costs
            what is new in it, however many files it has.
        hold: Given the files that will be read, in time before any is; gives them as they are to be read.
        should_abort: Asked before every few files.
        runner: Who writes the data objects.

    Raises:
        SnapshotAbortedError: `should_abort` said so.
        CutOvertakenError: A file vanished, or had another length than was said of it.
        StorageAccessError: The space could not be written, or a snapshot is there already.
    """
    if space.size(posixpath.join(directory, METADATA_NAME)) is not None:
        raise StorageAccessError(
            f"{space.url}/{directory} holds a snapshot already, and a snapshot is never overwritten. Give the new one "
            "another number, or delete that one first."
        )
    writer = _Writer(space, directory, header, options, base, extends=extends)

    def go_on() -> None:
        if should_abort():
            raise SnapshotAbortedError(f"{space.url}/{directory} was given up before it was whole.")

    try:
        # No list of all files outlives the next step: a snapshot may have a hundred thousand.
        inline, packed = writer.split(hold(writer.share(files)))
        for file in inline:
            go_on()
            writer.inline(file)
        writer.pack(packed, runner, go_on)
        return writer.finish()
    except BaseException:
        writer.remove()
        raise


class _Writer:
    def __init__(
        self,
        space: ObjectSpace,
        directory: str,
        header: SnapshotHeader,
        options: WriteOptions,
        base: Base | None,
        *,
        extends: bool,
    ) -> None:
        self._space = space
        self._directory = directory
        self._options = options
        self._base = base
        self._extends = extends
        self._known = Reusable(base, self._take, is_extended=extends)
        taken = base.metadata if base is not None and extends else None
        self._stable = Segment()
        self._manifest = Manifest(header, (*(taken.manifest.stable if taken else ()), self._stable))
        # With all stable files come their inlined bytes, and a few bytes of files that are gone: until the next
        # snapshot
        # that extends none.
        self._inline = bytearray(taken.inline if taken else b"")
        # Digests of what is there: logs that are read again need not be written again.
        others = taken.manifest.rest.files if taken else ()
        self._inlined = {entry.digest: entry.offset for entry in others if entry.object is None}
        # Of its own for each write: a second try of the same snapshot must not touch what a first one wrote.
        self._write_id = f"{header.number or 0}-{uuid.uuid4().hex[:16]}"
        self._made: list[str] = []
        # The disk's or the store's time for the last data object, beside the making of the metadata.
        self._completing: list[Future[None]] = []
        self._taken = 0
        self._written = 0
        self._publishing = False

    def share(self, files: Iterable[Source]) -> list[Source]:
        """Share what is unchanged for certain; returns the rest."""
        rest = []
        for file in files:
            # What extends the stable files of the base is not among them.
            line = None if self._extends and file.stable else self._known.unchanged(file)
            if line is None:
                rest.append(file)
                continue
            reference, offset = place_of(line)
            # With the stable files of the base all its inlined bytes came, at the same place.
            if reference is not None or self._extends:
                self._segment(file).add_line(file.size, reference, offset, line)
            elif self._may_inline(file.size):
                data = self._known.inline[offset : offset + file.size]
                self._segment(file).add(parse_line(line)._replace(offset=len(self._inline)))
                self._inline += data
            else:
                rest.append(file)
        return rest

    def split(self, files: Sequence[Source]) -> tuple[list[Source], list[Source]]:
        """Those that go into the metadata, and those that go into data objects.

        Where a data object is made anyway, small files that the next snapshots will have too go there: inlined, their
        bytes would be written again with each of them.
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
        """Put a file into the metadata."""
        data = read_small(file)
        digest = blake3(data).hexdigest()
        offset = self._inlined.setdefault(digest, len(self._inline))
        if offset == len(self._inline):
            self._inline += data
        entry = FileEntry(digest, file.path, file.size, file.identity, file.token, None, offset)
        self._segment(file).add(entry)

    def pack(self, files: list[Source], runner: PackRunner, go_on: Callable[[], None]) -> None:
        """Put files into data objects."""
        if not files:
            return
        lock = threading.Lock()

        def wrote(files: Sequence[Source], entries: Sequence[FileEntry]) -> None:
            stable = [entry for file, entry in zip(files, entries, strict=True) if file.stable]
            others = [entry for file, entry in zip(files, entries, strict=True) if not file.stable]
            with lock:
                self._stable.add_all(stable)
                self._manifest.rest.add_all(others)

        checks = Checks(
            self._known.same_content,
            self._known.is_likely,
            go_on,
            self._made.append,
            wrote,
            self._complete_beside,
        )
        create = _Objects(self._space, self._directory)
        tasks = self._tasks(files, runner)
        files.clear()
        self._written += runner.run(tasks, create, checks)

    def finish(self) -> WrittenSnapshot:
        """Make the snapshot visible."""
        if not self._stable.file_count:
            self._manifest.stable = self._manifest.stable[:-1]
        inline = bytes(self._inline)
        metadata = pack_metadata(self._manifest, inline)
        name = posixpath.join(self._directory, METADATA_NAME)
        self._space.publish(name, metadata, after=self._complete)
        return WrittenSnapshot(self._manifest, inline, self._written + len(metadata), tuple(self._made))

    def _complete_beside(self, work: Callable[[], None]) -> None:
        try:
            self._completing.append(begin(work))
        except RuntimeError:
            # The system gives no more threads; this needs none.
            work()

    def _complete(self) -> None:
        """Wait until the data objects are whole: only then the snapshot may be visible."""
        for completing in self._completing:
            completing.result()
        # Once more, also those that were there when the snapshot was begun: another process may have deleted one.
        problems = self._manifest.unusable_objects(self._space, self._directory) if self._manifest.objects else []
        if problems:
            raise StorageAccessError(
                f"{self._space.url}/{self._directory} is not finished, because data objects that it needs went away "
                f"while it was written: {'; '.join(problems[:3])}. Look whether something else deletes there; the next "
                "snapshot is written without them."
            )
        self._publishing = True

    def remove(self) -> None:
        """Remove what was written of a snapshot that is not to be."""
        if self._may_be_published():
            return
        wait(self._completing)
        for name in self._made:
            # What cannot be removed now is swept later; the error that led here is the one to tell.
            with contextlib.suppress(CkptError, OSError):
                self._space.delete(object_name(self._directory, name))

    def _may_be_published(self) -> bool:
        """A put can fail for us and succeed for the store: then the snapshot is whole and needs its objects."""
        if not self._publishing:
            return False
        try:
            return self._space.size(posixpath.join(self._directory, METADATA_NAME)) is not None
        except (CkptError, OSError):
            return True

    def _take(self, reference: str) -> str | None:
        """Make an object of the base one of this snapshot."""
        base = self._base
        if base is None or base.is_beside:
            return reference
        # A name of its own here too: another snapshot that took it over may be deleted, or given up, meanwhile.
        self._taken += 1
        name = f"{self._options.object_prefix}{self._write_id}-taken-{self._taken}.pack"
        self._made.append(name)
        source = object_name(base.directory, reference)
        return name if self._space.adopt(object_name(self._directory, name), base.space, source) else None

    def _segment(self, file: Source) -> Segment:
        return self._stable if file.stable else self._manifest.rest

    def _may_inline(self, size: int, inlined: int | None = None) -> bool:
        threshold = self._options.inline_threshold
        # An empty file needs no object, whatever the threshold.
        if threshold is None or size == 0:
            return True
        inlined = len(self._inline) if inlined is None else inlined
        return size < threshold and self._fits(inlined + size)

    def _fits(self, inlined: int) -> bool:
        return self._options.inline_threshold is None or inlined <= self._options.inline_limit_bytes

    def _tasks(self, files: Sequence[Source], runner: PackRunner) -> list[PackTask]:
        """Files in order, in about equal shares."""
        total = sum(file.size for file in files)
        shares = runner.width(total)
        share = total // shares + 1
        groups: list[deque[Source]] = [deque() for _ in range(shares)]
        before = 0
        for file in files:
            groups[before // share].append(file)
            before += file.size
        least, most = self._options.pack_least_bytes, self._options.pack_target_bytes
        target = min(max(total // PACKS_OF_AN_SNAPSHOT, least), most)
        name = f"{self._options.object_prefix}{self._write_id}"
        return [
            PackTask(f"{name}-{index}" if shares > 1 else name, group, target)
            for index, group in enumerate(groups)
            if group
        ]


@dataclass(frozen=True)
class _Objects:
    """Makes the data objects of a snapshot, in whatever process."""

    space: ObjectSpace
    directory: str

    def __call__(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return self.space.create(object_name(self.directory, name))
