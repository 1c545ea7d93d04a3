"""`Folder` on a local disk, using operating system calls directly."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.durability import flush, flush_tree, make_folder
from dagster_ckpt.io.folder import Entry, FileVersion, Folder, Listing, Look, accessing, explained, local_path

_DELETE_ATTEMPTS = 10
_READ_BYTES = 1024 * 1024
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class LocalListing(Listing):
    """Names from one call when first used; versions one by one, because few are needed."""

    def __init__(self, url: str, path: str, directory: str) -> None:
        self._url = url
        self._path = path
        self._directory = directory

    @cached_property
    def names(self) -> Set[str]:
        """Their names, without hidden ones."""
        with accessing("list", self._url, self._path):
            try:
                names = os.listdir(self._directory)  # noqa: PTH208 - no object for each name
            except (FileNotFoundError, NotADirectoryError):
                return frozenset()
        return {name for name in names if name[0] != "."}

    def version(self, name: str) -> FileVersion:
        """Version of a file."""
        if not name or name[0] == "." or "/" in name:
            # The names in a damaged snapshot are looked up here and nowhere else.
            raise FileNotFoundError(f"{self._url}/{self._path}/{name}")
        try:
            # Called ten thousand times per snapshot, so it creates no object or context manager per
            # call.
            return version_of(os.stat(f"{self._directory}/{name}"))  # noqa: PTH116
        except OSError as error:
            raise explained("read", self._url, f"{self._path}/{name}", error) from error


class LocalFolder(Folder):
    """A local directory, read with operating system calls."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.url = f"file://{root}"
        self._prefix = f"{root}/"

    def list(self, path: str = "") -> dict[str, Entry]:
        """Names in a directory without hidden ones; empty if the directory does not exist."""
        entries: dict[str, Entry] = {}
        try:
            with accessing("list", self.url, path), os.scandir(self.root / path) as found:
                for entry in found:
                    if not entry.name.startswith("."):
                        entries[entry.name] = Entry(entry.name, entry.is_dir(), _lazy_version(entry))
        except FileNotFoundError:
            return {}
        return entries

    def listing(self, path: str) -> Listing:
        """Files of a directory."""
        return LocalListing(self.url, path, self._prefix + path)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with accessing("read", self.url, path):
            return (self.root / path).open("rb")

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Content of a file, or its first `at_most` bytes."""
        with self._opened(path) as descriptor:
            return os.read(descriptor, at_most) if at_most >= 0 else _whole(descriptor, os.fstat(descriptor).st_size)

    def version(self, path: str) -> FileVersion:
        """Current version of a file."""
        try:
            return version_of(os.stat(self._prefix + path))  # noqa: PTH116 - no object for each file
        except OSError as error:
            raise explained("read", self.url, path, error) from error

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """Content and version of a file, of the same file even if it is replaced concurrently."""
        with self._opened(path) as descriptor:
            version = version_of(os.fstat(descriptor))
            return _whole(descriptor, version.size), version

    def look_at(self, paths: Sequence[str], at_most: int) -> Sequence[Look]:
        """Version of each file, and its content if it is at most `at_most` bytes, both of the same file."""
        looks: deque[Look] = deque()
        path = ""
        # Each snapshot of a larger query reads two hundred files: the path to the root is resolved
        # once, and no file gets a context manager.
        try:
            root = os.open(self._prefix, os.O_RDONLY)
            try:
                for path in paths:
                    descriptor = os.open(path, os.O_RDONLY, dir_fd=root)
                    try:
                        version = version_of(os.fstat(descriptor))
                        looks.append((version, _whole(descriptor, version.size) if version.size <= at_most else None))
                    finally:
                        os.close(descriptor)
            finally:
                os.close(root)
        except OSError as error:
            raise explained("read", self.url, path, error) from error
        return looks

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with accessing("read", self.url, path):
            descriptor = os.open(self._prefix + path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file atomically, replacing any file of that name; it is durable on return."""
        target = self.root / path
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4()}.tmp")
        with accessing("write", self.url, path):
            changed = make_folder(target.parent)
            try:
                with unfinished.open("wb") as stream:
                    stream.writelines(chunks)
                    stream.flush()
                    os.fsync(stream.fileno())
                unfinished.replace(target)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            for folder in (target.parent, *changed):
                flush(folder)

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a new file in a tree that nobody reads yet."""
        target = self._prefix + path
        with accessing("write", self.url, path):
            try:
                descriptor = os.open(target, _CREATE, 0o644)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120 - called once per directory
                descriptor = os.open(target, _CREATE, 0o644)
            try:
                for chunk in chunks:
                    done = os.write(descriptor, chunk)
                    while done < len(chunk):
                        done += os.write(descriptor, memoryview(chunk)[done:])
            finally:
                os.close(descriptor)

    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file atomically unless one of that name exists."""
        target = self.root / path
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4()}.tmp")
        with accessing("write", self.url, path):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with unfinished.open("xb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                # Unlike a rename, a link never replaces an existing file.
                with contextlib.suppress(FileExistsError):
                    os.link(unfinished, target)
            finally:
                unfinished.unlink(missing_ok=True)

    def delete(self, path: str) -> None:
        """Delete a file; a missing file is not an error."""
        with accessing("delete", self.url, path):
            (self.root / path).unlink(missing_ok=True)

    def delete_all(self) -> None:
        """Delete the whole tree; a missing tree is not an error. Of a symbolic link only the link is deleted."""
        with contextlib.suppress(FileNotFoundError), accessing("delete", self.url):
            if self.root.is_symlink():
                # The target of the link belongs to its creator.
                self.root.unlink()
                return
            for _ in range(_DELETE_ATTEMPTS - 1):
                try:
                    shutil.rmtree(self.root)
                except OSError as error:
                    # State stores of a stopped query may still upload a last snapshot.
                    if error.errno != errno.ENOTEMPTY:
                        raise
                else:
                    return
            shutil.rmtree(self.root)

    def delete_if_empty(self) -> None:
        """Delete the root if it is empty."""
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def exists(self) -> bool:
        """Whether the root exists."""
        with accessing("list", self.url):
            return self.root.is_dir()

    def rename(self, url: str) -> None:
        """Move the whole tree to a location that does not exist yet; its new name is durable on return."""
        target = local_path(url)
        if target is None:
            raise StorageAccessError(f"{self.url} is local and cannot be moved to {url}. Give a local path.")
        with accessing("move", self.url):
            changed = make_folder(target.parent)
            self.root.rename(target)
            for folder in (target.parent, *changed):
                flush(folder)

    def make(self) -> None:
        """Create the root; its name is then durable."""
        with accessing("write", self.url):
            for folder in make_folder(self.root):
                flush(folder)

    def flush(self, path: str) -> None:
        """Make a file, or the names in a directory, durable."""
        with accessing("write", self.url, path):
            flush(self.root / path)

    def flush_all(self) -> None:
        """Make the whole tree durable."""
        with accessing("write", self.url):
            flush_tree(self.root)


def version_of(stat: os.stat_result) -> FileVersion:
    """Version of a local file. Spark replaces files by renaming, so a replaced file has another inode."""
    return FileVersion(stat.st_size, token_of(stat))


def token_of(stat: os.stat_result) -> str:
    """See `FileVersion.token`."""
    return f"{stat.st_dev:x}.{stat.st_ino:x}.{stat.st_mtime_ns:x}"


def _whole(descriptor: int, size: int) -> bytes:
    """All bytes of a file, in one call if it has the expected size."""
    data = os.read(descriptor, size + 1)
    if len(data) != size:
        while more := os.read(descriptor, _READ_BYTES):
            data += more
    return data


def _lazy_version(entry: os.DirEntry[str]) -> Callable[[], FileVersion]:
    return lambda: version_of(entry.stat())
