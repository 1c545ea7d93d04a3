"""`Folder` over fsspec, and `open_folder`, which turns a URL into a `Folder`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec

from dagster_ckpt.config.storage_path import fsspec_arguments, has_folders
from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.folder import Entry, FileVersion, Folder, Listing, accessing, local_path
from dagster_ckpt.io.local_folder import LocalFolder

# The names that fsspec file systems use for an entity tag, a generation or a modification time.
_VERSION_MARKS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")
_READ_BYTES = 1024 * 1024
# A file up to this size is buffered in memory and put in one request.
_SINGLE_PUT_BYTES = 8 * 1024 * 1024


class RemoteListing(Listing):
    """Names and versions from one call."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    @property
    def names(self) -> Set[str]:
        """Their names, without hidden ones."""
        return self._entries.keys()

    def version(self, name: str) -> FileVersion:
        """Version of a file."""
        entry = self._entries.get(name)
        if entry is None:
            raise FileNotFoundError(name)
        return entry.version()


class RemoteFolder(Folder):
    """A directory tree on an fsspec file system."""

    width = 16

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        self.can_rename = has_folders(self.url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **fsspec_arguments(self.url, storage_options))
        except (ImportError, ValueError) as error:
            raise StorageAccessError(
                f"{url} cannot be opened: {error}. Install the fsspec driver of that file system, or correct the URL."
            ) from error

    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory without hidden ones; empty if the directory does not exist."""
        where = self._at(path)
        try:
            with _reaching("list", self.url, path):
                # Listings must include what Spark wrote a moment ago.
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
        """Files of a directory."""
        return RemoteListing(self.list(path))

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with _reaching("read", self.url, path):
            return cast("BinaryIO", self._fs.open(self._at(path), "rb"))

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or its first `at_most` bytes."""
        with _reaching("read", self.url, path):
            if at_most < 0:
                return cast("bytes", self._fs.cat_file(self._at(path)))
            with self._fs.open(self._at(path), "rb") as stream:
                return cast("bytes", stream.read(at_most))

    def version(self, path: str) -> FileVersion:
        """Current version of a file."""
        with _reaching("read", self.url, path):
            self._fs.invalidate_cache(self._at(path).rsplit("/", 1)[0])
            return _remote_version(self._fs.info(self._at(path)))

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file: object stores show it once it is complete."""
        where = self._at(path)
        with tempfile.SpooledTemporaryFile(_SINGLE_PUT_BYTES) as spool:
            # Buffer everything first: if the input fails halfway, for example in a digest check,
            # nothing is written.
            size = sum(map(spool.write, chunks))
            spool.seek(0)
            with _reaching("write", self.url, path):
                if self.can_rename:
                    self._fs.makedirs(where.rsplit("/", 1)[0], exist_ok=True)
                if size <= _SINGLE_PUT_BYTES:
                    self._fs.pipe_file(where, spool.read())
                    return
                with self._fs.open(where, "wb") as stream:
                    shutil.copyfileobj(spool, stream, _READ_BYTES)

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a new file."""
        self.write(path, chunks)

    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file atomically unless one of that name exists."""
        with _reaching("write", self.url, path):
            if self._fs.exists(self._at(path)):
                return
            with contextlib.suppress(FileExistsError):
                try:
                    self._fs.pipe_file(self._at(path), data, mode="create")
                except (TypeError, NotImplementedError):
                    # The store has no conditional put: a concurrent writer is detected by reading
                    # again.
                    self._fs.pipe_file(self._at(path), data)

    def delete(self, path: str) -> None:
        """Delete a file; a missing file is not an error."""
        with contextlib.suppress(FileNotFoundError), _reaching("delete", self.url, path):
            self._fs.rm_file(self._at(path))

    def delete_all(self) -> None:
        """Delete the whole tree; a missing tree is not an error."""
        with contextlib.suppress(FileNotFoundError), _reaching("delete", self.url):
            self._fs.rm(self._root, recursive=True)

    def exists(self) -> bool:
        """Whether the root exists."""
        with _reaching("list", self.url):
            self._fs.invalidate_cache(self._root)
            return bool(self._fs.exists(self._root))

    def rename(self, url: str) -> None:
        """Move the whole tree to a location that does not exist yet."""
        with _reaching("move", self.url):
            self._fs.mv(self._root, self._fs._strip_protocol(url), recursive=True)

    def make(self) -> None:
        """Do nothing: folders are created with the files in them."""

    def flush(self, path: str) -> None:
        """Do nothing: what the server has accepted is durable."""

    def flush_all(self) -> None:
        """Do nothing: what the server has accepted is durable."""

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")


@contextlib.contextmanager
def _reaching(verb: str, url: str, path: str = "") -> Iterator[None]:
    with accessing(verb, url, path):
        try:
            yield
        except (OSError, CkptError):
            raise
        # Drivers raise their own exception types (botocore, gcsfs, ...), which have no common base
        # class.
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def _remote_version(info: Mapping[str, Any]) -> FileVersion:
    marks = [info[mark] for mark in _VERSION_MARKS if info.get(mark)]
    # Some file systems return the same time as a number in a listing and as a date elsewhere.
    texts = [str(mark.timestamp() if isinstance(mark, datetime) else mark).strip('"') for mark in marks]
    return FileVersion(int(info["size"] or 0), ":".join(texts) or None)


def open_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Open a directory tree by URL; nothing is created.

    Args:
        url: A URL of any fsspec file system; a path without a scheme is local.
        storage_options: Arguments for the fsspec file system.

    Raises:
        StorageAccessError: The file system is unknown or its driver is not installed.
    """
    if "\0" in url:
        raise StorageAccessError(f"{url!r} is no place of files: no path holds a NUL. Correct the URL.")
    path = local_path(url)
    return LocalFolder(path) if path is not None else RemoteFolder(url, storage_options or {})
