"""Iceberg tables: what one remembers of a stream, and how it is rolled back.

Only a Spark session with the table's catalog knows the current table. Another process, such as a command line,
forecasts from the newest metadata file in the table's folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Self

from dagster_ckpt.errors import SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.batch_rows import rows_in_iceberg
from dagster_ckpt.sinks.iceberg_commit import OpenIcebergTable
from dagster_ckpt.sinks.iceberg_history import (
    EMPTIED,
    FENCE,
    IcebergHistory,
    IcebergPlan,
    history_in,
    history_in_folder,
)
from dagster_ckpt.sinks.sink import AskedBatch, BatchRows, FoundSink, OnRepeat, Replay, RollBack, Sink, SinkEffect
from dagster_ckpt.sinks.table import Obstacle, TablePlan, TableSink, VersionTakenError
from dagster_ckpt.spark.query.output import iceberg_name
from dagster_ckpt.spark.query.session import active_session

_NAME = re.compile(r"IcebergTable\[(?P<table>.+?)( at (?P<location>.+))?\]")
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

    def batch_after(self, replay: Replay) -> int | None:
        try:
            return self._history().batch_after(replay.back) if self._can_be_read else None
        except FileNotFoundError:
            return None

    def last_batch(self, query_id: str | None) -> int | None:
        """On any timeline of the table."""
        try:
            return self._history().last_batch(query_id) if query_id is not None else None
        except FileNotFoundError:
            return None

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        try:
            return rows_in_iceberg(self.table, self._history(), asked)
        except FileNotFoundError:
            return BatchRows(None, f"there is no Iceberg table {self.table}")

    def plan(self, to: RollBack) -> TablePlan | None:
        session = active_session()
        if session is None:
            raise SinkRollbackError(
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
        opened, _ = plan.basis
        opened.add_fence(FENCE)

    def _planned(self, history: IcebergHistory, to: RollBack, opened: OpenIcebergTable | None = None) -> TablePlan:
        found, (catalog, table) = history.plan(to), self._quoted
        target = found.snapshot_id
        return TablePlan(
            moves=found.moves,
            how="All rows of the table are deleted"
            if target is None
            else f"Snapshot {target} of the table becomes the current one",
            command=f"DELETE FROM {catalog}.{table}"
            if target is None
            else f"CALL {catalog}.system.set_current_snapshot('{table}', {target})",
            others=f"snapshots {', '.join(map(str, found.others))}" if found.others else "",
            obstacle=self._obstacle(found, to.batch_id),
            basis=(opened, found),
        )

    def _obstacle(self, found: IcebergPlan, batch_id: int) -> Obstacle | None:
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
                "repeated rows.",
            )
        if branch is None or not found.moves:
            return None
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
        """From its catalog, or else its newest metadata file.

        Raises:
            FileNotFoundError: There is no such table.
        """
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
