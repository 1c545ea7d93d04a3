"""Iceberg tables: what one remembers of a stream, asked from its catalog, and how it is rolled back.

Only a Spark session with the table's catalog can say what the table is now. A process without one, such
as a command line, forecasts by the newest metadata file in the table's folder; it changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Self

from dagster_ckpt.errors import CkptError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.iceberg_history import (
    EMPTIED,
    FENCE,
    IcebergHistory,
    TableRollBack,
    history_in,
    history_in_folder,
)
from dagster_ckpt.sinks.sink import FoundSink, OnRepeat, Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.sinks.tables import BATCH_MEMORY, LEFT_TO_YOU, cannot_look
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.query.iceberg import OpenIcebergTable
from dagster_ckpt.spark.query.output import iceberg_name
from dagster_ckpt.spark.query.session import active_session

_NAME = re.compile(r"IcebergTable\[(?P<table>.+?)( at (?P<location>.+))?\]")
# A folder, as a path or a URL: what Spark calls such a table where its query cannot be inspected.
_FOLDER = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?/\S.*")
# Another writer committed first each time; this stream does not write that often.
_TRIES = 5


class IcebergTable(Sink):
    """An Iceberg table, by its name in a catalog or by its folder."""

    noun = "table"
    on_repeat = OnRepeat.RUNS
    rolls_back = True
    knows_queries = True
    is_table = True
    # A new query id for each timeline makes a query id and a batch the name of one snapshot.
    remembers_undone = True

    def __init__(self, name: str, table: str, location: str | None) -> None:
        super().__init__(name, table)
        self.table = table
        self.location = location

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _NAME.fullmatch(name)
        if match is not None:
            return cls(name, match["table"], match["location"])
        return cls(name, name, name) if _FOLDER.fullmatch(name) else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """See `Sink.name_of`."""
        return iceberg_name(place) if output_format == "iceberg" else None

    def is_same(self, other: Sink) -> bool:
        """See `Sink.is_same`."""
        if not isinstance(other, IcebergTable):
            return False
        if self.table == other.table:
            return True
        mine, others = self._folder, other._folder
        return mine is not None and others is not None and same_folder(mine, others)

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """See `Sink.look`. Only the catalog says which table has the name; a table by its folder needs none."""
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
        """See `Sink.batch_after`."""
        if active_session() is None and self._folder is None:
            return None
        try:
            return self._history().batch_after(replay.query_ids, replay.query_id, replay.to_batch)
        except FileNotFoundError:
            return None

    def last_batch(self, query_id: str | None) -> int | None:
        """See `Sink.last_batch`. The newest batch on any timeline of the table."""
        try:
            return self._history().last_batch(query_id) if query_id is not None else None
        except FileNotFoundError:
            return None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        if active_session() is None and self._folder is None:
            return self._told(
                SinkEffect.UNKNOWN, "Only a Spark session with its catalog can read it: the start decides."
            )
        try:
            return self._forecast(self._history(), replay)
        except FileNotFoundError:
            if replay.to_batch < 0:
                return self._told(SinkEffect.EXACT, "There is no such table yet.")
            return self._told(
                SinkEffect.LOSE,
                f"There is no such table here: the rows of batches up to {replay.to_batch} would be missing.",
                "Bring the table back, or start with accept_loss to begin a new one.",
            )
        except StorageAccessError as error:
            return self._told(SinkEffect.UNREACHABLE, str(error))
        except CkptError as error:
            return cannot_look(self, "Iceberg", error)

    def _forecast(self, history: IcebergHistory, replay: Replay) -> SinkForecast:
        found = history.plan_roll_back(replay.query_ids, replay.query_id, replay.to_batch)
        if not found.reaches_back and found.branch is not None:
            return self._told(SinkEffect.LOSE, self._in_doubt(found), self._doubt_advice(found))
        if not found.reaches_back:
            return self._told(
                SinkEffect.LOSE,
                f"The table {BATCH_MEMORY} and query id, but its older snapshots have expired: the one "
                "that holds the rows of the batch is unknown.",
                "Make the snapshot of the batch the current one by hand, or start with new_query_id and accept "
                "repeated rows.",
            )
        if found.branch is not None and found.moves:
            return self._told(
                SinkEffect.IRREVERSIBLE, self._on_branch(found, replay.to_batch), self._branch_advice(found)
            )
        if found.others:
            return self._with_others(found, replay)
        if not found.moves:
            return self._told(SinkEffect.EXACT, f"The table holds no batch of this stream after {replay.to_batch}.")
        if not replay.roll_back_tables:
            reason = f"It has to be rolled back to batch {replay.to_batch}, {LEFT_TO_YOU}."
            return self._told(SinkEffect.IRREVERSIBLE, reason, f"Run: {self._command(found)}. Then start again.")
        return self._told(
            SinkEffect.EXACT,
            f"{self._how(found)}: it then holds exactly the batches of this stream up to {replay.to_batch}. The query "
            "continues under a new id.",
        )

    def check_roll_back(self, to: RollBack) -> None:
        """See `Sink.check_roll_back`."""
        try:
            self._decided(self._history(), to)
        except FileNotFoundError:
            return

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        """See `Sink.roll_back`. One commit of the table, which its catalog refuses after any other commit.

        If nothing is to be undone, an empty snapshot is committed instead: a predecessor that was stopped before
        its own commit can then no longer make it.
        """
        session = active_session()
        for _ in range(_TRIES):
            if session is None:
                raise self._without_session(to)
            opened = OpenIcebergTable.find(session, self.table)
            if opened is None:
                # Nothing was ever written.
                return
            # Asked after the table was read: a successor's commit is either seen there or makes this one fail.
            with still_mine():
                pass
            found = self._decided(history_in(opened.metadata, opened.name), to)
            if found is None or not found.moves:
                opened.add_fence(FENCE)
                return
            target = found.snapshot_id
            if opened.delete_rows(EMPTIED) if target is None else opened.make_current(target):
                return
        raise SinkRollbackError(
            f"The Iceberg table {self.table} could not be rolled back to batch {to.batch_id}: at each of {_TRIES} "
            "attempts another writer committed first. Stop the other writers, and start again."
        )

    def _decided(self, history: IcebergHistory, to: RollBack) -> TableRollBack | None:
        """What to do; None if the table is left as it is.

        Raises:
            SinkRollbackError: It must not be done, or not from here.
        """
        found = history.plan_roll_back(to.query_ids, to.query_id, to.batch_id)
        if to.may_repeat and (found.others or not found.reaches_back):
            return None
        if not found.reaches_back and found.branch is not None:
            raise SinkRollbackError(f"{self._in_doubt(found)} {self._doubt_advice(found)}")
        if found.branch is not None and found.moves:
            raise SinkRollbackError(f"{self._on_branch(found, to.batch_id)} {self._branch_advice(found)}")
        what = f"The Iceberg table {self.table} has to be rolled back to batch {to.batch_id}"
        if not found.reaches_back:
            raise SinkRollbackError(
                f"{what}, and its older snapshots have expired: the one that holds the rows of the batch is "
                "unknown. Make it current by hand, or start with new_query_id and accept repeated rows."
            )
        if found.others:
            listed = ", ".join(map(str, found.others))
            raise SinkRollbackError(
                f"{what}, and others have written snapshots {listed} since. To undo theirs as well, run: "
                f"{self._command(found)}"
            )
        if found.moves and not to.roll_back_tables:
            raise SinkRollbackError(f"{what}, {LEFT_TO_YOU}. Run: {self._command(found)}. Then start again.")
        return found

    def _history(self) -> IcebergHistory:
        """The table as its catalog has it; where that cannot be asked, as its newest metadata file has it.

        Raises:
            FileNotFoundError: There is no such table.
            StorageAccessError: It cannot be reached.
            LiveDirectoryError: Its metadata cannot be parsed.
        """
        session = active_session()
        try:
            opened = OpenIcebergTable.find(session, self.table) if session is not None else None
        except StorageAccessError:
            # A session of another stream may lack the catalog; a roll-back needs the catalog itself.
            if self._folder is None:
                raise
            return history_in_folder(open_file_io(self._folder))
        if opened is not None:
            return history_in(opened.metadata, opened.name)
        if session is not None or self._folder is None:
            raise FileNotFoundError(self.table)
        return history_in_folder(open_file_io(self._folder))

    def _with_others(self, found: TableRollBack, replay: Replay) -> SinkForecast:
        listed = ", ".join(map(str, found.others))
        advice = f"To undo theirs as well, run: {self._command(found)}"
        if not replay.keeps_query_id and replay.to_batch >= 0:
            return self._told(
                SinkEffect.DUPLICATE,
                f"Others have written snapshots {listed} since, so the table is not rolled back. It does not know the "
                "new query id, so it accepts the rewound batches again.",
                advice,
            )
        return self._told(
            SinkEffect.IRREVERSIBLE,
            f"It has to be rolled back to batch {replay.to_batch}, and others have written snapshots {listed} since: "
            "their rows would be undone as well.",
            f"{advice}. To leave them and write the batches again, start with new_query_id.",
        )

    def _on_branch(self, found: TableRollBack, batch_id: int) -> str:
        return (
            f"The stream writes to branch {found.branch} of the Iceberg table {self.table}, which has to go back to "
            f"batch {batch_id}. Only the main branch is rolled back, and it is not changed."
        )

    def _in_doubt(self, found: TableRollBack) -> str:
        return (
            f"The newest batch of this stream is in branch {found.branch} of the Iceberg table {self.table} alone. "
            "Whether main once had it is not known, because older snapshots have expired: the table is not changed."
        )

    def _doubt_advice(self, found: TableRollBack) -> str:
        catalog, table = self._quoted
        return (
            f"If the stream writes to main, keep the branch as a tag: ALTER TABLE {catalog}.{table} CREATE TAG <name> "
            f"AS OF VERSION {found.snapshot_id}, then ALTER TABLE {catalog}.{table} DROP BRANCH `{found.branch}`, and "
            "start again. If it writes to the branch, bring the branch back to the batch by hand, and start with "
            "new_query_id."
        )

    def _branch_advice(self, found: TableRollBack) -> str:
        catalog, table = self._quoted
        if found.snapshot_id is None:
            return f"Drop the branch and create it again, without the rows of this stream: {catalog}.{table}."
        return (
            f"Run: ALTER TABLE {catalog}.{table} CREATE OR REPLACE BRANCH `{found.branch}` AS OF VERSION "
            f"{found.snapshot_id}. Then start again."
        )

    def _without_session(self, to: RollBack) -> SinkRollbackError:
        return SinkRollbackError(
            f"The Iceberg table {self.table} has to be rolled back to batch {to.batch_id}, and this process has no "
            "Spark session. Start the stream, which does it."
        )

    def _told(self, effect: SinkEffect, reason: str, advice: str = "") -> SinkForecast:
        return SinkForecast(self.name, effect, reason, advice)

    def _how(self, found: TableRollBack) -> str:
        if found.snapshot_id is None:
            return "All rows of the table are deleted"
        return f"Snapshot {found.snapshot_id} of the table becomes the current one"

    @property
    def _quoted(self) -> tuple[str, str]:
        """Catalog and table, for a command."""
        if "/" in self.table:
            # Any catalog of Iceberg finds a table by its folder.
            return "<catalog>", f"`{self.table}`"
        catalog, _, table = self.table.partition(".")
        return catalog, table

    def _command(self, found: TableRollBack) -> str:
        catalog, table = self._quoted
        if found.snapshot_id is None:
            return f"DELETE FROM {catalog}.{table}"
        return f"CALL {catalog}.system.set_current_snapshot('{table}', {found.snapshot_id})"

    @property
    def _folder(self) -> str | None:
        return self.location or (self.table if _FOLDER.fullmatch(self.table) else None)
