"""Holding on to the files of a cut, so that Spark may purge while a slow upload goes on.

On a local disk a hard link is an ideal hold: it costs no bytes, and Spark never modifies a file in place
(it writes anew and renames), so a linked file can neither vanish nor change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, StorageAccessError
from dagster_ckpt.image import SourceFile
from dagster_ckpt.spark.cut import ATTEMPTS, Cut, cut
from dagster_ckpt.spark.folder import FileVersion, LocalFolder, version_of
from dagster_ckpt.spark.layout import LiveDirectory
from dagster_ckpt.spark.needed import NeededFile

_MARK = ".cut-"
# No links here: another device, a file system or a file that takes none, a limit reached.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EACCES}


class StagedCut:
    """A cut whose files stay as they were, until it is left.

    Content that the cut has read is kept in memory. Other local files are linked, or copied where links
    are impossible. Remote files that can never change (their name holds a uuid) are read in place, which lets
    an incremental image pass over them; other remote files are copied to this machine.

    Attributes:
        cut: The cut.
    """

    def __init__(self, taken: Cut, live: LiveDirectory) -> None:
        self.cut = taken
        self._live = live
        self._place: _Place | None = None
        self._held: list[NeededFile] = []

    @property
    def files(self) -> list[SourceFile]:
        """The files as an image takes them."""
        return [file.source_file() for file in self._held]

    @property
    def held(self) -> Sequence[NeededFile]:
        """The files where they are held."""
        return tuple(self._held)

    def __enter__(self) -> StagedCut:
        """Hold the files.

        Raises:
            IncompleteCutError: Spark replaced or purged one since the cut was taken.
            StorageAccessError: A file could not be read or the place for it not be written.
        """
        self._place = _Place.beside(self._live)
        try:
            self._held = [self._place.hold(file, str(index)) for index, file in enumerate(self.cut.needed)]
        except BaseException:
            self._place.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the files go."""
        if self._place is not None:
            self._place.remove()


@contextlib.contextmanager
def staged_cut(
    live: LiveDirectory, *, carry_in_flight: bool, sinks: Sequence[str] = (), at_batch: int | None = None
) -> Iterator[StagedCut]:
    """Cut a live directory and hold the files, beginning again where Spark purges in between.

    Args:
        live: The live directory.
        carry_in_flight: Also take the planned offsets of a batch that runs.
        sinks: The query's sinks, as its progress names them.
        at_batch: A committed batch that Spark still retains; default: the newest.

    Raises:
        NothingCommittedError: The query has not committed a batch yet.
        IncompleteCutError: A file that a restore needs is missing.
        LiveDirectoryError: A file cannot be read.
        StorageAccessError: The directory cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        yield _stage(live, stack, carry_in_flight=carry_in_flight, sinks=sinks, at_batch=at_batch)


def _stage(
    live: LiveDirectory,
    stack: contextlib.ExitStack,
    *,
    carry_in_flight: bool,
    sinks: Sequence[str],
    at_batch: int | None,
) -> StagedCut:
    for _ in range(ATTEMPTS - 1):
        taken = cut(live, carry_in_flight=carry_in_flight, sinks=sinks, at_batch=at_batch)
        with contextlib.suppress(IncompleteCutError):
            return stack.enter_context(StagedCut(taken, live))
    last = cut(live, carry_in_flight=carry_in_flight, sinks=sinks, at_batch=at_batch)
    return stack.enter_context(StagedCut(last, live))


@dataclass(frozen=True)
class _Place:
    """A folder for the files of one cut, locked while its process lives."""

    path: Path
    lock: int

    @staticmethod
    def beside(live: LiveDirectory) -> _Place:
        """Make a place on the live directory's own disk, where links work; else on this machine's."""
        root = live.local_path
        try:
            if root is None:
                return _Place._made(prefix="dagster-ckpt", directory=None)
            _remove_abandoned(root)
            return _Place._made(prefix=f".{root.name}{_MARK}", directory=root.parent)
        except FileNotFoundError as error:
            raise LiveDirectoryError(f"{live.url} is gone, so no image of it can be taken.") from error
        except OSError as error:
            raise StorageAccessError(
                f"Cannot make a folder beside {live.url} to hold the files of an image: {error}. "
                "Give this process the right to write there."
            ) from error

    @staticmethod
    def _made(prefix: str, directory: Path | None) -> _Place:
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have taken it for an abandoned one before it was locked.
            if path.exists():
                return _Place(path, lock)
            os.close(lock)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def hold(self, file: NeededFile, name: str) -> NeededFile:
        """Hold one file under a name of its own."""
        if file.data is not None:
            return file
        if file.identity is not None and not isinstance(file.folder, LocalFolder):
            return file
        target = self.path / name
        try:
            version = (
                _link(file.folder.root / file.source, target)
                if isinstance(file.folder, LocalFolder)
                else _copy(file, target)
            )
        except FileNotFoundError as error:
            raise _changed(file, "was purged") from error
        except OSError as error:
            raise StorageAccessError(
                f"Cannot hold {file.folder.url}/{file.source} for an image: {error}. Check space and rights "
                f"in {self.path.parent}."
            ) from error
        if version != file.version:
            raise _changed(file, "was replaced")
        return replace(file, folder=LocalFolder(self.path), source=name)


def _link(source: Path, target: Path) -> FileVersion:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        with source.open("rb") as stream, target.open("wb") as copy:
            version = version_of(os.fstat(stream.fileno()))
            shutil.copyfileobj(stream, copy)
        return version
    return version_of(target.stat())


def _copy(file: NeededFile, target: Path) -> FileVersion:
    with file.open() as stream, target.open("wb") as copy:
        shutil.copyfileobj(stream, copy)
    return file.folder.version(file.source)


def _remove_abandoned(root: Path) -> None:
    """Delete what a killed process left: nobody holds its lock any more."""
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


def _changed(file: NeededFile, what: str) -> IncompleteCutError:
    return IncompleteCutError(
        f"{file.folder.url}/{file.source} {what} by Spark after the cut was taken. Take a new cut; raise "
        "spark.sql.streaming.minBatchesToRetain if this happens often."
    )
