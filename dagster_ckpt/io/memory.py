"""`MemoryFileIO`: files in the memory of the process that supervises the query."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from dagster_ckpt.io.file_io import Entry, FileIO, FileStatus, FileVersion, Hook, no_op


class MemoryFileIO(FileIO):
    """Lost when the process ends. The URL is only a name for messages."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects: dict[str, tuple[int, int, bytes]] = {}
        self._writes = 0
        self._lock = threading.Lock()

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        with self._lock:
            statuses = {name: _status(*kept) for name, kept in self._objects.items()}
        return entries_below(path, statuses, hidden=hidden)

    def open(self, path: str, part: range | None = None) -> BinaryIO:  # noqa: ARG002
        return io.BytesIO(self._kept(path)[2])

    def status(self, path: str) -> FileStatus:
        return _status(*self._kept(path))

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        stream = io.BytesIO()
        yield stream
        self.write(path, [stream.getvalue()])

    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        data = b"".join(chunks)
        before_visible()
        with self._lock:
            if not replace and path in self._objects:
                raise FileExistsError(f"{self.url}/{path}")
            self._writes += 1
            self._objects[path] = (time.time_ns() // 1_000_000, self._writes, data)

    def create_if_absent(self, path: str, data: bytes) -> None:
        with self._lock:
            self._writes += 1
            self._objects.setdefault(path, (time.time_ns() // 1_000_000, self._writes, data))

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:
        if not isinstance(source, MemoryFileIO) or source.size(source_path) is None:
            return False
        self.write(path, [source.read(source_path)])
        return True

    def delete(self, path: str) -> None:
        with self._lock:
            self._objects.pop(path, None)

    def _kept(self, path: str) -> tuple[int, int, bytes]:
        with self._lock:
            if path not in self._objects:
                raise FileNotFoundError(f"{self.url}/{path}")
            return self._objects[path]


def _status(kept_at_ms: int, write: int, data: bytes) -> FileStatus:
    return FileStatus(FileVersion(len(data), str(write)), kept_at_ms, kept_at_ms)


def _same(status: FileStatus) -> FileStatus:
    return status


def entries_below(path: str, statuses: Mapping[str, FileStatus], *, hidden: bool) -> dict[str, Entry]:
    """List a directory of a flat storage, where directories are only parts of names."""
    start = f"{path}/" if path else ""
    found: dict[str, Entry] = {}
    for name, status in statuses.items():
        first, _, deeper = name.removeprefix(start).partition("/")
        if name.startswith(start) and first and (hidden or not first.startswith(".")):
            found[first] = Entry(first, bool(deeper), partial(_same, status))
    return found
