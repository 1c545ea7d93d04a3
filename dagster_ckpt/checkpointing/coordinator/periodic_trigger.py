"""The coordinator's periodic trigger: what a trigger policy sees, and when it fires."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from dagster_ckpt.policies.guard import GuardedTrigger
from dagster_ckpt.policies.trigger import MinPause, TriggerPolicy, TriggerProgress


class PeriodicTrigger:
    """Fires when its policy says that a checkpoint is due. Off until it is started.

    Args:
        policy: The policy; None never fires.
        min_pause_ms: The minimum pause, which holds for every periodic request.
        random: Draws the policy's share at each start.
    """

    def __init__(self, policy: TriggerPolicy | None, *, min_pause_ms: int, random: Random) -> None:
        self._policy = GuardedTrigger(policy) if policy is not None else None
        self._pause = MinPause(min_pause_ms)
        self._random = random
        self._progress: TriggerProgress | None = None
        self._before_firing: TriggerProgress | None = None
        # The policy sees batches and rows since the last firing; these are since the query started.
        self._batches = self._rows = self._batches_before = self._rows_before = 0
        self._not_before_ms = 0
        self._last_completed_ms: int | None = None
        self._wall_ahead_ms = 0

    def start(self, now_ms: int) -> None:
        """Turn it on. The policy counts from here."""
        self._progress = TriggerProgress(now_ms, now_ms, now_ms, self._random.random())
        self._before_firing = None
        self._batches_before, self._rows_before, self._not_before_ms = self._batches, self._rows, now_ms

    def stop(self) -> None:
        """Turn it off."""
        self._progress = None

    def progressed(self, now_ms: int, *, wall_ms: int, batches: int, rows: int) -> None:
        """Record the progress of the query since its start, and the wall clock."""
        self._batches, self._rows, self._wall_ahead_ms = batches, rows, wall_ms - now_ms

    def completed(self, now_ms: int) -> None:
        """Record that a snapshot was completed."""
        self._last_completed_ms = now_ms

    def due_at_ms(self, now_ms: int) -> int | None:
        """When it fires next, as far as is known; None while it is off."""
        progress = self._told(now_ms)
        if self._policy is None or progress is None:
            return None
        due_ms = self._policy.due_at_ms(progress)
        return None if due_ms is None else max(due_ms, self._not_before_ms)

    def fires(self, now_ms: int) -> bool:
        """Return whether it is due, and if so count from here."""
        due_ms = self.due_at_ms(now_ms)
        if self._progress is None or due_ms is None or now_ms < due_ms:
            return False
        self._before_firing = replace(self._progress, batches=self._batches_before, rows=self._rows_before)
        self._progress = replace(self._progress, last_due_ms=due_ms, last_triggered_ms=now_ms)
        self._batches_before, self._rows_before = self._batches, self._rows
        return True

    def postpone(self, until_ms: int) -> None:
        """Undo the last firing, because its request came too soon, and fire again at this time."""
        self._not_before_ms = until_ms
        if self._progress is not None and self._before_firing is not None:
            self._batches_before, self._rows_before = self._before_firing.batches, self._before_firing.rows
            self._progress = self._before_firing

    def pause_ends_ms(self, now_ms: int) -> int:
        """When the minimum pause after the last completed snapshot ends."""
        progress = TriggerProgress(now_ms, now_ms, now_ms, last_completed_ms=self._last_completed_ms)
        return self._pause.due_at_ms(progress) or 0

    def _told(self, now_ms: int) -> TriggerProgress | None:
        if self._progress is None:
            return None
        return replace(
            self._progress,
            now_ms=now_ms,
            wall_ms=now_ms + self._wall_ahead_ms,
            last_completed_ms=self._last_completed_ms,
            batches=self._batches - self._batches_before,
            rows=self._rows - self._rows_before,
        )
