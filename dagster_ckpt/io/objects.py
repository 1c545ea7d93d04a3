"""`ObjectSpace`: the storage interface that snapshots are written to and read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

# The age that a listing reports for an object of unknown age: it counts as new.
UNKNOWN_AGE_MS = 2**62


def no_op() -> None:
    """Do nothing: the default for a callback."""


class ObjectSpace(Protocol):
    """A flat space of named objects. Names are POSIX paths without a leading slash or `..`.

    Every failure is raised as StorageAccessError, except that a missing object raises
    FileNotFoundError.
    """

    @property
    def url(self) -> str:
        """URL of the space, for messages and locations."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new data object for writing; it is durable when the context exits without an error."""
        ...

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Write an object atomically and durably.

        Args:
            name: The object.
            data: Its bytes.
            after: Called once before the object becomes visible; if it raises, no object is
                created.
        """
        ...

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        ...

    def open(self, name: str, part: range | None = None) -> AbstractContextManager[BinaryIO]:
        """Open an object for reading; the stream is seekable.

        Args:
            name: The object.
            part: The range that will be read, so that nothing else needs to be fetched.
        """
        ...

    def size(self, name: str) -> int | None:
        """Length of an object in bytes, or None if it does not exist."""
        ...

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist."""
        ...

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Create an object in this space from one in another, without moving its bytes through this process.

        Returns:
            Whether it succeeded, which requires both spaces to be on one disk or in one object
            store.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete an object durably, so that it does not reappear after a crash; a missing object is not an error."""
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, without it, with the time of their last change in ms (0: a folder)."""
        ...
