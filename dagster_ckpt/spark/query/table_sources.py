"""Table sources of a described query (Delta, Iceberg): whether the tables still have what it would read next.

A Delta source needs the commits from its version on (`delta.logRetentionDuration`) and the data files that they add,
even if a later commit has removed them (`VACUUM`). An Iceberg source continues at a snapshot, which must be in the
history of the table; one that began with an empty table continues at the oldest snapshot that there is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from dagster_ckpt.errors import StateRewriteError, StorageAccessError
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.spark.query.output import is_delta, is_iceberg
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.safe_parsing import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

LOG = "_delta_log"
_ENTRY = re.compile(r"(\d{20})\.(json|checkpoint\b)")
# VACUUM deletes the files of the oldest commits first.
_COMMITS_LOOKED_AT = 200
_FILES_LOOKED_AT = 200
_SHOWN = 3
_Action = dict[str, Any]


@dataclass(frozen=True)
class DeltaOffset:
    """Where a Delta source continues (`DeltaSourceOffset`).

    Attributes:
        version: The version that is read next, or in part.
        index: The last file of the version that was read; negative before the first.
        is_initial: The source still reads the table as it was at that version.
    """

    table_id: str
    version: int
    index: int
    is_initial: bool

    def as_text(self) -> str:
        return json.dumps(
            {
                "reservoirId": self.table_id,
                "reservoirVersion": self.version,
                "index": self.index,
                "isStartingVersion": self.is_initial,
            }
        )


def delta_offset(text: str | None) -> DeltaOffset | None:
    try:
        found = from_json(text or "")
        return DeltaOffset(
            str(found["reservoirId"]),
            int(found["reservoirVersion"]),
            int(found["index"]),
            bool(found["isStartingVersion"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def delta_folder(leaf: Any) -> str | None:
    kind = str(leaf.getClass().getSimpleName())
    if kind == "StreamingRelationV2" and is_delta(leaf.table()):
        return str(leaf.table().path())
    if kind != "StreamingRelation" or str(leaf.dataSource().className()).lower() != "delta":
        return None
    path = leaf.dataSource().options().get("path")
    return str(path.get()) if path.isDefined() else None


STARTING_VERSION, STARTING_TIMESTAMP = "startingversion", "startingtimestamp"
# With these, a source has read other rows than its table shows.
CHANGE_OPTIONS = {
    "ignorechanges": "ignoreChanges",
    "ignoredeletes": "ignoreDeletes",
    "skipchangecommits": "skipChangeCommits",
    "readchangefeed": "readChangeFeed",
    "readchangedata": "readChangeData",
}


def delta_beginning(options: Mapping[str, str], end: DeltaOffset) -> DeltaOffset:
    """Return where a source begins that reads a table again, up to a position (`DeltaSource.extractStartingState`).

    Without an option it reads the table as it was then: the rows of all commits, if none has changed or deleted rows.
    `options` have names in lower case.

    Raises:
        StateRewriteError: What the query has read may be something else.
    """
    chosen = options.get(STARTING_VERSION)
    if STARTING_TIMESTAMP in options or (chosen is not None and not chosen.isdecimal()):
        option = "startingTimestamp" if STARTING_TIMESTAMP in options else f"startingVersion={chosen}"
        raise StateRewriteError(
            f"with {option} it is not recorded at which version it began. Give that version as startingVersion"
        )
    if chosen is not None:
        if int(chosen) > end.version:
            raise StateRewriteError(f"startingVersion is {chosen}, and it has read only up to version {end.version}")
        return DeltaOffset(end.table_id, int(chosen), -1, is_initial=False)
    for option, name in CHANGE_OPTIONS.items():
        if options.get(option, "").lower() == "true":
            raise StateRewriteError(
                f"with {name} it may have read other rows than the table had at once. Say with startingVersion at "
                "which version it began"
            )
    return DeltaOffset(end.table_id, end.version if end.is_initial else end.version - 1, -1, is_initial=True)


class TableFiles(Protocol):
    def log(self) -> Sequence[str]: ...

    def read(self, name: str) -> str: ...

    def exists(self, path: str) -> bool:
        """Whether a file exists, by the path of an `add` action."""


def gone(folder: str, offset: DeltaOffset, files: TableFiles) -> Iterator[str]:
    entries = {(int(match[1]), match[2]) for match in map(_ENTRY.match, files.log()) if match}
    versions = {version for version, kind in entries if kind == "json"}
    if not versions:
        yield f"The Delta table {folder} no longer exists."
        return
    newest, next_read = max(versions), offset.version
    if next_read > newest + 1:
        yield (
            f"The Delta table {folder} ends at version {newest}, and the query reads from {next_read} on: it was "
            "re-created or brought back from a copy."
        )
        return
    needed = range(_base(entries, next_read) if offset.is_initial else next_read, newest + 1)
    missing = [version for version in needed if version not in versions and (version, "checkpoint") not in entries]
    if missing:
        begins = min(version for version in versions if set(range(version, newest + 1)) <= versions)
        yield (
            f"The Delta table {folder}: the query reads from version {next_read} on, and the log begins at {begins}: "
            f"versions {missing[0]} to {missing[-1]} are gone (delta.logRetentionDuration)."
        )
        return
    yield from _gone_files(folder, offset, newest, files, reads_id=0 in versions)


def _base(entries: set[tuple[int, str]], version: int) -> int:
    checkpoints = [at for at, kind in entries if kind != "json" and at <= version]
    return max(checkpoints, default=0)


def _gone_files(folder: str, offset: DeltaOffset, newest: int, files: TableFiles, *, reads_id: bool) -> Iterator[str]:
    added: dict[str, int] = {}
    removed: set[str] = set()
    ids: set[str] = set()
    last = min(newest, offset.version + _COMMITS_LOOKED_AT - 1)
    for version in range(offset.version, last + 1):
        actions = _actions(files, version)
        ids |= _ids_in(actions)
        new = [action["add"]["path"] for action in actions if _adds_rows(action)]
        if version == offset.version:
            new = [] if offset.is_initial else new[max(0, offset.index + 1) :]
        gone_since = {action["remove"]["path"] for action in actions if "remove" in action}
        if offset.is_initial and offset.index < 0 and version > offset.version:
            # They are of the table as it was, which is read as a whole.
            new += [path for path in gone_since if path not in added]
        added |= dict.fromkeys(new, version)
        removed |= gone_since
    if not ids and reads_id:
        ids = _ids_in(_actions(files, 0))
        if ids - {offset.table_id}:
            # The table may have been replaced before the query began.
            before = (_ids_in(_actions(files, version)) for version in range(offset.version - 1, 0, -1))
            ids = next(filter(None, before), ids)
    if ids - {offset.table_id}:
        yield f"The Delta table {folder} is not the one that the query has read: it was re-created or replaced."
        return
    # A commit that is not looked at may remove any.
    oldest = list(added)[:_FILES_LOOKED_AT] if newest > last else []
    suspects = dict.fromkeys([*oldest, *(path for path in added if path in removed)])
    deleted = [path for path in suspects if not files.exists(path)]
    if deleted:
        listed = ", ".join(unquote(path) for path in deleted[:_SHOWN])
        yield (
            f"The Delta table {folder}: the query reads from version {offset.version} on, and {len(deleted)} data "
            f"files that it would read were deleted (VACUUM), such as {listed}."
        )


def _actions(files: TableFiles, version: int) -> list[_Action]:
    return [from_json(line) for line in files.read(f"{version:020}.json").splitlines() if line.strip()]


def _ids_in(actions: Iterable[_Action]) -> set[str]:
    return {str(action["metaData"].get("id")) for action in actions if "metaData" in action}


def _adds_rows(action: _Action) -> bool:
    return "add" in action and bool(action["add"].get("dataChange", True))


def gone_from(writer: DataStreamWriter, folder: str, offset: DeltaOffset) -> list[str]:
    try:
        return list(gone(folder, offset, _HadoopFiles(session_of(writer), folder)))
    except Exception as error:
        raise StorageAccessError(
            f"The versions of the Delta table {folder} cannot be read: {without_secrets(str(error))[:300]}"
        ) from error


class _HadoopFiles:
    def __init__(self, session: SparkSession, folder: str) -> None:
        jvm: Any = session._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        self._root = self._path(folder)
        self._system = self._root.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        self._log = self._path(self._root, LOG)

    def log(self) -> list[str]:
        if not self._system.exists(self._log):
            return []
        # One JVM call for all files.
        listed = str(self._jvm.scala.runtime.ScalaRunTime.stringOf(self._system.listStatus(self._log)))
        return re.findall(rf"path=[^;]*/{LOG}/([^;/]+);", listed)

    def read(self, name: str) -> str:
        opened = self._system.open(self._path(self._log, name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(opened, "UTF-8"))
        finally:
            opened.close()

    def exists(self, path: str) -> bool:
        # Encoded as a URI, and absolute in a shallow clone.
        place = self._path(self._jvm.java.net.URI(path))
        return bool(self._system.exists(place if place.isAbsolute() else self._path(self._root, place)))


_BEFORE_THE_FIRST = -1
FROM_THE_FIRST = json.dumps({"snapshot_id": _BEFORE_THE_FIRST, "position": -1})
STREAM_FROM = "stream-from-timestamp"


@dataclass(frozen=True)
class IcebergOffset:
    """The snapshot that is read, in part or as a whole (`StreamingOffset`).

    Attributes:
        position: Number of its files that were read.
        reads_table: All files that the table had then are read, not only new ones.
    """

    snapshot_id: int
    position: int = 0
    reads_table: bool = False

    @property
    def is_before_the_first(self) -> bool:
        return self.snapshot_id == _BEFORE_THE_FIRST


def iceberg_offset(text: str | None) -> IcebergOffset | None:
    try:
        found = from_json(text or "")
        return IcebergOffset(int(found["snapshot_id"]), int(found["position"]), found.get("scan_all_files") is True)
    except (KeyError, TypeError, ValueError):
        return None


def iceberg_table(leaf: Any) -> Any | None:
    if str(leaf.getClass().getSimpleName()) != "StreamingRelationV2":
        return None
    table = leaf.table()
    return table.table() if is_iceberg(table) else None


def expired_from(writer: DataStreamWriter, table: Any, offset: IcebergOffset, options: Mapping[str, str]) -> list[str]:
    """Return why a source with these options (in lower case) would not read everything from an offset on."""
    jvm: Any = session_of(writer)._jvm
    try:
        table.refresh()
        name, current = str(table.name()), table.currentSnapshot()
        util = jvm.org.apache.iceberg.util.SnapshotUtil
        if offset.is_before_the_first:
            oldest = util.oldestAncestor(table) if current is not None else None
            if oldest is None or oldest.parentId() is None or _is_older(oldest, options.get(STREAM_FROM)):
                return []
            return [
                f"The Iceberg table {name}: the query reads from its first snapshot on, which no longer exists "
                "(expire_snapshots)."
            ]
        if current is not None and bool(util.isAncestorOf(table, current.snapshotId(), offset.snapshot_id)):
            return []
        known = {int(each.snapshotId()) for each in table.snapshots()}
    except Exception as error:
        raise StorageAccessError(
            f"The snapshots of an Iceberg table cannot be read: {without_secrets(str(error))[:300]}"
        ) from error
    why = (
        "is no longer part of its history: the table was rolled back or replaced"
        if offset.snapshot_id in known
        else "no longer exists (expire_snapshots), or the table was created again"
    )
    return [f"The Iceberg table {name}: the query reads from snapshot {offset.snapshot_id} on, which {why}."]


def _is_older(snapshot: Any, timestamp: str | None) -> bool:
    return timestamp is not None and timestamp.isdecimal() and int(snapshot.timestampMillis()) < int(timestamp)
