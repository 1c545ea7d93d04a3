"""One query for each stateful operator of Spark, over the two input streams of a workload."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

# Python workers do not have the folder of the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WITHIN = "l.k = r.k AND l.t BETWEEN r.t - INTERVAL 20 SECONDS AND r.t + INTERVAL 20 SECONDS"


def windowed_counts(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy(F.window("t", "30 seconds"), "k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def counts_for_ever(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("largest"))


def one_total(left: DataFrame, right: DataFrame) -> DataFrame:
    """Without a key all state lies in one partition."""
    return left.agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def sessions(left: DataFrame, right: DataFrame) -> DataFrame:
    """Sessions that begin in one file and end in the next: their events are 16 and, between files, 28 seconds apart."""
    gap = F.expr("CASE WHEN v % 200 < 100 THEN '30 seconds' ELSE '20 seconds' END")
    return left.groupBy(F.session_window("t", gap), "k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def first_of_each(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.selectExpr("v % 53 AS seen").dropDuplicates(["seen"])


def first_of_each_event(left: DataFrame, right: DataFrame) -> DataFrame:
    """With the event time among the columns, so that state is dropped behind the watermark."""
    return left.union(right).select("k", "t").dropDuplicates(["k", "t"])


def first_within_watermark(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.selectExpr("v % 53 AS seen", "t").dropDuplicatesWithinWatermark(["seen"]).select("seen")


def inner_join(left: DataFrame, right: DataFrame) -> DataFrame:
    return _join(left, right, "inner")


def left_outer_join(left: DataFrame, right: DataFrame) -> DataFrame:
    return _join(left, right.where("k <> 1"), "left_outer")


def full_outer_join(left: DataFrame, right: DataFrame) -> DataFrame:
    return _join(left.where("k <> 2"), right.where("k <> 1"), "full_outer")


def _join(left: DataFrame, right: DataFrame, how: str) -> DataFrame:
    joined = left.alias("l").join(right.alias("r"), F.expr(WITHIN), how)
    return joined.select("l.k", "l.v", F.col("r.v").alias("w"))


def counts_over_a_join(left: DataFrame, right: DataFrame) -> DataFrame:
    joined = left.alias("l").join(right.alias("r"), F.expr(WITHIN)).select("l.t", "l.k", F.col("r.v").alias("w"))
    return joined.groupBy(F.window("t", "30 seconds"), "k").agg(F.count("*").alias("n"), F.sum("w").alias("total"))


def counts_of_firsts(left: DataFrame, right: DataFrame) -> DataFrame:
    firsts = left.union(right).dropDuplicates(["k", "t"])
    return firsts.groupBy(F.window("t", "30 seconds"), "k").agg(F.count("*").alias("n"))


def first_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.select("k", "v").limit(70)


# Those with all state in one partition.
IN_ONE_PARTITION = (one_total, first_rows)


def stateless_union(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.union(right).where("v % 3 <> 0").select("k", "v")


def pandas_with_state(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy("k").applyInPandasWithState(
        _running_total, "k long, n long, total long", "n long, total long", "append", GroupStateTimeout.NoTimeout
    )


def _running_total(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n, total = state.get if state.exists else (0, 0)
    for frame in frames:
        n, total = n + len(frame), total + int(frame.v.sum())
    state.update((n, total))
    yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})


_OUT = "k long, n long, recent long, rests long"


def transform_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    # Spark 3.5 has neither operator nor module.
    from spark_stateful_processors import RowProcessor

    return left.groupBy("k").transformWithState(RowProcessor(), _OUT, "append", "eventTime")


def transform_pandas(left: DataFrame, right: DataFrame) -> DataFrame:
    from spark_stateful_processors import PandasProcessor

    return left.groupBy("k").transformWithStateInPandas(PandasProcessor(), _OUT, "append", "eventTime")
