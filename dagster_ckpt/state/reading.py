"""Read the state of every operator as Spark DataFrames (sources `state-metadata` and `statestore`).

https://spark.apache.org/docs/latest/streaming/structured-streaming-state-data-source.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import STATE_FORMAT, read_commit_entry
from dagster_ckpt.spark.checkpoint_dir.operators import JOIN
from dagster_ckpt.spark.query.description import quoted
from dagster_ckpt.spark.versions import Feature, SparkRelease, release_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.types import DataType

KEY = "key"
MAP_KEY = "map_key"
VALUE = "value"
PARTITION = "partition"

# Kept by a copied session: settings of state stores, and what SQL conditions depend on.
OF_CONDITIONS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive")
_KEPT = ("spark.sql.streaming.stateStore.", *OF_CONDITIONS)
_SIDES = ("left", "right")
_T = TypeVar("_T")


class StateKind(StrEnum):
    """One row for each key (`VALUE`, `LIST` with all elements), or for each key of a map.

    A `JOIN_SIDE` has a row for each kept row, and `TIMERS` one for each timer, so a key may have several.
    """

    VALUE = "VALUE"
    LIST = "LIST"
    MAP = "MAP"
    JOIN_SIDE = "JOIN_SIDE"
    TIMERS = "TIMERS"


@dataclass(frozen=True)
class StateName:
    """One readable state of an operator.

    Attributes:
        state: Name of the store; the side for a join, the variable for transformWithState, or `timers`.
    """

    operator_id: int
    operator: str
    state: str
    partitions: int
    options: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.state} of operator {self.operator_id} ({self.operator})"

    def as_record(self) -> tuple[int, str, str, int]:
        return self.operator_id, self.operator, self.state, self.partitions


@dataclass(frozen=True)
class StateFrame:
    """The rows of a state: columns `key`, `value` and `partition`, and `map_key` for a map."""

    name: StateName
    kind: StateKind
    rows: DataFrame

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that tell rows apart; in join sides and timers, all but the partition."""
        if self.kind in (StateKind.JOIN_SIDE, StateKind.TIMERS):
            return (KEY, VALUE)
        return (KEY, MAP_KEY) if self.kind is StateKind.MAP else (KEY,)

    @property
    def content(self) -> DataFrame:
        return self.rows.drop(PARTITION)

    def where(self, condition: str) -> DataFrame:
        """Filter by an SQL condition on fields of the key, or columns of `rows`."""
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import functions as F

        fields = self.key_fields
        named = [F.col(KEY).getField(each).alias(each) for each in fields if each not in self.rows.columns]
        try:
            return self.rows.select("*", *named).where(condition).select(*self.rows.columns)
        except (AnalysisException, ParseException) as error:
            first = str(error).strip().partition("\n")[0]
            known = ", ".join([*fields, *self.rows.columns])
            raise OptionError(
                f"The condition {condition!r} does not fit the state {self.name}: {first} Its columns are: {known}. "
                "Name the operator and the state that it is for, if there are several."
            ) from error

    @property
    def key_fields(self) -> tuple[str, ...]:
        """Names of the key's fields; those of a join are `field0`, `field1` and so on."""
        from pyspark.sql.types import StructType

        kind = self.rows.schema[KEY].dataType
        return tuple(kind.names) if isinstance(kind, StructType) else ()


@dataclass(frozen=True)
class StateRows:
    operator_id: int
    operator: str
    state: str
    partitions: int
    rows: int


