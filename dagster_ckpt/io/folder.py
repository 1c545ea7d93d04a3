"""A directory tree on any file system, with the few calls that the package needs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.parallel import GoOn, in_threads

_LOCAL_SCHEMES = ("file://", "file:", "local://")


class FileVersion(NamedTuple):
    """What changes when a file is replaced by another one of the same name.

    Attributes:
        size: Bytes.
        token: Device, inode and modification time, or an object store's entity tag or generation. None where there
            is nothing that another content could not have as well.
    """

    size: int
    token: str | None


# Version of a file, and its content or None.
Look = tuple[FileVersion, bytes | None]


@dataclass(frozen=True)
class Entry:
    """A name in a listing. Its version is looked up only where it is asked for."""

    name: str
    is_directory: bool
    version: Callable[[], FileVersion]


class Listing(ABC):
    """The files of one directory, as they were at the first look."""

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """Their names, hidden ones left out."""

    @abstractmethod
    def version(self, name: str) -> FileVersion:
        """Version of one of them. Raises FileNotFoundError where it is not, or not any more."""


class Folder(ABC):
    """A directory tree. Paths are POSIX paths relative to its root.

    Hidden names are left out of listings: Spark's are unfinished files (`.<name>.<uuid>.tmp`) and Hadoop's
    `.crc` siblings, and neither belongs into a copy (a stale `.crc` makes Hadoop refuse a good file).
    A file that is not there raises FileNotFoundError; every other trouble is a StorageAccessError.

    Attributes:
        url: Where it is.
        moves_at_once: Whether the whole tree can be moved at once. In an object store it would be copied, file by file.
        width: How many files to look at, or to read, at the same time: worth it where each is a request.
    """

    url: str
    moves_at_once = True
    width = 1

    def __init__(self) -> None:
        # What was read of a file that did not change since: path to token and meaning. A running query is looked at
        # again and again, and nearly all of its files stay as they are.
        self.seen: dict[str, tuple[str, object]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What was seen is of use to one process only, and much.
        return {**self.__dict__, "seen": {}}

    @abstractmethod
    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory, hidden ones left out; empty if there is no such directory."""

    @abstractmethod
    def listing(self, path: str) -> Listing:
        """The same as `list`, for directories of many files of which few are looked at."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def version(self, path: str) -> FileVersion:
        """Version of a file as it is now."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file whole or not at all, in place of any other of that name; it is durable on return."""

    @abstractmethod
    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file where none is, in a tree that nobody reads yet: after a failure a part may be there."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file whole, unless one of that name is there: whoever else writes it at this moment."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete the whole tree; one that is not there is no error. Of a link only the link goes."""

    def delete_if_empty(self) -> None:
        """Delete the root if nothing is in it; where folders exist only as parts of names there is nothing to do."""
        return

    @abstractmethod
    def exists(self) -> bool:
        """Whether the root exists."""

    @abstractmethod
    def rename(self, url: str) -> None:
        """Move the whole tree to a place where nothing is yet; its new name is durable on return."""

    @abstractmethod
    def make(self) -> None:
        """Make the root; on a disk its name is durable then. An object store has no folders."""

    @abstractmethod
    def flush(self, path: str) -> None:
        """Make a file durable, or the names in a directory; what is behind a protocol is when it is written."""

    @abstractmethod
    def flush_all(self) -> None:
        """Make the whole tree durable; its root's own name is made so by `make` and `rename`."""

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or the first bytes of it."""
        with self.open(path) as stream:
            return stream.read(at_most)

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """Content of a file and its version; were it replaced in between, the version is the older one's."""
        version = self.version(path)
        return self.read(path), version

    def look_at(
        self,
        paths: Sequence[str],
        at_most: int,  # noqa: ARG002 - content would cost a request
    ) -> Sequence[Look]:
        """Version of each file, and its content if it is no larger than that and comes at no further cost."""

        def look(path: str, go_on: GoOn) -> Look:
            go_on()
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
    """Path of a local URL (`file:///a`, Hadoop's `file:/a`, or a plain path), None for any other."""
    for scheme in _LOCAL_SCHEMES:
        if url.startswith(scheme):
            return Path("/" + url.removeprefix(scheme).lstrip("/"))
    return None if "://" in url else Path(url).absolute()


@contextlib.contextmanager
def accessing(verb: str, url: str, path: str = "") -> Iterator[None]:
    """Tell what goes wrong as `explained` does."""
    try:
        yield
    except OSError as error:
        raise explained(verb, url, path, error) from error


def explained(verb: str, url: str, path: str, error: OSError) -> OSError:
    """The error that is told: FileNotFoundError where nothing is there, else StorageAccessError."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(f"{url}/{path}".rstrip("/"))
    return StorageAccessError(
        f"Cannot {verb} {url}/{path}: {error}. Check that the path is reachable and that this process has rights to it."
    )
