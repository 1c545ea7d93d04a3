"""Writing a file while the caller still reads and hashes.

What is written has to be on the disk before an image is visible, so the disk's time is paid in any case. Paid by the
`fsync` at the end it comes on top; another thread writes meanwhile, and lets the kernel begin with `sync_file_range`
where there is one (Linux).
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import BinaryIO

from dagster_ckpt.image import begin

# linux/fs.h: begin writing dirty pages, and wait for nothing.
_SYNC_FILE_RANGE_WRITE = 2
# The kernel is asked to begin after so many bytes.
_BEGIN_BYTES = 256 * 1024
# A smaller first piece is most likely all there is: it is written sooner than a thread begins.
_WORTH_A_THREAD_BYTES = 128 * 1024
# Pieces that may wait for the disk, of at most 1 MiB each: beyond this the caller waits. More would be memory for
# nothing, as the disk is behind anyway.
_WAITING = 4


# One such thread in a process: where several files are written at once, they fill each other's pauses.
_BESIDE = threading.Lock()


class WriteBehind:
    """A stream whose bytes a thread of its own writes, in order, where they are many.

    Leaving the context waits until all is written; an error of the thread is raised by the next write, or then.

    Args:
        stream: Where the bytes go.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._is_direct = False
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._writing: Future[None] | None = None
        self._begun = 0
        self._written = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *details: object) -> None:
        if self._writing is not None:
            self._pieces.put(None)
            self._writing.result()
            _BESIDE.release()
        if details[0] is None:
            self._raise_error()

    def write(self, data: bytes) -> int:
        """Let all of the data be written; the caller must not change it."""
        self._raise_error()
        if self._writing is None and not self._is_direct and len(data) >= _WORTH_A_THREAD_BYTES:
            self._begin()
        if self._writing is not None:
            self._pieces.put(data)
        else:
            self._write(data)
        return len(data)

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
        while (piece := self._pieces.get()) is not None:
            # After an error the rest is taken and dropped, so that nobody waits for room.
            if self._error is None:
                try:
                    self._write(piece)
                except BaseException as error:  # noqa: BLE001 - raised where the caller can see it
                    self._error = error

    def _write(self, piece: bytes) -> None:
        done = 0
        while done < len(piece):
            # An unbuffered file may take it in parts.
            done += self._stream.write(memoryview(piece)[done:] if done else piece)
        self._written += done
        if self._written - self._begun >= _BEGIN_BYTES:
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