class StateReader:
    """The state of a query after a committed batch, in a directory in which no query runs.

    Frames are lazy: until they are computed, the directory must exist where the executors reach it.
    """

    def __init__(self, spark: SparkSession, live: LiveDirectory, batch_id: int) -> None:
        self._spark = spark
        self.live = live
        self.batch_id = batch_id
        self._has_state = bool(live.folder.list(STATE))
        self.format_version = 1
        if self._has_state:
            release = require_state_reader(spark)
            if read_commit_entry(live.folder, batch_id).state_ids is not None:
                release.require(Feature.STATE_READER_FORMAT_2, "Reading this state")
                self.format_version = 2
            if release.has(Feature.CHECKPOINT_FORMAT_2):
                self._spark = _session_for(spark, str(self.format_version))

    @cached_property
    def states(self) -> tuple[StateName, ...]:
        return tuple(name for operator, stores in self._operators for name in _states(operator, stores))

    def select(self, operator: int | str | None = None, state: str | None = None) -> list[StateName]:
        wanted = None if operator is None else str(operator)
        found = [
            name
            for name in self.states
            if wanted in (None, str(name.operator_id), name.operator) and state in (None, name.state)
        ]
        if not found and (operator is not None or state is not None):
            known = "; ".join(map(str, self.states)) or "none, because it keeps no state"
            given = {"operator": operator, "state": state}
            what = " and ".join(f"{option} {value!r}" for option, value in given.items() if value is not None)
            raise OptionError(f"The query has no state with {what}. It has: {known}. Name one of these.")
        return found

    def frame(self, name: StateName) -> StateFrame:
        rows = self._load(name.operator_id, name.options, str(name))
        if "list_element" in rows.columns:
            # A flattened list would lose its order.
            rows = self._load(name.operator_id, {**name.options, "flattenCollectionTypes": "false"}, str(name))
            return _frame(name, StateKind.LIST, rows, {KEY: "key", VALUE: "list_value"})
        if "user_map_key" in rows.columns:
            columns = {KEY: "key", MAP_KEY: "user_map_key", VALUE: "user_map_value"}
            return _frame(name, StateKind.MAP, rows, columns)
        if "expiration_timestamp_ms" in rows.columns:
            return _frame(name, StateKind.TIMERS, rows, {KEY: "key", VALUE: "expiration_timestamp_ms"})
        if "joinSide" not in name.options:
            return _frame(name, StateKind.VALUE, rows, {KEY: "key", VALUE: "value"})
        if not release_of(self._spark.version).has(Feature.STATE_READER_FORMAT_2):
            rows = rows.withColumn(VALUE, _built_again(VALUE, rows.schema[VALUE].dataType))
        return _frame(name, StateKind.JOIN_SIDE, rows, {KEY: "key", VALUE: "value"})

    def count(self) -> list[StateRows]:
        counted = []
        for name in self.states:
            rows = attempt(self.frame(name).rows.count, self.live, str(name))
            counted.append(StateRows(name.operator_id, name.operator, name.state, name.partitions, rows))
        return counted

    @cached_property
    def _operators(self) -> list[tuple[Row, list[str]]]:
        if not self._has_state:
            return []
        rows = attempt(
            lambda: self._spark.read.format("state-metadata").load(self.live.spark_location).collect(),
            self.live,
            "the operators",
        )
        newest = {row.operatorId: row for row in sorted(rows, key=lambda row: row.operatorId)}
        return [
            (operator, [row.stateStoreName for row in rows if row.operatorId == number])
            for number, operator in newest.items()
        ]

    def _load(self, operator_id: int, options: Mapping[str, str], what: str) -> DataFrame:
        reader = self._spark.read.format("statestore").option("batchId", self.batch_id)
        reader = reader.option("operatorId", operator_id).options(**options)
        return attempt(partial(reader.load, self.live.spark_location), self.live, what)


def _session_for(spark: SparkSession, format_version: str) -> SparkSession:
    """Return a session with the format, which readers take from it even while they compute."""
    if spark.conf.get(STATE_FORMAT, "1") == format_version:
        return spark
    return session_like(spark, format_version)


def session_like(spark: SparkSession, format_version: str) -> SparkSession:
    """Return a session for a checkpoint format, where a condition means the same as in the caller's."""
    session = spark.newSession()
    for name, value in spark.conf.getAll.items():
        if name.startswith(_KEPT):
            session.conf.set(name, value)
    session.conf.set(STATE_FORMAT, format_version)
    return session


def require_state_reader(spark: SparkSession) -> SparkRelease:
    release = release_of(spark.version)
    release.require(Feature.STATE_READER, "Reading state")
    # Starts the coordinator of state stores, without which none can be loaded.
    _ = spark.streams.active
    return release


