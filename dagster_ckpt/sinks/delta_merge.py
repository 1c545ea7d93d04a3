"""Delta tables that a `foreachBatch` function writes to, such as by MERGE, with the batch in Delta's own log.

Delta drops a write whose `txnAppId` and `txnVersion` it has already, without running it, so that no state is
written for a repeated batch (`OnRepeat.SKIPS`). In `delta_transaction` these are the query's id and the batch:
the table's log then reads like that of Delta's own sink, and the table is rolled back in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from dagster_ckpt.errors import OptionError
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.sink import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.query.description import FOREACH_BATCH, foreach_batch_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEME = "delta:"
_NAME = re.compile(rf"ForeachBatchSink\[{_SCHEME}(?P<path>.+)\]")
_APP_ID = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
# A local property of the thread that runs the query (`StreamExecution.QUERY_ID_KEY`).
_QUERY_ID = "sql.streaming.queryId"


class DeltaMerge(DeltaTable):
    """A Delta table that a `foreachBatch` function writes to within `delta_transaction`."""

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _NAME.fullmatch(name)
        return cls(name, match["path"]) if match else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """See `Sink.name_of`."""
        is_delta = output_format == FOREACH_BATCH and place.startswith(_SCHEME)
        return foreach_batch_name(place) if is_delta else None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        found = super().forecast(replay)
        ids = {*replay.query_ids, replay.query_id}
        if found.effect is not SinkEffect.EXACT or any(self.last_batch(each) is not None for each in ids):
            return found
        return SinkForecast(
            self.name,
            SinkEffect.UNKNOWN,
            "The table has no batch of this stream. A function that writes outside delta_transaction writes the "
            "rewound batches once more.",
            "Write within delta_transaction.",
        )


@contextmanager
def delta_transaction(batch: DataFrame, batch_id: int) -> Iterator[None]:
    """Let what a `foreachBatch` function writes to a Delta table take effect once, also if the batch is repeated.

    Write through the session of the batch (`batch.sparkSession`), and to each table in one command: Delta
    drops a second one of the same batch. Name the table in the option `path` of the query, as `delta:` and
    its folder, so that a start rolls it back with the stream.

    Args:
        batch: The batch, as Spark gives it to the function.
        batch_id: Its number.

    Raises:
        OptionError: The function was not called by a streaming query.

    Example:
        >>> def upsert(batch, batch_id):
        ...     from delta.tables import DeltaTable
        ...
        ...     orders = DeltaTable.forPath(batch.sparkSession, "/data/orders")
        ...     with delta_transaction(batch, batch_id):
        ...         merge = orders.alias("old").merge(batch.alias("new"), "old.id = new.id")
        ...         merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        >>> def query(spark):
        ...     events = spark.readStream.schema("id long, amount long").json("/data/landing")
        ...     return events.writeStream.foreachBatch(upsert).option("path", "delta:/data/orders")
    """
    session = batch.sparkSession
    query_id = session.sparkContext.getLocalProperty(_QUERY_ID)
    if query_id is None:
        raise OptionError("delta_transaction is for a foreachBatch function, and no streaming query has called this.")
    session.conf.set(_APP_ID, query_id)
    session.conf.set(_VERSION, str(batch_id))
    try:
        yield
    finally:
        session.conf.unset(_APP_ID)
        session.conf.unset(_VERSION)
