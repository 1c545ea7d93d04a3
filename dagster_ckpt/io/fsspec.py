"""`FsspecFileIO`: files of any fsspec file system, which no other module opens."""

from __future__ import annotations

import getpass
import inspect
import io
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec
import fsspec.config
from fsspec.implementations.memory import MemoryFileSystem

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.file_io import Entry, FileIO, FileStatus, FileVersion, Guarded, Hook, accessing, no_op
from dagster_ckpt.values.redaction import user_info
from dagster_ckpt.values.storage_path import fsspec_arguments, has_folders

# Object stores accept parts of at least 5 MiB.
BLOCK_BYTES = 8 * 1024 * 1024
# Smaller files take one request: each costs as much time as a megabyte.
SINGLE_PUT_BYTES = 12 * 1024 * 1024
SINGLE_FETCH_BYTES = 16 * 1024 * 1024
# As in AWS's Java driver: a connection lasts until the next snapshot.
IDLE_CONNECTION_S = 60
_COPIED_BYTES = 1024 * 1024
# Their drivers have one connection, which threads cannot share.
_UNSUITABLE = ("ftp://", "sftp://", "ssh://")
_WHO_IN_HDFS = {"user", "token", "kerberos", "proxy_to"}
_LIBHDFS = ("hdfs://", "arrow_hdfs://")
_MAGIC = re.compile(r"[*?\[]")
_VERSION_MARKS = (
    *("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created"),
    *("modificationTime", "fileId"),
)
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
# WebHDFS has milliseconds, the others seconds or dates.
_TIME_MS = "modificationTime"


