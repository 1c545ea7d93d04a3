"""Compare two states of a query row by row.

Rows are matched by keys: a copy in other partitions or another backend does not differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from dagster_ckpt.state.reading import KEY, MAP_KEY, VALUE, StateFrame, StateName, StateReader, attempt

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

CHANGE = "change"
BEFORE = "before"
AFTER = "after"
ROWS = "rows"


class Change(StrEnum):
    ADDED = "ADDED"
    REMOVED = "REMOVED"
    CHANGED = "CHANGED"


@dataclass(frozen=True)
class StateDifference:
    """The rows in which one state differs.

    Attributes:
        rows: `change`, `key` (and `map_key`), the value `before` and `after`, and for how many equal `rows` (1 except
            for join sides).
        note: Why every row differs, if the two cannot be compared.
    """

    name: StateName
    rows: DataFrame
    reader: StateReader
    note: str | None = None

    @cached_property
    def counts(self) -> Mapping[Change, int]:
        from pyspark.sql import functions as F

        totals = self.rows.groupBy(CHANGE).agg(F.sum(ROWS).alias(ROWS))
        found = {row[0]: int(row[1]) for row in attempt(totals.collect, self.reader.live, str(self.name))}
        return {change: found.get(change.value, 0) for change in Change}

    @property
    def is_empty(self) -> bool:
        return not any(self.counts.values())


def differences(
    before: StateReader, after: StateReader, names: Sequence[tuple[StateName | None, StateName | None]]
) -> list[StateDifference]:
    found = []
    for old, new in names:
        first = before.frame(old) if old is not None else None
        if first is not None and before.format_version != after.format_version:
            first = replace(first, rows=attempt(first.rows.localCheckpoint, before.live, str(old)))
        second = after.frame(new) if new is not None else None
        found.extend(_difference(first, second, after if new is not None else before))
    return found


def paired(before: Sequence[StateName], after: Sequence[StateName]) -> list[tuple[StateName | None, StateName | None]]:
    old = {(name.operator_id, name.state): name for name in before}
    new = {(name.operator_id, name.state): name for name in after}
    return [(old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]


def _difference(before: StateFrame | None, after: StateFrame | None, reader: StateReader) -> list[StateDifference]:
    name = after.name if after is not None else before.name if before is not None else None
    if name is None:
        return []
    if before is None or after is None:
        which = "the second" if before is None else "the first"
        return [
            StateDifference(name, _all_of(frame, change), reader, f"only {which} has this state")
            for frame, change in ((before, Change.REMOVED), (after, Change.ADDED))
            if frame is not None
        ]
    if before.kind is not after.kind or not _same_types(before, after, before.identity):
        note = "the two have different keys, so that no row can be matched"
        return [
            StateDifference(name, _all_of(frame, change), reader, note)
            for frame, change in ((before, Change.REMOVED), (after, Change.ADDED))
        ]
    if VALUE in before.identity:
        return [StateDifference(name, _by_rows(before, after), reader)]
    has_same_values = _same_types(before, after, [VALUE])
    rows = _by_keys(before, after, is_comparable=has_same_values)
    return [StateDifference(name, rows, reader, None if has_same_values else "the two have different types of values")]


def _all_of(frame: StateFrame, change: Change) -> DataFrame:
    from pyspark.sql import functions as F

    kind = frame.content.schema[VALUE].dataType
    nothing = F.lit(None).cast(kind)
    before, after = (F.col(VALUE), nothing) if change is Change.REMOVED else (nothing, F.col(VALUE))
    return frame.content.select(
        F.lit(change.value).alias(CHANGE),
        *(name for name in (KEY, MAP_KEY) if name in frame.content.columns),
        before.alias(BEFORE),
        after.alias(AFTER),
        F.lit(1).cast("long").alias(ROWS),
    )


def _by_keys(before: StateFrame, after: StateFrame, *, is_comparable: bool) -> DataFrame:
    from pyspark.sql import functions as F

    old, new = _marked(before, "b"), _marked(after, "a")
    # Columns are prefixed, as both sides may read the same files.
    joined = old.join(new, _all_equal(before.identity), "full_outer")
    kinds = (old.schema[f"b_{VALUE}"].dataType, new.schema[f"a_{VALUE}"].dataType)
    values = [comparable(F.col(f"{side}_{VALUE}"), kind) for side, kind in zip("ba", kinds, strict=True)]
    is_new, is_old = F.col("b_there").isNull(), F.col("a_there").isNull()
    change = (
        F.when(is_new, Change.ADDED.value)
        .when(is_old, Change.REMOVED.value)
        .when(~values[0].eqNullSafe(values[1]) if is_comparable else F.lit(True), Change.CHANGED.value)
    )
    keys = [F.when(is_new, F.col(f"a_{key}")).otherwise(F.col(f"b_{key}")).alias(key) for key in before.identity]
    return joined.select(
        change.alias(CHANGE),
        *keys,
        F.col(f"b_{VALUE}").alias(BEFORE),
        F.col(f"a_{VALUE}").alias(AFTER),
        F.lit(1).cast("long").alias(ROWS),
    ).where(F.col(CHANGE).isNotNull())


def _by_rows(before: StateFrame, after: StateFrame) -> DataFrame:
    from pyspark.sql import functions as F

    old, new = (frame.content.withColumn(ROWS, F.lit(sign).cast("long")) for frame, sign in ((before, -1), (after, 1)))
    kinds = {each.name: each.dataType for each in before.content.schema.fields}
    groups = [comparable(F.col(name), kinds[name]).alias(f"by_{name}") for name in (KEY, VALUE)]
    both = old.unionByName(new).groupBy(*groups)
    counted = both.agg(F.first(KEY).alias(KEY), F.first(VALUE).alias(VALUE), F.sum(ROWS).alias(ROWS))
    value = F.col(VALUE)
    return counted.where(F.col(ROWS) != 0).select(
        F.when(F.col(ROWS) > 0, Change.ADDED.value).otherwise(Change.REMOVED.value).alias(CHANGE),
        KEY,
        F.when(F.col(ROWS) < 0, value).alias(BEFORE),
        F.when(F.col(ROWS) > 0, value).alias(AFTER),
        F.abs(ROWS).alias(ROWS),
    )


def _marked(frame: StateFrame, prefix: str) -> DataFrame:
    from pyspark.sql import functions as F

    columns = [F.col(each).alias(f"{prefix}_{each}") for each in frame.content.columns]
    return frame.content.select(*columns, F.lit(True).alias(f"{prefix}_there"))


def _all_equal(identity: Sequence[str]) -> Column:
    from pyspark.sql import functions as F

    condition = F.lit(True)
    for name in identity:
        condition &= F.col(f"b_{name}").eqNullSafe(F.col(f"a_{name}"))
    return condition


def _same_types(before: StateFrame, after: StateFrame, columns: Sequence[str]) -> bool:
    # An upgrade may change nullability, which is not compared.
    def types(frame: StateFrame) -> list[str]:
        return [frame.content.schema[column].dataType.simpleString() for column in columns]

    return types(before) == types(after)


def comparable(column: Column, kind: DataType) -> Column:
    """Convert maps, intervals and variants to types that can be compared and hashed."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if _is_comparable(kind):
        return column
    if isinstance(kind, StructType):
        fields = [comparable(column.getField(each.name), each.dataType).alias(each.name) for each in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda element: comparable(element, kind.elementType))
    if isinstance(kind, MapType):

        def entry(each: Column) -> Column:
            value = comparable(each.getField("value"), kind.valueType)
            return F.struct(comparable(each.getField("key"), kind.keyType).alias("key"), value.alias("value"))

        return F.array_sort(F.transform(F.map_entries(column), entry))
    return column.cast("string")


def _is_comparable(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return all(_is_comparable(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _is_comparable(kind.elementType)
    return not isinstance(kind, MapType) and kind.typeName() not in ("interval", "calendarinterval", "variant")
