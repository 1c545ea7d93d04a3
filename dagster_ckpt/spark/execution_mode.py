"""Spark's execution modes, and how to tell them apart.

Derived from Spark 4.3: `MicroBatchExecution`, `AsyncProgressTrackingMicroBatchExecution`,
`ContinuousExecution` and the real-time trigger. Triggers that only determine when a micro-batch
starts (processing time, available-now, once) are all `MICRO_BATCH`.
"""

from __future__ import annotations

from enum import StrEnum

from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry


class ExecutionMode(StrEnum):
    """How Spark executes a query.

    MICRO_BATCH: One planned batch after the other.
    ASYNC_PROGRESS: Micro-batches whose offsets and commits are written periodically in the
        background.
    CONTINUOUS: Long-running tasks with epochs; stateless.
    REAL_TIME: Long-running batches whose offsets are known only at their end.
    """

    MICRO_BATCH = "MICRO_BATCH"
    ASYNC_PROGRESS = "ASYNC_PROGRESS"
    CONTINUOUS = "CONTINUOUS"
    REAL_TIME = "REAL_TIME"


def mode_in_logs(committed: OffsetEntry, before: OffsetEntry | None) -> ExecutionMode:
    """The execution mode of a query, as far as its offset log shows it.

    The log of a real-time query looks like that of micro-batches, and so does that of asynchronous
    progress tracking without a gap. Only the running query can tell them apart
    (`SupervisedQuery.facts`).

    Args:
        committed: Offsets of the newest committed batch.
        before: The previous entry.
    """
    if committed.continuous:
        return ExecutionMode.CONTINUOUS
    if before is not None and before.batch_id < committed.batch_id - 1:
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH


def mode_of_execution(execution_class: str, trigger_class: str) -> ExecutionMode:
    """The execution mode of a running query.

    Args:
        execution_class: Simple name of its `StreamExecution`.
        trigger_class: Simple name of its trigger.
    """
    if trigger_class == "RealTimeTrigger":
        return ExecutionMode.REAL_TIME
    if execution_class == "ContinuousExecution":
        return ExecutionMode.CONTINUOUS
    if execution_class == "AsyncProgressTrackingMicroBatchExecution":
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH
