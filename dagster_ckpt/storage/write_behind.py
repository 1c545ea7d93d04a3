"""Letting the kernel write to the disk while this process still reads and hashes.

What is written has to be on the disk before an image is visible, so the disk's time is paid in any case. Begun only
by the `fsync` at the end it is paid all at once; Linux offers `sync_file_range` to begin it early.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

# linux/fs.h: begin writing dirty pages, and wait for nothing.
_SYNC_FILE_RANGE_WRITE = 2


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