class FsspecFileIO(FileIO):
    """`url_to_open` is the URL with user name and password, if needed."""

    width = 16

    def __init__(self, url: str, options: Mapping[str, Any], *, url_to_open: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _opened(self.url, (url_to_open or url).rstrip("/"), options)
        self._has_folders = self.can_rename = has_folders(url)
        # s3fs otherwise asks for the size first, to read parts concurrently.
        reading = inspect.signature(getattr(type(self._fs), "_cat_file", self._fs.cat_file)).parameters
        self._in_one_request = {"max_concurrency": 1} if "max_concurrency" in reading else {}

    # Reading

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        where = self._at(path)
        try:
            with self._accessing("list", path):
                infos = self._fs.ls(where, detail=True)
        except FileNotFoundError:
            return {}
        entries: dict[str, Entry] = {}
        for info in infos:
            name = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
            # Some stores list the directory itself.
            if name and str(info["name"]).strip("/") != where.strip("/") and (hidden or not name.startswith(".")):
                entries[name] = Entry(name, info["type"] == "directory", partial(_status, info))
        return entries

    def find(self, path: str = "", *, hidden: bool = False) -> Iterator[tuple[str, Entry]]:
        if self._has_folders:
            yield from super().find(path, hidden=hidden)
            return
        with self._accessing("list", path):
            infos: dict[str, dict[str, Any]] = self._fs.find(self._at(path), detail=True)
        start = f"{self._root.strip('/')}/"
        for where, info in sorted(infos.items()):
            # S3A marks a directory with an empty object.
            if where.endswith("/"):
                continue
            below = where.strip("/").removeprefix(start)
            if hidden or not any(name.startswith(".") for name in below.split("/")):
                yield below, Entry(below.rsplit("/", 1)[-1], is_directory=False, status=partial(_status, info))

    def open(self, path: str, part: range | None = None) -> BinaryIO:
        where = self._at(path)
        with self._accessing("read", path):
            if type(self._fs) is MemoryFileSystem:
                stream: Any = io.BytesIO(self._whole(where))
            elif part is not None and len(part) <= SINGLE_FETCH_BYTES:
                data = self._fs.cat_file(where, start=part.start, end=part.stop) if part else b""
                stream = _Part(data, part.start)
            elif part is not None:
                stream = self._fs.open(where, "rb", block_size=BLOCK_BYTES)
            else:
                stream = self._fs.open(where, "rb")
        return cast("BinaryIO", Guarded(stream, f"{self.url}/{path}"))

    def read(self, path: str, at_most: int = -1) -> bytes:
        if at_most >= 0:
            return super().read(path, at_most)
        with self._accessing("read", path):
            return self._whole(self._at(path))

    def status(self, path: str) -> FileStatus:
        with self._accessing("read", path):
            return _status(self._fs.info(self._at(path)))

    def size(self, path: str) -> int | None:
        with self._accessing("look at", path), suppress(FileNotFoundError):
            return int(self._fs.info(self._at(path))["size"])
        return None

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for folder in {path.rpartition("/")[0] for path in paths}:
            prefix = f"{folder}/" if folder else ""
            entries = self.list(folder, hidden=True).items()
            sizes |= {f"{prefix}{name}": entry.version().size for name, entry in entries}
        return {path: sizes[path] for path in paths if path in sizes}

    def exists(self) -> bool:
        with self._accessing("list"):
            return self._is_there(self._root)

    # Writing

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        with self._accessing("write", path):
            self._make_folder(self._at(path))
            with _Upload(self._fs, self._at(path)) as upload:
                yield cast("BinaryIO", Guarded(cast("BinaryIO", upload), f"{self.url}/{path}"))

    def write(self, path: str, chunks: Iterable[bytes], *, replace: bool = True, before_visible: Hook = no_op) -> None:
        target = self._at(path)
        folder, _, name = target.rpartition("/")
        unfinished = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp" if self._has_folders else target
        with self._spooled(chunks) as spool, self._accessing("write", path):
            if not self._has_folders:
                before_visible()
                if replace:
                    self._put(target, spool)
                    return
                spool.seek(0)
                is_new = self._put_new(target, spool.read())
            else:
                self._make_folder(target)
                try:
                    self._put(unfinished, spool)
                    before_visible()
                    is_new = self._renamed(unfinished, target, replace=replace)
                    if not is_new:
                        self._fs.rm_file(unfinished)
                except BaseException:
                    with suppress(Exception):
                        self._fs.rm_file(unfinished)
                    raise
        if not is_new:
            raise FileExistsError(f"{self.url}/{path}")

    def place(self, path: str, chunks: Iterable[bytes]) -> None:
        with self._spooled(chunks) as spool, self._accessing("write", path):
            self._make_folder(self._at(path))
            self._put(self._at(path), spool)

    def create_if_absent(self, path: str, data: bytes) -> None:
        if self.size(path) is None:
            with suppress(FileExistsError):
                self.write(path, [data], replace=False)

    def adopt(self, path: str, source: FileIO, source_path: str) -> bool:
        if not isinstance(source, FsspecFileIO) or source._fs is not self._fs or self._has_folders:
            return False
        with self._accessing("write", path), suppress(FileNotFoundError):
            self._fs.cp_file(source._at(source_path), self._at(path))
            return True
        return False

    def delete(self, path: str) -> None:
        with self._accessing("delete", path), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def delete_all(self) -> None:
        with self._accessing("delete"), suppress(FileNotFoundError):
            if not self._has_folders and _MAGIC.search(self._root):
                # fsspec would take the folder's name for a pattern, which others may match.
                super().delete_all()
                return
            self._fs.rm(self._root, recursive=True)

    def rename(self, url: str) -> None:
        target = self._fs._strip_protocol(url)
        with self._accessing("move"):
            self._make_folder(target)
            if not self._renamed(self._root, target, replace=False):
                raise FileExistsError(target)

    def _renamed(self, source: str, target: str, *, replace: bool) -> bool:
        """Return False if the name is taken."""
        if "webhdfs" in self._fs.protocol:
            # fsspec's `mv` does not replace a file, does not report that, and moves into an existing folder.
            option = "OVERWRITE" if replace else "NONE"
            try:
                self._fs._call("RENAME", method="put", path=source, destination=target, renameoptions=option)
            except RuntimeError:
                if replace or not self._is_there(target):
                    raise
                return False
            return True
        if self._is_there(target):
            if not replace:
                return False
            # Not every file system can rename onto a file.
            self._fs.rm_file(target)
        self._fs.mv(source, target)
        return True

    def _put(self, where: str, spool: BinaryIO) -> None:
        size = spool.seek(0, io.SEEK_END)
        spool.seek(0)
        if size <= SINGLE_PUT_BYTES:
            self._fs.pipe_file(where, spool.read())
            return
        with self._fs.open(where, "wb", block_size=BLOCK_BYTES) as stream:
            shutil.copyfileobj(spool, stream, _COPIED_BYTES)

    def _put_new(self, where: str, data: bytes) -> bool:
        """Return whether the object of that name is now this one."""
        try:
            self._fs.pipe_file(where, data, mode="create")
        except FileExistsError:
            # The driver may have put it: it repeats a request whose response was lost.
            return self._whole(where) == data
        except (TypeError, NotImplementedError):
            # The store has no conditional put.
            if self._is_there(where):
                return False
            self._fs.pipe_file(where, data)
        return True

    @contextmanager
    def _spooled(self, chunks: Iterable[bytes]) -> Iterator[BinaryIO]:
        """Read the input first: if it fails halfway, as in a digest check, nothing is written."""
        with tempfile.SpooledTemporaryFile(SINGLE_PUT_BYTES) as spool:
            spool.writelines(chunks)
            yield cast("BinaryIO", spool)

    def _whole(self, where: str) -> bytes:
        if type(self._fs) is MemoryFileSystem:
            # All readers of an in-memory object share one position.
            if where not in self._fs.store:
                raise FileNotFoundError(where)
            return cast("bytes", self._fs.store[where].getvalue())
        return cast("bytes", self._fs.cat_file(where, **self._in_one_request))

    def _is_there(self, where: str) -> bool:
        # fsspec's `exists` answers no to every error: an unavailable store would look empty.
        try:
            self._fs.info(where)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _make_folder(self, where: str) -> None:
        # In an object store, it would only create a misspelt bucket.
        if self._has_folders:
            self._fs.makedirs(where.rsplit("/", 1)[0], exist_ok=True)

    def _accessing(self, verb: str, path: str = "") -> accessing:
        return accessing(verb, f"{self.url}/{path}" if path else self.url)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")


def _opened(url: str, url_to_open: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    if url.startswith(_UNSUITABLE):
        raise StorageAccessError(
            f"{url} cannot be used: many threads write and read snapshots, and fsspec's driver for FTP and SSH has one "
            "connection for all of them. Mount the folder and name it as file://, use object storage or webhdfs://, or "
            "write a storage of your own (docs/custom-storage.md)."
        )
    # Some file systems log in when instantiated.
    with accessing("open", url):
        try:
            arguments = {**_user_of_hadoop(url_to_open, options), **fsspec_arguments(url_to_open, options)}
            fs, root = fsspec.core.url_to_fs(url_to_open, **arguments)
        except ImportError as error:
            raise StorageAccessError(
                f"{url} needs a driver that is not installed: {error}. Install it: pip install 'dagster-ckpt[s3]' (or "
                "[gcs], [azure]); for others the package that fsspec names."
            ) from error
        except ValueError as error:
            raise StorageAccessError(
                f"{url} has a protocol that fsspec does not know: {error}. Use file://, s3://, gs://, abfs:// or "
                "webhdfs://."
            ) from error
        except OSError as error:
            if not url.startswith(_LIBHDFS):
                raise
            # The other lines are a hundred places where PyArrow looked for it.
            first_line = str(error).partition("\n")[0]
            raise StorageAccessError(
                f"{url} cannot be opened by PyArrow, which needs Hadoop's libhdfs: {first_line}. Set "
                "JAVA_HOME, ARROW_LIBHDFS_DIR and CLASSPATH (the output of `hadoop classpath --glob`), or use "
                "webhdfs://<name node>:9870, which Spark and Python can read without it."
            ) from error
    _without_waiting(fs)
    return fs, str(root).rstrip("/")


def _user_of_hadoop(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Name the user as Hadoop's client, and so Spark, does; otherwise HDFS sees `dr.who`."""
    given = {**fsspec.config.conf.get("webhdfs", {}), **options}
    if not url.startswith("webhdfs://") or user_info(url)[1] or given.keys() & _WHO_IN_HDFS:
        return {}
    try:
        return {"user": os.environ.get("HADOOP_USER_NAME") or getpass.getuser()}
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        return {}


def _without_waiting(fs: Any) -> None:
    """Let s3fs put without asking the server first, and keep idle connections: each costs a round trip."""
    if "s3" not in fs.protocol or getattr(fs, "session", fs) is not None:
        return
    try:
        from aiobotocore.config import AioConfig  # noqa: PLC0415 - of S3 only
        from aiobotocore.session import AioSession  # noqa: PLC0415
        from botocore.handlers import add_expect_header  # noqa: PLC0415
    except ImportError:
        return
    session = AioSession(**fs.kwargs)
    session.unregister("before-call.s3", add_expect_header)
    session.set_default_client_config(AioConfig(connector_args={"keepalive_timeout": IDLE_CONNECTION_S}))
    fs.session = session


class _Upload:
    """Puts small objects in one request, and large ones in parts as they arrive."""

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
        for piece in pieces:
            self.write(piece)


class _Part(io.BytesIO):
    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(offset - self._start, whence) + self._start


def _status(info: Mapping[str, Any]) -> FileStatus:
    marks = [info[mark] for mark in _VERSION_MARKS if info.get(mark)]
    # Some file systems return a number in a listing and a date elsewhere.
    texts = [str(mark.timestamp() if isinstance(mark, datetime) else mark).strip('"') for mark in marks]
    time_ms = next((ms for name in _TIMES if (ms := _ms(info.get(name))) is not None), info.get(_TIME_MS))
    return FileStatus(FileVersion(int(info["size"] or 0), ":".join(texts) or None), time_ms, time_ms)


def _ms(value: object) -> int | None:
    seconds = value.timestamp() if isinstance(value, datetime) else value
    # Seconds as a float deviate slightly from the exact millisecond.
    return round(seconds * 1000) if isinstance(seconds, int | float) else None
