"""What the JSON commits of a Delta table say of a stream, and to which version the table is rolled back.

The sink writes a `txn` action with each batch (Delta protocol, "Transaction Identifiers": appId is the query's id,
version the batch), and skips a batch not greater than the newest one (`DeltaSink.addBatch`), even after a restore.

Parquet checkpoints of the log are not read: a table is not rolled back beyond them.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import unquote

from dagster_ckpt.errors import LiveDirectoryError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.sinks.delta_roll_back import ROLL_BACK_ID, query_of
from dagster_ckpt.sinks.sink import ReadOfSink, RollBack
from dagster_ckpt.spark.query.table_sources import LOG, DeltaOffset
from dagster_ckpt.values.safe_parsing import from_json, number_in, reading

_COMMIT = re.compile(r"(\d{20})\.json")
_COMMITS_LOOKED_AT = 200
# The predicate of a statement without a WHERE.
_NO_PREDICATE = (None, "[]", '["true"]')


UNKNOWN_VERSION = -2

# Delta names a deletion vector by its id in the base 85 of ZeroMQ, whose digits differ from Python's.
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_B85 = str.maketrans(_Z85, _B85)
_ID_DIGITS = 20
_ABSOLUTE = re.compile("/|[A-Za-z][A-Za-z0-9+.-]*:")


class DataFile(NamedTuple):
    """A file as the log names it; another deletion vector makes it another file."""

    path: str
    storage_type: str = ""
    vector: str = ""

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> DataFile:
        vector = action.get("deletionVector") or {}
        return cls(str(action["path"]), str(vector.get("storageType", "")), str(vector.get("pathOrInlineDv", "")))

    def places(self) -> Iterator[str]:
        """Yield the files that it needs in the table's folder (Delta protocol, "Deletion Vectors")."""
        if not _ABSOLUTE.match(self.path):
            yield unquote(self.path)
        if self.storage_type == "u":
            prefix, digits = self.vector[:-_ID_DIGITS], self.vector[-_ID_DIGITS:]
            name = f"deletion_vector_{uuid.UUID(bytes=base64.b85decode(digits.translate(_TO_B85)))}.bin"
            yield f"{prefix}/{name}" if prefix else name


@dataclass(frozen=True)
class DeltaCommit:
    """One version of a table.

    Attributes:
        restored_to: For a RESTORE, the version of its files; `UNKNOWN_VERSION` if no version that can be read has them.
        is_roll_back: Whether this package undid batches with it.
    """

    version: int
    batches: Mapping[str, int]
    restored_to: int | None
    empties: bool
    is_roll_back: bool
    changes: bool
    added: frozenset[DataFile]
    removed: frozenset[DataFile]

    def batch_of(self, query_ids: Collection[str]) -> int | None:
        return max((batch for query_id, batch in self.batches.items() if query_id in query_ids), default=None)


@dataclass(frozen=True)
class DeltaPlan:
    """What a roll-back would do to a table, decided on version `decided_on`.

    Attributes:
        version: Version to restore; -1 is before the first, None if nothing has to be undone.
        reaches_back: The readable commits are sufficient to decide.
        undone_by: Version with which others took the table to before the batch of version `wanted`.
        deleted: Files that the version to restore needs, and that no longer exist.
    """

    decided_on: int
    version: int | None = None
    others: tuple[int, ...] = ()
    reaches_back: bool = True
    undone_by: int | None = None
    wanted: int | None = None
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True)
class UndoneAhead:
    """Versions that a source would read next although a roll-back has undone them.

    Attributes:
        unread: Files of the version `roll_back` that were added after what the source has read, as the log names them.
    """

    roll_back: int
    unread: tuple[str, ...] = ()
    obstacle: str = ""


