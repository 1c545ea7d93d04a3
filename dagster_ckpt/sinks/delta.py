"""Delta tables: what one remembers of a stream, read from its plain JSON commits, and how it is rolled back.

The sink writes a `txn` action with each batch (the Delta protocol's "Transaction Identifiers":
appId is the query's id, version is the batch) and skips a batch that is not greater than the newest
one without running it (`DeltaSink.addBatch`). A restore brings back the files of an earlier version
in one commit (`delta_commit.py`), and does not touch the transactions: the table then still skips the
undone batches of that query id, so the query continues under a new one.

Checkpoints of the log are Parquet and are not read here. Where commits are only in them, Delta itself is asked which
batch it knows, and a table is not rolled back beyond.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from dagster_ckpt.errors import CkptError, LiveDirectoryError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta_commit import (
    ROLL_BACK_ID,
    UnknownDeltaError,
    VersionTakenError,
    newest_transaction,
    query_of,
    record_roll_back,
    restore_version,
    table_id,
)
from dagster_ckpt.sinks.sink import FoundSink, OnRepeat, Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.sinks.tables import BATCH_MEMORY, LEFT_TO_YOU, cannot_look
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.query.session import active_session, default_file_system
from dagster_ckpt.values.untrusted import from_json, number_in, reading

LOG = "_delta_log"
_NAME = re.compile(r"DeltaSink\[(?P<path>.+)\]")
_COMMIT = re.compile(r"(\d{20})\.json")
# Other writers, such as OPTIMIZE, may commit between a decision and its commit.
_ATTEMPTS = 10
# Commits that are looked at for the table's id, and for the newest batch of the stream.
_COMMITS_LOOKED_AT = 200
# How Delta writes the predicate of a statement without a WHERE.
_NO_PREDICATE = (None, "[]", '["true"]')


@dataclass(frozen=True)
class DeltaCommit:
    """One version of a table.

    Attributes:
        version: Its number.
        batches: Batches by the id of their query (`txn` actions).
        restored_to: The version whose files it restored, for a RESTORE.
        empties: Whether it removed all rows.
        is_roll_back: Whether this package committed it to undo batches.
        changes: Whether it changed rows, or the table's schema or settings.
    """

    version: int
    batches: Mapping[str, int]
    restored_to: int | None
    empties: bool
    is_roll_back: bool
    changes: bool

    def batch_of(self, query_ids: Collection[str]) -> int | None:
        """The batch of one of these queries that it contains, or None."""
        return max((batch for query_id, batch in self.batches.items() if query_id in query_ids), default=None)


@dataclass(frozen=True)
class TableRollBack:
    """What a roll-back to a batch would do to a table.

    Attributes:
        decided_on: The newest version of the table when this was determined.
        version: The version to restore; -1 is before the first, None if nothing has to be undone.
        others: Versions written by others that this would undo too.
        reaches_back: Whether the readable commits are sufficient to decide.
    """

    decided_on: int
    version: int | None = None
    others: tuple[int, ...] = ()
    reaches_back: bool = True


def plan_table_roll_back(
    table: FileIO, query_ids: Collection[str], query_id: str | None, batch_id: int
) -> TableRollBack:
    """Determine what a roll-back of a table to a batch would do.

    Args:
        table: The table's folder.
        query_ids: The ids that the stream's query has had.
        query_id: The id under which the batch was committed; None if unknown.
        batch_id: The last batch that stays; -1 keeps none.

    Raises:
        FileNotFoundError: The folder contains no Delta log with JSON commits.
        LiveDirectoryError: A commit cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    return _planned(_Log(table), query_ids, query_id, batch_id)


def _planned(log: _Log, query_ids: Collection[str], query_id: str | None, batch_id: int) -> TableRollBack:
    own = {*query_ids, *([query_id] if query_id is not None else [])}
    wanted = log.version_of(own, query_id, batch_id)
    if wanted is None:
        return TableRollBack(log.newest, reaches_back=False)
    at, target = log.newest, None
    others: list[int] = []
    foreign: list[int] = []
    while at > wanted:
        commit = log.commit(at)
        if commit is None:
            return TableRollBack(log.newest, reaches_back=False)
        if commit.restored_to is not None and commit.restored_to >= wanted:
            # The table is as it was then: what lies between does not count.
            at = commit.restored_to
            continue
        if commit.empties and wanted < 0:
            # The table is as before the first version.
            break
        if commit.is_roll_back and (commit.restored_to is not None or commit.empties):
            target, others = wanted, [*others, *foreign]
            break
        if commit.batch_of(own) is not None:
            target, others, foreign = at - 1, [*others, *foreign], []
        elif commit.changes:
            foreign.append(at)
        at -= 1
    return TableRollBack(log.newest, target, tuple(sorted(others)))


