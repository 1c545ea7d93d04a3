"""Another query's operators for a stopped query, and the rows that they take from its state.

A value is changed as bytes of an `UnsafeRow` (see `unsafe_rows.py`): its fields are taken by position, so its key, and
with it its partition, stays exactly as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.unsafe_rows import LONG_DIGITS, TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NUMBERS = {"boolean": "?", "byte": "b", "short": "h", "integer": "i", "long": "q", "float": "f", "double": "d"}
_IN_SLOT = (*_NUMBERS, "date", "timestamp", "timestamp_ntz")
_WIDER = {("byte", "short"), ("byte", "integer"), ("short", "integer"), ("float", "double")} | {
    (kind, "long") for kind in ("byte", "short", "integer")
}
# Columns of a store's rows as bytes; the first one decides the partition.
PARTITION_KEY, KEY_BYTES, VALUE_BYTES, FAMILY = "partition_key", "key_bytes", "value_bytes", "column_family_name"


class Taken(NamedTuple):
    """A field of a new value: the former field at `place` with its type, or the `start` of a new one."""

    kind: str
    place: int | None = None
    was: str = ""
    start: int | float | bool | None = None


@dataclass(frozen=True)
class TakenRows:
    """The rows that an operator takes.

    Attributes:
        values: How its values are made; empty: they stay as they are.
    """

    operator: int
    width: int = 0
    values: Sequence[Taken] = ()


@dataclass(frozen=True)
class Graft:
    """The operators of another query for a stopped one.

    Attributes:
        state: A directory in which no query runs, with these operators.
        rows: By their number; operators that are not in `given` either have the rows of that directory.
        given: Likewise, places of Parquet files with the rows of an operator, as `RowChange` returns them.
    """

    state: LiveDirectory
    rows: Mapping[int, TakenRows] = field(default_factory=dict)
    given: Mapping[int, LiveDirectory] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, object]:
        rows = {
            str(number): [each.operator, each.width, [list(one) for one in each.values]]
            for number, each in self.rows.items()
        }
        given = {str(number): each.url for number, each in self.given.items()}
        return {"state": self.state.url, "rows": rows, "given": given, "plan": dict(self.plan)}

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Graft:
        rows = {
            int(number): TakenRows(operator, width, tuple(Taken(*one) for one in values))
            for number, (operator, width, values) in record["rows"].items()
        }
        given = {int(number): LiveDirectory(url) for number, url in record["given"].items()}
        return Graft(LiveDirectory(record["state"]), rows, given, record.get("plan", {}))


def can_widen(was: str, now: str) -> bool:
    return (was, now) in _WIDER


def is_known(kind: str) -> bool:
    return kind in _IN_SLOT or kind in TEXT or kind.startswith("decimal")


def with_values(rows: DataFrame, wanted: TakenRows) -> DataFrame:
    from pyspark.sql import functions as F

    if not wanted.values:
        return rows
    width, values = wanted.width, tuple(wanted.values)
    make = F.udf(lambda value: taken(bytes(value), width, values), "binary")
    return rows.withColumn("value_bytes", make("value_bytes")).select(rows.columns)


def taken(row: bytes, width: int, values: Sequence[Taken]) -> bytes:
    fields = _fields_of(row, width)
    bits = (len(values) + 63) // 64 * 8
    head, tail = bytearray(bits + 8 * len(values)), bytearray()
    for index, each in enumerate(values):
        at = bits + 8 * index
        is_null, slot = (each.start is None, b"") if each.place is None else fields(each.place)
        if is_null:
            head[index // 8] |= 1 << index % 8
        if is_wide(each.kind) or (each.kind in TEXT and not is_null):
            size, data = _apart(row, slot) if slot else (0, bytes(16))
            struct.pack_into("<Q", head, at, (len(head) + len(tail)) << 32 | size)
            tail += data if not is_wide(each.kind) else data.ljust(16, b"\0")
        elif each.place is None and each.start is not None:
            struct.pack_into(f"<{_NUMBERS[each.kind]}", head, at, each.start)
        elif not is_null:
            head[at : at + 8] = _widened(slot, each.was, each.kind)
    return bytes(head + tail)


def _fields_of(row: bytes, width: int) -> Any:
    bits = (width + 63) // 64 * 8

    def field_at(index: int) -> tuple[bool, bytes]:
        at = bits + 8 * index
        return bool(row[index // 8] >> index % 8 & 1), row[at : at + 8]

    return field_at


def _apart(row: bytes, slot: bytes) -> tuple[int, bytes]:
    (both,) = struct.unpack("<Q", slot)
    offset, size = both >> 32, both & 0xFFFFFFFF
    return size, row[offset : offset + (size + 7) // 8 * 8]


def _widened(slot: bytes, was: str, now: str) -> bytes:
    if was == now:
        return slot
    if not can_widen(was, now):
        raise StateRewriteError(f"A value of type {was} cannot become {now}. Nothing was changed.")
    (number,) = struct.unpack_from(f"<{_NUMBERS[was]}", slot)
    return struct.pack(f"<{_NUMBERS[now]}", number).ljust(8, b"\0")


def is_wide(kind: str) -> bool:
    digits = kind.removeprefix("decimal(").partition(",")[0]
    return kind.startswith("decimal") and digits.isdecimal() and int(digits) > LONG_DIGITS
