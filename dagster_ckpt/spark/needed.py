"""A file that a restore needs: where it is now, and where it belongs in the image."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from dagster_ckpt.image import SourceFile
from dagster_ckpt.spark.folder import FileVersion, Folder


@dataclass(frozen=True)
class NeededFile:
    """One file of a cut.

    Attributes:
        folder: The directory tree it lies in.
        source: Its path there.
        path: Its path in the image.
        version: Its version when it was looked at; another one means that Spark replaced it.
        identity: A name that no other content will ever have (it holds a uuid), or None.
        data: Its content where it was read anyway.
    """

    folder: Folder
    source: str
    path: str
    version: FileVersion
    identity: str | None = None
    data: bytes | None = None

    def open(self) -> BinaryIO:
        """Open the content."""
        return self.folder.open(self.source) if self.data is None else BytesIO(self.data)

    def source_file(self) -> SourceFile:
        """The file as an image takes it."""
        return SourceFile(path=self.path, size=self.version.size, identity=self.identity, open=self.open)


def read_needed(folder: Folder, path: str, *, image_path: str | None = None) -> NeededFile:
    """Read a small file that is needed.

    Raises:
        FileNotFoundError: It is not there (any more).
    """
    data = folder.read(path)
    return NeededFile(folder, path, image_path or path, FileVersion(len(data), ""), data=data)
