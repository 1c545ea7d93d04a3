"""Where a query writes: its format, folder, topic or table, and the recorded name of its sink.

Spark reports many kinds of table by their catalog name; for Iceberg this package records `IcebergTable[<name> at
<location>]`. The option `kafka.transactional.id` selects Kafka in transactions; with it, Spark's own producer refuses
every record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.query.description import (
    described_field,
    described_options,
    execution_of,
    items_of,
    seen_in,
    session_of,
)
from dagster_ckpt.spark.query.session import active_in_thread
from dagster_ckpt.values.modes import KAFKA_WRITERS, MOST_KAFKA_WRITERS, TRANSACTIONAL_ID

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FOREACH_BATCH = "foreachbatch"
_FOREACH_BATCH_SINK = "ForeachBatchSink"
_ICEBERG = "iceberg"

_SINK_CLASSES = (
    "org.apache.spark.sql.sources.StreamSinkProvider",
    "org.apache.spark.sql.execution.datasources.FileFormat",
    "org.apache.spark.sql.execution.datasources.v2.FileDataSourceV2",
)

Columns = tuple[tuple[str, str], ...]
# Limited, because each snapshot records them.
MOST_COLUMNS = 300


@dataclass(frozen=True)
class NamedOutput:
    """Where a query writes; `of_files`: Spark writes the format with its file sink, as it does third-party ones."""

    format: str
    place: str | None
    sink: str | None = None
    of_files: bool = False

    def is_same(self, other: NamedOutput) -> bool:
        if self.place is None or other.place is None or self.format != other.format:
            return False
        return same_folder(self.place, other.place)


def named_output(writer: DataStreamWriter) -> NamedOutput | None:
    """Return where a described query writes; None for Spark Connect.

    `foreachBatch` has no location of its own: the option `path` or `table` names it. A table of a catalog is looked up
    in the session of the query.
    """
    described: Any = getattr(writer, "_jwrite", None)
    if described is None:
        return None
    options = described_options(writer)
    topic = kafka_place(options)
    if topic is not None:
        return NamedOutput(FOREACH_BATCH, str(topic))
    places = (options.get(name) for name in ("path", "topic", "table"))
    place = next((place for place in places if place is not None), None)
    source, table = str(described_field(described, "source")), table_of(writer)
    output_format = source.lower()
    if table is None and output_format == _ICEBERG and place is not None and "/" not in place:
        table = place
    if table is None:
        sink = kafka_sink_name(options) if output_format == "kafka" else None
        has_format = place is not None and sink is None and output_format != FOREACH_BATCH
        return NamedOutput(output_format, place, sink, of_files=has_format and _is_of_files(session_of(writer), source))
    sink = sink_of_name(session_of(writer), table)
    if sink is None and output_format == _ICEBERG:
        # The start creates the table.
        sink = iceberg_name(table)
    return NamedOutput(output_format, table if sink is not None else None, sink)


def _is_of_files(session: SparkSession, source: str) -> bool:
    """Whether Spark makes a file sink of a format (`DataSource.createSink`)."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    jvm: Any = session._jvm
    try:
        conf = session._jsparkSession.sessionState().conf()
        found = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(source, conf)
        provider, *formats = (jvm.java.lang.Class.forName(each).isAssignableFrom(found) for each in _SINK_CLASSES)
    except (Py4JError, PySparkException):
        # The query's start reports what is wrong with the format.
        return False
    return any(formats) and not provider


def output_of_started(query: StreamingQuery, described: NamedOutput | None) -> NamedOutput | None:
    """Add the recorded name of the sink, whose table the start may have created."""
    execution = execution_of(query)
    sink = sink_of(execution.sink()) if execution is not None else None
    if sink is None or described is None:
        return described
    return replace(described, sink=sink)


def columns_of_query(query: StreamingQuery) -> Columns | None:
    """Return the columns; None over Spark Connect, for `foreachBatch` and wide tables."""
    return seen_in(query, _columns_of)


def _columns_of(execution: Any) -> Columns | None:
    fields = list(execution.analyzedPlan().schema().fields())
    if is_foreach_batch(str(execution.sink().toString())) or len(fields) > MOST_COLUMNS:
        return None
    return tuple((str(each.name()), str(each.dataType().catalogString())) for each in fields)


def foreach_batch_name(place: str) -> str:
    return f"{_FOREACH_BATCH_SINK}[{place}]"


def is_foreach_batch(sink: str) -> bool:
    return sink.startswith(_FOREACH_BATCH_SINK)


def qualified(sink: str, output: NamedOutput | None) -> str:
    if output is not None and output.sink is not None:
        return output.sink
    if sink != _FOREACH_BATCH_SINK or output is None or output.format != FOREACH_BATCH or output.place is None:
        return sink
    return foreach_batch_name(output.place)