def _states(operator: Row, stores: list[str]) -> Iterator[StateName]:

    def name(state: str, **options: str) -> StateName:
        return StateName(operator.operatorId, operator.operatorName, state, operator.numPartitions, options)

    if operator.operatorName.startswith(JOIN):
        # The reader combines the stores of a join to the rows of a side.
        yield from (name(side, joinSide=side) for side in _SIDES)
        return
    properties = json.loads(operator.operatorProperties or "{}")
    variables = properties.get("stateVariables")
    if variables is None:
        yield from (name(store, storeName=store) for store in stores)
        return
    for variable in variables if isinstance(variables, list) else json.loads(variables):
        state = variable["stateName"]
        # Internal variables, such as timers, cannot be read by name.
        if not state.startswith("$"):
            yield name(state, stateVarName=state)
    if properties.get("timeMode", "NoTime") not in ("NoTime", "None"):
        yield name("timers", readRegisteredTimers="true")


def _frame(name: StateName, kind: StateKind, rows: DataFrame, columns: Mapping[str, str]) -> StateFrame:
    from pyspark.sql import functions as F

    selected = [F.col(source).alias(column) for column, source in columns.items()]
    return StateFrame(name, kind, rows.select(*selected, F.col("partition_id").alias(PARTITION)))


def _built_again(column: str, kind: DataType) -> Column:
    """Drop fields that the type of a struct lacks.

    Spark 4.0's reader of joins returns such, and comparisons of bytes see them.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    assert isinstance(kind, StructType)
    if len(set(kind.names)) < len(kind.names):
        return F.col(column)
    return F.struct(*(F.col(column).getField(name).alias(name) for name in kind.names))


def storable(rows: DataFrame) -> DataFrame:
    """Turn what Parquet cannot store, nulls without a type and structs without a field, into text."""
    from pyspark.sql import functions as F

    columns = []
    for each in rows.schema.fields:
        column = F.col(quoted(each.name))
        typed = _with_type(each.dataType)
        columns.append(column if typed == each.dataType else column.cast(typed).alias(each.name))
    return rows.select(*columns)


def unstored(rows: DataFrame, kinds: Mapping[str, DataType]) -> DataFrame:
    """Reverse `storable`."""
    from pyspark.sql import functions as F

    columns = []
    for name in rows.columns:
        column, kind = F.col(quoted(name)), kinds.get(name)
        if kind is not None:
            stored = _with_type(kind).simpleString()
            if kind.simpleString() != stored == rows.schema[name].dataType.simpleString():
                column = _without_type(column, kind).alias(name)
        columns.append(column)
    return rows.select(*columns)


def _without_type(column: Column, kind: DataType) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, NullType, StructType

    if isinstance(kind, NullType):
        return F.lit(None)
    if isinstance(kind, StructType):
        fields = [_without_type(column.getField(each.name), each.dataType).alias(each.name) for each in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda element: _without_type(element, kind.elementType))
    return column


def _with_type(kind: DataType) -> DataType:
    from pyspark.sql.types import ArrayType, MapType, NullType, StringType, StructField, StructType

    if isinstance(kind, NullType) or (isinstance(kind, StructType) and not kind.fields):
        return StringType()
    if isinstance(kind, StructType):
        return StructType([StructField(each.name, _with_type(each.dataType), each.nullable) for each in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_with_type(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_with_type(kind.keyType), _with_type(kind.valueType), kind.valueContainsNull)
    return kind


def attempt(read: Callable[[], _T], live: LiveDirectory, what: str) -> _T:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return read()
    except (PySparkException, Py4JError) as error:
        raise LiveDirectoryError(
            f"{live.url}: Spark cannot read the state, {what}: {cause_in(error)} Use another snapshot; if all fail in "
            "the same way, the session differs from the query's (Spark version, state store provider)."
        ) from error


def cause_in(error: Exception) -> str:
    lines = [line.removeprefix(": ") for line in str(error).strip().splitlines()] or [type(error).__name__]
    return next((line for line in lines if not line.startswith("An error occurred while calling")), lines[0])
