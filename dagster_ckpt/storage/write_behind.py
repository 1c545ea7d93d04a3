"""Writing a file while the caller still reads and hashes.

What is written has to be on the disk before an image is visible, so the disk's time is paid in any case. Paid by the
`fsync` at the end it comes on top; where there is much, another thread writes meanwhile, and lets the kernel begin with
`sync_file_range` where there is one (Linux).
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from io import FileIO

from dagster_ckpt.image import begin

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
