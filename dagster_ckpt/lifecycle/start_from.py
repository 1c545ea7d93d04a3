"""Where a start is to begin: the words a person may use, parsed once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.errors import OptionError
from dagster_ckpt.options import RecoveryClaimMode


class StartPoint(Enum):
    """The kinds of starting point."""

    LATEST = "latest"
    LATEST_CHECKPOINT = "latest-checkpoint"
    LATEST_SAVEPOINT = "latest-savepoint"
    PREFERRED_SAVEPOINT = "preferred-savepoint"
    EMPTY = "empty"
    BATCH = "batch"
    NAMED = "named"


_BATCH = re.compile(r"batch-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class StartFrom:
    """A starting point.

    Attributes:
        point: The kind.
        reference: For NAMED: an image id, `chk-<n>`, a savepoint's label, or a location. For BATCH: its number.
        new_query_id: Go on as another query: sinks that remember query ids then write the rewound batches again
            instead of passing over them. For a start from an image or a batch.
        accept_loss: Start also where a sink would lose rows.
        claim_mode: Who owns the image that is started from.
    """

    point: StartPoint = StartPoint.LATEST
    reference: str | None = None
    new_query_id: bool = False
    accept_loss: bool = False
    claim_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM

    @staticmethod
    def parse(
        text: str,
        *,
        new_query_id: bool = False,
        accept_loss: bool = False,
        claim_mode: RecoveryClaimMode | str = RecoveryClaimMode.NO_CLAIM,
    ) -> StartFrom:
        """Read what a person or a run configuration says.

        Args:
            text: "latest" (go on where the query stopped: the live directory, else the newest
                image), "latest-checkpoint", "latest-savepoint", "preferred-savepoint", "empty"
                (forget all state), "batch-<n>" (back to a batch that Spark still retains), or the name
                of an image.
            new_query_id: Go on as another query.
            accept_loss: Start also where a sink would lose rows.
            claim_mode: Who owns the image that is started from.

        Raises:
            OptionError: The text is empty, a new query id is asked for a start that keeps or gives up all state,
                an image is claimed by a start that names none, or the claim mode is not offered.
        """
        word = text.strip()
        if not word:
            raise OptionError(
                "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, "
                "preferred-savepoint, empty, batch-<n>, or the id, number (chk-7), label or location of an image."
            )
        point, reference = _point(word)
        if new_query_id and point in (StartPoint.LATEST, StartPoint.EMPTY):
            raise OptionError(
                f"new_query_id is for a start from an image or a batch, but start_from is {word!r}: "
                "latest goes on as the query it is, and empty begins as a new one anyway. Leave it out."
            )
        claim = RecoveryClaimMode(claim_mode)
        if claim is RecoveryClaimMode.CLAIM and point in (StartPoint.LATEST, StartPoint.EMPTY, StartPoint.BATCH):
            raise OptionError(
                f"claim_mode CLAIM is for a start from an image, but start_from is {word!r}, which names none. "
                "Name the image that the job is to own, or leave claim_mode out."
            )
        return StartFrom(point, reference, new_query_id, accept_loss, claim)

    @property
    def batch_id(self) -> int | None:
        """The batch to go back to, for BATCH."""
        return int(self.reference or 0) if self.point is StartPoint.BATCH else None

    def __str__(self) -> str:
        if self.point is StartPoint.BATCH:
            return f"batch-{self.reference}"
        return self.reference or self.point.value


def _point(word: str) -> tuple[StartPoint, str | None]:
    batch = _BATCH.fullmatch(word)
    if batch is not None:
        return StartPoint.BATCH, str(int(batch[1]))
    for point in StartPoint:
        if point not in (StartPoint.NAMED, StartPoint.BATCH) and word.lower() == point.value:
            return point, None
    return StartPoint.NAMED, word
