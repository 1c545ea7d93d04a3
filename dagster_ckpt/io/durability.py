"""Get bytes onto this machine's disks: flush them, so that they survive a power failure, and write behind."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from io import FileIO as RawFile
from itertools import islice
from pathlib import Path

from dagster_ckpt.io.parallel import CancelCheck, in_threads, start_in_thread

# Each flush of a file makes the disk empty its cache, whether or not the file changed. Above this
# number of files one call flushes the whole file system: 2,000 linked files take 10 ms instead of
# 140 ms.
_ONE_BY_ONE = 128
# The disk handles this many concurrent flushes in the time of one.
_THREADS = 8
# File systems where syncing the whole file system also flushes every file in it. FUSE does not
# guarantee this.
_FLUSHED_AS_A_WHOLE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"}


def make_folder(folder: Path) -> list[Path]:
    """Create a folder.

    Returns the directories with a new entry, which a power failure can undo until they are flushed.
    """
    changed: list[Path] = []
    missing = folder
    while not missing.is_dir():
        missing = missing.parent
        changed.append(missing)
    if changed:
        folder.mkdir(parents=True, exist_ok=True)
    return changed


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    """Make all files and names below a folder durable; the name of the folder itself belongs to its parent.

    Raises:
        OSError: The disk reports an error.
    """
    some = list(islice(_tree(root), _ONE_BY_ONE + 1))
    if len(some) > _ONE_BY_ONE:
        if sync_file_system(root):
            return
        some = list(_tree(root))

    def flush_part(part: list[Path], check_canceled: CancelCheck) -> None:
        for path in part:
            check_canceled()
            flush(path)

    files = [path for path, is_folder in some if not is_folder]
    in_threads(_THREADS, [part for first in range(_THREADS) if (part := files[first::_THREADS])], flush_part)
    # The target of a name is made durable before the name.
    for path in reversed([path for path, is_folder in some if is_folder]):
        flush(path)


def sync_file_system(folder: Path) -> bool:
    """Make the whole file system of a folder durable; returns False if this is not supported.

    Raises:
        OSError: The disk reports an error.
    """
    if _SYNCFS is None or _file_system_type(folder) not in _FLUSHED_AS_A_WHOLE:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _SYNCFS(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
    return True


def _tree(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The folder and everything below it, parents first, with whether each is a folder; symbolic links are skipped."""
    yield folder, True
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _tree(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path), False


def _file_system_type(folder: Path) -> str | None:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = (line.split() for line in mounts)
    return next((words[words.index("-") + 1] for words in found if words[2] == number), None)


def _syncfs() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_SYNCFS = _syncfs()


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

    def __init__(self, stream: RawFile, buffer_bytes: int) -> None:
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
