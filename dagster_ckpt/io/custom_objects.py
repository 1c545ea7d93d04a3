"""Custom storage: `CustomSpace`, the base class for user-defined object stores (four methods to implement)."""

from __future__ import annotations

import io
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from dagster_ckpt.io.access import Guarded, accessing, reading
from dagster_ckpt.io.objects import ObjectSpace, no_op

# A data object up to this size is buffered in memory before it is put; a larger one is spooled to a
# file.
SPOOLED_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredObject:
    """One object of a space.

    Attributes:
        name: Its name.
        size: Its length in bytes.
        changed_at_ms: When it was put, ms since the epoch. A sweep never deletes objects younger
            than its minimum age.
    """

    name: str
    size: int
    changed_at_ms: int


class CustomSpace(ABC):
    """A flat space of named objects, such as a table of blobs or a service of yours.

    Implement `put`, `get`, `remove` and `objects`, and name the class in a
    `CustomCheckpointStorage`. The class is called with `stream_id` and the settings, once for each
    stream that is opened. All streams share the space; folders, sharing between snapshots, and
    garbage collection are built on these methods. They are called from several threads
    concurrently.

    Any exception is reported to users as a StorageAccessError that names the object. Names are
    POSIX paths without a leading slash. Data objects are up to 64 MB, or as large as the largest
    file of a state store if that is larger; override `create` and `open` to stream them.

    Attributes:
        url: A URL with a scheme and a host that you choose, such as "blobs://orders"; locations of
            snapshots begin with it.
    """

    url: str

    @abstractmethod
    def put(self, name: str, data: BinaryIO) -> None:
        """Store an object under a name, atomically and durably. It may replace an existing object."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """All bytes of an object.

        Raises:
            FileNotFoundError: No object has this name.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object; a missing object is not an error."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterable[StoredObject]:
        """All objects whose names begin with a prefix, in any order. Must include objects that were just put."""

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new data object for writing; it is put when the context exits without an error."""
        where = f"{self.url}/{name}"
        with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as spool:
            yield cast("BinaryIO", Guarded(cast("BinaryIO", spool), where))
            spool.seek(0)
            with accessing("write", where):
                self.put(name, cast("BinaryIO", spool))

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Put an object."""
        after()
        with accessing("write", f"{self.url}/{name}"):
            self.put(name, io.BytesIO(data))

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with reading(f"{self.url}/{name}"):
            return self.get(name)

    @contextmanager
    def open(self, name: str, part: range | None = None) -> Iterator[BinaryIO]:  # noqa: ARG002
        """Open an object for reading. Override this if your store can fetch a part of an object."""
        yield io.BytesIO(self.read(name))

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        return self.sizes([name]).get(name)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist."""
        found: dict[str, int] = {}
        for name in names:
            with accessing("look at", f"{self.url}/{name}"):
                found.update({kept.name: kept.size for kept in self.objects(name) if kept.name == name})
        return found

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:  # noqa: ARG002
        """Return False, as nothing is shared between spaces. Override this if your store can copy on its side."""
        return False

    def delete(self, name: str) -> None:
        """Remove an object."""
        with accessing("delete", f"{self.url}/{name}"):
            self.remove(name)

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder)."""
        start = f"{prefix}/" if prefix else ""
        found: dict[str, int] = {}
        with accessing("list", f"{self.url}/{prefix}"):
            for kept in self.objects(start):
                first, _, deeper = kept.name.removeprefix(start).partition("/")
                found[first] = 0 if deeper else kept.changed_at_ms
        return found


class FolderOfSpace:
    """The objects of a space below a folder, as a separate space."""

    def __init__(self, space: ObjectSpace, folder: str) -> None:
        self._space = space
        self._folder = folder

    @property
    def url(self) -> str:
        """URL of the folder."""
        return f"{self._space.url}/{self._folder}"

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new data object for writing."""
        return self._space.create(f"{self._folder}/{name}")

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Write an object atomically."""
        self._space.publish(f"{self._folder}/{name}", data, after=after)

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        return self._space.read(f"{self._folder}/{name}")

    def open(self, name: str, part: range | None = None) -> AbstractContextManager[BinaryIO]:
        """Open an object for reading."""
        return self._space.open(f"{self._folder}/{name}", part)

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        return self._space.size(f"{self._folder}/{name}")

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist."""
        found = self._space.sizes([f"{self._folder}/{name}" for name in names])
        return {name.removeprefix(f"{self._folder}/"): size for name, size in found.items()}

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Copy an object of another space or folder without moving its bytes through this process."""
        if isinstance(source, FolderOfSpace):
            return self.adopt(name, source._space, f"{source._folder}/{source_name}")
        return self._space.adopt(f"{self._folder}/{name}", source, source_name)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._space.delete(f"{self._folder}/{name}")

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder)."""
        return self._space.list(f"{self._folder}/{prefix}" if prefix else self._folder)
