"""Commits to a Delta table that fail if it is no longer at the version on which they were decided.

SQL's `RESTORE` reads the newest version when it begins: a process paused before it would undo a successor's commits.
`commitLarge`, with the actions of `RestoreTableCommand`, writes the version after the one decided on, or fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import SinkRollbackError
from dagster_ckpt.sinks.table import VersionTakenError
from dagster_ckpt.spark.query.description import items_of, pairs_of
from dagster_ckpt.spark.query.session import active_in_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROLL_BACK_ID = "dagster_ckpt roll-back"
_NAME_FOLLOWS = "/"
_KEY = "dagster_ckpt_key"
_ADD = "dagster_ckpt_add"
_MISSING_SHOWN = 5
_NEVER = 2**63 - 1
_DIGITS = len(str(_NEVER))


def app_id_of(query_id: str, write: str = "") -> str:
    return f"{query_id}{_NAME_FOLLOWS}{write}" if write else query_id


def query_of(app_id: str) -> str:
    return app_id.partition(_NAME_FOLLOWS)[0]


class UnknownDeltaError(SinkRollbackError):
    """The session's Delta library lacks an interface; the table is unchanged."""


def restore_version(session: SparkSession, folder: str, version: int, *, decided_on: int) -> None:
    """Commit the rows of a version (-1: none) as the version after `decided_on`.

    Raises:
        VersionTakenError: Another commit has that version.
        SinkRollbackError: Data files of the version to restore were deleted.
    """
    with _Table.opened(session, folder, decided_on) as table:
        newest = table.snapshot(decided_on)
        transaction = table.transaction(newest)
        if version < 0:
            emptied = [table.roll_back_mark(decided_on), *table.removals(table.files(newest))]
            table.commit(transaction, emptied, table.operation("Truncate"))
            return
        wanted = table.snapshot(version)
        kept, there = table.files(wanted), table.files(newest)
        actions = [
            table.roll_back_mark(decided_on),
            *table.additions(kept.join(there, _KEY, "left_anti"), version),
            *table.removals(there.join(kept, _KEY, "left_anti")),
            *table.domains(wanted, newest),
        ]
        transaction.updateMetadata(table.metadata(wanted, newest), False)
        restore = table.operation("Restore", table.some(version), table.none())
        table.commit(transaction, actions, restore, table.some(table.protocol(wanted, newest)))


def record_roll_back(session: SparkSession, folder: str, *, decided_on: int) -> None:
    """Commit nothing but a mark, so that roll-backs decided on earlier versions fail."""
    with _Table.opened(session, folder, decided_on) as table:
        record = [table.roll_back_mark(decided_on)]
        table.commit(table.transaction(table.snapshot(decided_on)), record, table.manual_update())


def newest_transaction(session: SparkSession, folder: str, query_id: str) -> int | None:
    """Return the newest batch of a query, also from checkpoints of the log."""
    with _Table.opened(session, folder, _NEVER) as table:
        batches = (batch for app_id, batch in table.transactions() if query_of(app_id) == query_id)
        return max(batches, default=None)


def table_id(session: SparkSession, folder: str) -> str:
    with _Table.opened(session, folder, _NEVER) as table:
        return str(table.current().metadata().id())


def last_of_read(session: SparkSession, folder: str, version: int, unread: Sequence[str]) -> int | None:
    """Return the index of the last file before the `unread` ones, for a source that reads a version as a whole.

    It reads files by time, then name (`DeltaSourceSnapshot`). None if the `unread` ones are not the last.
    """
    from pyspark.sql import functions as F

    with _Table.opened(session, folder, version) as table:
        files = table.ordered(version)
        ahead = files.filter(F.col("path").isin(list(unread)))
        found = ahead.agg(F.count("*").alias("files"), F.min(_KEY).alias("first")).first()
        if found is None or found.files != len(unread):
            return None
        last = files.filter(F.col(_KEY) >= F.lit(found.first)).count()
        return int(files.count()) - last - 1 if last == len(unread) else None


def last_of_part(session: SparkSession, folder: str, version: int, was: int, index: int) -> int | None:
    """Return `index` if `version` begins with the files that a source has read of version `was`."""
    from pyspark.sql import functions as F

    with _Table.opened(session, folder, version) as table:
        read = table.ordered(was).orderBy(_KEY).limit(index + 1)
        last = read.agg(F.max(_KEY).alias("last")).first()
        if index < 0 or last is None or last.last is None:
            return index if index < 0 else None
        begins = table.ordered(version).filter(F.col(_KEY) <= F.lit(last.last))
        is_same = begins.count() == index + 1 and begins.join(read, _KEY).count() == index + 1
        return index if is_same else None


