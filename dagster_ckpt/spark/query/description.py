"""Inspect described queries, which are not started yet: trigger, session, options, and execution plan as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_ckpt.values.modes import TimeCharacteristic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def with_time(frame: DataFrame, characteristic: TimeCharacteristic, column: str, delay: str) -> DataFrame:
    """Add the time column that a stream's windows and timers use.

    Ingestion and processing time are `current_timestamp()`: one time per batch, which Spark writes to the offset log,
    so a replayed batch has the same time. Processing time has no watermark.
    """
    from pyspark.sql import functions as F

    if characteristic is TimeCharacteristic.EventTime:
        return frame.withWatermark(column, delay)
    stamped = frame.withColumn(column, F.current_timestamp())
    return stamped if characteristic is TimeCharacteristic.ProcessingTime else stamped.withWatermark(column, delay)


def quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


_NO_TRIGGER = "ProcessingTimeTrigger(0)"
_SINK, _SOURCE, _OPERATOR = "Data Sink", "Data Source", "Operator"

_Node = dict[str, Any]
_Seen = TypeVar("_Seen")


class QueryToStart:
    """A query that is described when needed, and again for each further start."""

    def __init__(self, describe: Callable[[], DataStreamWriter]) -> None:
        self._describe = describe
        self._writer: DataStreamWriter | None = None

    def described(self) -> DataStreamWriter:
        if self._writer is None:
            self._writer = self._describe()
        return self._writer

    def take(self) -> DataStreamWriter:
        writer, self._writer = self.described(), None
        return writer


def is_described_query(candidate: object) -> bool:
    """Whether this is a classic session's `DataFrame.writeStream`; Spark Connect's cannot be inspected."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter as ClassicWriter

    return isinstance(candidate, ClassicWriter)


def read_leaves(writer: DataStreamWriter) -> list[Any]:
    if not is_described_query(writer):
        return []
    leaves = items_of(writer._df._jdf.queryExecution().analyzed().collectLeaves())
    return [leaf for leaf in leaves if bool(leaf.isStreaming())]


def streaming_leaves(writer: DataStreamWriter) -> list[Any]:
    """Return the sources of a query: Spark makes one of relations that are equal."""
    found: list[Any] = []
    for leaf in read_leaves(writer):
        found += [] if any(leaf.equals(each) for each in found) else [leaf]
    return found


def session_of(writer: DataStreamWriter) -> SparkSession:
    of_connect: SparkSession | None = getattr(writer, "_session", None)
    return of_connect if of_connect is not None else writer._df.sparkSession


def same_session(one: SparkSession, other: SparkSession) -> bool:
    return bool(one._jsparkSession.equals(other._jsparkSession))


def brings_a_trigger(writer: DataStreamWriter) -> bool:
    return str(described_field(writer._jwrite, "trigger").toString()) != _NO_TRIGGER


def execution_plan(writers: Mapping[str, DataStreamWriter], parallelism: int) -> str:
    """Return the plan of described queries as JSON in the form of Flink's execution plans.

    `{"nodes": [...]}`: each node has `id`, `type`, `pact` (Data Source, Operator, Data Sink), `contents`,
    `parallelism`, and `predecessors` with the `id` of each. Sinks have their query's name in `contents`.
    """
    nodes: list[_Node] = []
    for name, writer in writers.items():
        top = _add_plan(nodes, writer._df._jdf.queryExecution().analyzed(), parallelism)
        sink = str(described_field(writer._jwrite, "source"))
        nodes.append(_node(len(nodes) + 1, f"Sink: {sink}", name, parallelism) | {"pact": _SINK, "predecessors": [top]})
    return json.dumps({"nodes": nodes}, indent=2)


def _add_plan(nodes: list[_Node], plan: Any, parallelism: int) -> _Node:
    below = [_add_plan(nodes, child, parallelism) for child in items_of(plan.children())]
    number, name = len(nodes) + 1, str(plan.nodeName())
    node = _node(number, name if below else f"Source: {name}", str(plan.simpleString(100)), parallelism)
    nodes.append(node | ({"pact": _OPERATOR, "predecessors": below} if below else {"pact": _SOURCE}))
    return {"id": number}


def _node(number: int, label: str, contents: str, parallelism: int) -> _Node:
    return {"id": number, "type": label, "contents": contents, "parallelism": parallelism}


def described_field(described: Any, name: str) -> Any:
    field = described.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(described)


def described_options(writer: DataStreamWriter) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in pairs_of(described_field(writer._jwrite, "extraOptions"))}


def execution_of(query: StreamingQuery) -> Any | None:
    jvm_query: Any = getattr(query, "_jsq", None)
    return jvm_query.streamingQuery() if jvm_query is not None else None


def seen_in(query: StreamingQuery, look: Callable[[Any], _Seen]) -> _Seen | None:
    """Look into the query's `StreamExecution`; None if that fails, which must not end the query."""
    from py4j.protocol import Py4JError

    try:
        execution = execution_of(query)
        return look(execution) if execution is not None else None
    except Py4JError:
        return None


def items_of(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def pairs_of(scala_map: Any) -> Iterator[tuple[Any, Any]]:
    pairs = scala_map.iterator()
    while pairs.hasNext():
        pair = pairs.next()
        yield pair._1(), pair._2()
