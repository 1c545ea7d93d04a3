"""An object store without rename, folders or append, whose requests are numbered.

Its objects lie in folders of this machine. A put is seen whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem
from sqlalchemy import Connection

from dagster_ckpt.catalog.database import Database
from tests.support.places import UNFINISHED, has_files

SCHEME = "bucket"


class ObjectFault(Enum):
    """What happens at a request to an object store."""

    KILLED = "the process is killed before a request that changes something, or before a transaction that writes"
    FAILS = "a request fails once, also one that only reads"
    AWAY = "the store is unavailable from there on, reads included"
    ANSWER_LOST = "a request that changes something is done, and its answer is lost"

    @property
    def only_changes(self) -> bool:
        """Whether only requests that change something count: at others it would be the same as at the next of these."""
        return self in (ObjectFault.KILLED, ObjectFault.ANSWER_LOST)


class Requests:
    """The requests of this process."""

    now: ClassVar[Requests | None] = None

    def __init__(self, fault: ObjectFault, call: int, die: Callable[[Sequence[str]], None]) -> None:
        self.made: list[str] = []
        self._fault = fault
        self._call = call
        self._die = die
        self._lock = threading.Lock()

    def install(self) -> None:
        """Count from now on; where the process is killed, transactions with the catalog are numbered along."""
        Requests.now = self
        if self._fault is ObjectFault.KILLED:
            Database.writing = self._transactions(Database.writing)  # type: ignore[method-assign]

    def _transactions(self, real: Callable[..., AbstractContextManager[Connection]]) -> Any:
        @contextmanager
        def counted(database: Database, **named: Any) -> Iterator[Connection]:
            with self.request("write the catalog", changes=True), real(database, **named) as connection:
                yield connection

        return counted

    @contextmanager
    def request(self, what: str, *, changes: bool) -> Iterator[None]:
        """Around a request."""
        if self._fault.only_changes and not changes:
            yield
            return
        with self._lock:
            self.made.append(what)
            number, fault = len(self.made), self._fault
            if number == self._call and fault is ObjectFault.KILLED:
                self._die(self.made)
        is_it = number == self._call
        if (is_it and fault is ObjectFault.FAILS) or (number >= self._call and fault is ObjectFault.AWAY):
            raise OSError(errno.EIO, "The store does not answer: a fault of the torture", what)
        yield
        if is_it and fault is ObjectFault.ANSWER_LOST:
            raise OSError(errno.EIO, "The store's answer was lost: a fault of the torture", what)


@contextmanager
def _request(what: str, path: str, *, changes: bool = False) -> Iterator[None]:
    if Requests.now is None:
        yield
        return
    with Requests.now.request(f"{what} {path}", changes=changes):
        yield


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """The store, as fsspec's drivers are."""

    protocol = SCHEME
    cacheable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Put an object."""
        path = self._strip_protocol(path)
        with _request("put", path, changes=True):
            if mode == "create" and Path(path).is_file():
                raise FileExistsError(path)
            unfinished = f"{path}.{threading.get_ident()}{UNFINISHED}"
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(unfinished).write_bytes(value)
            os.replace(unfinished, path)  # noqa: PTH105

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Get an object, or a part of it."""
        path = self._strip_protocol(path)
        with _request("get", path):
            return _file(path).read_bytes()[start:end]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Upload(self, path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """What is known of an object, or of a prefix that objects have."""
        path = self._strip_protocol(path)
        with _request("head", path):
            return _info(Path(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List what is below a prefix."""
        path = self._strip_protocol(path)
        with _request("list", path):
            place = Path(path)
            found = [place] if place.is_file() else sorted(place.iterdir()) if place.is_dir() else []
            infos = [_info(each) for each in found if _has_objects(each)]
        if not infos:
            raise FileNotFoundError(path)
        return infos if detail else [info["name"] for info in infos]

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        path = self._strip_protocol(path)
        with _request("delete", path, changes=True):
            _file(path).unlink()

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Let the store copy an object."""
        source = self._strip_protocol(path1)
        with _request("copy", source):
            data = _file(source).read_bytes()
        self.pipe_file(path2, data)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete all objects of a prefix, one by one."""
        for each in self.find(path):
            self.rm_file(each)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no folders."""
        raise AssertionError(f"a folder is made in an object store: {path}, {exist_ok}")

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """There is no renaming."""
        raise AssertionError(f"something is renamed in an object store: {path1} to {path2}")


class _Upload(io.BytesIO):
    def __init__(self, bucket: Bucket, path: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._path = path

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self._bucket.pipe_file(self._path, self.getvalue())
        super().__exit__(kind, *details)  # type: ignore[arg-type]


def _file(path: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(path)
    return Path(path)


def _has_objects(path: Path) -> bool:
    return has_files(path) or (path.is_file() and not path.name.endswith(UNFINISHED))


def _info(path: Path) -> dict[str, Any]:
    try:
        if has_files(path):
            return {"name": str(path), "size": 0, "type": "directory"}
        found, data = path.stat(), _file(str(path)).read_bytes()
    except NotADirectoryError as error:
        raise FileNotFoundError(str(path)) from error
    changed = datetime.fromtimestamp(found.st_mtime, UTC)
    etag = hashlib.sha1(data).hexdigest()
    return {"name": str(path), "size": len(data), "type": "file", "ETag": etag, "LastModified": changed}


fsspec.register_implementation(SCHEME, Bucket, clobber=True)