class _Table:
    def __init__(self, session: SparkSession, folder: str) -> None:
        self._session = session
        jvm: Any = session._jvm
        self._jvm = jvm
        self.delta = jvm.org.apache.spark.sql.delta
        self._log = self.delta.DeltaLog.forTable(session._jsparkSession, folder)

    @classmethod
    @contextmanager
    def opened(cls, session: SparkSession, folder: str, decided_on: int) -> Iterator[_Table]:
        from py4j.protocol import Py4JError, Py4JJavaError
        from pyspark.errors import PySparkException

        table = None
        with active_in_thread(session):
            try:
                table = cls(session, folder)
                yield table
            except (Py4JJavaError, PySparkException) as error:
                if table is not None and table.newest_version() > decided_on:
                    raise VersionTakenError(folder) from error
                raise
            except (Py4JError, TypeError, AttributeError) as error:
                raise UnknownDeltaError(
                    f"The Delta table {folder} cannot be rolled back: the Delta library of this session lacks an "
                    f"interface that a conditional commit needs ({error}). The table is unchanged."
                ) from error

    def current(self) -> Any:
        return _with_defaults(self._log, "update")

    def transactions(self) -> Iterator[tuple[str, int]]:
        return ((str(app_id), int(batch)) for app_id, batch in pairs_of(self.current().transactions()))

    def newest_version(self) -> int:
        return int(self.current().version())

    def snapshot(self, version: int) -> Any:
        return _with_defaults(self._log, "getSnapshotAt", version)

    def transaction(self, newest: Any) -> Any:
        return self._log.startTransaction(self.none(), self.some(newest))

    def files(self, snapshot: Any) -> DataFrame:
        from pyspark.sql import functions as F

        key = F.concat_ws("|", "path", F.to_json("deletionVector"))
        return self._all_files(snapshot).select(key.alias(_KEY), F.to_json(F.struct("*")).alias(_ADD))

    def ordered(self, version: int) -> DataFrame:
        from pyspark.sql import functions as F

        time = F.lpad(F.col("modificationTime").cast("string"), _DIGITS, "0")
        files = self._all_files(self.snapshot(version))
        return files.select("path", F.concat(time, F.lit(" "), "path").alias(_KEY))

    def _all_files(self, snapshot: Any) -> DataFrame:
        of_session: Any = type(self._session.range(0))
        files: DataFrame = of_session(snapshot.allFiles().toDF(), self._session)
        return files

    def additions(self, files: DataFrame, version: int) -> list[Any]:
        found = self._add_actions(files)
        missing = [str(each.path()) for each in found if not self._is_whole(each)]
        if missing:
            raise SinkRollbackError(
                f"Version {version} of the Delta table cannot be restored: {len(missing)} of its data files were "
                f"deleted since (VACUUM?), such as {', '.join(missing[:_MISSING_SHOWN])}. The table is unchanged. "
                "Bring them back, then start again."
            )
        return found

    def roll_back_mark(self, decided_on: int) -> Any:
        return self.delta.actions.SetTransaction(ROLL_BACK_ID, decided_on, self.none())

    def removals(self, files: DataFrame) -> list[Any]:
        return [_with_defaults(each, "removeWithTimestamp") for each in self._add_actions(files)]

    def _add_actions(self, files: DataFrame) -> list[Any]:
        found = (json.loads(row[_ADD]) for row in files.collect())
        parse = self.delta.actions.Action.fromJson
        return [parse(json.dumps({"add": {**add, "dataChange": True}})) for add in found]

    def _is_whole(self, add: Any) -> bool:
        """Whether all parts exist: VACUUM deletes old deletion vectors of files still in use."""
        root, vector = self._log.dataPath(), add.deletionVector()
        places = [self.delta.util.DeltaFileOperations.absolutePath(root.toString(), str(add.path()))]
        if vector is not None and vector.isOnDisk():
            places.append(vector.absolutePath(root))
        return all(each.getFileSystem(self._log.newDeltaHadoopConf()).exists(each) for each in places)

    def domains(self, wanted: Any, newest: Any) -> Iterable[Any]:
        return items_of(self.delta.DomainMetadataUtils.handleDomainMetadataForRestoreTable(wanted, newest))

    def metadata(self, wanted: Any, newest: Any) -> Any:
        """Identity columns are not restored, so that no value is issued twice."""
        to, now = wanted.metadata(), newest.metadata()
        merge = self.delta.IdentityColumn.copySchemaWithMergedHighWaterMarks
        schema = merge(self._log, to.schema(), now.schema()).json()
        # As JSON: the parameters of the class differ between versions of Delta.
        text = json.loads(to.json())
        text["metaData"]["schemaString"] = schema
        return self.delta.actions.Action.fromJson(json.dumps(text))

    def protocol(self, wanted: Any, newest: Any) -> Any:
        """Keep features of both, without which their files could not be read."""
        others = self._scala([newest.protocol()]).toList()
        return wanted.protocol().merge(others)

    def some(self, value: Any) -> Any:
        return self._jvm.scala.Some(value)

    def none(self) -> Any:
        return self._jvm.scala.Option.empty()

    def operation(self, name: str, *arguments: Any) -> Any:
        return getattr(self.delta, f"DeltaOperations${name}")(*arguments)

    def manual_update(self) -> Any:
        return getattr(getattr(self.delta, "DeltaOperations$ManualUpdate$"), "MODULE$")

    def commit(self, transaction: Any, actions: Iterable[Any], operation: Any, protocol: Any = None) -> None:
        nothing = self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
        protocol = self.none() if protocol is None else protocol
        session = self._session._jsparkSession
        transaction.commitLarge(session, self._scala(actions), protocol, operation, nothing, nothing)

    def _scala(self, objects: Iterable[Any]) -> Any:
        listed = self._jvm.java.util.ArrayList()
        for each in objects:
            listed.add(each)
        return self._jvm.scala.collection.JavaConverters.asScalaIteratorConverter(listed.iterator()).asScala()


def _with_defaults(target: Any, method: str, *given: object) -> Any:
    """Call a Scala method with its default values, whose number differs between versions."""
    from py4j.protocol import Py4JError, Py4JJavaError

    arguments = list(given)
    while True:
        try:
            arguments.append(getattr(target, f"{method}$default${len(arguments) + 1}")())
        except Py4JJavaError:
            raise
        except Py4JError:
            return getattr(target, method)(*arguments)
