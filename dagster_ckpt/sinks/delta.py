"""Delta tables, written by Delta's own sink or by a `foreachBatch` function.

Delta drops a write whose `txnAppId` and `txnVersion` it has; `delta_transaction` sets them. The session forgets the
version after the first write (`autoReset`), and Delta then refuses a second one. Writes have names, not numbers,
because changed code may add one before them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.delta_log import DeltaLog, DeltaPlan
from dagster_ckpt.sinks.delta_roll_back import (
    UnknownDeltaError,
    app_id_of,
    newest_transaction,
    record_roll_back,
    restore_version,
    table_id,
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
    SinkForecast,
)
from dagster_ckpt.sinks.table import NoSessionError, Obstacle, TablePlan, TableSink
from dagster_ckpt.spark.query.description import quoted
from dagster_ckpt.spark.query.output import FOREACH_BATCH, foreach_batch_name
from dagster_ckpt.spark.query.session import active_session, default_file_system
from dagster_ckpt.spark.query.table_sources import LOG, delta_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEME = "delta:"
_SHOWN = 3
# Options with which a source continues after a commit that removes rows.
_SKIPPING = frozenset({"ignorechanges", "ignoredeletes", "skipchangecommits", "readchangefeed", "readchangedata"})
_APP_ID = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
_ONE_WRITE = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
# The newest batch of a write. Spark clones the session for each start of a query.
_DONE = "spark.dagster_ckpt.delta_transaction."
# A local property of the thread that runs the query (`StreamExecution.QUERY_ID_KEY`).
_QUERY_ID = "sql.streaming.queryId"
_NAME_IT = (
    "Put each write into a separate with statement, and name all but one: delta_transaction(batch, batch_id, "
    "'<what it writes>')."
)


class DeltaTable(TableSink):
    names = re.compile(r"DeltaSink\[(?P<place>.+)\]")
    table_format = "Delta"
    on_repeat = OnRepeat.SKIPS
    knows_queries = True
    remembers_undone = True

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, place)
        self.folder = place

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        return f"DeltaSink[{place}]" if output_format == "delta" else None

    def is_same(self, other: Sink) -> bool:
        return isinstance(other, DeltaTable) and same_folder(self.folder, other.folder)

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        files = self._files()
        if not files.list(LOG):
            return FoundSink(None)
        try:
            log = DeltaLog(files)
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

    def read_up_to(
        self,
        offset: str,
        own: Collection[str],
        options: Mapping[str, str],
        *,
        rewound: bool,
        note: bytes | None = None,
    ) -> ReadOfSink | None:
        found = delta_offset(offset)
        if found is None:
            return None
        try:
            log = DeltaLog(open_file_io(self.folder))
        except FileNotFoundError:
            return ReadOfSink(why="there is no such table any more, and the position is")
        if log.identity() not in (None, found.table_id):
            return ReadOfSink(why="it has read another table at that place, and the position is")
        return log.read_up_to(found, own, skips_changes=not _SKIPPING.isdisjoint(options), rewound=rewound)

    def batch_after(self, replay: Replay) -> int | None:
        to = replay.back
        try:
            log = DeltaLog(self._files())
        except FileNotFoundError:
            return None
        version = log.plan(to).version
        return log.newest_batch_shown(to.own_ids, version)[0] if version is not None else None

    def last_batch(self, query_id: str | None) -> int | None:
        if query_id is None:
            return None
        try:
            log = DeltaLog(self._files())
            found = log.last_batch(query_id)
        except FileNotFoundError:
            return None
        if found is not None or log.has_beginning:
            return found
        session = active_session()
        if session is not None:
            # Delta also skips a batch that only a checkpoint of its log has.
            with suppress(UnknownDeltaError):
                return newest_transaction(session, self.folder, query_id)
        return None

    def plan(self, to: RollBack) -> TablePlan | None:
        try:
            found = DeltaLog(self._files()).plan(to)
        except FileNotFoundError:
            return None
        version = -1 if found.version is None else found.version
        table = f"delta.{quoted(self.folder)}"
        is_emptied = version < 0
        return TablePlan(
            moves=found.version is not None,
            how="All rows of the table are deleted" if is_emptied else f"The table is restored to version {version}",
            command=f"DELETE FROM {table}" if is_emptied else f"RESTORE TABLE {table} TO VERSION AS OF {version}",
            others=f"versions {', '.join(map(str, found.others))}" if found.others else "",
            obstacle=_obstacle(found, to, table),
            basis=found,
        )

    def commit(self, plan: TablePlan) -> None:
        session = active_session()
        if session is None:
            raise NoSessionError(
                f"The Delta table {self.folder} has to be rolled back, and this process has no Spark session. Start "
                f"the stream, which does it, or run: {plan.command}"
            )
        try:
            restore_version(session, self.folder, plan.basis.version, decided_on=plan.basis.decided_on)
        except UnknownDeltaError as error:
            raise UnknownDeltaError(f"{error} Run: {plan.command}. Then start again.") from error

    def fence(self, plan: TablePlan) -> None:
        session = active_session()
        # A session without Delta has rolled nothing back.
        if session is not None:
            with suppress(UnknownDeltaError):
                record_roll_back(session, self.folder, decided_on=plan.basis.decided_on)

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        table = self._files()
        version = _version_of(table, asked)
        if version is None:
            return BatchRows(None, f"no readable commit of the Delta table {self.folder} is of the batch")
        from pyspark.sql import functions as F

        rows = asked.session.read.format("delta").option("versionAsOf", version).load(self.folder)
        added = rows.where(F.col("_metadata.file_name").isin(DeltaLog(table).files_added(version)))
        return BatchRows(asked.columns_of(added), f"version {version} of the Delta table {self.folder}")

    def _files(self) -> FileIO:
        default = default_file_system() if self.folder.startswith("/") else None
        if default is not None:
            raise StorageAccessError(
                f"The Delta table {self.folder} is in {default} for Spark (fs.defaultFS), and a folder of this machine "
                f"for this package. Let the query name it in full: {default}{self.folder}."
            )
        return open_file_io(self.folder)


def _version_of(table: FileIO, asked: AskedBatch) -> int | None:
    try:
        return DeltaLog(table).version_of(asked.query_id, asked.batch_id) if asked.query_id is not None else None
    except FileNotFoundError:
        return None


class DeltaMerge(DeltaTable):
    names = re.compile(rf"ForeachBatchSink\[{_SCHEME}(?P<place>.+)\]")
    has_parts = True

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        is_delta = output_format == FOREACH_BATCH and place.startswith(_SCHEME)
        return foreach_batch_name(place) if is_delta else None

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """Return the table's id alone: the function may leave batches out."""
        return super().look()

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        version = _version_of(self._files(), asked)
        if version is None:
            return BatchRows(None, f"the Delta table {self.folder} has no commit of the batch")
        return BatchRows(
            None,
            f"the function of foreachBatch wrote version {version} of the Delta table {self.folder}: compare it with "
            f"version {version - 1} (DESCRIBE HISTORY, VERSION AS OF)",
        )

    def forecast(self, replay: Replay) -> SinkForecast:
        found = super().forecast(replay)
        ids = {*replay.query_ids, replay.query_id}
        if found.effect is not SinkEffect.EXACT or any(self.last_batch(each) is not None for each in ids):
            return found
        return self.forecast_as(
            SinkEffect.UNKNOWN,
            "The table has no batch of this stream. A function that writes outside delta_transaction writes the "
            "rewound batches once more.",
            "Write within delta_transaction.",
        )


