"""Where a start is to begin: the words a person may use, parsed once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.errors import OptionError


class StartPoint(Enum):
    """The kinds of starting point."""

    LATEST = "latest"
    LATEST_CHECKPOINT = "latest-checkpoint"
    LATEST_SAVEPOINT = "latest-savepoint"
    PREFERRED_SAVEPOINT = "preferred-savepoint"
    EMPTY = "empty"
    NAMED = "named"


@dataclass(frozen=True)
class StartFrom:
    """A starting point.

    Attributes:
        point: The kind.
        reference: For NAMED only: an image id, `chk-<n>`, a savepoint's label, or a location.
    """

    point: StartPoint = StartPoint.LATEST
    reference: str | None = None

    @staticmethod
    def parse(text: str) -> StartFrom:
        """Read what a person or a run configuration says.

        Args:
            text: "latest" (go on where the query stopped: the live directory, else the newest
                image), "latest-checkpoint", "latest-savepoint", "preferred-savepoint", "empty"
                (forget all state), or the name of an image.

        Raises:
            OptionError: The text is empty.
        """
        word = text.strip()
        if not word:
            raise OptionError(
                "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, "
                "preferred-savepoint, empty, or the id, number (chk-7), label or location of an image."
            )
        for point in StartPoint:
            if point is not StartPoint.NAMED and word.lower() == point.value:
                return StartFrom(point)
        return StartFrom(StartPoint.NAMED, word)

    def __str__(self) -> str:
        return self.reference or self.point.value
