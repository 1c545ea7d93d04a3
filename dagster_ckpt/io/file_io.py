"""`FileIO`: a tree of files on any storage, how its failures are reported, and work on files in several threads."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import IO, Any, BinaryIO, NamedTuple, Self, TypeVar

from dagster_ckpt.errors import CkptError, SnapshotAbortedError, StorageAccessError
from dagster_ckpt.values.redaction import cause_to_show, without_secrets

Part = TypeVar("Part")
Result = TypeVar("Result")
# Raises SnapshotAbortedError once another task has failed.
CancelCheck = Callable[[], None]


def in_threads(count: int, parts: Sequence[Part], work: Callable[[Part, CancelCheck], Result]) -> list[Result]:
    """In up to `count` threads, with the results in the order of the inputs.

    Raises the error of the task that failed first; a single task runs in the caller's thread.
    """
    failed = False

    def check_canceled() -> None:
        if failed:
            raise SnapshotAbortedError("Another part of the snapshot failed, so this part was canceled.")

    def do(part: Part) -> Result:
        nonlocal failed
        try:
            return work(part, check_canceled)
        except BaseException:
            failed = True
            raise

    if count < 2 or len(parts) < 2:
        return [do(part) for part in parts]
    with ThreadPoolExecutor(count, thread_name_prefix="snapshot") as pool:
        futures = [pool.submit(do, part) for part in parts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # Errors of canceled tasks come last.
    for error in sorted(errors, key=lambda error: isinstance(error, SnapshotAbortedError)):
        raise error
    return [future.result() for future in futures]


def start_in_thread(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


class FileVersion(NamedTuple):
    """Changes when another file replaces a file.

    Attributes:
        token: Device, inode and modification time, or an object store's entity tag or generation. None: nothing
            reliable.
    """

    size: int
    token: str | None


class FileStatus(NamedTuple):
    """Times are ms since the epoch by the storage's clock; None if it has none.

    Attributes:
        changed_at_ms: When its content was written, or when an older file got this name (by a hard link).
    """

    version: FileVersion
    modified_at_ms: int | None
    changed_at_ms: int | None


Look = tuple[FileVersion, bytes | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """`status` may look up the file on first use, and raises FileNotFoundError if it is gone."""

    name: str
    is_directory: bool
    status: Callable[[], FileStatus]

    def version(self) -> FileVersion:
        return self.status().version


class Listing:
    def __init__(self, entries: Callable[[], dict[str, Entry]]) -> None:
        self._list = entries

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return self._list()

    @property
    def names(self) -> Set[str]:
        return self._entries.keys()

    def version(self, name: str) -> FileVersion:
        """Raises FileNotFoundError."""
        entry = self._entries.get(name)
        if entry is None:
            raise FileNotFoundError(name)
        return entry.version()


Hook = Callable[[], None]


def no_op() -> None:
    """The default for a callback."""


class FileIO(ABC):
    """A tree of files. Paths are POSIX paths relative to its root, without a leading slash or `..`.

    A missing file raises FileNotFoundError; every other failure is a StorageAccessError. A write that raises may still
    have succeeded: a server's response can be lost. Several threads call the methods concurrently.

    Attributes:
        url: URL of the root, without user name and password.
        width: How many files to read concurrently; more than 1 where each is a request.
    """

    url: str
    can_rename: bool = False
    width: int = 1

    # Reading

    @abstractmethod
    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        """Including names just written; empty if the directory does not exist.

        Args:
            hidden: Also names that begin with a dot: Spark's unfinished files (`.<name>.<uuid>.tmp`) and Hadoop's
                `.crc` files. Neither belongs in a copy: a stale `.crc` makes Hadoop reject a good file.
        """

    @abstractmethod
    def open(self, path: str, part: range | None = None) -> BinaryIO:
        """As a seekable stream; `part` is the range that will be read."""

    @abstractmethod
    def status(self, path: str) -> FileStatus:
        """The status of a file."""

    def version(self, path: str) -> FileVersion:
        return self.status(path).version

    def size(self, path: str) -> int | None:
        try:
            return self.status(path).version.size
        except FileNotFoundError:
            return None

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        return {path: size for path in paths if (size := self.size(path)) is not None}

    def exists(self) -> bool:
        return bool(self.list(hidden=True))

    def read(self, path: str, at_most: int = -1) -> bytes:
        with self.open(path) as stream:
            return stream.read(at_most)

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        """The version may be older than the content."""
        version = self.version(path)
        return self.read(path), version

    def look_at(
        self,
        paths: Sequence[str],
        at_most: int,  # noqa: ARG002 - content would cost a request
    ) -> Sequence[Look]:
        """With content if it has at most `at_most` bytes and costs no extra request."""

        def look(path: str, check_canceled: CancelCheck) -> Look:
            check_canceled()
            return self.version(path), None

        return in_threads(self.width, paths, look)

    def listing(self, path: str) -> Listing:
        return Listing(lambda: self.list(path))

    def find(self, path: str = "", *, hidden: bool = False) -> Iterator[tuple[str, Entry]]:
        for name, entry in sorted(self.list(path, hidden=hidden).items()):
            below = f"{path}/{name}" if path else name
            if entry.is_directory:
                yield from self.find(below, hidden=hidden)
            else:
                yield below, entry

    # Writing

    @abstractmethod
    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """The file is durable when the context exits without an error."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        """Write a file atomically; it is durable on return.

        Args:
            chunks: If they raise, nothing is written.
            replace: False: FileExistsError if the file exists; one of several concurrent writers wins wherever the
                storage can tell.
            before_visible: Called once before the file becomes visible; if it raises, nothing is written.
        """

    def place(self, path: str, chunks: Iterable[bytes]) -> None:
        """In a tree without readers: a failure may leave a part. Durable after `flush_all`."""
        self.write(path, chunks)

    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file atomically unless one of that name exists; read it to learn which writer won."""
        if self.size(path) is None:
            self.write(path, [data])

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:  # noqa: ARG002
        """Link or copy a file of another tree, which is possible within one disk or one object store.

        The name is durable after a `flush` of its directory.
        """
        return False

    @abstractmethod
    def delete(self, path: str) -> None:
        """A missing file is not an error. A power failure may bring a file back until its directory is flushed."""

    def delete_if_empty(self, path: str = "") -> None:  # noqa: ARG002
        """Does nothing in object stores: some file systems of fsspec delete a directory with its content."""
        return

    def delete_all(self) -> None:
        """A missing tree is not an error. Of a symbolic link only the link is deleted."""
        for path, _ in self.find(hidden=True):
            self.delete(path)

    def rename(self, url: str) -> None:
        """Move the tree to a location that does not exist yet; its new name is durable on return."""
        raise StorageAccessError(f"{self.url} cannot be moved to {url}: this storage has no directories to rename.")

    def make(self) -> None:
        """On a disk its name is then durable."""
        return

    def flush(self, path: str) -> None:  # noqa: ARG002
        """A file, or the names in a directory; remote storage is durable once written."""
        return

    def flush_all(self) -> None:
        """The whole tree, except the root's own name; see `make` and `rename`."""
        return

    def clock_ms(self, probe: str) -> int | None:
        """By the clock that dates the files, ms since the epoch; None if it dates none.

        Taken from a file `probe`, which is then deleted: the storage's clock may be hours off.
        """
        self.write(probe, [b"dagster_ckpt"])
        try:
            with contextlib.suppress(FileNotFoundError):
                entry = self.list(hidden=True).get(probe)
                return entry.status().changed_at_ms if entry is not None else None
            return None
        finally:
            self.delete(probe)

    # Caching

    @cached_property
    def seen(self) -> dict[str, tuple[str, object]]:
        """Most files of a running query stay unchanged: path to token and parsed value."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Large, and only useful in this process.
        return {name: value for name, value in self.__dict__.items() if name != "seen"}


_MAY_BE_MISSING = frozenset({"read", "list", "flush"})


class accessing:  # noqa: N801 - used as a statement: `with accessing("read", url):`
    """Raise failures as StorageAccessError, or FileNotFoundError for a missing path to read, list or flush.

    Args:
        only: The exceptions to translate. Drivers raise types without a common base class (botocore, gcsfs, ...). A
            local disk raises only OSError, so errors of callers pass through.
    """

    __slots__ = ("_only", "_verb", "_where")

    def __init__(self, verb: str, where: str, *, only: type[Exception] = Exception) -> None:
        self._verb = verb
        self._where = where
        self._only = only

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._only) and not isinstance(error, CkptError):
            translated = explained(self._verb, self._where, error)
            raise translated from (None if isinstance(translated, FileNotFoundError) else cause_to_show(error))


def explained(verb: str, where: str, error: Exception) -> Exception:
    """FileNotFoundError where a path to read is missing or a folder, as in an object store; else StorageAccessError."""
    if verb in _MAY_BE_MISSING and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return FileNotFoundError(without_secrets(where))
    return StorageAccessError(
        f"Cannot {verb} {without_secrets(where)}: {type(error).__name__}: {without_secrets(str(error))}. Check that "
        f"the path is correct, that this process is allowed to {verb} there, and that credentials and endpoint are "
        "set."
    )


class Guarded:
    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = stream
        self._where = where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        """An unbuffered file may take the data in parts."""
        with accessing("write", self._where):
            done = 0
            while done < len(data):
                done += self._stream.write(memoryview(data)[done:] if done else data)
            return done

    def writelines(self, pieces: Iterable[bytes]) -> None:
        with accessing("write", self._where):
            self._stream.writelines(pieces)

    def read(self, size: int = -1) -> bytes:
        with accessing("read", self._where):
            return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        with accessing("read", self._where):
            return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
