"""New code is compared with what the stream did, batch by batch, before it continues the stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import small_spark
from tests.support.small_stream import STREAM, SmallStream

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


def first_seen(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["a"])


def in_other_words(rows: DataFrame) -> DataFrame:
    return rows.where("a >= 0").dropDuplicates(["a"])


def with_other_output(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["a"]).withColumn("a", F.when(F.col("a") == 17, F.lit(-1)).otherwise(F.col("a")))


def with_other_state(rows: DataFrame) -> DataFrame:
    return rows.where("a <> 17").dropDuplicates(["a"])


def failing(rows: DataFrame) -> DataFrame:
    seventeen = F.when(F.col("a") == 17, F.raise_error(F.lit("seventeen"))).otherwise(F.col("a"))
    return rows.dropDuplicates(["a"]).withColumn("a", seventeen)


def start(small: SmallStream, query: Callable[[DataFrame], DataFrame], **options: Any) -> None:
    small.query = query
    small.run(start_from=StartFrom(verify_batches=3), **options)


def test_code_that_does_the_same_continues_and_other_code_is_refused_before_anything_changes(
    spark: SparkSession, tmp_path: Path
) -> None:
    small = SmallStream(spark, tmp_path, first_seen)
    small.feed(4)
    small.run()
    small.feed(1)
    kept = ("live", "snapshots", "out")
    before, rows = small.files_of(*kept), small.rows()

    for query, says in (
        (with_other_output, r'batch 2: output differs in 2 rows, such as .*"a":-1'),
        (with_other_state, r"batch 2: output differs in 1 rows"),
        (failing, r"batch 2: it fails: .*seventeen"),
    ):
        with pytest.raises(RequestFailedError, match=says):
            start(small, query)
        assert small.files_of(*kept) == before

    start(small, in_other_words)
    assert small.rows() == rows + Counter((value,) for value in range(25, 30))
    with small.client() as client:
        managed = client.catalog.desired_states.find(STREAM)
    assert managed is not None
    assert managed.preflight is not None
    assert managed.preflight.passed
    compared = [f"batch {batch}: the same 5 rows of output, the same state" for batch in (1, 2, 3)]
    assert managed.preflight.reason == "; ".join(compared)


@pytest.mark.thorough
def test_what_a_release_declares_may_differ(spark: SparkSession, tmp_path: Path) -> None:
    small = SmallStream(spark, tmp_path, first_seen)
    small.feed(4)
    small.run()

    def but_seventeen_in_the_output(what: str, rows: DataFrame) -> DataFrame:
        return rows.where("a NOT IN (17, -1)") if what == "output" else rows

    with pytest.raises(RequestFailedError, match=r"batch 2: default of operator 0 .* differs in 1 rows"):
        start(small, with_other_state, unexpected_rows=but_seventeen_in_the_output)
    start(small, with_other_output, unexpected_rows=but_seventeen_in_the_output)
