"""A file that a restore needs: where it is now, and where it belongs in the snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from dagster_ckpt.io.folder import FileVersion, Folder

# So much of a cut is read at once, instead of being held by links; of more files the objects alone would count.
HELD_IN_MEMORY_BYTES = 32 * 1024 * 1024
HELD_IN_MEMORY_FILES = 5_000
# A larger file is read in pieces, in the same memory again and again: new memory costs as much as the reading.
READ_WHOLE_BYTES = 1024 * 1024


@dataclass(slots=True)
class NeededFile:
    """One file of a cut; a `Source` of a snapshot.

    Attributes:
        folder: The directory tree it lies in.
        source: Its path there.
        path: Its path in the snapshot.
        size: Its length in bytes.
        token: See `FileVersion.token`; another one means that Spark replaced it.
        identity: A name that no other content will ever have (it holds a uuid), or None.
        data: Its content where it was read anyway.
        stable: Whether the next snapshots will most likely have it too.
    """

    folder: Folder
    source: str
    path: str
    size: int
    token: str | None = None
    identity: str | None = None
    data: bytes | None = None
    stable: bool = False

    @property
    def version(self) -> FileVersion:
        """What it was when it was looked at."""
        return FileVersion(self.size, self.token)

    def open(self) -> BinaryIO:
        """Open the content."""
        return self.folder.open(self.source) if self.data is None else BytesIO(self.data)

    def read(self) -> bytes:
        """All of the content, or more than its size where it has grown."""
        return self.folder.read(self.source, self.size + 1) if self.data is None else self.data


def read_versioned(folder: Folder, path: str) -> NeededFile:
    """Read a small file together with the version that tells it from any other of its name.

    Raises:
        FileNotFoundError: It is not there (any more).
    """
    # The version is never a newer one's: were the file replaced in between, it would be taken for another later, which
    # is safe.
    data, version = folder.read_version(path)
    return NeededFile(folder, path, path, len(data), version.token, data=data)


def read_needed(folder: Folder, path: str, *, snapshot_path: str | None = None) -> NeededFile:
    """Read a small file that is needed.

    Raises:
        FileNotFoundError: It is not there (any more).
    """
    data = folder.read(path)
    return NeededFile(folder, path, snapshot_path or path, len(data), data=data)
