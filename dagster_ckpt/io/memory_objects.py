"""Object space in the memory of the process that supervises the query."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from dagster_ckpt.io.objects import ObjectSpace, no_op


class MemorySpace:
    """Objects that are lost when the process ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._objects: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """A name for messages; nothing else can open it."""
        return self._url

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new data object for writing."""
        stream = io.BytesIO()
        yield stream
        self.publish(name, stream.getvalue())

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Store an object."""
        after()
        with self._lock:
            self._objects[name] = (time.time_ns() // 1_000_000, data)

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(f"{self._url}/{name}")
            return self._objects[name][1]

    @contextmanager
    def open(self, name: str, part: range | None = None) -> Iterator[BinaryIO]:  # noqa: ARG002
        """Open an object for reading."""
        yield io.BytesIO(self.read(name))

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        with self._lock:
            kept = self._objects.get(name)
        return len(kept[1]) if kept is not None else None

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist."""
        return {name: size for name in names if (size := self.size(name)) is not None}

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Share an object of another stream's memory under a name in this space."""
        if not isinstance(source, MemorySpace) or source.size(source_name) is None:
            return False
        self.publish(name, source.read(source_name))
        return True

    def delete(self, name: str) -> None:
        """Delete an object."""
        with self._lock:
            self._objects.pop(name, None)

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time they were stored in ms (0: a folder)."""
        start = f"{prefix}/" if prefix else ""
        found: dict[str, int] = {}
        with self._lock:
            for name, (kept_at_ms, _) in self._objects.items():
                if name.startswith(start):
                    first, _, deeper = name[len(start) :].partition("/")
                    found[first] = 0 if deeper else kept_at_ms
        return found
