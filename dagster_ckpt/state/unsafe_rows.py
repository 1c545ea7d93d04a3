"""Encode rows as Spark's `UnsafeRow`, the form in which state stores keep keys and values.

The bytes equal those of Spark's `UnsafeProjection`: another bit is another key. Types for which this is not certain are
refused.

Layout: null bits in words of 8 bytes; a slot of 8 bytes per field; then what does not fit, padded to 8 bytes, with
offset and length in the slot. Arrays have their length first, and elements as wide as their type.

The operators of a `Graft` take values field by field, and keys as they are.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


_FIXED = {
    "boolean": ("<?", 1),
    "tinyint": ("<b", 1),
    "smallint": ("<h", 2),
    "int": ("<i", 4),
    "bigint": ("<q", 8),
    "float": ("<f", 4),
    "double": ("<d", 8),
    "date": ("<i", 4),
    "timestamp": ("<q", 8),
    "timestamp_ntz": ("<q", 8),
    "decimal": ("<q", 8),
}
TEXT = ("string", "binary")
_VOID = "void"
LONG_DIGITS = 18
_WIDE_DECIMAL = "wide_decimal"
# Spark's decimals have up to 38 digits.
_EXACT = Context(prec=80)
_MICROSECOND = datetime.timedelta(microseconds=1)

# A type as plain data: its name, `("decimal", scale)`, `("array", type)` or `("struct", types)`.
EncodedType = Any


def encoded_type(kind: DataType, where: str) -> EncodedType:
    from pyspark.sql.types import ArrayType, DecimalType, NullType, StringType, StructType

    if isinstance(kind, StructType):
        return ("struct", tuple(encoded_type(each.dataType, f"{where}.{each.name}") for each in kind.fields))
    if isinstance(kind, ArrayType) and not isinstance(kind.elementType, NullType):
        return ("array", encoded_type(kind.elementType, f"{where}[]"))
    if isinstance(kind, DecimalType):
        return ("decimal" if kind.precision <= LONG_DIGITS else _WIDE_DECIMAL, kind.scale)
    name = kind.simpleString()
    # Collations are part of a string type's name. A `void` is always null.
    if name in (*_FIXED, _VOID) or (name in TEXT and (not isinstance(kind, StringType) or name == "string")):
        return name
    raise StateRewriteError(
        f"{where} has the type {name}, whose bytes in a state store dagster_ckpt cannot write exactly as Spark does. "
        "Nothing was changed. Rows of this state can be forgotten, but not replaced."
    )


def plain(column: Column, kind: DataType) -> Column:
    """Convert times to numbers, which are independent of time zones."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, StructType):
        fields = [plain(column.getField(each.name), each.dataType).alias(each.name) for each in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda element: plain(element, kind.elementType))
    name = kind.simpleString()
    if name == "timestamp":
        return F.unix_micros(column)
    if name == "date":
        return F.unix_date(column)
    if name == "timestamp_ntz":
        return column - F.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'")
    return column


def encoder(schema: DataType, where: str) -> Any:
    from pyspark.sql import functions as F

    _, types = encoded_type(schema, where)
    return F.udf(lambda row: encode(row, types), "binary")


def encode(values: Sequence[Any], types: Sequence[EncodedType]) -> bytes:
    """Encode a row by types of `encoded_type`; structs are tuples, arrays lists."""
    bits = (len(types) + 63) // 64 * 8
    head, tail = bytearray(bits + 8 * len(types)), bytearray()
    for index, (value, kind) in enumerate(zip(values, types, strict=True)):
        at = bits + 8 * index
        is_wide = kind[0] == _WIDE_DECIMAL
        if value is None:
            _set_bit(head, 0, index)
            if is_wide:
                # Spark reserves the place of a long decimal, even of a null.
                _refer(head, tail, at, b"", bytes(16))
        elif isinstance(kind, str) and kind in _FIXED:
            struct.pack_into(_FIXED[kind][0], head, at, _number(value, kind))
        elif kind[0] == "decimal":
            struct.pack_into("<q", head, at, _unscaled(value, kind[1]))
        else:
            data = _data(value, kind)
            _refer(head, tail, at, data, data.ljust(16, b"\0") if is_wide else _padded(data))
    return bytes(head + tail)


