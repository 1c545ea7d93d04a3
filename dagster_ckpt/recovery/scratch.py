"""Temporary directories of a stream: copies of its state that are tried, read or verified, and then deleted.

They are next to the live directories, where every executor can reach them. A process that is killed
leaves its copy behind. While a directory is in use, a thread writes the catalog's time into a file
next to it, so the next user of the stream can tell which copies are left over.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dagster_ckpt.errors import CkptError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle

# Stream ids cannot begin with a dot.
SCRATCH_FOLDER = ".scratch"
# A directory whose user has not reported for this long was left by a process that is dead.
LEFT_AFTER_MS = 6 * 3_600_000
_REPORT_EVERY_S = 300.0
_IN_USE = ".in-use"


@contextmanager
def scratch_directory(stream: StreamHandle) -> Iterator[LiveDirectory]:
    """A temporary directory for a copy of a stream's state; it is not created, and deleted at the end.

    Args:
        stream: The stream.

    Raises:
        StorageAccessError: The folder of live directories cannot be reached.
    """
    remove_leftovers(stream)
    folder = _folder(stream)
    name = f"{stream.catalog.now_ms()}-{uuid.uuid4().hex[:8]}"
    scratch = folder.sibling(f"/{name}")
    over = threading.Event()

    def report() -> None:
        while not over.wait(_REPORT_EVERY_S):
            # Without a report for six hours the directory may be deleted; its user then fails.
            with suppress(CkptError):
                folder.folder.write(f"{name}{_IN_USE}", [str(stream.catalog.now_ms()).encode()])

    thread = threading.Thread(target=report, name=f"scratch-{stream.stream_id}", daemon=True)
    thread.start()
    try:
        yield scratch
    finally:
        over.set()
        thread.join()
        scratch.delete()
        scratch.sibling(".partial").delete()
        folder.folder.delete(f"{name}{_IN_USE}")


def remove_leftovers(stream: StreamHandle) -> None:
    """Delete the copies of killed processes. Only the catalog's clock determines their age.

    Raises:
        StorageAccessError: The folder of live directories cannot be reached.
    """
    now_ms = stream.catalog.now_ms()
    folder = _folder(stream)
    for name, entry in folder.folder.list().items():
        made_at = name.partition("-")[0]
        if not entry.is_directory or not made_at.isdecimal():
            continue
        # Unfinished and rewritten copies have the same name with a suffix.
        in_use = f"{name.partition('.')[0]}{_IN_USE}"
        if now_ms - max(int(made_at), _reported_at(folder, in_use)) > LEFT_AFTER_MS:
            folder.sibling(f"/{name}").delete()
            folder.folder.delete(in_use)


def scratch_copies(stream: StreamHandle) -> list[LiveDirectory]:
    """The temporary directories of a stream that exist, in use or left by a killed process.

    Raises:
        StorageAccessError: The folder of live directories cannot be reached.
    """
    folder = _folder(stream)
    return [folder.sibling(f"/{name}") for name, entry in sorted(folder.folder.list().items()) if entry.is_directory]


def _reported_at(folder: LiveDirectory, in_use: str) -> int:
    try:
        return int(folder.folder.read(in_use))
    except (FileNotFoundError, ValueError):
        return 0


def _folder(stream: StreamHandle) -> LiveDirectory:
    return LiveDirectory(f"{stream.live_root.rstrip('/')}/{SCRATCH_FOLDER}/{stream.stream_id}")