class _Log:
    """The readable commits of a table, each read once."""

    def __init__(self, table: FileIO) -> None:
        self._table = table
        self._versions = _versions(table)
        self._commits: dict[int, DeltaCommit] = {}
        self.newest = max(self._versions)
        # Below, commits are only in a checkpoint.
        self.oldest = self.newest
        while self.oldest - 1 in self._versions:
            self.oldest -= 1

    def commit(self, version: int) -> DeltaCommit | None:
        if version < self.oldest:
            return None
        if version not in self._commits:
            self._commits[version] = _read(self._table, version)
        return self._commits[version]

    def identity(self) -> str | None:
        """The id of the table; None if the commits that are looked at do not have it.

        A commit has it if it changes the schema or the settings, and so has the checksum file of any version (Delta 4).
        """
        for version in range(self.newest, max(self.oldest, self.newest - _COMMITS_LOOKED_AT) - 1, -1):
            found = _identity_in(self._table, version)
            if found is not None:
                return found
        return None

    def newest_batch_shown(self, own: Collection[str], at: int | None = None) -> tuple[int | None, bool]:
        """The newest batch of these queries in the rows of a version, the newest, and whether that is certain."""
        at = self.newest if at is None else at
        for _ in range(_COMMITS_LOOKED_AT):
            if at < self.oldest:
                return None, self.oldest == 0
            commit = _known(self.commit(at))
            batch = commit.batch_of(own)
            if batch is not None:
                return batch, True
            if commit.is_roll_back and commit.empties:
                return None, True
            at = commit.restored_to if commit.restored_to is not None else at - 1
        return None, False

    def version_of(self, own: Collection[str], query_id: str | None, batch_id: int) -> int | None:
        """The version after which the table holds the rows up to a batch; None if that is unknown."""
        first_own, first_of_query = self.newest + 1, self.newest + 1
        for at in range(self.newest, self.oldest - 1, -1):
            commit = _known(self.commit(at))
            batch = commit.batch_of([query_id]) if query_id is not None else None
            if batch is not None and 0 <= batch <= batch_id:
                return at
            first_of_query = at if batch is not None else first_of_query
            first_own = at if commit.batch_of(own) is not None else first_own
        # The query was restored under a new id, and its own first batch came later.
        before = self._before(first_of_query - 1, own, batch_id) if batch_id >= 0 else None
        if before is not None:
            return before
        return first_own - 1 if self.oldest == 0 else None

    def _before(self, at: int, own: Collection[str], batch_id: int) -> int | None:
        while at >= self.oldest:
            commit = _known(self.commit(at))
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


def _known(commit: DeltaCommit | None) -> DeltaCommit:
    assert commit is not None, "read within the readable commits"
    return commit


