"""When the next periodic checkpoint is due."""

from __future__ import annotations

from random import Random


class PeriodicTimer:
    """A fixed-rate timer with a random first delay, as in Flink's `CheckpointCoordinator`.

    The effective period is the longer of interval and pause. The first delay is drawn evenly
    between the pause and the period, so that jobs that start together do not all take their
    checkpoints together.

    Args:
        interval_ms: The checkpoint interval; None is a timer that never fires.
        min_pause_ms: The minimum pause between checkpoints.
        random: Where the first delay is drawn from.
    """

    def __init__(self, *, interval_ms: int | None, min_pause_ms: int, random: Random) -> None:
        self._period_ms = None if interval_ms is None else max(interval_ms, min_pause_ms)
        self._min_pause_ms = min_pause_ms
        self._random = random
        self._due_at_ms: int | None = None

    @property
    def due_at_ms(self) -> int | None:
        """When it fires next; None while it is off."""
        return self._due_at_ms

    def start(self, now_ms: int) -> None:
        """Turn the timer on, after a random first delay."""
        if self._period_ms is not None:
            self._due_at_ms = now_ms + self._random.randint(self._min_pause_ms, self._period_ms)

    def stop(self) -> None:
        """Turn the timer off."""
        self._due_at_ms = None

    def postpone(self, due_at_ms: int) -> None:
        """Fire next at this time, and at the fixed rate from then on."""
        self._due_at_ms = due_at_ms

    def fires(self, now_ms: int) -> bool:
        """Whether it is due; if so, it is set to the next time of its rate after now.

        Periods that went by unseen are skipped: catching up would take the same image again.
        """
        if self._period_ms is None or self._due_at_ms is None or now_ms < self._due_at_ms:
            return False
        missed = (now_ms - self._due_at_ms) // self._period_ms
        self._due_at_ms += (missed + 1) * self._period_ms
        return True
