"""Object space on a local or mounted disk, with write-behind of large objects."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from dagster_ckpt.errors import CkptError
from dagster_ckpt.io.access import Guarded, accessing, reading
from dagster_ckpt.io.durability import flush, make_folder
from dagster_ckpt.io.objects import ObjectSpace, no_op
from dagster_ckpt.io.parallel import start_in_thread

# linux/fs.h: start writing dirty pages without waiting.
_SYNC_FILE_RANGE_WRITE = 2
# Start write-back each time this many bytes are written.
_BEGIN_BYTES = 256 * 1024
# Smaller objects are written and flushed as fast without it: a thread competes for the interpreter
# lock, and the hint to the kernel may block, too.
_WORTH_A_THREAD_BYTES = 2 * 1024 * 1024
# Maximum number of buffers that wait for the disk, each at most 1 MiB or one write buffer. The
# caller then waits; more memory would not help, because the disk is the bottleneck.
_WAITING = 4
# Maximum number of pieces that Linux, macOS and the BSDs accept in one call.
_PIECES_OF_A_CALL = 1024


# One such thread per process: several files written concurrently already fill each other's pauses.
_BESIDE = threading.Lock()


class WriteBehind:
    """A file that a separate thread writes in order if it is large.

    Leaving the context waits until everything is written. An error of the thread is raised by the
    next write or on exit.

    Args:
        stream: The file, unbuffered.
        buffer_bytes: Smaller amounts are buffered until more data arrives or the file is closed.
    """

    def __init__(self, stream: FileIO, buffer_bytes: int) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_direct = False
        self._waiting: queue.Queue[list[bytes] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._writing: Future[None] | None = None
        self._begun = 0
        self._written = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *details: object) -> None:
        try:
            if details[0] is None:
                self._pass_on()
        finally:
            if self._writing is not None:
                self._waiting.put(None)
                self._writing.result()
                _BESIDE.release()
        if details[0] is None:
            self._raise_error()

    def write(self, data: bytes) -> int:
        """Queue data for writing; the caller must not change it afterwards."""
        self.writelines([data])
        return len(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Queue several pieces for writing; the caller must not change them afterwards."""
        self._raise_error()
        self._held += pieces
        self._held_bytes += sum(map(len, pieces))
        if self._held_bytes >= self._buffer_bytes:
            self._pass_on()

    def _pass_on(self) -> None:
        pieces = self._held
        self._held, self._held_bytes = [], 0
        if self._writing is None and not self._is_direct and self._written >= _WORTH_A_THREAD_BYTES:
            self._begin()
        if self._writing is not None:
            self._waiting.put(pieces)
        else:
            self._write(pieces)

    def _begin(self) -> None:
        """Start the thread if there is enough data and no other thread is running."""
        if not _BESIDE.acquire(blocking=False):
            self._is_direct = True
            return
        try:
            self._writing = start_in_thread(self._write_all)
        except RuntimeError:
            # The system cannot start another thread; write the bytes directly.
            _BESIDE.release()
            self._is_direct = True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        while (pieces := self._waiting.get()) is not None:
            # After an error the remaining data is discarded, so that the writer does not block.
            if self._error is None:
                try:
                    self._write(pieces)
                except BaseException as error:  # noqa: BLE001 - raised in the caller by the next call
                    self._error = error

    def _write(self, pieces: list[bytes]) -> None:
        for first in range(0, len(pieces), _PIECES_OF_A_CALL):
            some = pieces[first : first + _PIECES_OF_A_CALL]
            size = sum(map(len, some))
            # Written as separate pieces: concatenating them would take a third as long as hashing
            # them.
            done = os.writev(self._stream.fileno(), some)
            # A disk may accept only part of the data; the next call reports why.
            while done < size:
                done += self._stream.write(b"".join(some)[done:])
            self._written += size
        if self._written >= _WORTH_A_THREAD_BYTES and self._written - self._begun >= _BEGIN_BYTES:
            begin_writing(self._stream.fileno(), self._begun, self._written - self._begun)
            self._begun = self._written


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function  # type: ignore[no-any-return]


_BEGIN = _sync_file_range()


def begin_writing(descriptor: int, offset: int, size: int) -> None:
    """Ask the kernel to start writing a range of a file. This is a hint: if it fails, writing only starts later.

    Args:
        descriptor: The open file.
        offset: Start of the range.
        size: Its length in bytes.
    """
    if _BEGIN is not None:
        _BEGIN(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)


