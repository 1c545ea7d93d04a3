"""Writing files one after the other into few large data objects."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

from blake3 import blake3

from dagster_ckpt.errors import CutOvertakenError
from dagster_ckpt.image.entries import FileEntry
from dagster_ckpt.image.parallel import GoOn, in_threads
from dagster_ckpt.image.source import Source

# Reading and hashing in smaller pieces costs more than it saves; files up to this size are read once, at a go.
CHUNK_BYTES = 1024 * 1024
# Small files are written so much at a time: a call for each costs more than the bytes, and memory that stays this small
# is used again.
_TOGETHER_BYTES = 256 * 1024
# So many files are told of at a time.
_TOLD_AT_ONCE = 500
# Equal files of one image are stored once, as long as a table of so many digests can tell.
_REMEMBERED_DIGESTS = 1_024

# Below this a second thread costs more than it saves.
BYTES_WORTH_A_THREAD = 16 * 1024 * 1024

Create = Callable[[str], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class PackTask:
    """Files that one worker writes.

    Attributes:
        name: What the names of its data objects begin with, unlike any other's.
        files: The files; each is taken out when it is written, so that its memory is free for what follows.
        target_bytes: A data object of this size takes no further file. A file is never split.
    """

    name: str
    files: deque[Source]
    target_bytes: int


def at_once(work: Callable[[], None]) -> None:
    """Do it now."""
    work()


KnownContent = Callable[[str, Source], FileEntry | None]


@dataclass(frozen=True)
class Checks:
    """What a worker asks while it writes.

    Attributes:
        known: The entry of content that need not be written, by digest and file.
        is_likely_known: Whether a large file is worth reading for its digest first.
        go_on: Called before each file; raises ImageAbortedError where the image is given up.
        made: Told of each data object before it is made: one that could be made only in part has to be removed too.
        wrote: Told of some files where each lies; from several threads, where several write.
        complete: Given what completes the last data object of a task, to be done before the image is finished.
    """

    known: KnownContent
    is_likely_known: Callable[[Source], bool]
    go_on: Callable[[], None]
    made: Callable[[str], None]
    wrote: Callable[[Sequence[Source], Sequence[FileEntry]], None]
    complete: Callable[[Callable[[], None]], object] = at_once


def write_packs(task: PackTask, create: Create, checks: Checks) -> int:
    """Write the files of a task; returns how many bytes were written.

    Args:
        task: What to write.
        create: Opens a new data object by name.
        checks: What to ask meanwhile.

    Raises:
        ImageAbortedError: The image is given up.
        CutOvertakenError: A file vanished, or had another length than was said of it.
        StorageAccessError: A data object could not be written.
    """
    with _PackWriter(task, create, checks) as writer:
        while task.files:
            checks.go_on()
            writer.add(task.files.popleft())
    return writer.written


def pack_names(task: PackTask) -> list[str]:
    """Names of the data objects that a task may make, in order; equal files may leave the last ones out."""
    count, length = 0, task.target_bytes + 1
    for file in task.files:
        if not count or length + file.size > task.target_bytes:
            count, length = count + 1, 0
        length += file.size
    return [_pack_name(task, number) for number in range(count)]


class PackRunner(Protocol):
    """Who writes the data objects of an image."""

    def width(self, total_bytes: int) -> int:
        """How many tasks to make of so many bytes."""
        ...

    def run(self, tasks: Sequence[PackTask], create: Create, checks: Checks) -> int:
        """Write every task; returns how many bytes were written.

        Args:
            tasks: The tasks.
            create: Opens a new data object by name.
            checks: What to ask meanwhile.

        Raises:
            ImageAbortedError: The image is given up.
            CutOvertakenError: A file vanished, or had another length than was said of it.
            StorageAccessError: A data object could not be written.
        """
        ...


@dataclass(frozen=True)
class Threads:
    """Threads of this process; a single task is done in the caller's.

    Attributes:
        count: At most so many at a time.
    """

    count: int

    def width(self, total_bytes: int) -> int:
        """How many tasks to make of so many bytes."""
        return max(1, min(self.count, total_bytes // BYTES_WORTH_A_THREAD))

    def run(self, tasks: Sequence[PackTask], create: Create, checks: Checks) -> int:
        """Write every task; returns how many bytes were written."""

        def work(task: PackTask, go_on: GoOn) -> int:
            def both() -> None:
                go_on()
                checks.go_on()

            # Of several tasks the next one takes the thread: what the one before holds must be gone by then.
            complete = checks.complete if len(tasks) == 1 else at_once
            return write_packs(task, create, replace(checks, go_on=both, complete=complete))

        return sum(in_threads(self.count, tasks, work))


def read_file(file: Source) -> tuple[bytes, str]:
    """All bytes of a small file, and their digest.

    Raises:
        CutOvertakenError: It vanished, or has another length than was said of it.
    """
    try:
        data = file.read()
    except FileNotFoundError as error:
        raise vanished(file) from error
    if len(data) != file.size:
        raise _changed(file)
    return data, blake3(data).hexdigest()


def vanished(file: Source) -> CutOvertakenError:
    """The error about a file that is not there any more."""
    return CutOvertakenError(f"{file.path} vanished before it was read, so no image was written. Take the image anew.")


class _PackWriter:
    def __init__(self, task: PackTask, create: Create, checks: Checks) -> None:
        self._task = task
        self._create = create
        self._checks = checks
        self._open = contextlib.ExitStack()
        self._stream: BinaryIO | None = None
        self._length = 0
        self._places: dict[str, tuple[str, int, int]] = {}
        self._packs: list[str] = []
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._files: list[Source] = []
        self._entries: list[FileEntry] = []
        self.written = 0

    def __enter__(self) -> _PackWriter:
        return self

    def __exit__(self, *details: object) -> None:
        if details[0] is None:
            self._flush()
            self._checks.complete(self._open.close)
            self._tell()
            return
        with contextlib.suppress(Exception):
            self._open.close()

    def add(self, file: Source) -> None:
        if file.size > CHUNK_BYTES:
            self._add_large(file)
            return
        data, digest = read_file(file)
        entry = self._checks.known(digest, file) or self._seen(digest, file)
        if entry is None:
            entry = self._entry(file, digest, self._room_for(file.size))
            self._write(data)
        self._wrote(file, entry)

    def _add_large(self, file: Source) -> None:
        if self._checks.is_likely_known(file):
            read = blake3()
            for chunk in _chunks(file):
                read.update(chunk)
            entry = self._checks.known(read.hexdigest(), file)
            if entry is not None:
                self._wrote(file, entry)
                return
        offset = self._room_for(file.size)
        digest = blake3()
        for chunk in _chunks(file):
            digest.update(chunk)
            self._write(chunk)
        self._wrote(file, self._entry(file, digest.hexdigest(), offset))

    def _wrote(self, file: Source, entry: FileEntry) -> None:
        self._files.append(file)
        self._entries.append(entry)
        if len(self._files) >= _TOLD_AT_ONCE:
            self._tell()

    def _tell(self) -> None:
        self._checks.wrote(self._files, self._entries)
        self._files.clear()
        self._entries.clear()

    def _seen(self, digest: str, file: Source) -> FileEntry | None:
        place = self._places.get(digest)
        if place is None or place[2] != file.size:
            return None
        return FileEntry(digest, file.path, file.size, file.identity, file.token, place[0], place[1])

    def _entry(self, file: Source, digest: str, offset: int) -> FileEntry:
        pack = self._packs[-1]
        if len(self._places) < _REMEMBERED_DIGESTS:
            self._places[digest] = (pack, offset, file.size)
        return FileEntry(digest, file.path, file.size, file.identity, file.token, pack, offset)

    def _room_for(self, size: int) -> int:
        """Offset at which a file of this size goes into the open data object, which may be a new one."""
        if self._stream is None or self._length + size > self._task.target_bytes:
            self._close()
            name = _pack_name(self._task, len(self._packs))
            self._checks.made(name)
            self._packs.append(name)
            self._stream = self._open.enter_context(self._create(name))
            self._length = 0
        return self._length

    def _write(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._length += len(data)
        self.written += len(data)
        if self._pending_bytes >= _TOGETHER_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what has come together."""
        if self._stream is not None and self._pending:
            self._stream.write(b"".join(self._pending) if len(self._pending) > 1 else self._pending[0])
        self._pending.clear()
        self._pending_bytes = 0

    def _close(self) -> None:
        self._flush()
        self._open.close()


def _chunks(file: Source) -> Iterator[bytes]:
    left = file.size
    try:
        with file.open() as stream:
            # One byte more than expected, so that a file that has grown is noticed.
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
        f"{file.path} had {file.size} bytes when it was looked at, and another length when it was read: it "
        "changed meanwhile, so no image was written. Take the image anew."
    )
