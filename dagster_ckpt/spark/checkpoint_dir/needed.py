"""`NeededFile`: a file that a restore needs, with its location now and its path in the snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from dagster_ckpt.io.file_io import FileIO, FileVersion

# Up to these limits, files of a cut are read at once instead of being protected by links; above the
# number of files, the objects alone would take too much memory.
HELD_IN_MEMORY_BYTES = 32 * 1024 * 1024
HELD_IN_MEMORY_FILES = 5_000
# A larger file is read in pieces into a reused buffer: allocating memory costs as much as reading.
READ_WHOLE_BYTES = 1024 * 1024


@dataclass(slots=True)
class NeededFile:
    """One file of a cut, and a `Source` of a snapshot.

    Attributes:
        folder: Its directory tree.
        source: Its path there.
        path: Its path in the snapshot.
        size: Its length in bytes.
        token: See `FileVersion.token`; if it changed, Spark replaced the file.
        identity: A name that is unique to this content (it contains a uuid), or None.
        data: Its content, if it was read already.
        stable: Whether the next snapshots will probably contain it too.
    """

    folder: FileIO
    source: str
    path: str
    size: int
    token: str | None = None
    identity: str | None = None
    data: bytes | None = None
    stable: bool = False

    @property
    def version(self) -> FileVersion:
        """Version of the file when it was inspected."""
        return FileVersion(self.size, self.token)

    def open(self) -> BinaryIO:
        """Open the content."""
        return self.folder.open(self.source) if self.data is None else BytesIO(self.data)

    def read(self) -> bytes:
        """The whole content, or more than its size if it has grown."""
        return self.folder.read(self.source, self.size + 1) if self.data is None else self.data


def read_versioned(folder: FileIO, path: str) -> NeededFile:
    """Read a small file together with its version.

    Raises:
        FileNotFoundError: It does not exist or no longer exists.
    """
    # The version is never newer than the content: if the file was replaced in between, it is later
    # treated as changed, which is safe.
    data, version = folder.read_version(path)
    return NeededFile(folder, path, path, len(data), version.token, data=data)


def read_needed(folder: FileIO, path: str, *, snapshot_path: str | None = None) -> NeededFile:
    """Read a small file that is needed.

    Raises:
        FileNotFoundError: It does not exist or no longer exists.
    """
    data = folder.read(path)
    return NeededFile(folder, path, snapshot_path or path, len(data), data=data)
