"""A request to take an image: what for, and on whose behalf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class TriggerKind(Enum):
    """What is asked for.

    `STOP_WITH_SAVEPOINT` is a savepoint that the query's life ends with: whoever runs the
    attempt lets no batch begin between the cut and the attempt's end, so that the savepoint is
    the last thing the query did.
    """

    CHECKPOINT = auto()
    SAVEPOINT = auto()
    STOP_WITH_SAVEPOINT = auto()

    @property
    def is_savepoint(self) -> bool:
        """Whether the image will belong to a person."""
        return self is not TriggerKind.CHECKPOINT


class TriggerOrigin(Enum):
    """Who asks: a person may ignore the minimum pause, a period may not."""

    USER = auto()
    PERIODIC = auto()


@dataclass(frozen=True)
class TriggerRequest:
    """One request for an image.

    Attributes:
        request_id: Whom to answer. None is the coordinator's own timer, which nobody waits for.
        kind: What is asked for.
        origin: Who asks.
    """

    request_id: str | None
    kind: TriggerKind
    origin: TriggerOrigin

    @property
    def is_timer(self) -> bool:
        """Whether the coordinator's own timer made this request."""
        return self.request_id is None


TIMER_REQUEST = TriggerRequest(None, TriggerKind.CHECKPOINT, TriggerOrigin.PERIODIC)
"""What the periodic timer asks for."""
