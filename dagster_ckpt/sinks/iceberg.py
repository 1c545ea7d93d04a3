"""Iceberg tables: what they remember of a stream, and how they are rolled back.

Only a Spark session with the table's catalog knows the current table. Another process forecasts from the newest
metadata file in the table's folder.

A catalog refuses a commit made from metadata that is no longer current: a Hadoop table by the name of the next version,
JDBC and Hive by a conditional update, REST by `assert-ref-snapshot-id`. Iceberg's own procedures retry on the newest
metadata, so they are not used.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.iceberg_history import (
    DROPPED,
    EMPTIED,
    FENCE,
    MAIN,
    IcebergHistory,
    IcebergPlan,
    history_in,
    history_in_folder,
)
from dagster_ckpt.sinks.sink import (
    AskedBatch,
    BatchRows,
    FoundSink,
    OnRepeat,
    ReadOfSink,
    Replay,
    RollBack,
    Sink,
    SinkEffect,
)
from dagster_ckpt.sinks.table import NoSessionError, Obstacle, TablePlan, TableSink, VersionTakenError
from dagster_ckpt.spark.query.output import iceberg_name, is_iceberg, load_table
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.spark.query.table_sources import iceberg_offset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A folder may contain " at "; only the name of a table in a catalog is followed by a location.
_NAME = re.compile(r"IcebergTable\[(?P<table>[^/]+?|.+)( at (?P<location>\S*/.*))?\]")
# Spark's name for a table if its query cannot be inspected.
_FOLDER = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?/\S.*")
_NO_CATALOG = Obstacle(SinkEffect.UNKNOWN, "Only a Spark session with its catalog can read it: the start decides.")


class IcebergTable(TableSink):
    table_format = "Iceberg"
    on_repeat = OnRepeat.RUNS
    knows_queries = True
    # Query id and batch identify one snapshot: each timeline has a new query id.
    remembers_undone = True

    def __init__(self, name: str, table: str, location: str | None) -> None:
        super().__init__(name, table)
        self.table = table
        self.location = location

    @classmethod
    def of(cls, name: str) -> Self | None:
        match = _NAME.fullmatch(name)
        if match is not None:
            return cls(name, match["table"], match["location"])
        return cls(name, name, name) if _FOLDER.fullmatch(name) else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        return iceberg_name(place) if output_format == "iceberg" else None

    def is_same(self, other: Sink) -> bool:
        if not isinstance(other, IcebergTable):
            return False
        if self.table == other.table:
            return True
        mine, others = self._folder, other._folder
        return mine is not None and others is not None and same_folder(mine, others)

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        session = active_session()
        try:
            if session is not None:
                opened = OpenIcebergTable.find(session, self.table)
                history = history_in(opened.metadata, opened.name) if opened is not None else None
            elif _FOLDER.fullmatch(self.table):
                history = history_in_folder(open_file_io(self.table))
            else:
                return None
        except FileNotFoundError:
            history = None
        if history is None:
            return FoundSink(None)
        if history.uuid is None:
            return None
        return FoundSink(history.uuid, *(history.newest_batch_shown(query_ids) if query_ids else (None, False)))

    def read_up_to(
        self,
        offset: str,
        own: Collection[str],
        options: Mapping[str, str],
        *,
        rewound: bool,
        note: bytes | None = None,
    ) -> ReadOfSink | None:
        found = iceberg_offset(offset)
        if found is None or "branch" in options:
            return None
        if self._folder is None:
            return ReadOfSink(why="the folder of the table is not known, and the position is")
        try:
            # A thread that takes a snapshot must not use the session.
            return history_in_folder(open_file_io(self._folder)).read_up_to(found, own)
        except FileNotFoundError:
            return ReadOfSink(why="there is no such table any more, and the position is")

    def batch_after(self, replay: Replay) -> int | None:
        try:
            return self._history().batch_after(replay.back) if self._can_be_read else None
        except FileNotFoundError:
            return None

    def last_batch(self, query_id: str | None) -> int | None:
        try:
            return self._history().last_batch(query_id) if query_id is not None else None
        except FileNotFoundError:
            return None

    def may_have_forgotten(self, query_id: str, since_ms: int) -> bool:
        try:
            return self._can_be_read and self._history().may_have_forgotten(query_id, since_ms)
        except FileNotFoundError:
            return False

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        try:
            history = self._history()
            found = history.snapshot_of(asked.query_id, asked.batch_id) if asked.query_id is not None else None
        except FileNotFoundError:
            return BatchRows(None, f"there is no Iceberg table {self.table}")
        if found is None:
            return BatchRows(None, f"no snapshot of the Iceberg table {self.table} is of the batch, or it has expired")
        reader = asked.session.read.format("iceberg")
        if found.summary.get("operation") == "append" and found.parent is not None:
            reader = reader.option("start-snapshot-id", found.parent).option("end-snapshot-id", found.id)
        else:
            # The first snapshot, or one that replaced all rows.
            reader = reader.option("versionAsOf", found.id)
        rows = asked.columns_of(reader.load(self.table))
        return BatchRows(rows, f"snapshot {found.id} of the Iceberg table {self.table}")

    def plan(self, to: RollBack) -> TablePlan | None:
        session = active_session()
        if session is None:
            raise NoSessionError(
                f"The Iceberg table {self.table} has to be rolled back to batch {to.batch_id}, and this process has no "
                "Spark session. Start the stream, which does it."
            )
        opened = OpenIcebergTable.find(session, self.table)
        return self._planned(history_in(opened.metadata, opened.name), to, opened) if opened is not None else None

    def foresee(self, to: RollBack) -> TablePlan | None:
        if not self._can_be_read:
            return TablePlan(moves=True, obstacle=_NO_CATALOG)
        try:
            return self._planned(self._history(), to)
        except FileNotFoundError:
            return None

    def commit(self, plan: TablePlan) -> None:
        opened, found = plan.basis
        target = found.snapshot_id
        if not (opened.delete_rows(EMPTIED) if target is None else opened.make_current(target)):
            raise VersionTakenError(self.table)

    def fence(self, plan: TablePlan) -> None:
        opened, found = plan.basis
        # Of a stream that writes to a branch, no roll-back changes main, so there is nothing to fence.
        if found.branch is None:
            opened.add_fence(FENCE)

    def _planned(self, history: IcebergHistory, to: RollBack, opened: OpenIcebergTable | None = None) -> TablePlan:
        found, (catalog, table) = history.plan(to), self._quoted
        target = found.snapshot_id
        command = (
            f"DELETE FROM {catalog}.{table}"
            if target is None
            else f"CALL {catalog}.system.set_current_snapshot('{table}', {target})"
        )
        return TablePlan(
            moves=found.moves,
            how="All rows of the table are deleted"
            if target is None
            else f"Snapshot {target} of the table becomes the current one",
            command=command,
            others=f"snapshots {', '.join(map(str, found.others))}" if found.others else "",
            obstacle=self._obstacle(found, to.batch_id, command),
            basis=(opened, found),
        )

    def _obstacle(self, found: IcebergPlan, batch_id: int, command: str) -> Obstacle | None:
        catalog, table = self._quoted
        name, branch, head = f"{catalog}.{table}", found.branch, found.snapshot_id
        if not found.reaches_back and branch is not None:
            return Obstacle(
                SinkEffect.LOSE,
                f"The newest batch of this stream is in branch {branch} of the Iceberg table {self.table} alone. "
                "Whether main once had it is not known, because older snapshots have expired: the table is not "
                "changed.",
                f"If the stream writes to main, keep the branch as a tag: ALTER TABLE {name} CREATE TAG <name> AS OF "
                f"VERSION {head}, then ALTER TABLE {name} DROP BRANCH `{branch}`, and start again. If it writes to the "
                "branch, bring the branch back to the batch by hand, and start with new_query_id.",
            )
        if not found.reaches_back:
            return Obstacle(
                SinkEffect.LOSE,
                "The table remembers batches by number and query id, but its older snapshots have expired: the one "
                "that holds the rows of the batch is unknown.",
                "Make the snapshot of the batch the current one by hand, or start with new_query_id and accept "
                "repeated rows."
                if batch_id >= 0
                else f"If all its rows are of this stream, run: DELETE FROM {name}. Then start again. To leave its "
                "rows, start with accept_loss.",
            )
        if branch is None or not found.moves:
            return None
        if branch == DROPPED:
            return Obstacle(
                SinkEffect.IRREVERSIBLE,
                f"The stream has written to a branch of the Iceberg table {self.table}, which was published to main "
                f"and dropped. Batches after {batch_id} are in main, which is not changed.",
                f"To undo them in main, run: {command}. Then start again.",
            )
        replace = f"ALTER TABLE {name} CREATE OR REPLACE BRANCH `{branch}` AS OF VERSION {head}"
        return Obstacle(
            SinkEffect.IRREVERSIBLE,
            f"The stream writes to branch {branch} of the Iceberg table {self.table}, which has to go back to batch "
            f"{batch_id}. Only the main branch is rolled back, and it is not changed.",
            f"Drop the branch and create it again, without the rows of this stream: {name}."
            if head is None
            else f"Run: {replace}. Then start again.",
        )

    def _history(self) -> IcebergHistory:
        session = active_session()
        try:
            opened = OpenIcebergTable.find(session, self.table) if session is not None else None
        except StorageAccessError:
            if self._folder is None:
                raise
            return history_in_folder(open_file_io(self._folder))
        if opened is not None:
            return history_in(opened.metadata, opened.name)
        if session is not None or self._folder is None:
            raise FileNotFoundError(self.table)
        return history_in_folder(open_file_io(self._folder))

    @property
    def _can_be_read(self) -> bool:
        return active_session() is not None or self._folder is not None

    @property
    def _quoted(self) -> tuple[str, str]:
        if "/" in self.table:
            # Every Iceberg catalog finds a table by its folder.
            return "<catalog>", f"`{self.table}`"
        catalog, _, table = self.table.partition(".")
        return catalog, table

    @property
    def _folder(self) -> str | None:
        return self.location or (self.table if _FOLDER.fullmatch(self.table) else None)


# The table has changed, or it is unknown whether it has.
_TO_EXAMINE_AGAIN = ("CommitFailedException", "CommitStateUnknownException", "ValidationException")


class OpenIcebergTable:
    def __init__(self, jvm: Any, table: Any) -> None:
        self._jvm = jvm
        self._table = table
        self.name = str(table.name())
        self.location = str(table.location())
        table.refresh()
        self._base = table.operations().current()

    @classmethod
    def find(cls, session: SparkSession, name: str) -> Self | None:
        """Find a table by name or folder; StorageAccessError if no catalog of the session answers."""
        with _asking(name):
            table = _table_in_folder(session, name) if "/" in name else _table_of_catalog(session, name)
            return cls(session._jvm, table) if table is not None else None

    @property
    def metadata(self) -> str:
        with _asking(self.name):
            return str(self._jvm.org.apache.iceberg.TableMetadataParser.toJson(self._base))

    def make_current(self, snapshot_id: int) -> bool:
        """Return False if the table changed since it was opened."""
        with _asking(self.name):
            return self._move(self._base, snapshot_id)

    def delete_rows(self, mark: str) -> bool:
        """Return False if the table changed since it was opened."""
        with _asking(self.name):
            staged = str(uuid.uuid4())
            everything = self._jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
            delete = self._table.newDelete().deleteFromRowFilter(everything)
            # Without staging, it would commit on the newest metadata.
            delete.set(mark, staged).stageOnly().commit()
            self._table.refresh()
            base = self._table.operations().current()
            for snapshot in base.snapshots():
                if snapshot.summary().get(mark) == staged:
                    parent = _id_of(self._base.currentSnapshot())
                    is_child = snapshot.parentId() == parent == _id_of(base.currentSnapshot())
                    return is_child and self._move(base, snapshot.snapshotId())
            return False

    def add_fence(self, mark: str) -> None:
        """Commit an empty snapshot with `mark` in its summary: earlier decisions can no longer be committed."""
        with _asking(self.name):
            self._table.newFastAppend().set(mark, str(uuid.uuid4())).commit()

    def _move(self, base: Any, snapshot_id: int) -> bool:
        updated = self._jvm.org.apache.iceberg.TableMetadata.buildFrom(base).setBranchSnapshot(snapshot_id, MAIN)
        try:
            self._table.operations().commit(base, updated.build())
        except Exception as error:
            if any(kind in _class_of(error) for kind in _TO_EXAMINE_AGAIN):
                return False
            raise
        return True


def _table_of_catalog(session: SparkSession, name: str) -> Any | None:
    table = load_table(session, name)
    return table.table() if table is not None and is_iceberg(table) else None


def _table_in_folder(session: SparkSession, folder: str) -> Any | None:
    conf = session._jsparkSession.sessionState().newHadoopConf()
    tables = session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf)  # type: ignore[union-attr]
    return tables.load(folder) if tables.exists(folder) else None


def _id_of(snapshot: Any | None) -> int | None:
    return int(snapshot.snapshotId()) if snapshot is not None else None


@contextmanager
def _asking(name: str) -> Iterator[None]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (TypeError, AttributeError) as error:
        # To py4j, a missing class is a package.
        raise StorageAccessError(
            f"The Iceberg table {name} cannot be opened: this Spark application was started without Iceberg's jar. "
            "Add it to spark.jars.packages."
        ) from error
    except (Py4JError, PySparkException) as error:
        raise StorageAccessError(
            f"The Iceberg table {name} cannot be opened or changed: {_first_line(error)}. Make its catalog reachable "
            "from this Spark session, then try again."
        ) from error


def _class_of(error: Exception) -> str:
    thrown = getattr(error, "java_exception", None)
    return str(thrown.getClass().getName()) if thrown is not None else type(error).__name__


def _first_line(error: Exception) -> str:
    thrown = getattr(error, "java_exception", None)
    lines = str(thrown.toString() if thrown is not None else error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
