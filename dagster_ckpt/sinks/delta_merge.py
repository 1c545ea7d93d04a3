"""Delta tables that a `foreachBatch` function writes to, such as by MERGE, with the batch in Delta's own log.

Delta drops a write whose `txnAppId` and `txnVersion` it has already, without running it, so that no state is
written for a repeated batch (`OnRepeat.SKIPS`). In `delta_transaction` these are the query's id and the batch:
the table's log then reads like that of Delta's own sink, and the table is rolled back in the same way.

Delta would drop a second write under the same two as well, although it is another one. So the session lets Delta
forget the version after the first (`autoReset`), and Delta refuses the second. Several writes of a batch have names,
which are part of their `txnAppId`. They are not numbered: where a batch is repeated by changed code, or a write
depends on a condition, the first write may be another one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from dagster_ckpt.errors import OptionError
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.delta_commit import app_id_of
from dagster_ckpt.sinks.sink import FoundSink, Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.query.output import FOREACH_BATCH, foreach_batch_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEME = "delta:"
_NAME = re.compile(rf"ForeachBatchSink\[{_SCHEME}(?P<path>.+)\]")
_APP_ID = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
_ONE_WRITE = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
# Spark clones the session at each start of a query, and runs no batch twice in one clone.
_DONE = "spark.dagster_ckpt.delta_transaction."
# A local property of the thread that runs the query (`StreamExecution.QUERY_ID_KEY`).
_QUERY_ID = "sql.streaming.queryId"


_NAME_IT = (
    "Put each write into a separate with statement, and name all but one: delta_transaction(batch, batch_id, "
    "'<what it writes>')."
)


class DeltaMerge(DeltaTable):
    """A Delta table that a `foreachBatch` function writes to within `delta_transaction`."""

    # The function may write more than once.
    has_parts = True

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

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """See `Sink.look`. The function may leave a batch out, so that only the table's id is certain."""
        return super().look()

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
def delta_transaction(batch: DataFrame, batch_id: int, write: str = "") -> Iterator[None]:
    """Let a write of a `foreachBatch` function to a Delta table take effect once, also if the batch is repeated.

    Write through the session of the batch (`batch.sparkSession`), in one command. Name the table in the option
    `path` of the query, as `delta:` and its folder, so that a start rolls it back with the stream. A function that
    writes several times has a `with` statement for each, and names each but one.

    Args:
        batch: The batch, as Spark gives it to the function.
        batch_id: Its number.
        write: Name of the write, if the function has several, in any number of tables. Keep it: under another
            name, a batch that is repeated is written once more.

    Raises:
        OptionError: The function was not called by a streaming query, writes more than once in one `with` statement
            or under one name, or has such a statement within another.

    Example:
        >>> def upsert(batch, batch_id):
        ...     from delta.tables import DeltaTable
        ...
        ...     orders = DeltaTable.forPath(batch.sparkSession, "/data/orders")
        ...     with delta_transaction(batch, batch_id):
        ...         merge = orders.alias("old").merge(batch.alias("new"), "old.id = new.id")
        ...         merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        ...     with delta_transaction(batch, batch_id, "large"):
        ...         batch.filter("amount > 1000").write.format("delta").mode("append").save("/data/large")
        >>> def query(spark):
        ...     events = spark.readStream.schema("id long, amount long").json("/data/landing")
        ...     return events.writeStream.foreachBatch(upsert).option("path", "delta:/data/orders")
    """
    session = batch.sparkSession
    query_id = session.sparkContext.getLocalProperty(_QUERY_ID)
    if query_id is None:
        raise OptionError("delta_transaction is for a foreachBatch function, and no streaming query has called this.")
    if session.conf.get(_APP_ID, None) is not None:
        raise OptionError(f"delta_transaction is used within another one, or the session sets {_APP_ID} itself.")
    done = f"{_DONE}{write}"
    if session.conf.get(done, None) == str(batch_id):
        raise OptionError(
            f"Batch {batch_id} has written in delta_transaction{f' as {write!r}' if write else ''} already, and Delta "
            f"would drop what it writes now. {_NAME_IT}"
        )
    settings = {_APP_ID: app_id_of(query_id, write), _VERSION: str(batch_id), _ONE_WRITE: "true"}
    for key, value in settings.items():
        session.conf.set(key, value)
    try:
        yield
    except Exception as error:
        # Delta's own message for one without the other.
        if _APP_ID in str(error) and _VERSION in str(error):
            raise OptionError(
                f"Batch {batch_id} writes more than once in one delta_transaction: nothing of the second command was "
                f"written. {_NAME_IT} Put a loop that tries a command again around the with statement."
            ) from error
        raise
    finally:
        for key in settings:
            session.conf.unset(key)
    session.conf.set(done, str(batch_id))
