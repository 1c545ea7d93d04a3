"""Object space over fsspec: object stores, HDFS, or fsspec's in-memory file system."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from dagster_ckpt.config.storage_path import fsspec_arguments, has_folders
from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.access import Guarded, accessing, reading
from dagster_ckpt.io.objects import UNKNOWN_AGE_MS, ObjectSpace, no_op

# Object stores accept parts of at least 5 MiB; fsspec's files are written in blocks of this size.
BLOCK_BYTES = 8 * 1024 * 1024
# Objects up to this size are buffered in memory and put in one request, which costs as much time as
# a megabyte.
SINGLE_PUT_BYTES = 12 * 1024 * 1024
SINGLE_FETCH_BYTES = 16 * 1024 * 1024


def _opened(url: str, url_to_open: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url_to_open, **arguments))
    except (ImportError, ValueError):
        raise
    except Exception as error:
        # Some file systems log in when they are instantiated.
        with accessing("open", url):
            raise error from None


class FsspecSpace:
    """A prefix of any fsspec file system. Objects of a store become visible when they are closed.

    Args:
        url: URL as shown and stored.
        options: Arguments for the file system.
        url_to_open: The same URL with user name and password, if it needs them.
    """

    def __init__(self, url: str, options: Mapping[str, Any], *, url_to_open: str | None = None) -> None:
        self._url = url.rstrip("/")
        try:
            opened = (url_to_open or url).rstrip("/")
            self._fs, root = _opened(self._url, opened, fsspec_arguments(opened, options))
        except ImportError as error:
            raise StorageAccessError(
                f"{url} needs a driver that is not installed: {error}. For S3: pip install 'dagster-ckpt[s3]'; for "
                "others the package that fsspec names."
            ) from error
        except ValueError as error:
            raise StorageAccessError(
                f"{url} is of a kind that fsspec does not know: {error}. Use file://, s3://, gs://, abfs:// or hdfs://."
            ) from error
        self._root = root.rstrip("/")
        self._has_folders = has_folders(url)

    @property
    def url(self) -> str:
        """URL of the space."""
        return self._url

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new data object for writing."""
        path = self._path(name)
        with accessing("write", f"{self._url}/{name}"):
            self._make_folder(path)
            with _Upload(self._fs, path) as upload:
                yield cast("BinaryIO", Guarded(cast("BinaryIO", upload), f"{self._url}/{name}"))

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = no_op) -> None:
        """Write an object atomically: in a single put, or by renaming a temporary file where there are real folders."""
        path = self._path(name)
        with accessing("write", f"{self._url}/{name}"):
            if not self._has_folders:
                after()
                self._fs.pipe_file(path, data)
                return
            self._make_folder(path)
            unfinished = f"{name}.{uuid.uuid4().hex}.tmp"
            try:
                self._fs.pipe_file(self._path(unfinished), data)
                after()
                self._fs.mv(self._path(unfinished), path)
            except BaseException:
                with suppress(CkptError):
                    self.delete(unfinished)
                raise

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with reading(f"{self._url}/{name}"):
            return self._whole(self._path(name))

    @contextmanager
    def open(self, name: str, part: range | None = None) -> Iterator[BinaryIO]:
        """Open an object for reading; a part of moderate size is fetched in one request."""
        where = f"{self._url}/{name}"
        with reading(where):
            if isinstance(self._fs, MemoryFileSystem):
                stream = io.BytesIO(self._whole(self._path(name)))
            elif part is not None and len(part) <= SINGLE_FETCH_BYTES:
                data = self._fs.cat_file(self._path(name), start=part.start, end=part.stop) if part else b""
                stream = _Part(data, part.start)
            else:
                stream = self._fs.open(self._path(name), "rb", block_size=BLOCK_BYTES)
        with stream:
            yield cast("BinaryIO", Guarded(stream, where))

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        path = self._path(name)
        with accessing("look at", f"{self._url}/{name}"):
            self._fs.invalidate_cache(path.rsplit("/", 1)[0])
            try:
                return int(self._fs.info(path)["size"])
            except FileNotFoundError:
                return None

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of the objects that exist, from one listing per folder."""
        sizes: dict[str, int] = {}
        for folder in {name.rpartition("/")[0] for name in names}:
            prefix = f"{folder}/" if folder else ""
            sizes |= {f"{prefix}{name}": int(entry["size"] or 0) for name, entry in self._entries(folder).items()}
        return {name: sizes[name] for name in names if name in sizes}

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Copy an object within the store."""
        if not isinstance(source, FsspecSpace) or source._fs is not self._fs or self._has_folders:
            return False
        with accessing("write", f"{self._url}/{name}"):
            self._fs.cp_file(source._path(source_name), self._path(name))
        return True

    def delete(self, name: str) -> None:
        """Delete an object."""
        path = self._path(name)
        with accessing("delete", f"{self._url}/{name}"):
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return
            finally:
                self._fs.invalidate_cache(path.rsplit("/", 1)[0])

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder)."""
        return {name: _changed_ms(entry) for name, entry in self._entries(prefix).items()}

    def _entries(self, prefix: str) -> dict[str, dict[str, Any]]:
        path = self._path(prefix)
        with accessing("list", f"{self._url}/{prefix}"):
            self._fs.invalidate_cache(path)
            try:
                entries = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            named = ((str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], entry) for entry in entries)
            return {name: entry for name, entry in named if name}

    def _whole(self, path: str) -> bytes:
        if isinstance(self._fs, MemoryFileSystem):
            # All readers of an in-memory object share one position, so threads would disturb each
            # other.
            if path not in self._fs.store:
                raise FileNotFoundError(path)
            return cast("bytes", self._fs.store[path].getvalue())
        return cast("bytes", self._fs.cat_file(path))

    def _make_folder(self, path: str) -> None:
        # In an object store this would only create a bucket with a misspelt name.
        if self._has_folders:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


class _Upload:
    """Bytes of a new object: a small one is put in one request, a large one in parts as they arrive."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._stream: Any = None

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, *details)
        elif kind is None:
            self._fs.pipe_file(self._path, b"".join(self._held))

    def write(self, data: bytes) -> int:
        """Write some bytes."""
        if self._stream is None and self._held_bytes + len(data) <= SINGLE_PUT_BYTES:
            self._held.append(bytes(data))
            self._held_bytes += len(data)
            return len(data)
        if self._stream is None:
            self._stream = self._fs.open(self._path, "wb", block_size=BLOCK_BYTES)
            self._stream.write(b"".join(self._held))
            self._held.clear()
        return cast("int", self._stream.write(data))

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write several pieces."""
        for piece in pieces:
            self.write(piece)


class _Part(io.BytesIO):
    """A fetched part of an object, addressed by offsets of the whole object."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset of the whole object."""
        return super().seek(offset - self._start, whence) + self._start


def _changed_ms(entry: Mapping[str, Any]) -> int:
    if entry["type"] == "directory":
        return 0
    for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1000)
        if isinstance(value, int | float):
            return int(value * 1000)
    # Unknown ages count as new: files of an attempt in progress are never swept.
    return UNKNOWN_AGE_MS
