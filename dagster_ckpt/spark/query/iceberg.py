"""Iceberg tables through a session's catalogs: what a source would read next, and changes of an examined table.

The catalog refuses a commit that was made from metadata that is no longer current (a Hadoop table by the name
of the next version, JDBC and Hive by a conditional update, REST by `assert-ref-snapshot-id`), so a change
decided on older metadata fails. Iceberg's own procedures repeat it on the newest metadata; they are not used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.output import is_iceberg, load_table
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.untrusted import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TABLE = "org.apache.iceberg.spark.source."
# Offset of a source of an empty table.
_BEFORE_THE_FIRST = -1


@dataclass(frozen=True)
class IcebergOffset:
    """Where an Iceberg source continues (`StreamingOffset`): the snapshot that is read, in part or as a whole."""

    snapshot_id: int


def iceberg_offset(text: str | None) -> IcebergOffset | None:
    """Parse the offset of a source; None if it is not one of Iceberg."""
    try:
        found = from_json(text or "")
        return IcebergOffset(int(found["snapshot_id"])) if "position" in found else None
    except (KeyError, TypeError, ValueError):
        return None


def iceberg_table(leaf: Any) -> Any | None:
    """The `org.apache.iceberg.Table` that a node of a plan reads; None for another source."""
    if str(leaf.getClass().getSimpleName()) != "StreamingRelationV2":
        return None
    table = leaf.table()
    return table.table() if str(table.getClass().getName()).startswith(_TABLE) else None


def iceberg_sources(writer: DataStreamWriter) -> list[Any | None]:
    """The Iceberg tables of a described query in the order of its offset log; None for other sources."""
    return [iceberg_table(leaf) for leaf in streaming_leaves(writer)]


def expired_from(writer: DataStreamWriter, table: Any, offset: IcebergOffset) -> list[str]:
    """What an Iceberg source of a described query would read next and no longer has."""
    if offset.snapshot_id == _BEFORE_THE_FIRST:
        return []
    jvm: Any = session_of(writer)._jvm
    try:
        table.refresh()
        name, current = str(table.name()), table.currentSnapshot()
        util = jvm.org.apache.iceberg.util.SnapshotUtil
        if current is not None and bool(util.isAncestorOf(table, current.snapshotId(), offset.snapshot_id)):
            return []
        known = {int(each.snapshotId()) for each in table.snapshots()}
    except Exception as error:  # py4j raises what the catalog raises
        raise StorageAccessError(
            f"An Iceberg table does not say which snapshots it has: {without_secrets(str(error))[:300]}"
        ) from error
    why = (
        "is no longer part of its history: the table was rolled back or replaced"
        if offset.snapshot_id in known
        else "does not exist any more (expire_snapshots), or the table was created again"
    )
    return [f"The Iceberg table {name}: the query continues at snapshot {offset.snapshot_id}, which {why}."]


_MAIN = "main"
# The catalog has other metadata, or does not know: examine the table again.
_TO_EXAMINE_AGAIN = ("CommitFailedException", "CommitStateUnknownException", "ValidationException")


class OpenIcebergTable:
    """A table as its catalog had it when it was opened."""

    def __init__(self, jvm: Any, table: Any) -> None:
        self._jvm = jvm
        self._table = table
        self.name = str(table.name())
        self.location = str(table.location())
        table.refresh()
        self._base = table.operations().current()

    @classmethod
    def find(cls, session: SparkSession, name: str) -> Self | None:
        """Open a table by its name in a catalog (`lake.db.orders`) or its folder; None if there is none."""
        with _asking(name):
            table = _table_in_folder(session, name) if "/" in name else _table_of_catalog(session, name)
            return cls(session._jvm, table) if table is not None else None

    @property
    def metadata(self) -> str:
        """Its metadata when it was opened, as JSON."""
        with _asking(self.name):
            return str(self._jvm.org.apache.iceberg.TableMetadataParser.toJson(self._base))

    def make_current(self, snapshot_id: int) -> bool:
        """Make a snapshot current; False if the table changed since it was opened."""
        with _asking(self.name):
            return self._move(self._base, snapshot_id)

    def delete_rows(self, mark: str) -> bool:
        """Delete all rows, with `mark` in the snapshot's summary; False if the table changed since it was opened."""
        with _asking(self.name):
            staged = str(uuid.uuid4())
            everything = self._jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
            delete = self._table.newDelete().deleteFromRowFilter(everything)
            # Staged first: a deletion would commit on metadata newer than ours.
            delete.set(mark, staged).stageOnly().commit()
            self._table.refresh()
            base = self._table.operations().current()
            for snapshot in base.snapshots():
                if snapshot.summary().get(mark) == staged:
                    is_child = snapshot.parentId() == self.current_id == _id_of(base.currentSnapshot())
                    return is_child and self._move(base, snapshot.snapshotId())
            return False

    def add_fence(self, mark: str) -> None:
        """Commit an empty snapshot with `mark` in its summary, so that earlier decisions fail."""
        with _asking(self.name):
            self._table.newFastAppend().set(mark, str(uuid.uuid4())).commit()

    @property
    def current_id(self) -> int | None:
        """Id of the current snapshot when it was opened; None if the table had none."""
        return _id_of(self._base.currentSnapshot())

    def _move(self, base: Any, snapshot_id: int) -> bool:
        updated = self._jvm.org.apache.iceberg.TableMetadata.buildFrom(base).setBranchSnapshot(snapshot_id, _MAIN)
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
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield
    except (TypeError, AttributeError) as error:
        # To py4j, a class that the JVM lacks is a package.
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
