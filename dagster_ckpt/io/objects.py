"""What the writer and the reader of snapshots need of a storage: a few verbs on names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

# What a listing says of an object whose age it does not know: it counts as new.
UNKNOWN_AGE_MS = 2**62


def nothing() -> None:
    """Nothing to wait for."""


class ObjectSpace(Protocol):
    """A flat space of named objects. Names are POSIX paths without a leading slash or `..`.

    Whatever goes wrong is raised as StorageAccessError, except that a missing object raises FileNotFoundError.
    """

    @property
    def url(self) -> str:
        """Where the space is, for messages and locations."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new data object for writing; it is durable once the context is left without an error."""
        ...

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = nothing) -> None:
        """Write an object that is seen whole or not at all, and is durable on return.

        Args:
            name: The object.
            data: Its bytes.
            after: Called once, before it is seen; what it raises leaves no object.
        """
        ...

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        ...

    def open(self, name: str, part: range | None = None) -> AbstractContextManager[BinaryIO]:
        """Open an object for reading; it can be sought in.

        Args:
            name: The object.
            part: The only bytes that will be read, so that no others need to be fetched.
        """
        ...

    def size(self, name: str) -> int | None:
        """Length of an object in bytes, or None where there is none."""
        ...

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of those objects that are there."""
        ...

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Make an object of this space from one of another without moving its bytes through this process.

        Returns:
            Whether it was done: only where both spaces are on one disk, or in one object store.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete an object, so that it does not come back after a crash; one that is not there is no error."""
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, without it, with the time of their last change in ms (0: a folder)."""
        ...
