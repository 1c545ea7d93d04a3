"""The pending attempts, and the aborted ones whose work has not ended yet."""

from __future__ import annotations

from collections.abc import Callable

from dagster_ckpt.checkpointing.coordinator.messages import Attempt, CheckpointFailureReason
from dagster_ckpt.checkpointing.coordinator.requests import TriggerKind


class PendingAttempts:
    """Attempts by number. At most one of them is in its triggering phase."""

    def __init__(self) -> None:
        self._pending: dict[int, Attempt] = {}
        self._aborted: dict[int, CheckpointFailureReason] = {}
        self._triggering: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The pending attempts, oldest first."""
        return tuple(self._pending.values())

    @property
    def is_triggering(self) -> bool:
        """Whether an attempt has begun but its cut does not exist yet."""
        return self._triggering is not None

    @property
    def next_expiry_ms(self) -> int | None:
        """When the next attempt expires; None if none is pending."""
        return min((attempt.expires_at_ms for attempt in self._pending.values()), default=None)

    def add(self, attempt: Attempt) -> None:
        """Add an attempt in its triggering phase."""
        self._pending[attempt.number] = attempt
        self._triggering = attempt.number

    def cut_taken(self, number: int) -> None:
        """End the triggering phase of an attempt."""
        if self._triggering == number:
            self._triggering = None

    def end(self, number: int) -> Attempt | None:
        """Remove an attempt that ended; None if it is not pending."""
        self.cut_taken(number)
        return self._pending.pop(number, None)

    def abort(self, which: Callable[[Attempt], bool], reason: CheckpointFailureReason) -> tuple[Attempt, ...]:
        """Remove the matching attempts, oldest first, and keep the reason until their work has ended."""
        chosen = tuple(attempt for attempt in self._pending.values() if which(attempt))
        for attempt in chosen:
            self.end(attempt.number)
            self._aborted[attempt.number] = reason
        return chosen

    def abort_settled(self, number: int) -> CheckpointFailureReason | None:
        """Forget an aborted attempt whose work has ended, and return its reason; None for other attempts."""
        return self._aborted.pop(number, None)


def expired_at(now_ms: int) -> Callable[[Attempt], bool]:
    """Match attempts that have expired."""
    return lambda attempt: attempt.expires_at_ms <= now_ms


def subsumed_by(completed: Attempt) -> Callable[[Attempt], bool]:
    """Match attempts that a completed one makes obsolete: the older checkpoints.

    Never a savepoint, which was requested. And never by a savepoint: since FLIP-193 a savepoint
    belongs to the user, who may delete it, so it replaces no checkpoint.
    """
    return lambda attempt: (
        completed.kind is attempt.kind is TriggerKind.CHECKPOINT and attempt.number < completed.number
    )
