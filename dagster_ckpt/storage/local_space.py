"""Objects as files of this machine, with the calls of the operating system."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from dagster_ckpt.errors import CkptError
from dagster_ckpt.image import ObjectSpace, flush, make_folder, nothing
from dagster_ckpt.storage.access import Guarded, accessing, reading
from dagster_ckpt.storage.write_behind import WriteBehind

# Many small files lie side by side in one object.
READ_BYTES = 256 * 1024


class LocalSpace:
    """A folder on a local or mounted disk. What is written is flushed to the disk before it is relied on."""

    def __init__(self, root: Path, *, buffer_bytes: int) -> None:
        self._root = root
        self._buffer_bytes = buffer_bytes

    @property
    def url(self) -> str:
        """Where the space is."""
        return f"file://{self._root}"

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new data object for writing."""
        path = self._root / name
        with accessing("write", f"file://{path}"):
            changed = make_folder(path.parent)
            with self._new_file(path) as stream:
                with WriteBehind(stream, self._buffer_bytes) as behind:
                    yield cast("BinaryIO", Guarded(cast("BinaryIO", behind), f"file://{path}"))
                os.fsync(stream.fileno())
            for folder in (path.parent, *changed):
                flush(folder)

    def publish(self, name: str, data: bytes, *, after: Callable[[], None] = nothing) -> None:
        """Write an object at once: beside it, flushed, then renamed, and the folder flushed too."""
        unfinished_name = f"{name}.{uuid.uuid4().hex}.tmp"
        path, unfinished = self._root / name, self._root / unfinished_name
        with accessing("write", f"file://{path}"):
            changed = make_folder(path.parent)
            try:
                with unfinished.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                for folder in changed:
                    flush(folder)
                # What it waits for, mostly the disk as well, was done meanwhile.
                after()
                unfinished.replace(path)
            except BaseException:
                with suppress(CkptError):
                    self.delete(unfinished_name)
                raise
            flush(path.parent)

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with reading(f"{self.url}/{name}"):
            return (self._root / name).read_bytes()

    @contextmanager
    def open(self, name: str, part: range | None = None) -> Iterator[BinaryIO]:  # noqa: ARG002
        """Open an object for reading."""
        where = f"{self.url}/{name}"
        with reading(where):
            stream = (self._root / name).open("rb", buffering=READ_BYTES)
        with stream:
            yield cast("BinaryIO", Guarded(stream, where))

    def size(self, name: str) -> int | None:
        """Length of an object, or None."""
        return self.sizes([name]).get(name)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of those objects that are there."""
        found: dict[str, int] = {}
        # The error itself names the object.
        with accessing("look at", self.url):
            for name in names:
                with suppress(FileNotFoundError):
                    found[name] = os.stat(f"{self._root}/{name}").st_size  # noqa: PTH116 - a dozen with every image
        return found

    def adopt(self, name: str, source: ObjectSpace, source_name: str) -> bool:
        """Link an object of another space on the same disk: it costs no bytes, and lives as long as either."""
        if not isinstance(source, LocalSpace):
            return False
        path = self._root / name
        with accessing("write", f"file://{path}"):
            for folder in make_folder(path.parent):
                flush(folder)
            try:
                path.hardlink_to(source._root / source_name)
            except OSError:
                # Another device, a disk without links, a limit reached: then the bytes are written anew.
                return False
            # An image that refers to it may be published next, and the source deleted.
            flush(path.parent)
        return True

    def delete(self, name: str) -> None:
        """Delete an object, and its folder if that is empty then."""
        path = self._root / name
        with accessing("delete", f"file://{path}"):
            path.unlink(missing_ok=True)
            # Somebody else may delete the folder meanwhile, or write into it.
            with suppress(FileNotFoundError):
                if path.parent != self._root and not any(path.parent.iterdir()):
                    with suppress(OSError):
                        path.parent.rmdir()
                        return
                # What it referred to may be deleted next: it must not come back without that.
                flush(path.parent)

    def list(self, prefix: str) -> dict[str, int]:
        """Names directly below a prefix, with the time of their last change in ms (0: a folder).

        Behind a link nothing is listed: what lies there can be read by its name, but is not ours to clear away.
        """
        folder = self._root / prefix
        with accessing("list", f"{self.url}/{prefix}"):
            if prefix and folder.is_symlink():
                return {}
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                return {}
            found: dict[str, int] = {}
            with entries:
                for entry in entries:
                    # One that is deleted meanwhile is not there; all the others are.
                    with suppress(FileNotFoundError):
                        # The time of the inode, not of the content: a link to an old object is as new as objects get.
                        changed_ms = entry.stat(follow_symlinks=False).st_ctime_ns // 1_000_000
                        found[entry.name] = 0 if entry.is_dir() else changed_ms
            return found

    def _new_file(self, path: Path) -> FileIO:
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            # The folder went with the last other object in it, in the moment between.
            for folder in make_folder(path.parent):
                flush(folder)
            return path.open("xb", buffering=0)
