"""A query of `run_stream` is described and run with the settings of the session, as without the product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.errors import StreamFailedError
from tests.support.small_spark import small_spark
from tests.support.small_stream import SmallStream

pytestmark = [pytest.mark.spark, pytest.mark.core]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    # The default of Spark 3.5 is false, that of Spark 4 true.
    with small_spark({"spark.sql.ansi.enabled": "true"}) as session:
        yield session


def test_an_expression_is_parsed_with_the_settings_of_the_session(spark: SparkSession, tmp_path: Path) -> None:
    active: list[SparkSession | None] = []

    def no_number(rows: DataFrame) -> DataFrame:
        active.append(SparkSession.getActiveSession())
        return rows.withColumn("a", F.expr("CAST(concat(a, ' apples') AS INT)"))

    stream = SmallStream(spark, tmp_path, no_number)
    stream.feed(1)
    with pytest.raises(StreamFailedError, match="CAST_INVALID_INPUT"):
        stream.run()
    assert {None if each is None else each._jsparkSession.hashCode() for each in active} == {
        spark._jsparkSession.hashCode()
    }
