"""`StateMigration`, a user's rule for the state of an operator that a release changes, and the rows that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import OptionError, StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import DEFAULT_STORE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import Operator, key_columns, value_columns
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.spark.jobs import in_job_group
from dagster_ckpt.spark.versions import PINNED_SINCE_OPERATOR_METADATA
from dagster_ckpt.state.reading import KEY, VALUE, StateKind, cause_in
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.state.stopped_state import SESSION_START, TRANSFORM, StoppedState
from dagster_ckpt.state.unsafe_rows import FAMILY, KEY_BYTES, PARTITION_KEY, VALUE_BYTES, encode, encoder, plain

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType


@dataclass(frozen=True)
class StateMigration:
    """Your rule for the state of an operator, where the former state alone does not say what the new one is.

    A start with `migrate_state` carries it out if the operator differs from the former one, so the rule can stay in the
    code.

    Attributes:
        operator: Number or name of the operator in the new code, as `dagster-ckpt check` lists it, such as
            `aggregation by country`.
        using: Function that gets the rows of the former operator, with the columns `key` and `value` as
            `StreamState.rows` has them, or None if there was none. It returns the rows of the new one, with the same
            columns; fields are taken by position. A total needs no `key`, a `dropDuplicates` no `value`.
        former: Number or name of the former operator whose rows it gets; default: the one in the same place.

    Example:
        >>> def by_country(sites: DataFrame | None) -> DataFrame:
        ...     assert sites is not None
        ...     totals = sites.groupBy(country_of("key.site").alias("country")).agg(F.sum("value.count").alias("n"))
        ...     return totals.select(F.struct("country").alias("key"), F.struct("n").alias("value"))
        >>> StateMigration("aggregation by country", using=by_country)
    """

    operator: int | str
    using: Callable[[DataFrame | None], DataFrame]
    former: int | str | None = None

    def __post_init__(self) -> None:
        if not callable(self.using):
            raise OptionError(f"using of the state migration of operator {self.operator!r} is not a function.")

    def __str__(self) -> str:
        return f"by your function {getattr(self.using, '__name__', repr(self.using))}"


@dataclass(frozen=True)
class RuledOperator:
    rule: StateMigration
    name: str
    operator: Operator
    former: Operator | None

    def __str__(self) -> str:
        return f"the {self.name}, {self.rule}"


def write_ruled_rows(
    spark: SparkSession,
    ruled: RuledOperator,
    source: StoppedState,
    made: StoppedState,
    *,
    place: LiveDirectory,
    watch: Watch,
) -> int:
    """Write a rule's rows to Parquet files, as `RowChange` returns rows; returns their number."""
    _refuse_other_stores(ruled, made)
    what = f"state of {ruled}"
    return in_job_group(spark.sparkContext, what, partial(_write, spark, ruled, source, place), watch)


def _write(spark: SparkSession, ruled: RuledOperator, source: StoppedState, place: LiveDirectory) -> int:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    former = ruled.former
    with readers_of(spark, source.live, [source.batch_id] if former is not None else []) as readers:
        old = None
        if former is not None:
            reader = readers[source.batch_id]
            frames = [reader.frame(name) for name in reader.states if name.operator_id == former.number]
            if len(frames) != 1 or frames[0].kind is not StateKind.VALUE:
                raise _refused(ruled, f"the former operator {former.number} ({former.name}) keeps several states")
            old = frames[0].rows.select(KEY, VALUE)
        try:
            rows = _as_bytes(ruled, ruled.rule.using(old))
            rows.write.parquet(place.spark_location)
        except StateRewriteError:
            raise
        except (PySparkException, Py4JError) as error:
            raise _refused(ruled, f"it failed: {cause_in(error)}") from error
        except Exception as error:
            raise _refused(ruled, f"it failed: {type(error).__name__}: {error}") from error
    written = spark.read.parquet(place.spark_location)
    count = written.count()
    twice = written.groupBy(KEY_BYTES).count().where("count > 1").count()
    if twice:
        raise _refused(ruled, f"it returns {twice} keys several times, but an operator has one row for each key")
    return count


def _as_bytes(ruled: RuledOperator, rows: Any) -> DataFrame:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F
    from pyspark.sql.types import NullType

    if not isinstance(rows, DataFrame):
        raise _refused(ruled, f"it returns a {type(rows).__name__} and no DataFrame")
    schema = ruled.operator.files[-1]
    key, value = _struct(key_columns(schema)), _struct(value_columns(schema))
    found, encoded = {}, []
    for name, kind in ((KEY, key), (VALUE, value)):
        if all(isinstance(each.dataType, NullType) for each in kind.fields):
            encoded.append(F.lit(encode([None] * len(kind), ["bigint"] * len(kind))))
            continue
        given = rows.schema[name].dataType if name in rows.columns else None
        if given is None or _unnamed(given) != _unnamed(kind):
            what = "is missing" if given is None else f"is {given.simpleString()}"
            raise _refused(ruled, f"the column {name} of its rows {what}, but the operator keeps {kind.simpleString()}")
        # Cast to unnamed fields, since several may have the same name.
        found[name] = F.col(name).cast(_unnamed(kind))
        encoded.append(encoder(_unnamed(kind), f"{name} of {ruled}")(plain(found[name], _unnamed(kind))))
    names = (KEY_BYTES, VALUE_BYTES)
    return rows.select(
        _partition_key(found.get(KEY), key).alias(PARTITION_KEY),
        *(column.alias(name) for column, name in zip(encoded, names, strict=True)),
        F.lit(DEFAULT_STORE).alias(FAMILY),
    )


def _partition_key(column: Column | None, key: StructType) -> Column:
    from pyspark.sql import functions as F

    if column is None:
        # A total has only one partition.
        return F.lit(0)
    is_session = len(key) > 1 and key.names[-1] == SESSION_START
    return F.struct(*(column.getField(f"_{at}") for at in range(len(key) - is_session)))


def _struct(columns: Sequence[dict[str, Any]]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson({"type": "struct", "fields": list(columns)})


def _unnamed(kind: DataType) -> Any:
    from pyspark.sql.types import ArrayType, MapType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(f"_{at}", _unnamed(each.dataType)) for at, each in enumerate(kind.fields)])
    if isinstance(kind, ArrayType):
        return ArrayType(_unnamed(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_unnamed(kind.keyType), _unnamed(kind.valueType))
    return kind


def _refuse_other_stores(ruled: RuledOperator, made: StoppedState) -> None:
    operator = ruled.operator
    if operator.stores != (DEFAULT_STORE,) or operator.name.startswith(TRANSFORM):
        raise _refused(ruled, "this operator keeps several states in step, which no function can give")
    encoding = made.offsets.conf.get(PINNED_SINCE_OPERATOR_METADATA)
    if encoding not in (None, "unsaferow"):
        raise _refused(ruled, f"{PINNED_SINCE_OPERATOR_METADATA} is {encoding}, and rows are written as unsaferow")


def _refused(ruled: RuledOperator, why: str) -> StateRewriteError:
    return StateRewriteError(f"The state of {ruled}, cannot be migrated: {why}. Nothing was changed.")
