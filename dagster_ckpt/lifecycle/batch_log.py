"""What the batches of a running query did: the figures that a checkpoint is reported with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dagster_ckpt.spark import QueryProgress

# Batches remembered: far more than lie between two checkpoints that anybody reads row counts of.
REMEMBERED = 10_000


@dataclass(frozen=True)
class BatchFigures:
    """Figures of the query up to one batch.

    Attributes:
        rows: Input rows since the image before, as far as this execution saw them.
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
            batch_id: The batch the image stands at.
            since_batch: The batch of the image before; None counts from the start of the execution.
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
