"""What an image is made of: named byte streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol


class Source(Protocol):
    """One file to put into an image.

    Attributes:
        path: Its name in the image, a relative POSIX path.
        size: Its length in bytes; a stream of another length is refused.
        identity: A name that no other content will ever have, such as one with a uuid in it, or None.
        token: What changes when another file takes the name: inode and time of a local file, the entity tag of an
            object. None where the storage has nothing certain.
        stable: Whether the next images will most likely have it too. Stable files are kept together, so that an image
            can take all of those of an earlier one at once.

    Where an earlier image has the same path with the same identity, or the same token, the bytes are not even read.
    Otherwise the content decides.
    """

    @property
    def path(self) -> str:
        """Name in the image."""
        ...

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    @property
    def identity(self) -> str | None:
        """A name that no other content will ever have."""
        ...

    @property
    def token(self) -> str | None:
        """What changes when another file takes the name."""
        ...

    @property
    def stable(self) -> bool:
        """Whether the next images will most likely have it too."""
        ...

    def open(self) -> BinaryIO:
        """Open the bytes."""
        ...

    def read(self) -> bytes:
        """All bytes, or more than `size` where it has grown; for small files."""
        ...


@dataclass(frozen=True)
class SourceFile:
    """A source from a function that opens it. See `Source` for the attributes."""

    path: str
    size: int
    identity: str | None
    open: Callable[[], BinaryIO]
    token: str | None = None
    stable: bool = False

    def read(self) -> bytes:
        """All bytes."""
        with self.open() as stream:
            return stream.read(self.size + 1)
