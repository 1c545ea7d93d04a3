"""Delete snapshots and the remains of crashes, but no byte that another snapshot needs.

A deletion can be interrupted at any point: see docs/snapshot-format.md, section 5.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from dagster_ckpt.errors import CkptError, SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.manifest import checkpoint_number
from dagster_ckpt.snapshot.reader import read_references
from dagster_ckpt.snapshot.writer import METADATA_NAME

SHARED = "shared"
SAVEPOINT = "savepoint-"
DELETING_NAME = "_deleting"
# First object of a savepoint until it is complete: distinguishes a crashed savepoint from a user's copy in progress.
INCOMPLETE_NAME = "_incomplete"
SET_NAME = "_set"
# Marks a copy whose bytes were all read and compared.
VERIFIED_NAME = "_verified"
NOTES_NAME = "_notes"
_PROBE = "probe-"
_PROBE_NAME = re.compile(rf"{_PROBE}[0-9a-f]{{32}}\.tmp")
# Upper limit of listings until no snapshot is deleted while they are read.
_LISTINGS = 5
_log = logging.getLogger(__name__)


def checkpoint_directories(file_io: FileIO) -> list[str]:
    return [name for name in _numbered(file_io) if file_io.size(f"{name}/{METADATA_NAME}") is not None]


def savepoint_directories(file_io: FileIO) -> list[str]:
    names = sorted(name for name, entry in file_io.list().items() if name.startswith(SAVEPOINT) and entry.is_directory)
    return [name for name in names if file_io.size(f"{name}/{METADATA_NAME}") is not None]


def delete_snapshot(file_io: FileIO, directory: str, protected: Iterable[str] = ()) -> int:
    """Delete a snapshot, or resume an interrupted deletion; a missing one is not an error.

    Shared objects are kept if a snapshot that may use them cannot be read. Returns the freed bytes: of a shared object
    those that this snapshot needed.

    Args:
        file_io: The folder of the snapshot and of all snapshots that may share its objects.
        protected: Directories of snapshots whose objects must be kept, listed or not.
    """
    # Another process may be deleting the same snapshot.
    metadata = read_if_there(file_io, f"{directory}/{METADATA_NAME}")
    if metadata is not None:
        file_io.write(f"{directory}/{DELETING_NAME}", [metadata])
        file_io.delete(f"{directory}/{METADATA_NAME}")
    try:
        objects = read_references(file_io, directory, DELETING_NAME)
    except SnapshotNotFoundError:
        return 0
    except SnapshotCorruptError as error:
        _log.warning("The shared objects of %s/%s are kept until the next sweep: %s", file_io.url, directory, error)
        objects = {}
    freed = 0
    with suppress(FileNotFoundError):
        # First, so that the snapshot is not listed again after a power failure.
        file_io.flush(directory)
    for name in sorted(_disposable(file_io, frozenset(objects), directory, protected)):
        file_io.delete(name)
        freed += objects[name]
    for name, entry in sorted(file_io.list(directory, hidden=True).items()):
        if _is_ours(name):
            with suppress(FileNotFoundError):
                freed += entry.version().size
            if name != DELETING_NAME:
                file_io.delete(f"{directory}/{name}")
    file_io.delete(f"{directory}/{DELETING_NAME}")
    file_io.delete_if_empty(directory)
    return freed


@dataclass(frozen=True)
class Garbage:
    location: str
    reason: str
    age_ms: int = field(compare=False)


def storage_time_ms(file_io: FileIO) -> int | None:
    """A time after every existing object, by the storage's clock; None if it dates no objects."""
    now_ms = file_io.clock_ms(probe_name())
    return now_ms + 1 if now_ms is not None else None


def probe_name() -> str:
    return f"{_PROBE}{uuid.uuid4().hex}.tmp"


