"""Requests to take a snapshot, and which waiting request may start now."""

from __future__ import annotations

from bisect import insort
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
        """Whether the snapshot will belong to a person."""
        return self is not TriggerKind.CHECKPOINT


class TriggerOrigin(Enum):
    """Who asks: a person may ignore the minimum pause, a period may not."""

    USER = auto()
    PERIODIC = auto()


@dataclass(frozen=True)
class TriggerRequest:
    """One request for a snapshot.

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


MAX_QUEUED_REQUESTS = 1000
"""Requests that may wait, as in Flink."""


@dataclass(frozen=True)
class Load:
    """What a decision depends on, beside the waiting requests.

    Attributes:
        now_ms: Monotonic time.
        triggering: Whether an attempt is in its triggering phase.
        pending: Attempts under way, savepoints included.
        cleaning: Snapshots being deleted.
        last_completion_ms: When a snapshot was last completed; None if none ever was.
    """

    now_ms: int
    triggering: bool
    pending: int
    cleaning: int
    last_completion_ms: int | None


@dataclass(frozen=True)
class Start:
    """This request becomes an attempt."""

    request: TriggerRequest


@dataclass(frozen=True)
class TooSoon:
    """This request is dropped: the minimum pause lasts for another `remaining_ms`."""

    request: TriggerRequest
    remaining_ms: int


@dataclass(frozen=True)
class Wait:
    """Nothing can start now."""


Decision = Start | TooSoon | Wait


class RequestDecider:
    """The queue of requests and the limits that hold them back.

    Order: savepoint before checkpoint, a person's before a periodic one, older before newer. A
    forced request ignores how many attempts are pending; as only savepoints are forced, Flink's
    rule that a forced one goes first needs no rank of its own.

    Args:
        max_concurrent: Attempts that may be pending at once.
        min_pause_ms: Pause between a completion and the next periodic attempt.
        force_savepoints: Whether savepoints are forced. Flink forces them unless checkpoints
            are unaligned.
        max_queued: Requests that may wait.
    """

    def __init__(
        self,
        *,
        max_concurrent: int,
        min_pause_ms: int,
        force_savepoints: bool,
        max_queued: int = MAX_QUEUED_REQUESTS,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._min_pause_ms = min_pause_ms
        self._force_savepoints = force_savepoints
        self._max_queued = max_queued
        self._queue: list[TriggerRequest] = []

    @property
    def waiting(self) -> tuple[TriggerRequest, ...]:
        """The waiting requests, the next one first."""
        return tuple(self._queue)

    def submit(self, request: TriggerRequest) -> TriggerRequest | None:
        """Let a request wait.

        Returns:
            The request that had to be dropped because too many wait: the lowest in order, or the
            new one if the others all come from people. None if there was room.
        """
        is_full = len(self._queue) >= self._max_queued
        if is_full and self._queue[-1].origin is TriggerOrigin.USER:
            return request
        insort(self._queue, request, key=_rank)
        return self._queue.pop() if is_full else None

    def decide(self, load: Load) -> Decision:
        """Take the next request from the queue if it can start or must be dropped now."""
        if load.triggering or not self._queue or load.cleaning > self._max_concurrent:
            return Wait()
        request = self._queue[0]
        if load.pending >= self._max_concurrent and not self._is_forced(request):
            return Wait()
        del self._queue[0]
        remaining_ms = self._remaining_pause_ms(load)
        if request.origin is TriggerOrigin.PERIODIC and not self._is_forced(request) and remaining_ms > 0:
            return TooSoon(request, remaining_ms)
        return Start(request)

    def drop_all(self) -> tuple[TriggerRequest, ...]:
        """Empty the queue and return what was in it."""
        waiting = self.waiting
        self._queue.clear()
        return waiting

    def _is_forced(self, request: TriggerRequest) -> bool:
        return self._force_savepoints and request.kind.is_savepoint

    def _remaining_pause_ms(self, load: Load) -> int:
        if load.last_completion_ms is None:
            return 0
        return load.last_completion_ms + self._min_pause_ms - load.now_ms


def _rank(request: TriggerRequest) -> tuple[bool, bool]:
    """Lower goes first; among equals the older one, because a new one is put behind its equals."""
    return request.kind is TriggerKind.CHECKPOINT, request.origin is TriggerOrigin.PERIODIC