_TABLE = "_dagster_ckpt_table"
_ICEBERG_TABLE = "org.apache.iceberg.spark.source."
_DELTA = "org.apache.spark.sql.delta.catalog.DeltaTableV2"


def to_table(writer: DataStreamWriter, table: str) -> DataStreamWriter:
    """Let a described query write to a table of a catalog, as `DataStreamWriter.toTable` does.

    Spark's `toTable` starts the query at once; here it starts once its checkpoint location is known. As with Spark, a
    table that does not exist is created.

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
    named: str | None = getattr(writer, _TABLE, None)
    return named


def iceberg_name(table: str, location: str | None = None) -> str:
    if location is None or "/" in table:
        return f"IcebergTable[{table}]"
    return f"IcebergTable[{table} at {location}]"


def load_table(session: SparkSession, name: str) -> Any | None:
    """Return a table as a py4j object; None if the catalog has no such table.

    `name` is SQL, or Iceberg's name of a table (catalog, namespace and table without quotes).
    """
    from pyspark.errors import ParseException

    state: Any = session._jsparkSession.sessionState()
    catalogs = state.catalogManager()
    wrong: ParseException | None = None
    found = None
    try:
        parts = [str(part) for part in items_of(state.sqlParser().parseMultipartIdentifier(name))]
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
    """Return the identifiers that a name may stand for if its parts may contain dots.

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
    return str(table.getClass().getName()).startswith(_ICEBERG_TABLE)


def is_delta(table: Any) -> bool:
    return str(table.getClass().getName()) == _DELTA


def sink_of(table: Any) -> str | None:
    if is_iceberg(table):
        return iceberg_name(str(table.table().name()), str(table.table().location()))
    if is_delta(table):
        return f"DeltaSink[{table.path()}]"
    return None


def sink_of_name(session: SparkSession, table: str) -> str | None:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with active_in_thread(session):
            found = load_table(session, table)
        return sink_of(found) if found is not None else None
    except (Py4JError, PySparkException):
        # The query's start reports what is wrong with the name.
        return None


_SERVERS = "kafka.bootstrap.servers"
_PREFIX = re.compile(r"[\w.-]+")
_PLACE = re.compile(r"kafka://(?P<servers>[^/]+)/(?P<topic>[^/?]+)\?id=(?P<prefix>[\w.-]+)")


@dataclass(frozen=True)
class KafkaPlace:
    """A topic for transactional writes; `client`, the options below `kafka.`, may contain secrets."""

    servers: str
    topic: str
    prefix: str
    writers: int = 1
    client: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"kafka://{self.servers}/{self.topic}?id={self.prefix}"

    @staticmethod
    def parse(place: str) -> KafkaPlace | None:
        match = _PLACE.fullmatch(place)
        if match is None:
            return None
        servers, topic, prefix = match.groups()
        # Of another place on these servers: better than no credentials at all.
        of_servers = _clients.get((servers,), {"bootstrap.servers": servers})
        return KafkaPlace(servers, topic, prefix, client=_clients.get((servers, topic, prefix), of_servers))


def kafka_sink_name(options: Mapping[str, str]) -> str | None:
    servers, topic = options.get(_SERVERS), options.get("topic")
    return f"KafkaTable[{servers.replace(' ', '')}/{topic}]" if servers and topic else None


# Options by place, and by servers those described last, because the recorded name of a sink has no secrets.
_clients: dict[tuple[str, ...], Mapping[str, str]] = {}


def kafka_place(options: Mapping[str, str]) -> KafkaPlace | None:
    prefix = options.get(TRANSACTIONAL_ID)
    if prefix is None:
        return None
    if not _PREFIX.fullmatch(prefix):
        raise OptionError(f"{TRANSACTIONAL_ID} is {prefix!r}. Use letters, digits, '.', '_' and '-'.")
    servers, topic = options.get(_SERVERS), options.get("topic")
    if not servers or not topic:
        missing = _SERVERS if not servers else "topic"
        raise OptionError(
            f"A query that writes to Kafka in transactions needs the option {missing}. All rows go to one topic; a "
            "column topic names no other."
        )
    writers = options.get(KAFKA_WRITERS, "1")
    if not writers.isdecimal() or not 1 <= int(writers) <= MOST_KAFKA_WRITERS:
        raise OptionError(f"{KAFKA_WRITERS} is {writers!r}. Give a number from 1 to {MOST_KAFKA_WRITERS}.")
    client = {
        name.removeprefix("kafka."): value
        for name, value in options.items()
        if name.startswith("kafka.") and name not in (TRANSACTIONAL_ID, KAFKA_WRITERS)
    }
    servers = servers.replace(" ", "")
    _clients[(servers,)] = _clients[servers, topic, prefix] = client
    return KafkaPlace(servers, topic, prefix, int(writers), client)
