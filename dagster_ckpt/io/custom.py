"""`CustomFileIO`: the base class for storage of your own."""

from __future__ import annotations

import io
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from dagster_ckpt.io.file_io import Entry, FileIO, FileStatus, FileVersion, Guarded, Hook, accessing, no_op
from dagster_ckpt.io.memory import entries_below

SPOOLED_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredObject:
    """One object of your storage.

    Attributes:
        name: POSIX path without a leading slash.
        changed_at_ms: When it was put, in ms since the epoch; clean-up spares young objects.
    """

    name: str
    size: int
    changed_at_ms: int


class CustomFileIO(FileIO):
    """A flat storage of named objects, such as a table of blobs or a service of yours.

    Implement `put`, `get`, `remove` and `objects`, and name the class in a `CustomCheckpointStorage`. It is called with
    `stream_id` and the settings for each stream; all streams share the storage. Several threads call the methods
    concurrently.

    Users see any exception as a StorageAccessError that names the object. Data objects have up to 64 MB, or the size of
    the largest file of a state store; override `create` and `open` to stream them, and `adopt` if your storage can copy
    an object itself.

    Attributes:
        url: The root of snapshot locations, with a scheme and host of your choice, such as "blobs://orders".
    """

    @abstractmethod
    def put(self, name: str, data: BinaryIO) -> None:
        """Store an object atomically and durably, replacing any of that name."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the content of an object, or raise FileNotFoundError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete an object if it exists."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterable[StoredObject]:
        """Return the objects whose names begin with a prefix, in any order, including those just put."""

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        with accessing("list", f"{self.url}/{path}"):
            statuses = {kept.name: _status(kept) for kept in self.objects(f"{path}/" if path else "")}
        return entries_below(path, statuses, hidden=hidden)

    def open(self, path: str, part: range | None = None) -> BinaryIO:  # noqa: ARG002
        """Override this if your storage can fetch part of an object."""
        with accessing("read", f"{self.url}/{path}"):
            return io.BytesIO(self.get(path))

    def status(self, path: str) -> FileStatus:
        with accessing("look at", f"{self.url}/{path}"):
            found = [kept for kept in self.objects(path) if kept.name == path]
        if not found:
            raise FileNotFoundError(f"{self.url}/{path}")
        return _status(found[0])

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        where = f"{self.url}/{path}"
        with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as spool:
            yield cast("BinaryIO", Guarded(cast("BinaryIO", spool), where))
            spool.seek(0)
            with accessing("write", where):
                self.put(path, cast("BinaryIO", spool))

    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        """Override this if your storage can refuse atomically to replace an object."""
        data = b"".join(chunks)
        before_visible()
        if not replace and self.size(path) is not None:
            raise FileExistsError(f"{self.url}/{path}")
        with accessing("write", f"{self.url}/{path}"):
            self.put(path, io.BytesIO(data))

    def delete(self, path: str) -> None:
        with accessing("delete", f"{self.url}/{path}"):
            self.remove(path)


def _status(kept: StoredObject) -> FileStatus:
    return FileStatus(FileVersion(kept.size, None), kept.changed_at_ms, kept.changed_at_ms)


class FolderFileIO(FileIO):
    def __init__(self, whole: FileIO, folder: str) -> None:
        self.url = f"{whole.url}/{folder}"
        self.width = whole.width
        self._whole = whole
        self._folder = folder

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        return self._whole.list(f"{self._folder}/{path}" if path else self._folder, hidden=hidden)

    def open(self, path: str, part: range | None = None) -> BinaryIO:
        return self._whole.open(f"{self._folder}/{path}", part)

    def status(self, path: str) -> FileStatus:
        return self._whole.status(f"{self._folder}/{path}")

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        found = self._whole.sizes([f"{self._folder}/{path}" for path in paths])
        return {path.removeprefix(f"{self._folder}/"): size for path, size in found.items()}

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        return self._whole.create(f"{self._folder}/{path}")

    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        self._whole.write(f"{self._folder}/{path}", chunks, replace=replace, before_visible=before_visible)

    def create_if_absent(self, path: str, data: bytes) -> None:
        self._whole.create_if_absent(f"{self._folder}/{path}", data)

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:
        if isinstance(source, FolderFileIO):
            return self.adopt(path, source._whole, f"{source._folder}/{source_path}")
        return self._whole.adopt(f"{self._folder}/{path}", source, source_path)

    def delete(self, path: str) -> None:
        self._whole.delete(f"{self._folder}/{path}")
