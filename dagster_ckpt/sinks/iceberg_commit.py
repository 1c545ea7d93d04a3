"""Iceberg tables through a session's catalogs: find one, read its metadata, and change it only if nobody else has.

A catalog refuses a commit made from metadata that is no longer current: a Hadoop table by the name of the next version,
a JDBC or Hive catalog by a conditional update, a REST catalog by the requirement `assert-ref-snapshot-id`. Iceberg's
own procedures retry on the newest metadata, so they are not used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.query.output import is_iceberg, load_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAIN = "main"
# Other metadata, or no answer which.
_TO_EXAMINE_AGAIN = ("CommitFailedException", "CommitStateUnknownException", "ValidationException")


class OpenIcebergTable:
    """As its catalog had it when it was opened."""

    def __init__(self, jvm: Any, table: Any) -> None:
        self._jvm = jvm
        self._table = table
        self.name = str(table.name())
        self.location = str(table.location())
        table.refresh()
        self._base = table.operations().current()

    @classmethod
    def find(cls, session: SparkSession, name: str) -> Self | None:
        """By its name in a catalog, such as `lake.db.orders`, or its folder.

        Raises:
            StorageAccessError: The session lacks Iceberg or this catalog, or the catalog does not answer.
        """
        with _asking(name):
            table = _table_in_folder(session, name) if "/" in name else _table_of_catalog(session, name)
            return cls(session._jvm, table) if table is not None else None

    @property
    def metadata(self) -> str:
        """As JSON, when opened."""
        with _asking(self.name):
            return str(self._jvm.org.apache.iceberg.TableMetadataParser.toJson(self._base))

    def make_current(self, snapshot_id: int) -> bool:
        """False if the table changed since it was opened."""
        with _asking(self.name):
            return self._move(self._base, snapshot_id)

    def delete_rows(self, mark: str) -> bool:
        """False if the table changed since it was opened."""
        with _asking(self.name):
            staged = str(uuid.uuid4())
            everything = self._jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
            delete = self._table.newDelete().deleteFromRowFilter(everything)
            # Unstaged, it would commit on the newest metadata.
            delete.set(mark, staged).stageOnly().commit()
            self._table.refresh()
            base = self._table.operations().current()
            for snapshot in base.snapshots():
                if snapshot.summary().get(mark) == staged:
                    is_child = snapshot.parentId() == self.current_id == _id_of(base.currentSnapshot())
                    return is_child and self._move(base, snapshot.snapshotId())
            return False

    def add_fence(self, mark: str) -> None:
        """Commit an empty snapshot with `mark` in its summary: earlier decisions can no longer be committed."""
        with _asking(self.name):
            self._table.newFastAppend().set(mark, str(uuid.uuid4())).commit()

    @property
    def current_id(self) -> int | None:
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
