"""Write files back to back into few large data objects ("packs")."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Protocol

from blake3 import blake3

from dagster_ckpt.errors import CutOvertakenError, DamagedCutError
from dagster_ckpt.io.file_io import CancelCheck, in_threads
from dagster_ckpt.snapshot.entries import BlockBuilder, FileEntry
from dagster_ckpt.snapshot.reuse import ContentCheck, Source

# Smaller pieces cost more than they save.
CHUNK_BYTES = 1024 * 1024
# Small files are written together, as a call per file costs more than its bytes; an abort waits meanwhile.
_TOGETHER_FILES = 50
_TOGETHER_BYTES = 256 * 1024
# Equal files of one snapshot are stored once, as far as this many digests show.
_REMEMBERED_DIGESTS = 1_024

# Below this size a second thread costs more than it saves.
BYTES_WORTH_A_THREAD = 16 * 1024 * 1024

Place = tuple[str, int]
Create = Callable[[str], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class PackTask:
    """Files that one worker writes.

    Attributes:
        files: Each is removed when it is written, to free its memory.
        target_bytes: Size from which a data object takes no further file. A file is never split.
    """

    name: str
    files: deque[Source]
    target_bytes: int


def run_now(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True)
class PackCallbacks:
    """What a worker calls while it writes.

    Attributes:
        is_likely_unchanged: Whether to read a large file for its digest first.
        check_aborted: Raises SnapshotAbortedError; called at short intervals.
        creating: Called with the name of each data object before it is created, to remove a partial one.
        complete: Called with a function that completes a task's last data object, which must run before the snapshot is
            finished.
    """

    stored_at: Callable[[Source, str], Place | None]
    is_likely_unchanged: Callable[[Source], bool]
    check_aborted: Callable[[], None]
    creating: Callable[[str], None]
    complete: Callable[[Callable[[], None]], object] = run_now


@dataclass(frozen=True)
class Packed:
    entries: BlockBuilder = field(default_factory=BlockBuilder)
    written: int = 0

    @staticmethod
    def joined(parts: Iterable[Packed]) -> Packed:
        entries, written = BlockBuilder(), 0
        for part in parts:
            entries.add_all(part.entries)
            written += part.written
        return Packed(entries, written)


def write_packs(task: PackTask, create: Create, callbacks: PackCallbacks) -> Packed:
    with _PackWriter(task, create, callbacks) as writer:
        while task.files:
            callbacks.check_aborted()
            some = _next_small(task.files)
            if some:
                writer.add_small(some)
            else:
                writer.add_large(task.files.popleft())
    return Packed(writer.entries, writer.written)


def pack_names(task: PackTask) -> list[str]:
    count, length = 0, task.target_bytes + 1
    for file in task.files:
        if not count or length + file.size > task.target_bytes:
            count, length = count + 1, 0
        length += file.size
    return [_pack_name(task, number) for number in range(count)]


class PackRunner(Protocol):
    def width(self, total_bytes: int, pack_bytes: int) -> int:
        """Return the number of tasks to create, if a data object takes `pack_bytes`."""

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        """Run tasks, whose files are in order of path within a task and from task to task."""


@dataclass(frozen=True)
class Threads:
    count: int

    def width(self, total_bytes: int, pack_bytes: int) -> int:
        # A thread waits until its data object is stored before it begins the next.
        wanted = max(total_bytes // BYTES_WORTH_A_THREAD, math.ceil(total_bytes / pack_bytes))
        return max(1, min(self.count, wanted))

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        def work(task: PackTask, check_canceled: CancelCheck) -> Packed:
            def check_aborted() -> None:
                check_canceled()
                callbacks.check_aborted()

            # The next task reuses the thread: release the buffers first.
            complete = callbacks.complete if len(tasks) == 1 else run_now
            return write_packs(task, create, replace(callbacks, check_aborted=check_aborted, complete=complete))

        return Packed.joined(in_threads(self.count, tasks, work))


def read_small(file: Source) -> bytes:
    try:
        data = file.read()
    except FileNotFoundError as error:
        raise vanished(file) from error
    if len(data) != file.size:
        raise _changed(file)
    return data


def check_content(file: Source, data: bytes) -> None:
    check = file.check()
    if check is not None:
        check.update(data)
        _refuse_damaged(file, check)


def _refuse_damaged(file: Source, check: ContentCheck | None) -> None:
    trouble = check.trouble() if check is not None else None
    if trouble is not None:
        raise DamagedCutError(
            f"{file.path} in the live directory is damaged, so no snapshot was written: {trouble}. Earlier snapshots "
            "are unchanged. A running query may still replace the file; if this repeats, examine the stream with "
            "dagster-ckpt doctor and restart it."
        )


def vanished(file: Source) -> CutOvertakenError:
    return CutOvertakenError(
        f"{file.path} vanished before it was read, so no snapshot was written. Take the snapshot again."
    )


class _PackWriter:
    def __init__(self, task: PackTask, create: Create, callbacks: PackCallbacks) -> None:
        self._task = task
        self._create = create
        self._callbacks = callbacks
        self._open = contextlib.ExitStack()
        self._stream: BinaryIO | None = None
        self._length = 0
        self._places: dict[str, Place] = {}
        self._packs: list[str] = []
        self._pending: list[bytes] = []
        self.entries = BlockBuilder()
        self.written = 0

    def __enter__(self) -> _PackWriter:
        return self

    def __exit__(self, *details: object) -> None:
        if details[0] is None:
            self._callbacks.complete(self._open.close)
            return
        with contextlib.suppress(Exception):
            self._open.close()

    def add_small(self, files: Sequence[Source]) -> None:
        contents = list(map(read_small, files))
        digests = [blake3(data).hexdigest() for data in contents]
        for file, data, digest in zip(files, contents, digests, strict=True):
            if not self._is_stored(file, digest):
                check_content(file, data)
                place = self._new_place(file.size)
                self._pending.append(data)
                self._add(file, digest, place)
        self._flush()

    def add_large(self, file: Source) -> None:
        if self._callbacks.is_likely_unchanged(file):
            read = blake3()
            for chunk in _chunks(file):
                read.update(chunk)
            if self._is_stored(file, read.hexdigest()):
                return
        place = self._new_place(file.size)
        digest, check = blake3(), file.check()
        for chunk in _chunks(file):
            digest.update(chunk)
            if check is not None:
                check.update(chunk)
            self._pending.append(chunk)
            self._flush()
        _refuse_damaged(file, check)
        self._add(file, digest.hexdigest(), place)

    def _is_stored(self, file: Source, digest: str) -> bool:
        place = self._callbacks.stored_at(file, digest) or self._places.get(digest)
        if place is None:
            return False
        self._add(file, digest, place)
        return True

    def _add(self, file: Source, digest: str, place: Place) -> None:
        if len(self._places) < _REMEMBERED_DIGESTS:
            self._places[digest] = place
        entry = FileEntry(digest, file.path, file.size, file.identity, file.token, *place)
        self.entries.add(entry, stable=file.stable)

    def _new_place(self, size: int) -> Place:
        if self._stream is None or self._length + size > self._task.target_bytes:
            self._flush()
            self._open.close()
            name = _pack_name(self._task, len(self._packs))
            self._callbacks.creating(name)
            self._packs.append(name)
            self._stream = self._open.enter_context(self._create(name))
            self._length = 0
        place = self._packs[-1], self._length
        self._length += size
        return place

    def _flush(self) -> None:
        if self._stream is not None and self._pending:
            pieces, self._pending = self._pending, []
            self._stream.writelines(pieces)
            self.written += sum(map(len, pieces))


def _next_small(files: deque[Source]) -> list[Source]:
    some: list[Source] = []
    size = 0
    while files and len(some) < _TOGETHER_FILES and (not some or size + files[0].size <= _TOGETHER_BYTES):
        if files[0].size > CHUNK_BYTES:
            break
        size += files[0].size
        some.append(files.popleft())
    return some


def _chunks(file: Source) -> Iterator[bytes]:
    left = file.size
    try:
        with file.open() as stream:
            # One more byte than expected detects a file that has grown.
            while chunk := stream.read(min(left + 1, CHUNK_BYTES)):
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
    except FileNotFoundError as error:
        raise vanished(file) from error
    if left:
        raise _changed(file)


def _pack_name(task: PackTask, number: int) -> str:
    return f"{task.name}-{number}.pack"


def _changed(file: Source) -> CutOvertakenError:
    return CutOvertakenError(
        f"{file.path} had {file.size} bytes when it was listed, but another length when it was read: it changed in "
        "the meantime, so no snapshot was written. Take the snapshot again."
    )
