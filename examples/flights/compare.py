"""Compares two tables row by row, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.errors import CkptError


@dataclass(frozen=True)
class TableComparison:
    """The comparison of two tables as multisets of rows.

    Attributes:
        rows_left: Rows of the first.
        rows_right: Rows of the second.
        only_left: Rows of the first that are missing in the second, or are there less often.
        only_right: Rows of the second that are missing in the first, or are there less often.
    """

    rows_left: int
    rows_right: int
    only_left: int
    only_right: int

    @property
    def equal(self) -> bool:
        """Whether they are the same. False for two empty tables, which prove nothing."""
        return self.rows_left > 0 and not self.only_left and not self.only_right


def compare_tables(spark: SparkSession, left: str, right: str) -> TableComparison:
    """Compare two Parquet tables; a streaming one is read through its log, like by any reader.

    Args:
        spark: A session.
        left: Folder of the first.
        right: Folder of the second.

    Raises:
        CkptError: A table does not exist, or the two have different columns.
    """
    first, second = _table(spark, left), _table(spark, right)
    if first.dtypes != second.dtypes:
        raise CkptError(
            f"{left} and {right} cannot be compared: their columns are {first.dtypes} and {second.dtypes}. "
            "Both must have been written by the same version of the example."
        )
    first, second = first.cache(), second.cache()
    try:
        return TableComparison(
            rows_left=first.count(),
            rows_right=second.count(),
            only_left=first.exceptAll(second).count(),
            only_right=second.exceptAll(first).count(),
        )
    finally:
        first.unpersist()
        second.unpersist()


def _table(spark: SparkSession, path: str) -> DataFrame:
    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        raise CkptError(
            f"There is no Parquet table at {path} ({error.getCondition()}). Let the stream that writes it run first."
        ) from error
