"""Counts failures in a row, and says when there were too many.

The rules are those of Flink's `CheckpointFailureManager`.
"""

from __future__ import annotations

from dagster_ckpt.coordinator.reasons import CheckpointFailureReason, FailureSide
from dagster_ckpt.coordinator.request import TriggerKind

UNLIMITED = 2**31 - 1
"""From this number on, failures are not counted at all (Java's `Integer.MAX_VALUE`, as in Flink)."""


class FailureCounter:
    """Consecutive failures that count, against the number that is tolerated.

    Args:
        tolerable: Failures in a row after which one more fails the query.
    """

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._counted: set[int] = set()
        self._last_success: int | None = None

    @property
    def consecutive(self) -> int:
        """Counted failures since the last success."""
        return len(self._counted)

    def exceeded_by(self, number: int, kind: TriggerKind, reason: CheckpointFailureReason) -> bool:
        """Record a failure and tell whether it is one too many.

        A number counts once, and not at all if a later or the same number has succeeded. When
        the answer is true the count starts again at zero, so one streak fails the query once.

        Args:
            number: The attempt that failed.
            kind: What it was to take.
            reason: Why it failed.
        """
        if self._tolerable >= UNLIMITED or not _counts(kind, reason):
            return False
        if self._last_success is not None and number <= self._last_success:
            return False
        self._counted.add(number)
        if len(self._counted) <= self._tolerable:
            return False
        self._counted.clear()
        return True

    def succeeded(self, number: int) -> None:
        """Record a success, which ends a streak of failures unless it is an old one."""
        if self._last_success is None or number > self._last_success:
            self._last_success = number
            self._counted.clear()


def _counts(kind: TriggerKind, reason: CheckpointFailureReason) -> bool:
    match kind:
        case TriggerKind.CHECKPOINT:
            return reason.counts
        case TriggerKind.SAVEPOINT:
            return reason.counts and reason.side is FailureSide.QUERY
        case TriggerKind.STOP_WITH_SAVEPOINT:
            # In Flink tasks block in a synchronous savepoint until they hear of its completion,
            # so a failed one must fail the job or they would wait for ever. Here nothing in the
            # query waits for it: the process that hears of the failure is the one that lets the
            # query go on, and the attempt's timeout bounds the wait.
            return False
