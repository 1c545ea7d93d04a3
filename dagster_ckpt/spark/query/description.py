"""Described queries, which are not started yet: trigger, session, output, and execution plan as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.query.kafka_output import kafka_place, kafka_sink_name
from dagster_ckpt.spark.query.table_names import iceberg_name, sink_of, sink_of_name, table_of
from dagster_ckpt.values.modes import TimeCharacteristic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def with_time(frame: DataFrame, characteristic: TimeCharacteristic, column: str, delay: str) -> DataFrame:
    """Add the time column that a stream's windows and timers use.

    Ingestion and processing time are Spark's `current_timestamp()`: one time per batch, which Spark
    writes to the offset log, so that a replayed batch has the same time.

    Args:
        frame: The stream, as read from its source.
        characteristic: Event time uses the existing column; the others replace it.
        column: Name of the column.
        delay: How late rows may be, such as "10 minutes". Processing time has no late rows, and no
            watermark.
    """
    # Imported here, because reading live directories does not require Spark.
    from pyspark.sql import functions as F  # noqa: PLC0415

    if characteristic is TimeCharacteristic.EventTime:
        return frame.withWatermark(column, delay)
    stamped = frame.withColumn(column, F.current_timestamp())
    return stamped if characteristic is TimeCharacteristic.ProcessingTime else stamped.withWatermark(column, delay)


# The trigger of a writer for which none was set (`org.apache.spark.sql.classic.DataStreamWriter`).
_NO_TRIGGER = "ProcessingTimeTrigger(0)"
_SINK, _SOURCE, _OPERATOR = "Data Sink", "Data Source", "Operator"

_Node = dict[str, Any]


class QueryToStart:
    """A query that is described lazily, and again for each further start.

    Args:
        describe: Returns the described query.
    """

    def __init__(self, describe: Callable[[], DataStreamWriter]) -> None:
        self._describe = describe
        self._writer: DataStreamWriter | None = None

    def described(self) -> DataStreamWriter:
        """The description that the next start will use."""
        if self._writer is None:
            self._writer = self._describe()
        return self._writer

    def take(self) -> DataStreamWriter:
        """Return the description for a start."""
        writer, self._writer = self.described(), None
        return writer


def is_described_query(candidate: object) -> bool:
    """Whether this is the result of `DataFrame.writeStream` in a classic session; Connect's cannot be inspected."""
    # Imported here, because reading live directories does not require Spark.
    from pyspark.sql.streaming.readwriter import DataStreamWriter as ClassicWriter  # noqa: PLC0415

    return isinstance(candidate, ClassicWriter)


def streaming_leaves(writer: DataStreamWriter) -> list[Any]:
    """The plan's node of each source of a described query, in the order of its offset log.

    Empty if the query cannot be inspected (Spark Connect).
    """
    if not is_described_query(writer):
        return []
    leaves = writer._df._jdf.queryExecution().analyzed().collectLeaves()
    found: list[Any] = []
    for leaf in (leaves.apply(index) for index in range(leaves.size())):
        # A relation that is read twice is one source.
        if bool(leaf.isStreaming()) and not any(leaf.equals(each) for each in found):
            found.append(leaf)
    return found


def session_of(writer: DataStreamWriter) -> SparkSession:
    """The session in which a query was described, and in which it will start."""
    return writer._df.sparkSession


def same_session(one: SparkSession, other: SparkSession) -> bool:
    """Whether two handles refer to one session, with one set of settings."""
    return bool(one._jsparkSession.equals(other._jsparkSession))


def brings_a_trigger(writer: DataStreamWriter) -> bool:
    """Whether a query was described with an explicit trigger."""
    return str(described_field(writer._jwrite, "trigger").toString()) != _NO_TRIGGER


def execution_plan(writers: Mapping[str, DataStreamWriter], parallelism: int) -> str:
    """Return the plans of queries that are not started, as JSON in the form of Flink's execution plans.

    Args:
        writers: The queries, by name.
        parallelism: The parallelism to show for each operator.

    Returns:
        `{"nodes": [...]}`: each node with `id`, `type`, `pact` (Data Source, Operator, Data Sink),
        `contents`,
        `parallelism`, and `predecessors` with the `id` of each. Sinks have their query's name in
        `contents`.
    """
    nodes: list[_Node] = []
    for name, writer in writers.items():
        top = _add_plan(nodes, writer._df._jdf.queryExecution().analyzed(), parallelism)
        sink = str(described_field(writer._jwrite, "source"))
        nodes.append(_node(len(nodes) + 1, f"Sink: {sink}", name, parallelism) | {"pact": _SINK, "predecessors": [top]})
    return json.dumps({"nodes": nodes}, indent=2)


def _add_plan(nodes: list[_Node], plan: Any, parallelism: int) -> _Node:
    """Add the nodes of a logical plan, and return a reference to its root."""
    children = plan.children()
    below = [_add_plan(nodes, children.apply(index), parallelism) for index in range(children.size())]
    number, name = len(nodes) + 1, str(plan.nodeName())
    node = _node(number, name if below else f"Source: {name}", str(plan.simpleString(100)), parallelism)
    nodes.append(node | ({"pact": _OPERATOR, "predecessors": below} if below else {"pact": _SOURCE}))
    return {"id": number}


def _node(number: int, label: str, contents: str, parallelism: int) -> _Node:
    return {"id": number, "type": label, "contents": contents, "parallelism": parallelism}


def described_field(described: Any, name: str) -> Any:
    """A field of the JVM's description of a query that has no public getter.

    Args:
        described: An `org.apache.spark.sql.classic.DataStreamWriter`, as a py4j object.
        name: Name of the field.
    """
    field = described.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(described)


# Spark's format for `foreachBatch`, and its name for every such sink.
FOREACH_BATCH = "foreachbatch"
_FOREACH_BATCH_SINK = "ForeachBatchSink"
_ICEBERG = "iceberg"


@dataclass(frozen=True)
class NamedOutput:
    """The output location of a described query.

    Attributes:
        format: Format of its sink, such as `parquet` or `kafka`.
        place: Its folder, topic or table, or None.
        sink: Spark's name for the sink, if it is known already.
    """

    format: str
    place: str | None
    sink: str | None = None

    def is_same(self, other: NamedOutput) -> bool:
        """Whether both write to the same location."""
        if self.place is None or other.place is None or self.format != other.format:
            return False
        return same_folder(self.place, other.place)


def named_output(writer: DataStreamWriter) -> NamedOutput | None:
    """The output location of a described query.

    `foreachBatch` has no location of its own; the option `path` or `table` names it. A table of a
    catalog is looked up in the session of the query.

    Returns:
        None for Spark Connect, whose writer cannot be inspected.

    Raises:
        OptionError: It writes to Kafka in transactions, and an option of these is missing or wrong.
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
    output_format, table = str(described_field(described, "source")).lower(), table_of(writer)
    if table is None and output_format == _ICEBERG and place is not None and "/" not in place:
        table = place
    if table is None:
        return NamedOutput(output_format, place, kafka_sink_name(options) if output_format == "kafka" else None)
    sink = sink_of_name(session_of(writer), table)
    if sink is None and output_format == _ICEBERG:
        # The start creates it.
        sink = iceberg_name(table)
    return NamedOutput(output_format, table if sink is not None else None, sink)


def output_of_started(query: StreamingQuery, described: NamedOutput | None) -> NamedOutput | None:
    """The output of a started query, whose start may have created its table.

    Args:
        query: The query.
        described: Its output before it was started.
    """
    execution: Any = getattr(query, "_jsq", None) and query._jsq.streamingQuery()
    sink = sink_of(execution.sink()) if execution is not None else None
    if sink is None or described is None:
        return described
    return replace(described, sink=sink)


def described_options(writer: DataStreamWriter) -> dict[str, str]:
    """Options of a described query, with names in lower case, as Spark compares them."""
    pairs = described_field(writer._jwrite, "extraOptions").iterator()
    options = {}
    while pairs.hasNext():
        pair = pairs.next()
        options[str(pair._1()).lower()] = str(pair._2())
    return options


def foreach_batch_name(place: str) -> str:
    """The name of a `foreachBatch` sink whose writer says where it writes."""
    return f"{_FOREACH_BATCH_SINK}[{place}]"


def is_foreach_batch(sink: str) -> bool:
    """Whether Spark's name of a sink is that of a function that gets each batch."""
    return sink.startswith(_FOREACH_BATCH_SINK)


def qualified(sink: str, output: NamedOutput | None) -> str:
    """Spark's name for a sink of a query, with the place where the query writes if the name lacks it.

    Args:
        sink: `sink.description` of the query's progress.
        output: Where the query writes; None if unknown.
    """
    if output is not None and output.sink is not None:
        return output.sink
    if sink != _FOREACH_BATCH_SINK or output is None or output.format != FOREACH_BATCH or output.place is None:
        return sink
    return foreach_batch_name(output.place)
