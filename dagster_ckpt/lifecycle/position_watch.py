"""How far a running query is, looked up where that may have changed."""

from __future__ import annotations

from dagster_ckpt.lifecycle.batch_log import BatchLog
from dagster_ckpt.lifecycle.job import Clock, monotonic_ms
from dagster_ckpt.spark import LiveDirectory, Positions

# Spark reports a batch right after its commit is visible. This is for what it does not report in time: a batch that was
# only planned, and the batches of continuous processing.
LOOK_AGAIN_MS = 2_000


class PositionWatch:
    """Positions of a live directory, for a loop that asks several times a second.

    On this machine a look costs microseconds and is taken each time. In object storage it is two requests that list,
    which are paid for: there it is taken when Spark has reported another batch, or some time has passed.

    Args:
        live: The live directory.
        log: What the query has reported.
        clock: In ms; never goes back.
    """

    def __init__(self, live: LiveDirectory, log: BatchLog, clock: Clock = monotonic_ms) -> None:
        self._live = live
        self._log = log
        self._clock = clock
        self._seen: Positions | None = None
        self._seen_after: object = None
        self._seen_at_ms = 0

    def look(self) -> Positions:
        """Positions as they are now.

        Raises:
            StorageAccessError: The directory cannot be reached.
        """
        # What is reported while the look is under way may not be in it.
        after, now_ms = self._log.latest, self._clock()
        self._seen = self._live.positions()
        self._seen_after, self._seen_at_ms = after, now_ms
        return self._seen

    def latest(self) -> Positions:
        """Positions as they are now, or where a look costs requests: as they were after the last report of a batch.

        Raises:
            StorageAccessError: The directory cannot be reached.
        """
        is_new = self._log.latest is not self._seen_after or self._clock() >= self._seen_at_ms + LOOK_AGAIN_MS
        if self._seen is None or is_new or self._live.local_path is not None:
            return self.look()
        return self._seen
