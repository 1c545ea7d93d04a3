"""One directory tree on any file system, as small as the rest of this room needs it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.options.file_systems import fsspec_arguments, has_folders

_LOCAL_SCHEMES = ("file://", "file:", "local://")
# What the fsspec file systems call an entity tag, a generation or a time of change.
_VERSION_MARKS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")
_DELETE_ATTEMPTS = 10
_READ_BYTES = 1024 * 1024
# A file up to this size is held in memory and put by one request.
_PUT_AT_ONCE_BYTES = 8 * 1024 * 1024
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class FileVersion(NamedTuple):
    """What changes when a file is replaced by another one of the same name.

    Attributes:
        size: Bytes.
        token: Device, inode and modification time, or an object store's entity tag or generation. None where there
            is nothing that another content could not have as well.
    """

    size: int
    token: str | None


@dataclass(frozen=True)
class Entry:
    """A name in a listing. Its version is looked up only where it is asked for."""

    name: str
    is_directory: bool
    version: Callable[[], FileVersion]


class Listing(ABC):
    """The files of one directory, as they were at the first look.

    Attributes:
        names: Their names, hidden ones left out.
    """

    names: Set[str]

    @abstractmethod
    def version(self, name: str) -> FileVersion:
        """Version of one of them. Raises FileNotFoundError where it is gone."""


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
        """Write a file whole or not at all, in place of any other of that name."""

    @abstractmethod
    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file where none is, in a tree that nobody reads yet: after a failure a part may be there."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete the whole tree; one that is not there is no error."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the root exists."""

    @abstractmethod
    def rename(self, url: str) -> None:
        """Move the whole tree to a place where nothing is yet."""

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or the first bytes of it."""
        with self.open(path) as stream:
            return stream.read(at_most)

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """Content of a file and its version; were it replaced in between, the version is the older one's."""
        version = self.version(path)
        return self.read(path), version

    def look(self, path: str, at_most: int) -> tuple[FileVersion, bytes | None]:  # noqa: ARG002 - it would cost a request
        """Version of a file, and its content if it is no larger than that and comes at no further cost."""
        return self.version(path), None

    def files(self, path: str = "") -> Iterator[tuple[str, Entry]]:
        """Every file below a directory, with its path from the root."""
        for name, entry in sorted(self.list(path).items()):
            below = f"{path}/{name}" if path else name
            if entry.is_directory:
                yield from self.files(below)
            else:
                yield below, entry