class DeltaLog:
    """The JSON commits of a table, each read once.

    FileNotFoundError if there are none; later StorageAccessError if one is deleted before it is read.
    """

    def __init__(self, table: FileIO) -> None:
        self._table = table
        self._versions = _versions(table)
        self._commits: dict[int, DeltaCommit] = {}
        self.newest = max(self._versions)
        self.oldest = self.newest
        while self.oldest - 1 in self._versions:
            self.oldest -= 1

    def commit(self, version: int) -> DeltaCommit:
        if version not in self._commits:
            self._commits[version] = found = _read(self._table, version)
            if found.restored_to == UNKNOWN_VERSION:
                self._commits[version] = replace(found, restored_to=self._restored_by(found))
        return self._commits[version]

    def _restored_by(self, restore: DeltaCommit) -> int:
        """Find the version of a RESTORE TO TIMESTAMP by its files: Delta records no number."""
        wanted = restore.removed, restore.added
        # Files of the version before the restore that one further back lacks, and the other way around.
        more, fewer = frozenset[DataFile](), frozenset[DataFile]()
        for at in range(restore.version - 1, self.oldest - 1, -1):
            if (more, fewer) == wanted:
                return at
            added, removed = self.commit(at).added, self.commit(at).removed
            more, fewer = (more | added) - removed - (fewer & added), (fewer | removed) - added - (more & removed)
        return -1 if (more, fewer) == wanted and self.oldest == 0 else UNKNOWN_VERSION

    def _vacuumed(self, version: int) -> tuple[str, ...]:
        needed = set[DataFile]()
        for at in range(self.newest, version, -1):
            commit = self.commit(at)
            needed = (needed - commit.added) | commit.removed
        with reading(lambda why: LiveDirectoryError(f"The log of {self._table.url} names a file that is none: {why}.")):
            places = sorted({place for file in needed for place in file.places()})
        there = self._table.sizes(places)
        return tuple(place for place in places if place not in there)

    def plan(self, to: RollBack) -> DeltaPlan:
        own = to.own_ids
        wanted = self._version_of(own, to.query_id, to.batch_id)
        if wanted is None and to.batch_id >= 0:
            return DeltaPlan(self.newest, reaches_back=False)
        # A table that was emptied holds no row of an older version.
        wanted = -1 if wanted is None else wanted
        at, target, undone_by = self.newest, None, None
        others: list[int] = []
        foreign: list[int] = []
        while at > wanted:
            if at < self.oldest:
                return DeltaPlan(self.newest, reaches_back=False)
            commit = self.commit(at)
            if commit.restored_to == UNKNOWN_VERSION:
                return DeltaPlan(self.newest, reaches_back=False)
            if commit.restored_to is not None and commit.restored_to >= wanted:
                at = commit.restored_to
                continue
            if commit.empties and wanted < 0:
                break
            if commit.is_roll_back and (commit.restored_to is not None or commit.empties):
                target, others = wanted, [*others, *foreign]
                break
            if commit.restored_to is not None:
                # Others went back to before `wanted`: only `target` is undone without what they removed.
                undone_by = at if self.commit(wanted).batch_of(own) is not None else None
                break
            if commit.batch_of(own) is not None:
                target, others, foreign = at - 1, [*others, *foreign], []
            elif commit.changes:
                foreign.append(at)
            at -= 1
        deleted = self._vacuumed(target) if target is not None and target >= 0 else ()
        return DeltaPlan(
            self.newest, target, tuple(sorted(others)), undone_by=undone_by, wanted=wanted, deleted=deleted
        )

    def last_batch(self, query_id: str) -> int | None:
        """Return the newest batch of a query, even an undone one."""
        batches = (self.commit(version).batch_of([query_id]) for version in sorted(self._versions, reverse=True))
        return next((batch for batch in batches if batch is not None), None)

    def version_of(self, query_id: str, batch_id: int) -> int | None:
        versions = sorted(self._versions, reverse=True)
        return next((each for each in versions if self.commit(each).batches.get(query_id) == batch_id), None)

    def files_added(self, version: int) -> list[str]:
        return [unquote(str(add["path"])).rpartition("/")[2] for add in self._actions(version, "add")]

    @property
    def has_beginning(self) -> bool:
        return 0 in self._versions

    def identity(self) -> str | None:
        """Return the table's id; None unless a recent commit or checksum file has it."""
        for version in range(self.newest, max(self.oldest, self.newest - _COMMITS_LOOKED_AT) - 1, -1):
            found = _identity_in(self._table, version)
            if found is not None:
                return found
        return None

    def newest_batch_shown(self, own: Collection[str], at: int | None = None) -> tuple[int | None, bool]:
        """Return the newest batch that a version (default: the newest) shows, and whether it is certain."""
        at = self.newest if at is None else at
        for _ in range(_COMMITS_LOOKED_AT):
            if at < self.oldest:
                return None, self.oldest == 0
            commit = self.commit(at)
            batch = commit.batch_of(own)
            if batch is not None:
                return batch, True
            if commit.is_roll_back and commit.empties:
                return None, True
            if commit.restored_to == UNKNOWN_VERSION:
                return None, False
            at = commit.restored_to if commit.restored_to is not None else at - 1
        return None, False

    def read_up_to(
        self, offset: DeltaOffset, own: Collection[str], *, skips_changes: bool, rewound: bool
    ) -> ReadOfSink:
        """Return how far a source has read; `skips_changes`: it continues after removed rows."""
        read = self._last_read(offset)
        if not self.oldest - 1 <= read <= self.newest:
            return ReadOfSink(why=f"version {read}, up to which it has read, is not in the table's log and is")
        read, undone = self._shown_of(read)
        if read == UNKNOWN_VERSION:
            return ReadOfSink(why="the table was restored to a version that its log no longer has, and the position is")
        if skips_changes and rewound and self._has_roll_back(read):
            return ReadOfSink(why="it skips commits that change rows, and what it read before a roll-back is")
        batch, is_certain = self.newest_batch_shown(own, read) if read >= 0 else (None, True)
        if batch is None and not is_certain:
            return ReadOfSink(why="the log of the table begins later than its batches, and the position is")
        return ReadOfSink(batch, sum(self.commit(version).batch_of(own) is not None for version in undone))

    def undone_ahead(self, offset: DeltaOffset) -> UndoneAhead | None:
        """Return what a roll-back undid after what a source has read, unless that was undone too."""
        read = self._last_read(offset)
        if not self.oldest - 1 <= read < self.newest:
            return None
        read, undone = self._shown_of(read)
        if undone or read < self.oldest - (self.oldest == 0):
            return None
        roll_back, kept, at = -1, list[int](), self.newest
        while at > read:
            commit = self.commit(at)
            if commit.is_roll_back and (commit.restored_to is not None or commit.empties):
                roll_back, kept = (at, []) if roll_back < 0 else (roll_back, kept)
            else:
                kept.append(at)
            at = self._before(at)
        if roll_back < 0:
            return None
        is_part = offset.index >= 0 and not offset.is_initial
        unread = self._added_rows(offset.version)[offset.index + 1 :] if is_part else []
        for version in reversed(kept):
            if self._is_no_append(version):
                return UndoneAhead(roll_back, obstacle=f"version {version} changes or removes rows, or the schema")
            unread += self._added_rows(version)
        return UndoneAhead(roll_back, tuple(unread))

    def _last_read(self, offset: DeltaOffset) -> int:
        return offset.version if offset.index >= 0 or offset.is_initial else offset.version - 1

    def _shown_of(self, version: int) -> tuple[int, list[int]]:
        """Return the newest version up to this one in the table's history, and the undone ones after it."""
        undone = []
        while version >= self.oldest and not self._is_shown(version):
            before = self._before(version)
            is_write = before == version - 1 and (self._added_rows(version) or self._is_no_append(version))
            undone += [version] if is_write else []
            version = before
        return version, undone

    def _is_shown(self, version: int) -> bool:
        at = self.newest
        while at > version:
            at = self._before(at)
        return at == version

    def _before(self, version: int) -> int:
        commit = self.commit(version)
        if commit.restored_to is not None:
            return commit.restored_to
        return -1 if commit.is_roll_back and commit.empties else version - 1

    def _has_roll_back(self, version: int) -> bool:
        looked_at = range(version, max(self.oldest, version - _COMMITS_LOOKED_AT) - 1, -1)
        return any(self._before(at) != at - 1 for at in looked_at)

    def _added_rows(self, version: int) -> list[str]:
        return [str(add["path"]) for add in self._actions(version, "add") if add.get("dataChange", True)]

    def _is_no_append(self, version: int) -> bool:
        removed = any(remove.get("dataChange", True) for remove in self._actions(version, "remove"))
        return removed or bool(self._actions(version, "cdc") or (version and self._actions(version, "metaData")))

    def _actions(self, version: int, kind: str) -> list[Any]:
        with self._reading(version):
            return [action[kind] for action in self._lines(version) if kind in action]

    def _lines(self, version: int) -> Iterator[Any]:
        text = _commit_text(self._table, version)
        return (from_json(line) for line in text.splitlines() if line.strip())

    def _reading(self, version: int) -> AbstractContextManager[None]:
        name = f"{self._table.url}/{LOG}/{version:020}.json"
        return reading(lambda why: LiveDirectoryError(f"{name} is not a Delta commit: {why}."))

    def _version_of(self, own: Collection[str], query_id: str | None, batch_id: int) -> int | None:
        first_own, first_of_query = self.newest + 1, self.newest + 1
        for at in range(self.newest, self.oldest - 1, -1):
            commit = self.commit(at)
            batch = commit.batch_of([query_id]) if query_id is not None else None
            if batch is not None and 0 <= batch <= batch_id:
                return at
            first_of_query = at if batch is not None else first_of_query
            first_own = at if commit.batch_of(own) is not None else first_own
        before = self._batch_before(first_of_query - 1, own, batch_id) if batch_id >= 0 else None
        if before is not None:
            return before
        return first_own - 1 if self.oldest == 0 else None

    def _batch_before(self, at: int, own: Collection[str], batch_id: int) -> int | None:
        while at >= self.oldest:
            commit = self.commit(at)
            if commit.empties and commit.is_roll_back:
                return None
            if commit.restored_to is not None:
                at = commit.restored_to
                continue
            batch = commit.batch_of(own)
            if batch is not None and batch <= batch_id:
                return at
            at -= 1
        return None