@dataclass(frozen=True)
class Sweep:
    """One pass over the remains of crashes.

    Objects are listed before the snapshots are read, so those of one published meanwhile count as used.

    Attributes:
        now_ms: By the storage's clock.
        older_than_ms: Younger objects may belong to an attempt in progress.
        under_way: Numbers of attempts whose process is alive: their objects are kept.
    """

    file_io: FileIO
    now_ms: int
    older_than_ms: int
    dry_run: bool = False
    under_way: frozenset[int] = frozenset()

    def stream(self) -> list[Garbage]:
        file_io = self.file_io
        candidates = {
            f"{SHARED}/{name}": changed
            for name, changed in self._changes(SHARED).items()
            if self._is_old(changed) and not self._is_under_way(name)
        }
        found: list[Garbage] = []
        for directory in _numbered(file_io):
            with logging_failure(f"{file_io.url}/{directory}"):
                found += self._checkpoint(directory)
        found += self._probes()
        used = _used(file_io) if candidates else frozenset()
        if used is None:
            return found
        unused = {name: changed for name, changed in candidates.items() if name not in used}
        return found + self._delete(unused, "no snapshot refers to it")

    def _probes(self) -> list[Garbage]:
        names = {name: changed for name, changed in self._changes("").items() if _PROBE_NAME.fullmatch(name)}
        old = {name: changed for name, changed in names.items() if self._is_old(changed)}
        return self._delete(old, "an interrupted check of the storage's clock or permissions left it")

    def _checkpoint(self, directory: str) -> list[Garbage]:
        names = self._changes(directory)
        is_under_way = checkpoint_number(directory) in self.under_way
        if METADATA_NAME in names or is_under_way or not all(self._is_old(changed) for changed in names.values()):
            return []
        if DELETING_NAME in names:
            return self._rest_of_deletion(directory, names)
        ours = {f"{directory}/{name}": names[name] for name in names if _is_ours(name)}
        return self._delete(ours, f"{directory} was never finished: it has no {METADATA_NAME}")

    def savepoints(self, stream_id: str) -> list[Garbage]:
        """Delete the remains of crashed savepoints, known by `INCOMPLETE_NAME`."""
        file_io = self.file_io
        found = self._probes()
        for directory, entry in file_io.list().items():
            if entry.is_directory and directory.startswith(SAVEPOINT):
                with logging_failure(f"{file_io.url}/{directory}"):
                    found += self._savepoint(directory, stream_id)
        return found

    def _savepoint(self, directory: str, stream_id: str) -> list[Garbage]:
        file_io = self.file_io
        found: list[Garbage] = []
        names = self._changes(directory)
        if INCOMPLETE_NAME not in names or not all(self._is_old(changed) for changed in names.values()):
            return []
        if any(self._is_under_way(name) for name in names):
            return []
        if read_if_there(file_io, f"{directory}/{INCOMPLETE_NAME}") != stream_id.encode():
            return []
        if METADATA_NAME not in names:
            left = {f"{directory}/{name}": names[name] for name in names if name.endswith((".pack", ".tmp"))}
            found += self._delete(left, f"{directory} was never finished: it has no {METADATA_NAME}")
        if not self.dry_run:
            file_io.delete(f"{directory}/{INCOMPLETE_NAME}")
            file_io.delete_if_empty(directory)
        return found

    def _rest_of_deletion(self, directory: str, names: dict[str, int | None]) -> list[Garbage]:
        if not self.dry_run:
            delete_snapshot(self.file_io, directory)
        reason = f"the deletion of {directory} was interrupted"
        return [self._garbage(f"{directory}/{name}", names[name], reason) for name in sorted(names) if _is_ours(name)]

    def _changes(self, directory: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name, entry in self.file_io.list(directory, hidden=True).items():
            with suppress(FileNotFoundError):
                found[name] = None if entry.is_directory else entry.status().changed_at_ms
        return found

    def _delete(self, names: dict[str, int | None], reason: str) -> list[Garbage]:
        if not self.dry_run:
            for name in sorted(names):
                self.file_io.delete(name)
            for directory in {name.rpartition("/")[0] for name in names} - {"", SHARED}:
                self.file_io.delete_if_empty(directory)
        return [self._garbage(name, names[name], reason) for name in sorted(names)]

    def _garbage(self, name: str, changed_ms: int | None, reason: str) -> Garbage:
        return Garbage(f"{self.file_io.url}/{name}", reason, self.now_ms - (changed_ms or 0))

    def _is_old(self, changed_ms: int | None) -> bool:
        # Unknown age counts as new, and directories are never garbage.
        return changed_ms is not None and changed_ms < self.now_ms - self.older_than_ms

    def _is_under_way(self, name: str) -> bool:
        """The names of an attempt's data objects begin with its number."""
        number = name.partition("-")[0]
        return number.isdecimal() and int(number) in self.under_way


@contextmanager
def logging_failure(place: str) -> Iterator[None]:
    try:
        yield
    except (CkptError, OSError) as error:
        _log.warning("%s is left for the next pass: %s", place, error)


def read_if_there(file_io: FileIO, name: str) -> bytes | None:
    try:
        return file_io.read(name)
    except FileNotFoundError:
        return None


def _numbered(file_io: FileIO) -> list[str]:
    numbers = {name: number for name in file_io.list() if (number := checkpoint_number(name)) is not None}
    return sorted(numbers, key=numbers.__getitem__)


def _disposable(file_io: FileIO, objects: frozenset[str], directory: str, protected: Iterable[str]) -> frozenset[str]:
    shared = frozenset(name for name in objects if name.startswith(f"{SHARED}/"))
    if not shared:
        return shared
    used = _used(file_io, [name for name in protected if name != directory], without=directory)
    return frozenset() if used is None else shared - used


def _used(file_io: FileIO, protected: Iterable[str] = (), *, without: str | None = None) -> frozenset[str] | None:
    """The objects of all snapshots but one; None if they cannot be known.

    If a listed snapshot was deleted before it is read, a newer one that was published after the listing may share its
    objects, so the snapshots are listed again. A folder that has no metadata in two equal listings is no snapshot.
    """
    used: set[str] = set()
    wanted, read, before = set(protected), set[str](), set[str]()
    for _ in range(_LISTINGS):
        listed = {*_numbered(file_io)} - {without}
        missing = False
        for directory in sorted((listed | wanted) - read):
            try:
                used.update(_references(file_io, directory, may_be_deleting=directory in wanted))
                read.add(directory)
            except SnapshotNotFoundError:
                if directory in wanted:
                    _log.warning(
                        "Shared objects in %s are kept: the protected snapshot %s is missing.", file_io.url, directory
                    )
                    return None
                missing = True
            except SnapshotCorruptError as error:
                _log.warning("Shared objects in %s are kept, because they may be needed: %s", file_io.url, error)
                return None
        if not missing or listed == before:
            return frozenset(used)
        before = listed
    _log.warning("Shared objects in %s are kept until the next sweep: its snapshots keep changing.", file_io.url)
    return None


def _references(file_io: FileIO, directory: str, *, may_be_deleting: bool) -> dict[str, int]:
    try:
        return read_references(file_io, directory)
    except SnapshotNotFoundError:
        if not may_be_deleting:
            raise
        return read_references(file_io, directory, DELETING_NAME)


def _is_ours(name: str) -> bool:
    """Whether this package wrote a file; users' files are kept."""
    known = (METADATA_NAME, DELETING_NAME, INCOMPLETE_NAME, SET_NAME, VERIFIED_NAME, NOTES_NAME)
    return name in known or name.endswith((".pack", ".tmp"))