def open_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Open a directory tree by URL; nothing is created.

    Args:
        url: A URL of any file system fsspec knows; a path without a scheme is local.
        storage_options: Arguments of the fsspec file system.

    Raises:
        StorageAccessError: The file system is unknown or its driver is not installed.
    """
    path = local_path(url)
    return LocalFolder(path) if path is not None else RemoteFolder(url, storage_options or {})


def local_path(url: str) -> Path | None:
    """Path of a local URL (`file:///a`, Hadoop's `file:/a`, or a plain path), None for any other."""
    for scheme in _LOCAL_SCHEMES:
        if url.startswith(scheme):
            return Path("/" + url.removeprefix(scheme).lstrip("/"))
    return None if "://" in url else Path(url).absolute()


class LocalListing(Listing):
    """Names from one call; versions one by one, as few are asked for."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self.names = {name for name in os.listdir(path) if name[0] != "."}  # noqa: PTH208 - no object for each name
        except (FileNotFoundError, NotADirectoryError):
            self.names = frozenset()

    def version(self, name: str) -> FileVersion:
        """Version of a file."""
        return version_of(os.stat(f"{self._path}/{name}"))  # noqa: PTH116 - ten thousand times an image


class LocalFolder(Folder):
    """A local directory, read with the calls of the operating system."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.url = f"file://{root}"
        self._prefix = f"{root}/"

    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory, hidden ones left out; empty if there is no such directory."""
        entries: dict[str, Entry] = {}
        try:
            with _access("list", self.url, path), os.scandir(self.root / path) as found:
                for entry in found:
                    if not entry.name.startswith("."):
                        entries[entry.name] = Entry(entry.name, entry.is_dir(), _lazy_version(entry))
        except FileNotFoundError:
            return {}
        return entries

    def listing(self, path: str) -> Listing:
        """Names in a directory."""
        with _access("list", self.url, path):
            return LocalListing(self._prefix + path)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with _access("read", self.url, path):
            return (self.root / path).open("rb")

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or the first bytes of it."""
        with self._opened(path) as descriptor:
            return os.read(descriptor, at_most) if at_most >= 0 else _whole(descriptor, os.fstat(descriptor).st_size)

    def version(self, path: str) -> FileVersion:
        """Version of a file as it is now."""
        try:
            return version_of(os.stat(self._prefix + path))  # noqa: PTH116 - no object for each file
        except OSError as error:
            raise _explained("read", self.url, path, error) from error

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """Content of a file and its version, of one and the same file whatever takes its name meanwhile."""
        with self._opened(path) as descriptor:
            version = version_of(os.fstat(descriptor))
            return _whole(descriptor, version.size), version

    def look(self, path: str, at_most: int) -> tuple[FileVersion, bytes | None]:
        """Version of a file, and its content if it is no larger than that: of one and the same file, too."""
        # Two hundred times an image at the least, so without a context manager.
        try:
            descriptor = os.open(self._prefix + path, os.O_RDONLY)
            try:
                version = version_of(os.fstat(descriptor))
                return version, _whole(descriptor, version.size) if version.size <= at_most else None
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _explained("read", self.url, path, error) from error

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with _access("read", self.url, path):
            descriptor = os.open(self._prefix + path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file whole or not at all, in place of any other of that name."""
        target = self.root / path
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4()}.tmp")
        with _access("write", self.url, path):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with unfinished.open("wb") as stream:
                    stream.writelines(chunks)
                unfinished.replace(target)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file where none is, in a tree that nobody reads yet."""
        target = self._prefix + path
        with _access("write", self.url, path):
            try:
                descriptor = os.open(target, _CREATE, 0o644)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120 - once a directory
                descriptor = os.open(target, _CREATE, 0o644)
            try:
                for chunk in chunks:
                    done = os.write(descriptor, chunk)
                    while done < len(chunk):
                        done += os.write(descriptor, memoryview(chunk)[done:])
            finally:
                os.close(descriptor)

    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error."""
        with _access("delete", self.url, path):
            (self.root / path).unlink(missing_ok=True)

    def delete_all(self) -> None:
        """Delete the whole tree; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError), _access("delete", self.url):
            for _ in range(_DELETE_ATTEMPTS - 1):
                try:
                    shutil.rmtree(self.root)
                except OSError as error:
                    # State stores of a stopped query still upload a last snapshot.
                    if error.errno != errno.ENOTEMPTY:
                        raise
                else:
                    return
            shutil.rmtree(self.root)

    def exists(self) -> bool:
        """Whether the root exists."""
        return self.root.is_dir()

    def rename(self, url: str) -> None:
        """Move the whole tree to a place where nothing is yet."""
        target = local_path(url)
        if target is None:
            raise StorageAccessError(f"{self.url} is local and cannot be moved to {url}. Give a local path.")
        with _access("move", self.url):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.root.rename(target)


class RemoteListing(Listing):
    """Names and versions from one call."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.names = entries.keys()

    def version(self, name: str) -> FileVersion:
        """Version of a file."""
        return self._entries[name].version()


class RemoteFolder(Folder):
    """A directory tree behind fsspec."""

    width = 16

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        self.moves_at_once = has_folders(self.url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **fsspec_arguments(self.url, storage_options))
        except (ImportError, ValueError) as error:
            raise StorageAccessError(
                f"{url} cannot be opened: {error}. Install the fsspec driver of that file system, or correct the URL."
            ) from error

    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory, hidden ones left out; empty if there is no such directory."""
        where = self._at(path)
        try:
            with _access("list", self.url, path):
                # Listings must show what Spark wrote a moment ago.
                self._fs.invalidate_cache(where)
                infos = self._fs.ls(where, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries: dict[str, Entry] = {}
        for info in infos:
            name = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
            if name and not name.startswith(".") and str(info["name"]).strip("/") != where.strip("/"):
                entries[name] = Entry(name, info["type"] == "directory", partial(_remote_version, info))
        return entries

    def listing(self, path: str) -> Listing:
        """Names in a directory."""
        return RemoteListing(self.list(path))

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with _access("read", self.url, path):
            return cast("BinaryIO", self._fs.open(self._at(path), "rb"))

    def version(self, path: str) -> FileVersion:
        """Version of a file as it is now."""
        with _access("read", self.url, path):
            self._fs.invalidate_cache(self._at(path).rsplit("/", 1)[0])
            return _remote_version(self._fs.info(self._at(path)))

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file: object stores show it when it is whole."""
        where = self._at(path)
        with tempfile.SpooledTemporaryFile(_PUT_AT_ONCE_BYTES) as spool:
            # All of it first: what fails halfway, such as a check of the bytes, leaves nothing of it.
            size = sum(map(spool.write, chunks))
            spool.seek(0)
            with _access("write", self.url, path):
                if self.moves_at_once:
                    self._fs.makedirs(where.rsplit("/", 1)[0], exist_ok=True)
                if size <= _PUT_AT_ONCE_BYTES:
                    self._fs.pipe_file(where, spool.read())
                    return
                with self._fs.open(where, "wb") as stream:
                    shutil.copyfileobj(spool, stream, _READ_BYTES)

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file where none is."""
        self.write(path, chunks)

    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError), _access("delete", self.url, path):
            self._fs.rm_file(self._at(path))

    def delete_all(self) -> None:
        """Delete the whole tree; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError), _access("delete", self.url):
            self._fs.rm(self._root, recursive=True)

    def exists(self) -> bool:
        """Whether the root exists."""
        with _access("list", self.url):
            self._fs.invalidate_cache(self._root)
            return bool(self._fs.exists(self._root))

    def rename(self, url: str) -> None:
        """Move the whole tree to a place where nothing is yet."""
        with _access("move", self.url):
            self._fs.mv(self._root, self._fs._strip_protocol(url), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")


def version_of(stat: os.stat_result) -> FileVersion:
    """Version of a local file. Spark replaces files by renaming, so a replaced one has another inode."""
    return FileVersion(stat.st_size, f"{stat.st_dev:x}.{stat.st_ino:x}.{stat.st_mtime_ns:x}")


def _whole(descriptor: int, size: int) -> bytes:
    """All bytes of a file, in one call where it has the size it is said to have."""
    data = os.read(descriptor, size + 1)
    if len(data) != size:
        while more := os.read(descriptor, _READ_BYTES):
            data += more
    return data


def _lazy_version(entry: os.DirEntry[str]) -> Callable[[], FileVersion]:
    return lambda: version_of(entry.stat())


def _remote_version(info: Mapping[str, Any]) -> FileVersion:
    marks = [info[mark] for mark in _VERSION_MARKS if info.get(mark)]
    # Some file systems give one and the same time as a number in a listing and as a date elsewhere.
    texts = [str(mark.timestamp() if isinstance(mark, datetime) else mark).strip('"') for mark in marks]
    return FileVersion(int(info["size"] or 0), ":".join(texts) or None)


@contextlib.contextmanager
def _access(verb: str, url: str, path: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _explained(verb, url, path, error) from error


def _explained(verb: str, url: str, path: str, error: OSError) -> OSError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(f"{url}/{path}".rstrip("/"))
    return StorageAccessError(
        f"Cannot {verb} {url}/{path}: {error}. Check that the path is reachable and that this process has rights to it."
    )
