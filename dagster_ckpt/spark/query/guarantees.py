"""The delivery guarantees of a restored query in each of Spark's execution modes.

Derived from Spark 4.3: `MicroBatchExecution`, `AsyncProgressTrackingMicroBatchExecution`,
`ContinuousExecution` and the real-time trigger. Triggers that only determine when a micro-batch
starts (processing time, available-now, once) are all `MICRO_BATCH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry
from dagster_ckpt.spark.query.sinks import can_replay_a_batch, is_unproven


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


class Guarantee(StrEnum):
    """How often an input row takes effect after a restore."""

    EXACTLY_ONCE = "EXACTLY_ONCE"
    AT_LEAST_ONCE = "AT_LEAST_ONCE"


@dataclass(frozen=True)
class Guarantees:
    """The guarantees of a query, and the reasons.

    They require sources that return the same rows for the same offsets (files, Kafka, rate; not a
    socket).

    Attributes:
        mode: How Spark executes it.
        state: For its state and its position in the input.
        sink: For the output in its sinks.
        unaligned: Whether a snapshot may include the batch in flight, so that exactly this batch is
            replayed.
        why: The reasons, as text for people.
    """

    mode: ExecutionMode
    state: Guarantee
    sink: Guarantee
    unaligned: bool
    why: str

    def properties(self) -> dict[str, Any]:
        """The properties for a snapshot's header."""
        return {
            "mode": self.mode.value,
            "guarantee": {
                "state": self.state.value,
                "sink": self.sink.value,
                "unaligned": self.unaligned,
                "why": self.why,
            },
        }


_AT_LEAST_ONCE_MODES = {
    ExecutionMode.ASYNC_PROGRESS: (
        "Asynchronous progress tracking leaves batches out of both logs, and what came after the newest batch in both "
        "is cut into batches anew. The query keeps no state; its sink gets those rows again, under other batch ids. "
        "Only aligned snapshots are taken."
    ),
    ExecutionMode.CONTINUOUS: (
        "Continuous processing starts again after the newest committed epoch, and its epochs are not repeated as they "
        "were. The query keeps no state; its sink gets the rows after that epoch again. Only aligned snapshots are "
        "taken."
    ),
}


def guarantees(mode: ExecutionMode, sinks: Sequence[str]) -> Guarantees:
    """The guarantees of a query with this mode and these sinks.

    Args:
        mode: How Spark executes it.
        sinks: Its sinks as its progress names them; empty means unknown.
    """
    exactly, at_least = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
    if mode is ExecutionMode.REAL_TIME:
        why = (
            "In real-time mode a batch gets its offsets only when it ends, so a batch that was cut off is made anew of "
            "other rows: state is exact (checkpoint format v2), a sink may show rows twice. Only aligned snapshots are "
            "taken."
        )
        return Guarantees(mode, exactly, at_least, unaligned=False, why=why)
    if mode in _AT_LEAST_ONCE_MODES:
        return Guarantees(mode, at_least, at_least, unaligned=False, why=_AT_LEAST_ONCE_MODES[mode])
    forgetful = [sink for sink in sinks if not can_replay_a_batch(sink)]
    if sinks and not forgetful:
        why = "Every batch is replayed with the same offsets and state, and its sink knows batches it has written."
        return Guarantees(mode, exactly, exactly, unaligned=True, why=why)
    unsure = _unsure(forgetful[0]) if forgetful else "it is not known which sinks it has"
    why = f"Every batch is replayed with the same offsets and state, but {unsure}: a replayed batch may show twice."
    # Including the batch in flight is correct for the state; the user decides whether its sink may
    # get it twice.
    return Guarantees(mode, exactly, at_least, unaligned=True, why=why)


def _unsure(sink: str) -> str:
    if is_unproven(sink):
        return f"no test with a real table shows that {sink} passes over batches it has written"
    return f"{sink} does not know batches it has written"


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
