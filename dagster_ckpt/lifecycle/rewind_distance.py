"""How much further back a recovery goes because it prefers a checkpoint to a newer savepoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog import ImageRecord
from dagster_ckpt.options.durations import iso_duration


@dataclass(frozen=True)
class RewindDistance:
    """What lies between two images of one timeline.

    Attributes:
        batches: Committed batches between them; None where an image does not tell its batch.
        rows: Input rows that the catalog noted between them; None where an image has no figure.
        span_ms: Time between their completions, ms; None where that is not known.
    """

    batches: int | None
    rows: int | None
    span_ms: int | None

    def __str__(self) -> str:
        batches = "an unknown number of batches" if self.batches is None else f"{self.batches} batches"
        rows = "rows unknown" if self.rows is None else f"{self.rows:,} rows"
        span = "time unknown" if self.span_ms is None else iso_duration(self.span_ms)
        return f"{batches}, {rows}, {span}"


def distance_passed_over(images: Sequence[ImageRecord], chosen: ImageRecord) -> RewindDistance | None:
    """How far `chosen` is behind the newest image, or None where it is the newest itself.

    Args:
        images: Restorable images of one timeline, newest first; `chosen` is among them.
        chosen: The image that a recovery takes.
    """
    newer = images[: next(at for at, image in enumerate(images) if image.image_id == chosen.image_id)]
    if not newer:
        return None
    rows = [image.rows for image in newer if image.rows is not None]
    return RewindDistance(
        batches=_difference(newer[0].batch_id, chosen.batch_id),
        # An image counts the rows since the one before it.
        rows=sum(rows) if len(rows) == len(newer) else None,
        span_ms=_difference(newer[0].completed_at_ms, chosen.completed_at_ms),
    )


def _difference(newer: int | None, older: int | None) -> int | None:
    return None if newer is None or older is None else max(0, newer - older)
