"""The bytes of a row are those of Spark's own projection, for every supported type; others are refused."""

from __future__ import annotations

import datetime
from decimal import Context, Decimal
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.state.unsafe_rows import encode, encoded_type, plain
from tests.support.thorough import either

pytestmark = pytest.mark.spark
_EXACT = Context(prec=60)
TYPES = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-(2**7), 2**7 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "string": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    "binary": st.binary(max_size=20).map(bytearray),
    "date": st.dates(datetime.date(1700, 1, 1), datetime.date(2400, 1, 1)),
    "timestamp": st.datetimes(
        datetime.datetime(1971, 1, 1), datetime.datetime(2400, 1, 1), timezones=st.just(datetime.UTC)
    ),
    "timestamp_ntz": st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2400, 1, 1)),
    "decimal(9,2)": st.decimals(Decimal("-9999999.99"), Decimal("9999999.99"), places=2),
    "decimal(18,0)": st.integers(-(10**18) + 1, 10**18 - 1).map(Decimal),
    "decimal(38,4)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda number: Decimal(number).scaleb(-4, _EXACT)),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, list[tuple[Any, ...]]]:
    """A schema of a few columns, some of them nested, and rows of it."""
    kinds = draw(st.lists(st.sampled_from([*TYPES]), min_size=1, max_size=12))
    fields: list[tuple[str, st.SearchStrategy[Any]]] = []
    for kind in kinds:
        shape = draw(st.sampled_from(["plain", "plain", "array", "struct", "structs"]))
        one = st.none() | TYPES[kind]
        if shape == "plain":
            fields.append((kind, one))
        elif shape == "array":
            fields.append((f"array<{kind}>", st.none() | st.lists(one, max_size=4)))
        elif shape == "struct":
            pair = st.tuples(one, st.none() | st.text("ab", max_size=9))
            fields.append((f"struct<x:{kind},y:string>", st.none() | pair))
        else:
            fields.append((f"array<struct<x:{kind}>>", st.none() | st.lists(st.none() | st.tuples(one), max_size=3)))
    schema = ", ".join(f"c{number} {kind}" for number, (kind, _) in enumerate(fields))
    return schema, draw(st.lists(st.tuples(*(values for _, values in fields)), min_size=1, max_size=20))


# Without making a counterexample smaller: each try runs two jobs of Spark.
@settings(max_examples=either(quick=3, thorough=25), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(columns())
def test_the_bytes_are_those_of_spark(spark: SparkSession, drawn: tuple[str, list[tuple[Any, ...]]]) -> None:
    schema, rows = drawn
    frame = spark.createDataFrame(rows, schema).coalesce(1).select("*")
    kind: StructType = frame.schema

    theirs = [bytes(row.getBytes()) for row in frame._jdf.queryExecution().executedPlan().executeCollect()]

    _, types = encoded_type(kind, "the row")
    plains = frame.select(*(plain(F.col(each.name), each.dataType).alias(each.name) for each in kind.fields))
    assert [encode(tuple(row), types) for row in plains.collect()] == theirs


@pytest.mark.parametrize(
    "kind",
    [
        "map<string,int>",
        "interval day to second",
        "interval year to month",
        "array<map<int,int>>",
        "struct<x:interval day to second>",
    ],
)
def test_a_type_that_could_differ_is_refused(spark: SparkSession, kind: str) -> None:
    schema = StructType.fromDDL(f"k bigint, v {kind}")
    with pytest.raises(StateRewriteError, match=r"value\.v.* has the type .*Nothing was changed"):
        encoded_type(schema, "value")


def test_a_string_with_a_collation_is_refused(spark: SparkSession) -> None:
    collated = spark.sql("SELECT 'a' COLLATE UTF8_LCASE AS v").schema
    with pytest.raises(StateRewriteError, match="string collate UTF8_LCASE"):
        encoded_type(collated, "value")
