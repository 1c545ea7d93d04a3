"""Objects as files on this machine."""

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
from dagster_ckpt.io.objects import ObjectSpace, nothing
from dagster_ckpt.io.parallel import begin

# linux/fs.h: begin writing dirty pages, and wait for nothing.
_SYNC_FILE_RANGE_WRITE = 2
# The kernel is asked to begin after so many bytes.
_BEGIN_BYTES = 256 * 1024
# What is smaller is written and flushed as soon without: a thread takes the interpreter's lock from the caller, and
# telling the kernel is a call that has to wait, too.
_WORTH_A_THREAD_BYTES = 2 * 1024 * 1024
# So often may bytes wait for the disk, at most 1 MiB or a buffer each time: beyond this the caller waits. More would be
# memory for nothing, as the disk is behind anyway.
_WAITING = 4
# So many pieces Linux, macOS and the BSDs take by one call.
_PIECES_OF_A_CALL = 1024


# One such thread in a process: where several files are written at once, they fill each other's pauses.
_BESIDE = threading.Lock()


class WriteBehind:
    """A file whose bytes a thread of its own writes, in order, where they are many.

    Leaving the context waits until all is written; an error of the thread is raised by the next write, or then.

    Args:
        stream: The file, unbuffered.
        buffer_bytes: Fewer bytes wait for more, or for the end.
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
        """Let all of the data be written; the caller must not change it."""
        self.writelines([data])
        return len(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Let some pieces be written, one after the other; the caller must not change them."""
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
        """There is enough for a thread, if none is at work yet."""
        if not _BESIDE.acquire(blocking=False):
            self._is_direct = True
            return
        try:
            self._writing = begin(self._write_all)
        except RuntimeError:
            # The system gives no more threads; the bytes need none.
            _BESIDE.release()
            self._is_direct = True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        while (pieces := self._waiting.get()) is not None:
            # After an error the rest is taken and dropped, so that nobody waits for room.
            if self._error is None:
                try:
                    self._write(pieces)
                except BaseException as error:  # noqa: BLE001 - raised where the caller can see it
                    self._error = error

    def _write(self, pieces: list[bytes]) -> None:
        for first in range(0, len(pieces), _PIECES_OF_A_CALL):
            some = pieces[first : first + _PIECES_OF_A_CALL]
            size = sum(map(len, some))
            # As they are: to put them together first would take as long as a third of their digests.
            done = os.writev(self._stream.fileno(), some)
            # A disk may take a part; why it does not take more the next call says.
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
    """Ask the kernel to begin writing a range of a file; a hint, whose failure means only that it is late.

    Args:
        descriptor: The open file.
        offset: Where the range begins.
        size: Its length in bytes.
    """
    if _BEGIN is not None:
        _BEGIN(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)


# Many small files lie side by side in one object.
READ_BYTES = 256 * 1024


class LocalSpace:
    """A folder on a local or mounted disk. What is written is flushed to the disk before it is relied on."""

    def __init__(self, root: Path, *, buffer_bytes: int) -> None:
        self._root = root
        self._buffer_bytes = buffer_bytes

    @property
    def url(self) -> str:
        """Where the space is."""
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

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = nothing) -> None:
        """Write an object at once: beside it, flushed, then renamed, and the folder flushed too."""
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
                # What it waits for, mostly the disk as well, was done meanwhile.
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
        """Lengths of those objects that are there."""
        found: dict[str, int] = {}
        # The error itself names the object.
        with accessing("look at", self.url):
            for name in names:
                with suppress(FileNotFoundError):
                    found[name] = os.stat(f"{self._root}/{name}").st_size  # noqa: PTH116 - a dozen with every snapshot
        return found

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Link an object of another space on the same disk: it costs no bytes, and lives as long as either."""
        if not isinstance(source, LocalSpace):
            return False
        path = self._root / name
        with accessing("write", f"file://{path}"):
            for folder in make_folder(path.parent):
                flush(folder)
            try:
                path.hardlink_to(source._root / source_name)
            except OSError:
                # Another device, a disk without links, a limit reached: then the bytes are written anew.
                return False
            # A snapshot that refers to it may be published next, and the source deleted.
            flush(path.parent)
        return True

    def delete(self, name: str) -> None:
        """Delete an object, and its folder if that is empty then."""
        path = self._root / name
        with accessing("delete", f"file://{path}"):
            path.unlink(missing_ok=True)
            # Somebody else may delete the folder meanwhile, or write into it.
            with suppress(FileNotFoundError):
                if path.parent != self._root and not any(path.parent.iterdir()):
                    with suppress(OSError):
                        path.parent.rmdir()
                        return
                # What it referred to may be deleted next: it must not come back without that.
                flush(path.parent)

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder).

        Behind a link nothing is listed: what lies there can be read by its name, but is not ours to clear away.
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
                    # One that is deleted meanwhile is not there; all the others are.
                    with suppress(FileNotFoundError):
                        # The time of the inode, not of the content: a link to an old object is as new as objects get.
                        changed_ms = entry.stat(follow_symlinks=False).st_ctime_ns // 1_000_000
                        found[entry.name] = 0 if entry.is_dir() else changed_ms
            return found

    def _new_file(self, path: Path) -> FileIO:
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            # The folder went with the last other object in it, in the moment between.
            for folder in make_folder(path.parent):
                flush(folder)
            return path.open("xb", buffering=0)