@contextmanager
def delta_transaction(batch: DataFrame, batch_id: int, write: str = "") -> Iterator[None]:
    """Let a `foreachBatch` function's write to a Delta table take effect once, even if the batch is repeated.

    Write through `batch.sparkSession`, in one command. Name the table in the option `path` of the query, as `delta:`
    and its folder, so that a start rolls it back with the stream. Use one `with` statement for each write, and name all
    but one.

    Args:
        write: Name of the write, if the function has several, in any number of tables. Keep it: under another name, a
            repeated batch is written once more.

    Raises:
        OptionError: The function was not called by a streaming query, has such a statement within another, or writes
            twice in one statement or under one name.

    Example:
        >>> def upsert(batch, batch_id):
        ...     from delta.tables import DeltaTable
        ...
        ...     orders = DeltaTable.forPath(batch.sparkSession, "/data/orders")
        ...     with delta_transaction(batch, batch_id):
        ...         merge = orders.alias("old").merge(batch.alias("new"), "old.id = new.id")
        ...         merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        ...     with delta_transaction(batch, batch_id, "large"):
        ...         batch.filter("amount > 1000").write.format("delta").mode("append").save("/data/large")
        >>> def query(spark):
        ...     events = spark.readStream.schema("id long, amount long").json("/data/landing")
        ...     return events.writeStream.foreachBatch(upsert).option("path", "delta:/data/orders")
    """
    session = batch.sparkSession
    query_id = session.sparkContext.getLocalProperty(_QUERY_ID)
    if query_id is None:
        raise OptionError("delta_transaction is for a foreachBatch function, and no streaming query has called this.")
    if session.conf.get(_APP_ID, None) is not None:
        raise OptionError(f"delta_transaction is used within another one, or the session sets {_APP_ID} itself.")
    done = f"{_DONE}{write}"
    if session.conf.get(done, None) == str(batch_id):
        raise OptionError(
            f"Batch {batch_id} has written in delta_transaction{f' as {write!r}' if write else ''} already, and Delta "
            f"would drop what it writes now. {_NAME_IT}"
        )
    settings = {_APP_ID: app_id_of(query_id, write), _VERSION: str(batch_id), _ONE_WRITE: "true"}
    for key, value in settings.items():
        session.conf.set(key, value)
    try:
        yield
    except Exception as error:
        if _APP_ID in str(error) and _VERSION in str(error):
            raise OptionError(
                f"Batch {batch_id} writes more than once in one delta_transaction: nothing of the second command was "
                f"written. {_NAME_IT} Put a loop that tries a command again around the with statement."
            ) from error
        raise
    finally:
        for key in settings:
            session.conf.unset(key)
    session.conf.set(done, str(batch_id))


