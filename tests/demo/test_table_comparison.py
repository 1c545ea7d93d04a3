from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.errors import CkptError
from examples.flights.compare import compare_tables

pytestmark = pytest.mark.spark


def write(spark: SparkSession, path: Path, *rows: int) -> str:
    spark.createDataFrame([(row,) for row in rows], "v long").write.parquet(str(path))
    return str(path)


def test_only_rows_that_a_sink_has_committed_count(spark: SparkSession, tmp_path: Path) -> None:
    source = write(spark, tmp_path / "source", 1, 2)
    query = (
        spark.readStream.schema("v long")
        .parquet(source)
        .writeStream.option("checkpointLocation", str(tmp_path / "live"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "sink"))
    )
    query.awaitTermination()
    # What a killed batch leaves behind: a whole file that is not in the sink's log.
    spark.createDataFrame([(9,)], "v long").write.mode("append").parquet(str(tmp_path / "orphan"))
    for file in (tmp_path / "orphan").glob("part-*"):
        file.rename(tmp_path / "sink" / file.name)
    assert compare_tables(spark, str(tmp_path / "sink"), source).equal


def test_a_missing_table_is_named(spark: SparkSession, tmp_path: Path) -> None:
    left = write(spark, tmp_path / "left", 1)
    with pytest.raises(CkptError, match=r"There is no Parquet table at .*/nowhere"):
        compare_tables(spark, left, str(tmp_path / "nowhere"))


def test_tables_of_other_columns_are_not_compared(spark: SparkSession, tmp_path: Path) -> None:
    left, right = write(spark, tmp_path / "left", 1), str(tmp_path / "right")
    spark.createDataFrame([("1",)], "v string").write.parquet(right)
    with pytest.raises(CkptError, match="cannot be compared: their columns"):
        compare_tables(spark, left, right)
