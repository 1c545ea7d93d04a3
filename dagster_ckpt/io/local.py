"""`LocalFileIO`: files on a local or mounted disk, written so that they survive a power failure."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from io import FileIO as RawFile
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.file_io import (
    CancelCheck,
    Entry,
    FileIO,
    FileStatus,
    FileVersion,
    Guarded,
    Hook,
    Listing,
    Look,
    accessing,
    explained,
    in_threads,
    no_op,
)
from dagster_ckpt.values.storage_path import local_path

# Each flush empties the disk's cache. Above this number, one call flushes the file system: for 2,000 linked files in 10
# ms instead of 140 ms.
_ONE_BY_ONE = 128
# A disk handles this many flushes in the time of one.
_THREADS = 8
# Syncing these also flushes every file in them, unlike FUSE.
_FLUSHED_AS_A_WHOLE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"}


def make_folder(folder: Path) -> list[Path]:
    """Create a directory; return those that got a new entry, for the caller to flush."""
    changed: list[Path] = []
    missing = folder
    while not missing.is_dir():
        missing = missing.parent
        changed.append(missing)
    if changed:
        folder.mkdir(parents=True, exist_ok=True)
    return changed


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    some = list(islice(_tree(root), _ONE_BY_ONE + 1))
    if len(some) > _ONE_BY_ONE:
        if sync_file_system(root):
            return
        some = list(_tree(root))

    def flush_part(part: list[Path], check_canceled: CancelCheck) -> None:
        for path in part:
            check_canceled()
            flush(path)

    files = [path for path, is_folder in some if not is_folder]
    in_threads(_THREADS, [part for first in range(_THREADS) if (part := files[first::_THREADS])], flush_part)
    # Targets before the names that lead to them.
    for path in reversed([path for path, is_folder in some if is_folder]):
        flush(path)


def sync_file_system(folder: Path) -> bool:
    """Flush the file system of a folder; return False if that is not supported."""
    if _SYNCFS is None or _file_system_type(folder) not in _FLUSHED_AS_A_WHOLE:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _SYNCFS(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
    return True


def _tree(folder: Path) -> Iterator[tuple[Path, bool]]:
    yield folder, True
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _tree(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path), False


def _file_system_type(folder: Path) -> str | None:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = (line.split() for line in mounts)
    return next((words[words.index("-") + 1] for words in found if words[2] == number), None)


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform.startswith("linux") else None


_SYNCFS = _libc("syncfs")
_SYNC_FILE_RANGE = _libc("sync_file_range")
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


# linux/fs.h: start writing dirty pages without waiting.
_SYNC_FILE_RANGE_WRITE = 2
# Start write-back each time this many bytes are written; for smaller files the hint may block and gains nothing.
_BEGIN_BYTES = 8 * 1024 * 1024
_PIECES_OF_A_CALL = 1024


class PieceWriter:
    def __init__(self, stream: RawFile, buffer_bytes: int) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._begun = 0
        self._written = 0

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self._pass_on()

    def write(self, data: bytes) -> int:
        self.writelines([data])
        return len(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self._held += pieces
        self._held_bytes += sum(map(len, pieces))
        if self._held_bytes >= self._buffer_bytes:
            self._pass_on()

    def _pass_on(self) -> None:
        pieces = self._held
        self._held, self._held_bytes = [], 0
        for first in range(0, len(pieces), _PIECES_OF_A_CALL):
            some = pieces[first : first + _PIECES_OF_A_CALL]
            size = sum(map(len, some))
            # Not joined first: that takes a third as long as hashing.
            done = os.writev(self._stream.fileno(), some)
            # A disk may accept only part; the next call reports why.
            while done < size:
                done += self._stream.write(b"".join(some)[done:])
            self._written += size
        if self._written - self._begun >= _BEGIN_BYTES:
            if _SYNC_FILE_RANGE is not None:
                size = self._written - self._begun
                _SYNC_FILE_RANGE(self._stream.fileno(), self._begun, size, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._written


_DELETE_ATTEMPTS = 10
_READ_BYTES = 1024 * 1024
# Many small files are adjacent in one data object.
_BUFFERED_BYTES = 256 * 1024
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# Errors of file systems without hard links, such as exFAT.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalListing(Listing):
    """Lists names in one call, and looks up the few versions that are needed."""

    def __init__(self, url: str, directory: str) -> None:
        self._url = url
        self._directory = directory

    @cached_property
    def names(self) -> Set[str]:
        try:
            with _accessing("list", self._url):
                names = os.listdir(self._directory)  # noqa: PTH208 - no object for each name
        except FileNotFoundError:
            return frozenset()
        return {name for name in names if name[0] != "."}

    def version(self, name: str) -> FileVersion:
        if not name or name[0] == "." or "/" in name:
            # A damaged snapshot may name any path.
            raise FileNotFoundError(f"{self._url}/{name}")
        try:
            # Called ten thousand times per snapshot.
            return version_of(os.stat(f"{self._directory}/{name}"))  # noqa: PTH116
        except OSError as error:
            raise explained("read", f"{self._url}/{name}", error) from error


class LocalFileIO(FileIO):
    """A directory on a local or mounted disk.

    Args:
        buffer_bytes: Size of the pieces that `create` passes to the disk; -1 passes each on at once.
        follow_links: Whether to list linked directories, whose content belongs to the link's creator.
    """

    can_rename = True

    def __init__(self, root: Path, *, buffer_bytes: int = -1, follow_links: bool = True) -> None:
        self.root = root
        self.url = f"file://{root}"
        self._prefix = f"{root}/"
        self._buffer_bytes = buffer_bytes
        self._follow_links = follow_links

    # Reading

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        directory = self.root / path
        with suppress(FileNotFoundError), self._accessing("list", path):
            if not self._follow_links and path and directory.is_symlink():
                return {}
            with os.scandir(directory) as found:
                for entry in found:
                    if hidden or not entry.name.startswith("."):
                        entries[entry.name] = Entry(entry.name, entry.is_dir(), partial(_status_of_entry, entry))
        return entries

    def listing(self, path: str) -> Listing:
        return LocalListing(f"{self.url}/{path}", self._prefix + path)

    def open(self, path: str, part: range | None = None) -> BinaryIO:
        with self._accessing("read", path):
            stream = (self.root / path).open("rb", buffering=-1 if part is None else _BUFFERED_BYTES)
        return cast("BinaryIO", Guarded(stream, f"{self.url}/{path}"))

    def read(self, path: str, at_most: int = -1) -> bytes:
        with self._opened(path) as descriptor:
            return os.read(descriptor, at_most) if at_most >= 0 else _whole(descriptor, os.fstat(descriptor).st_size)

    def status(self, path: str) -> FileStatus:
        with self._accessing("read", path):
            found = os.stat(self._prefix + path)  # noqa: PTH116 - as `version`
        return _status(found, found)

    def version(self, path: str) -> FileVersion:
        try:
            return version_of(os.stat(self._prefix + path))  # noqa: PTH116 - no object for each file
        except OSError as error:
            raise explained("read", f"{self.url}/{path}", error) from error

    def read_version(self, path: str) -> tuple[bytes, FileVersion]:
        with self._opened(path) as descriptor:
            version = version_of(os.fstat(descriptor))
            return _whole(descriptor, version.size), version

    def look_at(self, paths: Sequence[str], at_most: int) -> Sequence[Look]:
        looks: deque[Look] = deque()
        path = ""
        # Resolve the root once for the two hundred files of a larger query.
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
            raise explained("read", f"{self.url}/{path}", error) from error
        return looks

    def size(self, path: str) -> int | None:
        return self.sizes([path]).get(path)

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        # The error itself names the file.
        with _accessing("look at", self.url):
            for path in paths:
                with suppress(FileNotFoundError):
                    found[path] = os.stat(self._prefix + path).st_size  # noqa: PTH116 - called often
        return found

    def exists(self) -> bool:
        with self._accessing("list"):
            return self.root.is_dir()

    # Writing

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        target = self.root / path
        where = f"{self.url}/{path}"
        with accessing("write", where):
            changed = make_folder(target.parent)
            with self._new_file(target) as stream:
                with PieceWriter(stream, self._buffer_bytes) as pieces:
                    yield cast("BinaryIO", Guarded(cast("BinaryIO", pieces), where))
                os.fsync(stream.fileno())
            for folder in (target.parent, *changed):
                flush(folder)

    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        target = self.root / path
        is_new = True
        with self._accessing("write", path), self._unfinished(target, chunks) as unfinished:
            before_visible()
            if replace:
                unfinished.replace(target)
            else:
                is_new = _link_new(unfinished, target)
        if not is_new:
            raise FileExistsError(f"{self.url}/{path}")

    def place(self, path: str, chunks: Iterable[bytes]) -> None:
        target = self._prefix + path
        with self._accessing("write", path):
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
        target = self.root / path
        # Unlike a rename, a link never replaces an existing file.
        with self._accessing("write", path), self._unfinished(target, [data]) as unfinished, suppress(FileExistsError):
            os.link(unfinished, target)

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:
        if not isinstance(source, LocalFileIO):
            return False
        target = self.root / path
        with self._accessing("write", path):
            for folder in make_folder(target.parent):
                flush(folder)
            try:
                target.hardlink_to(source.root / source_path)
            except OSError:
                return False
        return True

    def delete(self, path: str) -> None:
        with self._accessing("delete", path):
            (self.root / path).unlink(missing_ok=True)

    def delete_if_empty(self, path: str = "") -> None:
        with suppress(OSError):
            (self.root / path).rmdir()

    def delete_all(self) -> None:
        with self._accessing("delete"), suppress(FileNotFoundError, NotADirectoryError):
            if self.root.is_symlink():
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

    def rename(self, url: str) -> None:
        target = local_path(url)
        if target is None:
            raise StorageAccessError(f"{self.url} is local and cannot be moved to {url}. Give a local path.")
        with self._accessing("move"):
            changed = make_folder(target.parent)
            self.root.rename(target)
            for folder in (target.parent, *changed):
                flush(folder)

    def make(self) -> None:
        with self._accessing("write"):
            for folder in make_folder(self.root):
                flush(folder)

    def flush(self, path: str) -> None:
        with self._accessing("flush", path):
            flush(self.root / path)

    def flush_all(self) -> None:
        with self._accessing("write"):
            flush_tree(self.root)

    def _accessing(self, verb: str, path: str = "") -> contextlib.AbstractContextManager[None]:
        return _accessing(verb, f"{self.url}/{path}" if path else self.url)

    @contextmanager
    def _unfinished(self, target: Path, chunks: Iterable[bytes]) -> Iterator[Path]:
        """Write a flushed temporary file next to its target, and flush the directory on exit."""
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4()}.tmp")
        changed = make_folder(target.parent)
        try:
            with unfinished.open("xb") as stream:
                stream.writelines(chunks)
                stream.flush()
                os.fsync(stream.fileno())
            for folder in changed:
                flush(folder)
            yield unfinished
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        flush(target.parent)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with self._accessing("read", path):
            descriptor = os.open(self._prefix + path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _new_file(self, path: Path) -> RawFile:
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            # The directory was removed with its last file.
            for folder in make_folder(path.parent):
                flush(folder)
            return path.open("xb", buffering=0)


# Errors of callers' iterators pass unchanged.
_accessing = partial(accessing, only=OSError)


def version_of(stat: os.stat_result) -> FileVersion:
    """Tell files apart by inode: Spark replaces a file by renaming another."""
    return FileVersion(stat.st_size, token_of(stat))


def token_of(stat: os.stat_result) -> str:
    return f"{stat.st_dev:x}.{stat.st_ino:x}.{stat.st_mtime_ns:x}"


def _link_new(unfinished: Path, target: Path) -> bool:
    try:
        target.hardlink_to(unfinished)
    except FileExistsError:
        # NFS repeats a call whose response was lost.
        return target.samefile(unfinished)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            return False
        unfinished.rename(target)
    return True


def _whole(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size + 1)
    if len(data) != size:
        while more := os.read(descriptor, _READ_BYTES):
            data += more
    return data


def _status_of_entry(entry: os.DirEntry[str]) -> FileStatus:
    # By its inode's change time, a new link to an old file is new.
    with _accessing("read", f"file://{entry.path}"):
        return _status(entry.stat(), entry.stat(follow_symlinks=False))


def _status(content: os.stat_result, name: os.stat_result) -> FileStatus:
    return FileStatus(version_of(content), content.st_mtime_ns // 1_000_000, name.st_ctime_ns // 1_000_000)
