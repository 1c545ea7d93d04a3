"""Tables of a catalog as sinks: `to_table`, and the names under which such sinks are recorded.

Spark reports an Iceberg table by its name in the catalog, as it does with many other kinds of table. The
package asks for the table itself and records `IcebergTable[<name> at <location>]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import OptionTypeError
from dagster_ckpt.spark.query.session import active_in_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TABLE = "_dagster_ckpt_table"
_ICEBERG = "org.apache.iceberg.spark.source."
_DELTA = "org.apache.spark.sql.delta.catalog.DeltaTableV2"


def to_table(writer: DataStreamWriter, table: str) -> DataStreamWriter:
    """Let a described query write to a table of a catalog, as `DataStreamWriter.toTable` does.

    Spark's `toTable` starts the query at once. Here the query is only described, and starts once its
    checkpoint location is known. As with Spark, a table that does not exist is created.

    Args:
        writer: The result of `DataFrame.writeStream`, not started.
        table: Name of the table, such as `lake.db.orders`.

    Returns:
        The writer.

    Raises:
        OptionTypeError: The name is not a string, or is empty.

    Example:
        >>> def orders(spark):
        ...     events = spark.readStream.schema("shop long").json("/data/landing")
        ...     return to_table(events.writeStream, "lake.db.orders")
    """
    if not isinstance(table, str) or not table.strip():
        raise OptionTypeError(f"table is {table!r}, but must be the name of a table, such as lake.db.orders.")
    setattr(writer, _TABLE, table)
    return writer


def table_of(writer: DataStreamWriter) -> str | None:
    """The table that `to_table` named, or None."""
    named: str | None = getattr(writer, _TABLE, None)
    return named


def iceberg_name(table: str, location: str | None = None) -> str:
    """The recorded name of an Iceberg table.

    Args:
        table: Its name in a catalog, or its folder.
        location: Its folder; None if unknown.
    """
    if location is None or "/" in table:
        return f"IcebergTable[{table}]"
    return f"IcebergTable[{table} at {location}]"


def load_table(session: SparkSession, name: str) -> Any | None:
    """One of Spark's tables, as a py4j object; None if the catalog has no such table.

    Args:
        session: A classic session.
        name: The name, with its catalog and namespace or in the current ones, as SQL has it. Or Iceberg's name of
            a table: catalog, namespace and table, without the quotes that SQL may need.
    """
    # Imported here, because reading live directories does not require Spark.
    from pyspark.errors import ParseException  # noqa: PLC0415

    state: Any = session._jsparkSession.sessionState()
    catalogs = state.catalogManager()
    wrong: ParseException | None = None
    found = None
    try:
        parsed = state.sqlParser().parseMultipartIdentifier(name)
        parts = [str(parsed.apply(index)) for index in range(parsed.size())]
        if len(parts) > 1 and catalogs.isCatalogRegistered(parts[0]):
            found = _table_in(session, catalogs.catalog(parts[0]), parts[1:])
        else:
            within = [str(part) for part in catalogs.currentNamespace()] if len(parts) == 1 else []
            found = _table_in(session, catalogs.currentCatalog(), [*within, *parts])
    except ParseException as error:
        wrong = error
    if found is not None:
        return found
    first = name.partition(".")[0]
    if "`" not in name and catalogs.isCatalogRegistered(first):
        catalog = catalogs.catalog(first)
        unquoted = (_table_in(session, catalog, parts) for parts in divisions(name.split(".")[1:]))
        named = [table for table in unquoted if table is not None and str(table.name()) == name]
        if len(named) == 1:
            return named[0]
    if wrong is not None:
        raise wrong
    return None


def divisions(parts: Sequence[str]) -> list[list[str]]:
    """The identifiers that a name may stand for whose parts may contain dots themselves.

    Example:
        >>> divisions(["sales", "eu", "orders"])
        [['sales', 'eu', 'orders'], ['sales', 'eu.orders'], ['sales.eu', 'orders'], ['sales.eu.orders']]
    """
    if len(parts) < 2:
        return [list(parts)]
    rest = divisions(parts[1:])
    apart = [[parts[0], *each] for each in rest]
    return [*apart, *([f"{parts[0]}.{each[0]}", *each[1:]] for each in rest)]


def _table_in(session: SparkSession, catalog: Any, parts: Sequence[str]) -> Any | None:
    jvm: Any = session._jvm
    namespace = session.sparkContext._gateway.new_array(jvm.java.lang.String, len(parts) - 1)  # type: ignore[union-attr]
    for index, part in enumerate(parts[:-1]):
        namespace[index] = part
    found = jvm.org.apache.spark.sql.connector.catalog.Identifier.of(namespace, parts[-1])
    return catalog.loadTable(found) if catalog.tableExists(found) else None


def is_iceberg(table: Any) -> bool:
    """Whether one of Spark's tables is an Iceberg table."""
    return str(table.getClass().getName()).startswith(_ICEBERG)


def sink_of(table: Any) -> str | None:
    """The recorded name of the sink behind one of Spark's tables; None for a kind of table that has none."""
    if is_iceberg(table):
        return iceberg_name(str(table.table().name()), str(table.table().location()))
    if str(table.getClass().getName()) == _DELTA:
        return f"DeltaSink[{table.path()}]"
    return None


def sink_of_name(session: SparkSession, table: str) -> str | None:
    """The recorded name of the sink behind a table; None if it does not exist yet, or cannot be looked up.

    Args:
        session: The session in which the query was described.
        table: The table, as the query names it.
    """
    # Imported here, because reading live directories does not require Spark.
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        with active_in_thread(session):
            found = load_table(session, table)
        return sink_of(found) if found is not None else None
    except (Py4JError, PySparkException):
        # The query itself reports what is wrong with the name when it starts.
        return None
