"""Processors of transformWithState, in Python by rows and by frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

# Python workers do not have the folder of the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