# Many small files are adjacent in one object.
READ_BYTES = 256 * 1024


class LocalSpace:
    """A folder on a local or mounted disk. Data is flushed to the disk before anything relies on it."""

    def __init__(self, root: Path, *, buffer_bytes: int) -> None:
        self._root = root
        self._buffer_bytes = buffer_bytes

    @property
    def url(self) -> str:
        """URL of the space."""
        return f"file://{self._root}"

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new data object for writing."""
        path = self._root / name
        with accessing("write", f"file://{path}"):
            changed = make_folder(path.parent)
            with self._new_file(path) as stream:
                with WriteBehind(stream, self._buffer_bytes) as behind:
                    yield cast("BinaryIO", Guarded(cast("BinaryIO", behind), f"file://{path}"))
                os.fsync(stream.fileno())
            for folder in (path.parent, *changed):
                flush(folder)

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Write an object atomically: to a temporary file, flushed, then renamed, and the folder is flushed too."""
        unfinished_name = f"{name}.{uuid.uuid4().hex}.tmp"
        path, unfinished = self._root / name, self._root / unfinished_name
        with accessing("write", f"file://{path}"):
            changed = make_folder(path.parent)
            try:
                with unfinished.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                for folder in changed:
                    flush(folder)
                # The work that it waits for, mostly also flushing to disk, ran concurrently.
                after()
                unfinished.replace(path)
            except BaseException:
                with suppress(CkptError):
                    self.delete(unfinished_name)
                raise
            flush(path.parent)

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with reading(f"{self.url}/{name}"):
            return (self._root / name).read_bytes()

    @contextmanager
    def open(self, name: str, part: range | None = None) -> Iterator[BinaryIO]:  # noqa: ARG002
        """Open an object for reading."""
        where = f"{self.url}/{name}"
        with reading(where):
            stream = (self._root / name).open("rb", buffering=READ_BYTES)
        with stream:
            yield cast("BinaryIO", Guarded(stream, where))

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        return self.sizes([name]).get(name)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist."""
        found: dict[str, int] = {}
        # The error itself names the object.
        with accessing("look at", self.url):
            for name in names:
                with suppress(FileNotFoundError):
                    found[name] = os.stat(f"{self._root}/{name}").st_size  # noqa: PTH116 - called often
        return found

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Hard-link an object of another space on the same disk.

        This costs no bytes, and they live as long as either link.
        """
        if not isinstance(source, LocalSpace):
            return False
        path = self._root / name
        with accessing("write", f"file://{path}"):
            for folder in make_folder(path.parent):
                flush(folder)
            try:
                path.hardlink_to(source._root / source_name)
            except OSError:
                # Another device, a disk without hard links, or a link limit: then the bytes are
                # written again.
                return False
            # A snapshot that refers to the object may be published next, and the source deleted.
            flush(path.parent)
        return True

    def delete(self, name: str) -> None:
        """Delete an object, and its folder if that becomes empty."""
        path = self._root / name
        with accessing("delete", f"file://{path}"):
            path.unlink(missing_ok=True)
            # Another process may delete the folder or write into it concurrently.
            with suppress(FileNotFoundError):
                if path.parent != self._root and not any(path.parent.iterdir()):
                    with suppress(OSError):
                        path.parent.rmdir()
                        return
                # The objects that it referred to may be deleted next, so it must not reappear after
                # a crash.
                flush(path.parent)

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder).

        Symbolic links are not followed: what is behind them can be read by name, but does not
        belong to this space.
        """
        folder = self._root / prefix
        with accessing("list", f"{self.url}/{prefix}"):
            if prefix and folder.is_symlink():
                return {}
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                return {}
            found: dict[str, int] = {}
            with entries:
                for entry in entries:
                    # An object that is deleted concurrently is omitted; all others are listed.
                    with suppress(FileNotFoundError):
                        # The time of the inode, not of the content: a new link to an old object
                        # counts as new.
                        changed_ms = entry.stat(follow_symlinks=False).st_ctime_ns // 1_000_000
                        found[entry.name] = 0 if entry.is_dir() else changed_ms
            return found

    def _new_file(self, path: Path) -> FileIO:
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            # The folder was removed concurrently, along with the last other object in it.
            for folder in make_folder(path.parent):
                flush(folder)
            return path.open("xb", buffering=0)
