"""One query for each stateful operator of Spark, over the two input streams of a workload."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

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
    return left.selectExpr("v % 37 AS seen").dropDuplicates(["seen"])


def first_of_each_event(left: DataFrame, right: DataFrame) -> DataFrame:
    """With the event time among the columns, so that state is dropped behind the watermark."""
    return left.union(right).select("k", "t").dropDuplicates(["k", "t"])


def first_within_watermark(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.selectExpr("v % 11 AS seen", "t").dropDuplicatesWithinWatermark(["seen"]).select("seen")


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


class _Processor(StatefulProcessor):
    """A value, a list and a map of each key, and a timer half a minute after its newest event."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long")
        self._recent = handle.getListState("recent", "v long")
        self._by_rest = handle.getMapState("by_rest", "rest long", "n long")

    def _take(self, values: list[int], newest_ms: int) -> tuple[int, int, int]:
        count = (self._count.get()[0] if self._count.exists() else 0) + len(values)
        self._count.update((count,))
        recent = [row[0] for row in self._recent.get()][-3:] + values[:2] if self._recent.exists() else values[:2]
        self._recent.put([(value,) for value in recent])
        for value in values:
            rest = (value % 5,)
            before = self._by_rest.getValue(rest)[0] if self._by_rest.containsKey(rest) else 0
            self._by_rest.updateValue(rest, (before + 1,))
        self._handle.registerTimer(newest_ms + 30_000)
        return count, sum(recent), sum(1 for _ in self._by_rest.keys())  # noqa: SIM118 - not a dict

    def close(self) -> None:
        pass


class RowProcessor(_Processor):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        taken = list(rows)
        newest = max(int(row.t.timestamp() * 1000) for row in taken)
        count, recent, rests = self._take([row.v for row in taken], newest)
        yield Row(k=key[0], n=count, recent=recent, rests=rests)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=-1, recent=expiredTimerInfo.getExpiryTimeInMs() // 1000, rests=-1)


class PandasProcessor(_Processor):
    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,
    ) -> Iterator[pd.DataFrame]:
        taken = pd.concat(list(rows))
        newest = int(taken.t.max().timestamp() * 1000)
        count, recent, rests = self._take([int(value) for value in taken.v], newest)
        yield pd.DataFrame({"k": [key[0]], "n": [count], "recent": [recent], "rests": [rests]})

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: Any,
        expiredTimerInfo: Any,
    ) -> Iterator[pd.DataFrame]:
        expired = expiredTimerInfo.getExpiryTimeInMs() // 1000
        yield pd.DataFrame({"k": [key[0]], "n": [-1], "recent": [expired], "rests": [-1]})


_OUT = "k long, n long, recent long, rests long"


def transform_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy("k").transformWithState(RowProcessor(), _OUT, "append", "eventTime")


def transform_pandas(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy("k").transformWithStateInPandas(PandasProcessor(), _OUT, "append", "eventTime")
