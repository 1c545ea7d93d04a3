"""What the batches of a running query did, and how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.query.progress import QueryProgress
from dagster_ckpt.stream.handle import Clock, monotonic_ms

# Batches remembered: far more than lie between two checkpoints that anybody reads row counts of.
REMEMBERED = 10_000


@dataclass(frozen=True)
class BatchFigures:
    """Figures of the query up to one batch.

    Attributes:
        rows: Input rows since the snapshot before, as far as this execution saw them.
        state_rows: Rows in all state stores.
        watermark: Event-time watermark as ISO-8601, or None where the query has none.
    """

    rows: int | None = None
    state_rows: int | None = None
    watermark: str | None = None


@dataclass
class BatchLog:
    """The progress of the batches of one execution, each noted once."""

    total_rows: int = 0
    latest: QueryProgress | None = None
    _batches: deque[QueryProgress] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, reports: Iterable[QueryProgress]) -> None:
        """Note reports of batches that ran, oldest first."""
        for report in reports:
            self._batches.append(report)
            self.latest = report
            self.total_rows += report.input_rows

    def figures(self, batch_id: int, *, since_batch: int | None) -> BatchFigures:
        """Figures at a batch.

        Args:
            batch_id: The batch the snapshot stands at.
            since_batch: The batch of the snapshot before; None counts from the start of the execution.
        """
        seen = [report for report in self._batches if report.batch_id <= batch_id]
        if not seen:
            return BatchFigures()
        newest = seen[-1]
        after = -1 if since_batch is None else since_batch
        return BatchFigures(
            rows=sum(report.input_rows for report in seen if report.batch_id > after),
            state_rows=newest.state_rows,
            watermark=newest.watermark,
        )


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