def _array(values: Sequence[Any], kind: EncodedType) -> bytes:
    name = kind if isinstance(kind, str) else kind[0]
    form, width = _FIXED.get(name, ("", 8))
    head = bytearray(struct.pack("<q", len(values))) + bytearray((len(values) + 63) // 64 * 8)
    first = len(head)
    head += _padded(bytes(width * len(values)))
    tail = bytearray()
    for index, value in enumerate(values):
        at = first + width * index
        if value is None:
            _set_bit(head, 8, index)
        elif name == "decimal":
            struct.pack_into("<q", head, at, _unscaled(value, kind[1]))
        elif form:
            struct.pack_into(form, head, at, _number(value, name))
        else:
            data = _data(value, kind)
            _refer(head, tail, at, data, _padded(data))
    return bytes(head + tail)


def _data(value: Any, kind: EncodedType) -> bytes:
    if kind in TEXT:
        return value.encode() if isinstance(value, str) else bytes(value)
    name, inner = kind
    if name == "struct":
        return encode(value, inner)
    if name == "array":
        return _array(value, inner)
    unscaled = _unscaled(value, inner)
    # As Java's BigInteger.toByteArray: the fewest bytes, with a sign.
    return unscaled.to_bytes((unscaled + (unscaled < 0)).bit_length() // 8 + 1, "big", signed=True)


def _refer(head: bytearray, tail: bytearray, at: int, data: bytes, stored: bytes) -> None:
    offset = len(head) + len(tail)
    struct.pack_into("<Q", head, at, offset << 32 | len(data))
    tail += stored


def _set_bit(head: bytearray, first: int, index: int) -> None:
    head[first + index // 8] |= 1 << index % 8


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _number(value: Any, kind: str) -> Any:
    return value // _MICROSECOND if kind == "timestamp_ntz" and isinstance(value, datetime.timedelta) else value


def _unscaled(value: Decimal, scale: int) -> int:
    return int(value.scaleb(scale, _EXACT))


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
    """The rows that an operator takes; without `values`, its values stay as they are."""

    operator: int
    width: int = 0
    values: Sequence[Taken] = ()


@dataclass(frozen=True)
class Graft:
    """The operators of another query for a stopped one.

    Attributes:
        state: A directory in which no query runs, with these operators.
        rows: Rows to take, by number of the operator; one that is not in `given` either has the rows of `state`.
        given: Parquet files with the rows of an operator, as `RowChange` returns them, by its number.
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
            _set_bit(head, 0, index)
        if is_wide(each.kind) or (each.kind in TEXT and not is_null):
            size, data = _apart(row, slot) if slot else (0, bytes(16))
            struct.pack_into("<Q", head, at, (len(head) + len(tail)) << 32 | size)
            tail += data if not is_wide(each.kind) else data.ljust(16, b"\0")
        elif each.place is None and each.start is not None:
            struct.pack_into(f"<{_NUMBERS.get(each.kind, 'q')}", head, at, _as_stored(each.kind, each.start))
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


def can_begin(kind: str) -> bool:
    return kind in _NUMBERS or (kind.startswith("decimal") and not is_wide(kind))


def _as_stored(kind: str, start: float) -> float:
    # A decimal is the whole number of its digits; each start of one is 0.
    return start if kind in _NUMBERS else int(start)


def is_wide(kind: str) -> bool:
    digits = kind.removeprefix("decimal(").partition(",")[0]
    return kind.startswith("decimal") and digits.isdecimal() and int(digits) > LONG_DIGITS
