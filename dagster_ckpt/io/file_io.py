"""`FileIO`: a tree of files on any storage; how its failures are reported; work in threads."""

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
    """Call `work` for each part in up to `count` threads; if one fails, cancel the others and raise its error."""
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

    `token` is device, inode and modification time, or an object store's entity tag or generation, if known.
    """

    size: int
    token: str | None


class FileStatus(NamedTuple):
    """Version and times of a file, in ms since the epoch by the storage's clock; None if it has none.

    Attributes:
        changed_at_ms: When its content was written, or when a hard link gave it this name.
    """

    version: FileVersion
    modified_at_ms: int | None
    changed_at_ms: int | None


Look = tuple[FileVersion, bytes | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory; `status` raises FileNotFoundError if the file is gone by then."""

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
        entry = self._entries.get(name)
        if entry is None:
            raise FileNotFoundError(name)
        return entry.version()


Hook = Callable[[], None]


def no_op() -> None: ...


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
        """List a directory, with names just written; empty if it does not exist.

        Args:
            hidden: Include names that begin with a dot: Spark's unfinished files (`.<name>.<uuid>.tmp`) and Hadoop's
                `.crc` files. Neither belongs in a copy: a stale `.crc` makes Hadoop reject a good file.
        """

    @abstractmethod
    def open(self, path: str, part: range | None = None) -> BinaryIO:
        """Open a seekable stream; only the range `part` is read, if given."""

    @abstractmethod
    def status(self, path: str) -> FileStatus: ...

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
        """Return content and version of a file; the version may be older."""
        version = self.version(path)
        return self.read(path), version

    def look_at(
        self,
        paths: Sequence[str],
        at_most: int,  # noqa: ARG002 - content would cost a request
    ) -> Sequence[Look]:
        """Return versions, with content that has at most `at_most` bytes and costs no extra request."""

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
        """Write a new file, which is durable once the context exits without an error."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        """Write a file atomically; it is durable on return.

        Args:
            chunks: If they raise, nothing is written.
            replace: False raises FileExistsError if the file exists; one of several writers wins if storage can tell.
            before_visible: Called once before the file becomes visible; if it raises, nothing is written.
        """

    def place(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file in a tree without readers: a failure may leave part of it. `flush_all` makes it durable."""
        self.write(path, chunks)

    def create_if_absent(self, path: str, data: bytes) -> None:
        """Write a small file atomically unless it exists; read it to learn which writer won."""
        if self.size(path) is None:
            self.write(path, [data])

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:  # noqa: ARG002
        """Link or copy a file within one disk or object store; return False if that is impossible.

        A `flush` of the directory makes the name durable.
        """
        return False

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file if it exists. Until its directory is flushed, a power failure may bring it back."""

    def delete_if_empty(self, path: str = "") -> None:  # noqa: ARG002
        """Delete an empty directory of a local disk only: fsspec's file systems may delete its content too."""
        return

    def delete_all(self) -> None:
        """Delete the tree if it exists; of a symbolic link, only the link."""
        for path, _ in self.find(hidden=True):
            self.delete(path)

    def rename(self, url: str) -> None:
        """Move the tree to a location that does not exist yet; its new name is durable on return."""
        raise StorageAccessError(f"{self.url} cannot be moved to {url}: this storage has no directories to rename.")

    def make(self) -> None:
        """Create the root directory durably on a local disk; other storages need none."""
        return

    def flush(self, path: str) -> None:  # noqa: ARG002
        """Make a file, or the names in a directory, durable. Remote storage is durable once written."""
        return

    def flush_all(self) -> None:
        """Make the tree durable, except the name of its root (see `make` and `rename`)."""
        return

    def clock_ms(self, probe: str) -> int | None:
        """Return the storage's time in ms since the epoch, from a temporary file `probe`; None if it dates none."""
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
        """Parsed files by path, each with its token: most files of a running query do not change."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # The cache is large, and useless elsewhere.
        return {name: value for name, value in self.__dict__.items() if name != "seen"}


_MAY_BE_MISSING = frozenset({"read", "list", "flush"})


class accessing:  # noqa: N801 - used as a statement: `with accessing("read", url):`
    """Raise failures as StorageAccessError, or FileNotFoundError for a missing path to read, list or flush.

    Args:
        only: What to translate: all, as drivers have no common base class; only OSError for a local disk, so that
            callers' errors pass.
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
    """Return FileNotFoundError if a path to read is missing or a folder; otherwise StorageAccessError."""
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
        with accessing("write", self._where):
            done = 0
            # An unbuffered file may accept only part.
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