def _obstacle(found: DeltaPlan, to: RollBack, table: str) -> Obstacle | None:
    goes_on_without = found.version is not None and (to.accepts_loss or to.in_flight)
    if found.undone_by is not None and not goes_on_without:
        return Obstacle(
            SinkEffect.LOSE,
            f"Version {found.undone_by} took the table back to before batch {to.batch_id}, and this stream did not do "
            "it: the rows of batches up to this one would be missing.",
            f"Run: RESTORE TABLE {table} TO VERSION AS OF {found.wanted}. Then start again. To continue without them, "
            "start with accept_loss.",
        )
    if found.deleted:
        return Obstacle(
            SinkEffect.IRREVERSIBLE,
            f"It has to be restored to version {found.version} for batch {to.batch_id}, and {len(found.deleted)} files "
            f"that this version needs were deleted since (VACUUM), such as {', '.join(found.deleted[:_SHOWN])}.",
            "To leave its rows and write the batches again, start with new_query_id.",
            may_stay=True,
        )
    if found.reaches_back:
        return None
    return Obstacle(
        SinkEffect.LOSE,
        "The table remembers batches by number and query id, but older commits are only in Parquet checkpoints of its "
        "log: the version to restore is unknown.",
        "RESTORE it to the version of the batch, and start with new_query_id."
        if to.batch_id >= 0
        else f"If all its rows are of this stream, run: DELETE FROM {table}. Then start again. To leave its rows, "
        "start with accept_loss.",
    )