def last_batch_in(table: FileIO, query_id: str) -> int | None:
    """The newest batch of a query in a table's log, even if its rows were undone since: the table skips it.

    Raises:
        FileNotFoundError: The folder contains no Delta log with JSON commits.
        LiveDirectoryError: A commit cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    batches = (_read(table, version).batch_of([query_id]) for version in sorted(_versions(table), reverse=True))
    return next((batch for batch in batches if batch is not None), None)


def _versions(table: FileIO) -> set[int]:
    versions = {int(match[1]) for match in map(_COMMIT.fullmatch, table.list(LOG)) if match}
    if not versions:
        raise FileNotFoundError(f"{table.url}/{LOG}")
    return versions


def _read(table: FileIO, version: int) -> DeltaCommit:
    name = f"{LOG}/{version:020}.json"
    text = table.read(name).decode("utf-8", "replace")
    with reading(lambda why: LiveDirectoryError(f"{table.url}/{name} is not a Delta commit: {why}. Repair the table.")):
        actions = [from_json(line) for line in text.splitlines() if line.strip()]
    found = [action for action in actions if isinstance(action, dict)]
    info: Mapping[str, Any] = next(
        (action["commitInfo"] for action in found if isinstance(action.get("commitInfo"), dict)), {}
    )
    operation, parameters = str(info.get("operation")), info.get("operationParameters") or {}
    batches = dict(batch for batch in map(_batch, found) if batch is not None)
    return DeltaCommit(
        version,
        batches,
        number_in(str(parameters.get("version"))) if operation == "RESTORE" else None,
        operation == "TRUNCATE" or (operation == "DELETE" and parameters.get("predicate") in _NO_PREDICATE),
        ROLL_BACK_ID in batches,
        # A roll-back with nothing to undo repeats the metadata.
        ROLL_BACK_ID not in batches and any(_is_change(action) for action in found),
    )


def _identity_in(table: FileIO, version: int) -> str | None:
    name = f"{LOG}/{version:020}"
    for action in map(from_json, table.read(f"{name}.json").decode("utf-8", "replace").splitlines()):
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
        # OPTIMIZE rewrites files without changing rows.
        if isinstance(file, dict) and file.get("dataChange", True):
            return True
    return any(kind in action for kind in ("metaData", "protocol", "cdc"))


class DeltaTable(Sink):
    """A Delta table known by its folder."""

    noun = "table"
    on_repeat = OnRepeat.SKIPS
    rolls_back = True
    knows_queries = True
    is_table = True
    remembers_undone = True

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, place)
        self.folder = place

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _NAME.fullmatch(name)
        return cls(name, match["path"]) if match else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """See `Sink.name_of`."""
        return f"DeltaSink[{place}]" if output_format == "delta" else None

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """See `Sink.look`."""
        files = self._files()
        if not files.list(LOG):
            return FoundSink(None)
        try:
            log = _Log(files)
        except FileNotFoundError:
            return None
        identity = log.identity()
        session = active_session()
        if identity is None and session is not None:
            with suppress(UnknownDeltaError):
                identity = table_id(session, self.folder)
        if identity is None:
            return None
        return FoundSink(identity, *(log.newest_batch_shown(query_ids) if query_ids else (None, False)))

    def batch_after(self, replay: Replay) -> int | None:
        """See `Sink.batch_after`."""
        try:
            log = _Log(self._files())
        except FileNotFoundError:
            return None
        found = _planned(log, replay.query_ids, replay.query_id, replay.to_batch)
        own = {*replay.query_ids, *([replay.query_id] if replay.query_id is not None else [])}
        return log.newest_batch_shown(own, found.version)[0] if found.version is not None else None

    def last_batch(self, query_id: str | None) -> int | None:
        """See `Sink.last_batch`."""
        if query_id is None:
            return None
        files = self._files()
        try:
            found = last_batch_in(files, query_id)
            if found is not None or 0 in _versions(files):
                return found
        except FileNotFoundError:
            return None
        session = active_session()
        if session is not None:
            # Delta skips a batch that it knows from a checkpoint as well.
            with suppress(UnknownDeltaError):
                return newest_transaction(session, self.folder, query_id)
        return None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        try:
            found = plan_table_roll_back(self._files(), replay.query_ids, replay.query_id, replay.to_batch)
        except (CkptError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and replay.to_batch < 0:
                return self._told(SinkEffect.EXACT, "There is no such table yet.")
            return cannot_look(self, "Delta", error)
        if not found.reaches_back:
            return self._told(
                SinkEffect.LOSE,
                f"The table {BATCH_MEMORY} and query id, but older commits are only in Parquet checkpoints of its "
                "log: the version to restore is unknown.",
                "RESTORE it to the version of the batch, and start with new_query_id.",
            )
        if found.others:
            return self._with_others(found, replay)
        if found.version is None:
            return self._told(SinkEffect.EXACT, f"The table holds no batch of this stream after {replay.to_batch}.")
        if not replay.roll_back_tables:
            reason = f"It has to be rolled back to batch {replay.to_batch}, {LEFT_TO_YOU}."
            advice = f"Run: {self._command(found.version)}. Then start again."
            return self._told(SinkEffect.IRREVERSIBLE, reason, advice)
        return self._told(
            SinkEffect.EXACT,
            f"{self._how(found.version)}: it then holds no batch of this stream after {replay.to_batch}. The query "
            "continues under a new id.",
        )

    def check_roll_back(self, to: RollBack) -> None:
        """See `Sink.check_roll_back`."""
        found = self._found(to)
        if found is not None and found.version is not None and not to.roll_back_tables:
            raise SinkRollbackError(
                f"The Delta table {self.folder} has to be rolled back to batch {to.batch_id}, {LEFT_TO_YOU}. "
                f"Run: {self._command(found.version)}. Then start again."
            )

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        """See `Sink.roll_back`. One commit of the table; repeated, it finds nothing to undo.

        The commit is the version after the one that was looked at, or fails. The lease is asked in
        between: if it is still held then, every commit of a successor comes after the version looked
        at, and this commit fails. A table with nothing to undo gets a commit as well, so that the
        roll-back of a former holder that was decided before fails.
        """
        taken: VersionTakenError | None = None
        for _ in range(_ATTEMPTS):
            found = self._found(to)
            if found is None or (found.version is None and not to.roll_back_tables):
                return
            with still_mine():
                pass
            try:
                self._commit(found, to.batch_id)
            except VersionTakenError as error:
                # Ours no more, or another writer's commit, such as OPTIMIZE: look again.
                taken = error
                continue
            with still_mine():
                pass
            return
        raise SinkRollbackError(
            f"The Delta table {self.folder} could not be rolled back to batch {to.batch_id}: others committed to it "
            f"during each of {_ATTEMPTS} attempts. Start again once they pause."
        ) from taken

    def _files(self) -> FileIO:
        """The table's folder.

        Raises:
            StorageAccessError: Spark and this package would look for it in different file systems.
        """
        default = default_file_system() if self.folder.startswith("/") else None
        if default is not None:
            raise StorageAccessError(
                f"The Delta table {self.folder} is in {default} for Spark (fs.defaultFS), and a folder of this machine "
                f"for this package. Let the query name it in full: {default}{self.folder}."
            )
        return open_file_io(self.folder)

    def _commit(self, found: TableRollBack, batch_id: int) -> None:
        session = active_session()
        if found.version is None:
            # Without Delta there is no roll-back of a former holder in this process's reach, and no query after it.
            if session is not None:
                with suppress(UnknownDeltaError):
                    record_roll_back(session, self.folder, decided_on=found.decided_on)
            return
        command = self._command(found.version)
        if session is None:
            raise SinkRollbackError(
                f"The Delta table {self.folder} has to be rolled back to batch {batch_id}, and this process has no "
                f"Spark session. Start the stream, which does it, or run: {command}"
            )
        try:
            restore_version(session, self.folder, found.version, decided_on=found.decided_on)
        except UnknownDeltaError as error:
            raise UnknownDeltaError(f"{error} Run: {command}. Then start again.") from error

    def _found(self, to: RollBack) -> TableRollBack | None:
        """What a roll-back would do; None if the table does not exist.

        Raises:
            SinkRollbackError: The table cannot be rolled back to that batch.
        """
        try:
            found = plan_table_roll_back(self._files(), to.query_ids, to.query_id, to.batch_id)
        except FileNotFoundError:
            # Nothing was ever written.
            return None
        if to.may_repeat and (found.others or not found.reaches_back):
            return replace(found, version=None)
        if not found.reaches_back:
            raise SinkRollbackError(
                f"The Delta table {self.folder} cannot be rolled back to batch {to.batch_id}: older commits are only "
                "in Parquet checkpoints of its log. RESTORE it to the version of that batch, and start with "
                "new_query_id."
            )
        if found.others:
            listed = ", ".join(map(str, found.others))
            raise SinkRollbackError(
                f"The Delta table {self.folder} cannot be rolled back to batch {to.batch_id}: others have written "
                f"versions {listed} since. To undo theirs as well, run: {self._command(found.version or 0)}"
            )
        return found

    def _with_others(self, found: TableRollBack, replay: Replay) -> SinkForecast:
        listed = ", ".join(map(str, found.others))
        advice = f"To undo theirs as well, run: {self._command(found.version or 0)}"
        if not replay.keeps_query_id and replay.to_batch >= 0:
            return self._told(
                SinkEffect.DUPLICATE,
                f"Others have written versions {listed} since, so the table is not rolled back. It does not know the "
                "new query id, so it accepts the rewound batches again.",
                advice,
            )
        return self._told(
            SinkEffect.IRREVERSIBLE,
            f"It has to be rolled back to batch {replay.to_batch}, and others have written versions {listed} since: "
            "their rows would be undone as well.",
            f"{advice} To leave them and write the batches again, start with new_query_id.",
        )

    def _told(self, effect: SinkEffect, reason: str, advice: str = "") -> SinkForecast:
        return SinkForecast(self.name, effect, reason, advice)

    def _how(self, version: int) -> str:
        return f"The table is restored to version {version}" if version >= 0 else "All rows of the table are deleted"

    def _command(self, version: int) -> str:
        # Before its first version a table does not exist: this stream created it.
        return (
            f"RESTORE TABLE {self._quoted} TO VERSION AS OF {version}"
            if version >= 0
            else f"DELETE FROM {self._quoted}"
        )

    @property
    def _quoted(self) -> str:
        return "delta.`{}`".format(self.folder.replace("`", "``"))
