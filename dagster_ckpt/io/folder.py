"""`Folder`: a directory tree on any file system, with the few operations that this package needs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.parallel import CancelCheck, in_threads

_LOCAL_SCHEMES = ("file://", "file:", "local://")


class FileVersion(NamedTuple):
    """Identifies the version of a file: it changes when the file is replaced by another one of the same name.

    Attributes:
        size: Bytes.
        token: Device, inode and modification time, or an object store's entity tag or generation.
            None if the storage offers nothing that reliably identifies the content.
    """

    size: int
    token: str | None


# Version of a file, and its content or None.
Look = tuple[FileVersion, bytes | None]


@dataclass(frozen=True)
class Entry:
    """A name in a listing. Its version is looked up on first use."""

    name: str
    is_directory: bool
    version: Callable[[], FileVersion]


class Listing(ABC):
    """The files of one directory, as of the first access."""

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """Their names, without hidden ones."""

    @abstractmethod
    def version(self, name: str) -> FileVersion:
        """Version of one of them. Raises FileNotFoundError if it does not exist or no longer exists."""


class Folder(ABC):
    """A directory tree. Paths are POSIX paths relative to its root.

    Listings omit hidden names. Spark's hidden files are unfinished files (`.<name>.<uuid>.tmp`) and
    Hadoop's `.crc` files, and neither belongs in a copy: a stale `.crc` makes Hadoop reject a good
    file. A missing file raises FileNotFoundError; every other failure is a StorageAccessError.

    Attributes:
        url: URL of the root.
        can_rename: Whether the whole tree can be renamed at once. An object store would copy it
            file by file.
        width: How many files to read or stat concurrently; more than 1 where each is a request.
    """

    url: str
    can_rename = True
    width = 1

    def __init__(self) -> None:
        # Cache of what was parsed from unchanged files: path to token and value. A running query is
        # inspected repeatedly, and nearly all of its files stay unchanged.
        self.seen: dict[str, tuple[str, object]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # The cache is large and only useful in this process.
        return {**self.__dict__, "seen": {}}

    @abstractmethod
    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory without hidden ones; empty if the directory does not exist."""

    @abstractmethod
    def listing(self, path: str) -> Listing:
        """Like `list`, for directories with many files of which few are inspected."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def version(self, path: str) -> FileVersion:
        """Current version of a file."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file atomically, replacing any file of that name; it is durable on return."""

    @abstractmethod
    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a new file in a tree that nobody reads yet: after a failure, part of it may exist."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file atomically unless one of that name exists, even with concurrent writers."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; a missing file is not an error."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete the whole tree; a missing tree is not an error. Of a symbolic link only the link is deleted."""

    def delete_if_empty(self) -> None:
        """Delete the root if it is empty. Does nothing where folders exist only as parts of names."""
        return

    @abstractmethod
    def exists(self) -> bool:
        """Whether the root exists."""

    @abstractmethod
    def rename(self, url: str) -> None:
        """Move the whole tree to a location that does not exist yet; its new name is durable on return."""

    @abstractmethod
    def make(self) -> None:
        """Create the root; on a disk its name is then durable. An object store has no folders."""

    @abstractmethod
    def flush(self, path: str) -> None:
        """Make a file, or the names in a directory, durable. Remote storage is durable once written."""

    @abstractmethod
    def flush_all(self) -> None:
        """Make the whole tree durable; `make` and `rename` make the root's own name durable."""

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or its first `at_most` bytes."""
        with self.open(path) as stream:
            return stream.read(at_most)

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """Content of a file and its version.

        If the file is replaced in between, the version is that of the older file.
        """
        version = self.version(path)
        return self.read(path), version

    def look_at(
        self,
        paths: Sequence[str],
        at_most: int,  # noqa: ARG002 - content would cost a request
    ) -> Sequence[Look]:
        """Version of each file, and its content if it is at most `at_most` bytes and costs no extra request."""

        def look(path: str, check_canceled: CancelCheck) -> Look:
            check_canceled()
            return self.version(path), None

        return in_threads(self.width, paths, look)

    def files(self, path: str = "") -> Iterator[tuple[str, Entry]]:
        """Every file below a directory, with its path from the root."""
        for name, entry in sorted(self.list(path).items()):
            below = f"{path}/{name}" if path else name
            if entry.is_directory:
                yield from self.files(below)
            else:
                yield below, entry


def local_path(url: str) -> Path | None:
    """Path of a local URL (`file:///a`, Hadoop's `file:/a`, or a plain path); None for any other URL."""
    for scheme in _LOCAL_SCHEMES:
        if url.startswith(scheme):
            return Path("/" + url.removeprefix(scheme).lstrip("/"))
    return None if "://" in url else Path(url).absolute()


@contextlib.contextmanager
def accessing(verb: str, url: str, path: str = "") -> Iterator[None]:
    """Raise failures as `explained` converts them."""
    try:
        yield
    except OSError as error:
        raise explained(verb, url, path, error) from error


def explained(verb: str, url: str, path: str, error: OSError) -> OSError:
    """The exception to raise: FileNotFoundError if the path does not exist, else StorageAccessError."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(f"{url}/{path}".rstrip("/"))
    return StorageAccessError(
        f"Cannot {verb} {url}/{path}: {error}. Check that the path is reachable and that this process has rights to it."
    )
