"""Encode rows as Spark's `UnsafeRow`, the form in which state stores keep keys and values.

The bytes equal those of Spark's `UnsafeProjection`: another bit is another key. Types for which this is not certain are
refused.

Layout: null bits in words of 8 bytes; a slot of 8 bytes per field; then what does not fit, padded to 8 bytes, with
offset and length in the slot. Arrays have their length first, and elements as wide as their type.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import StateRewriteError

if TYPE_CHECKING:
    from pyspark.sql import Column
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
LONG_DIGITS = 18
_WIDE_DECIMAL = "wide_decimal"
# Spark's decimals have up to 38 digits.
_EXACT = Context(prec=80)
_MICROSECOND = datetime.timedelta(microseconds=1)

# A type as plain data: its name, `("decimal", scale)`, `("array", type)` or `("struct", types)`.
EncodedType = Any


def encoded_type(kind: DataType, where: str) -> EncodedType:
    from pyspark.sql.types import ArrayType, DecimalType, StringType, StructType

    if isinstance(kind, StructType):
        return ("struct", tuple(encoded_type(each.dataType, f"{where}.{each.name}") for each in kind.fields))
    if isinstance(kind, ArrayType):
        return ("array", encoded_type(kind.elementType, f"{where}[]"))
    if isinstance(kind, DecimalType):
        return ("decimal" if kind.precision <= LONG_DIGITS else _WIDE_DECIMAL, kind.scale)
    name = kind.simpleString()
    # Collations are part of a string type's name.
    if name in _FIXED or (name in TEXT and (not isinstance(kind, StringType) or name == "string")):
        return name
    raise StateRewriteError(
        f"{where} has the type {name}, whose bytes in a state store dagster_ckpt cannot write exactly as Spark does. "
        "Nothing was changed. Rows of this state can be forgotten, but not replaced."
    )


def plain(column: Column, kind: DataType) -> Column:
    """Times become numbers, independent of time zones."""
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
    """A UDF that encodes a struct of this type, converted by `plain`."""
    from pyspark.sql import functions as F

    _, types = encoded_type(schema, where)
    return F.udf(lambda row: encode(row, types), "binary")


def encode(values: Sequence[Any], types: Sequence[EncodedType]) -> bytes:
    """Types are from `encoded_type`; structs are tuples, arrays lists."""
    bits = (len(types) + 63) // 64 * 8
    head, tail = bytearray(bits + 8 * len(types)), bytearray()
    for index, (value, kind) in enumerate(zip(values, types, strict=True)):
        at = bits + 8 * index
        is_wide = kind[0] == _WIDE_DECIMAL
        if value is None:
            _set_bit(head, 0, index)
            if is_wide:
                # Spark reserves the place of a long decimal.
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
