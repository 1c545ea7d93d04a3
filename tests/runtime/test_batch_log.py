"""What is remembered of a query's batches."""

from dagster_ckpt.runtime.batch_progress import BatchLog
from dagster_ckpt.spark.query.query import QueryProgress


def report(batch_id: int, rows: int, sink: str = "FileSink[file:/out]") -> QueryProgress:
    said = {"batchId": batch_id, "runId": "run", "timestamp": "2024-01-01T00:00:00.000Z", "numInputRows": rows}
    return QueryProgress.of({**said, "durationMs": {"addBatch": 2}, "sink": {"description": sink}})


def test_a_batch_without_rows_is_not_compared_with_its_replay() -> None:
    """Its sink may have had it already: Spark then reads nothing, and a replay reads all of it."""
    log = BatchLog()
    log.note([report(4, 7), report(5, 0), report(6, 9), report(7, 3, "ForeachBatchSink")])

    assert log.rows_after(3) == {4: 7, 6: 9}
    assert log.rows_after(5) == {6: 9}