def _versions(table: FileIO) -> set[int]:
    versions = {int(match[1]) for match in map(_COMMIT.fullmatch, table.list(LOG)) if match}
    if not versions:
        raise FileNotFoundError(f"{table.url}/{LOG}")
    return versions


def _commit_text(table: FileIO, version: int) -> str:
    name = f"{LOG}/{version:020}.json"
    try:
        return table.read(name).decode("utf-8", "replace")
    except FileNotFoundError as error:
        # Only a log without commits means that there is no table.
        raise StorageAccessError(
            f"{table.url}/{name} was deleted while the log was read: Delta deletes old commits "
            "(delta.logRetentionDuration). Start again."
        ) from error


def _read(table: FileIO, version: int) -> DeltaCommit:
    name = f"{LOG}/{version:020}.json"
    text = _commit_text(table, version)
    with reading(lambda why: LiveDirectoryError(f"{table.url}/{name} is not a Delta commit: {why}. Repair the table.")):
        actions = [from_json(line) for line in text.splitlines() if line.strip()]
        found = [action for action in actions if isinstance(action, dict)]
        added, removed = (
            frozenset(DataFile.of(action[kind]) for action in found if kind in action) for kind in ("add", "remove")
        )
    info: Mapping[str, Any] = next(
        (action["commitInfo"] for action in found if isinstance(action.get("commitInfo"), dict)), {}
    )
    operation, parameters = str(info.get("operation")), info.get("operationParameters") or {}
    batches = dict(batch for batch in map(_batch, found) if batch is not None)
    return DeltaCommit(
        version,
        batches,
        _restored_to(parameters) if operation == "RESTORE" else None,
        operation == "TRUNCATE" or (operation == "DELETE" and parameters.get("predicate") in _NO_PREDICATE),
        ROLL_BACK_ID in batches,
        # A roll-back with nothing to undo repeats the metadata.
        ROLL_BACK_ID not in batches and any(_is_change(action) for action in found),
        added,
        removed,
    )


def _restored_to(parameters: Mapping[str, Any]) -> int:
    version = number_in(str(parameters.get("version")))
    return UNKNOWN_VERSION if version is None else version


def _identity_in(table: FileIO, version: int) -> str | None:
    name = f"{LOG}/{version:020}"
    for action in map(from_json, _commit_text(table, version).splitlines()):
        metadata = action.get("metaData") if isinstance(action, dict) else None
        if isinstance(metadata, dict) and metadata.get("id"):
            return str(metadata["id"])
    with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        return str(from_json(table.read(f"{name}.crc"))["metadata"]["id"])
    return None


def _batch(action: Mapping[str, Any]) -> tuple[str, int] | None:
    txn = action.get("txn")
    if not isinstance(txn, dict) or not isinstance(txn.get("version"), int):
        return None
    return query_of(str(txn.get("appId"))), int(txn["version"])


def _is_change(action: Mapping[str, Any]) -> bool:
    for kind in ("add", "remove"):
        file = action.get(kind)
        if isinstance(file, dict) and file.get("dataChange", True):
            return True
    return any(kind in action for kind in ("metaData", "protocol", "cdc"))
