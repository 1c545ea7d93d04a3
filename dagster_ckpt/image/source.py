"""What an image is made of: named byte streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True)
class SourceFile:
    """One file to put into an image.

    Attributes:
        path: Its name in the image, a relative POSIX path.
        size: Its length in bytes; a stream of another length is refused.
        identity: A name that no other content will ever have, such as one with a uuid in it. Where an earlier image
            has the same identity the bytes are not even read. None lets the content decide.
        open: Opens the bytes; called at most twice.
    """

    path: str
    size: int
    identity: str | None
    open: Callable[[], BinaryIO]
