"""Protect the files of a cut from Spark's purging during a slow upload.

Spark never modifies a file in place, so a file that is hard-linked or kept open can neither vanish nor change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar, Unpack, cast

from dagster_ckpt.errors import CutOvertakenError, LiveDirectoryError, StorageAccessError
from dagster_ckpt.io.file_io import CancelCheck, FileVersion, in_threads
from dagster_ckpt.io.hard_links import Linker
from dagster_ckpt.io.local import LocalFileIO, version_of
from dagster_ckpt.snapshot.reuse import Source
from dagster_ckpt.spark.checkpoint_dir.cut import ATTEMPTS, Cut, CutOptions, cut
from dagster_ckpt.spark.checkpoint_dir.layout import (
    HELD_IN_MEMORY_BYTES,
    HELD_IN_MEMORY_FILES,
    READ_WHOLE_BYTES,
    LiveDirectory,
    NeededFile,
)

_MARK = ".cut-"
_COPIED_BYTES = 1024 * 1024
HELD_OPEN_FILES = 64
# Linux reopens a file by its descriptor, even without its name.
_OPEN_FILES = LocalFileIO(Path("/proc/self/fd"))

T = TypeVar("T")


class StagedCut:
    """A cut with protection for the files that will be read; its attribute `cut` has no files.

    Local files are read at once if few and small, kept open if few and large, and otherwise hard-linked or copied.
    Remote files with a uuid in their name never change and are read in place; others are copied to this machine.
    """

    def __init__(self, taken: Cut, live: LiveDirectory, release: contextlib.ExitStack) -> None:
        self.cut = replace(taken, needed=())
        self._needed = deque(taken.needed)
        self._live = live
        self._release = release

    @property
    def files(self) -> Sequence[Source]:
        """Call `stage` before reading them."""
        return self.needed

    @property
    def needed(self) -> Sequence[NeededFile]:
        return list(self._needed)

    def hand_over(self) -> Iterator[NeededFile]:
        """Yield each file once, without keeping it."""
        while self._needed:
            yield self._needed.popleft()

    def stage(self, files: Sequence[Source]) -> list[Source]:
        """Protect files until the context exits, and return them in the form to read."""
        wanted = cast("Sequence[NeededFile]", files)
        unread = [file for file in wanted if file.data is None]
        if not unread:
            return list(wanted)
        small = [file for file in unread if file.size <= READ_WHOLE_BYTES and isinstance(file.folder, LocalFileIO)]
        if len(small) <= HELD_IN_MEMORY_FILES and sum(file.size for file in small) <= HELD_IN_MEMORY_BYTES:
            for folder, files_of_it in groupby(small, attrgetter("folder")):
                _read_now(folder, list(files_of_it))
            unread = [file for file in unread if file.data is None]
        if len(unread) <= HELD_OPEN_FILES:
            unread = [file for file in unread if not self._keep_open(file)]
        if not unread:
            return list(wanted)
        place = _Place.beside(self._live)
        self._release.callback(place.remove)

        def pin(indexes: range, check_canceled: CancelCheck) -> None:
            for index in indexes:
                check_canceled()
                place.pin(unread[index], index)

        width = self._live.folder.width
        in_threads(width, [range(first, len(unread), width) for first in range(width)], pin)
        return list(wanted)

    def _keep_open(self, file: NeededFile) -> bool:
        if not isinstance(file.folder, LocalFileIO) or not _OPEN_FILES.root.is_dir():
            return False
        try:
            descriptor = os.open(file.folder.root / file.source, os.O_RDONLY)
        except FileNotFoundError as error:
            raise overtaken(file, "was purged") from error
        except OSError as error:
            raise _cannot_pin(file, error, "Check its permissions.") from error
        self._release.callback(os.close, descriptor)
        if version_of(os.fstat(descriptor)) != file.version:
            raise overtaken(file, "was replaced")
        file.folder, file.source = _OPEN_FILES, str(descriptor)
        return True


@contextlib.contextmanager
def staged_cut(live: LiveDirectory, **options: Unpack[CutOptions]) -> Iterator[StagedCut]:
    with contextlib.ExitStack() as release:
        # Not bound to a variable, which would keep handed-over files.
        yield StagedCut(cut(live, **options), live, release)


def until_not_overtaken(work: Callable[[], T]) -> T:
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(CutOvertakenError):
            return work()
    return work()


@dataclass
class _Place:
    """A folder for the staged files of one cut, locked while its process is alive."""

    path: Path
    lock: int

    @staticmethod
    def beside(live: LiveDirectory) -> _Place:
        root = live.local_path
        try:
            if root is None:
                return _Place._made(prefix="dagster-ckpt", directory=None)
            _remove_abandoned(root)
            return _Place._made(prefix=f".{root.name}{_MARK}", directory=root.parent)
        except FileNotFoundError as error:
            raise LiveDirectoryError(f"{live.url} no longer exists, so no snapshot of it can be taken.") from error
        except OSError as error:
            raise StorageAccessError(
                f"Cannot create a folder beside {live.url} to hold the files of a snapshot: {error}. Allow this "
                "process to write there."
            ) from error

    @staticmethod
    def _made(prefix: str, directory: Path | None) -> _Place:
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have removed it before it was locked.
            if path.exists():
                return _Place(path, lock)
            os.close(lock)

    @cached_property
    def folder(self) -> LocalFileIO:
        return LocalFileIO(self.path)

    @cached_property
    def _linker(self) -> Linker:
        return Linker(self.path)

    def remove(self) -> None:
        self._linker.close()
        with contextlib.suppress(OSError), os.scandir(self.path) as held:
            for entry in held:
                os.unlink(entry.path)  # noqa: PTH108 - no object for each file
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def pin(self, file: NeededFile, number: int) -> None:
        is_local = isinstance(file.folder, LocalFileIO)
        if file.identity is not None and not is_local:
            return
        # A local token is unique to the content and needs no memory.
        name = (file.token if is_local else None) or str(number)
        try:
            version = self._hold(file, name)
        except FileNotFoundError as error:
            raise overtaken(file, "was purged") from error
        if version != file.version:
            raise overtaken(file, "was replaced")
        # In place: a second list of 100,000 files would not fit in memory.
        file.folder, file.source = self.folder, name

    def _hold(self, file: NeededFile, name: str) -> FileVersion:
        if isinstance(file.folder, LocalFileIO):
            if self._linker.link(str(file.folder.root), file.source, name):
                return self._linker.linked_version(name)
            # The content is held already under this name, or links are impossible.
            if self.folder.size(name) is not None:
                return file.version
        with file.open() as stream:
            self.folder.place(name, iter(partial(stream.read, _COPIED_BYTES), b""))
        return file.folder.version(file.source)


def _read_now(folder: LocalFileIO, files: Sequence[NeededFile]) -> None:
    try:
        looks = folder.look_at([file.source for file in files], READ_WHOLE_BYTES)
    except FileNotFoundError as error:
        raise _overtaken(str(error), "was purged") from error
    for file, (version, data) in zip(files, looks, strict=True):
        if data is None or len(data) != file.size or version != file.version:
            raise overtaken(file, "was replaced")
        file.data = data


def _remove_abandoned(root: Path) -> None:
    for path in root.parent.iterdir():
        if not path.name.startswith(f".{root.name}{_MARK}"):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _cannot_pin(file: NeededFile, error: OSError, advice: str) -> StorageAccessError:
    return StorageAccessError(f"Cannot hold {file.folder.url}/{file.source} for a snapshot: {error}. {advice}")


def overtaken(file: NeededFile, what: str) -> CutOvertakenError:
    return _overtaken(f"{file.folder.url}/{file.source}", what)


def _overtaken(url: str, what: str) -> CutOvertakenError:
    return CutOvertakenError(
        f"{url} {what} by Spark after the cut was taken. Take a new cut; raise "
        "spark.sql.streaming.minBatchesToRetain if this happens often."
    )
