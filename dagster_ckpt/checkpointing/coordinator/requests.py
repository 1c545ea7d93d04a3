"""Requests to take a snapshot, and the rule that picks the request to start next."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum, auto


class TriggerKind(Enum):
    """The kind of snapshot requested.

    `STOP_WITH_SAVEPOINT` is a savepoint that ends the query: the driver of the attempt starts no
    batch between the cut and the end of the attempt, so that nothing in the query happens after the
    savepoint.
    """

    CHECKPOINT = auto()
    SAVEPOINT = auto()
    STOP_WITH_SAVEPOINT = auto()

    @property
    def is_savepoint(self) -> bool:
        """Whether the snapshot will belong to the user."""
        return self is not TriggerKind.CHECKPOINT


class TriggerOrigin(Enum):
    """The origin of a request: a user's ignores the minimum pause, a periodic one does not."""

    USER = auto()
    PERIODIC = auto()


@dataclass(frozen=True)
class TriggerRequest:
    """One request for a snapshot.

    Attributes:
        request_id: The request to answer. None for the coordinator's own timer, which needs no answer.
        kind: The kind of snapshot.
        origin: Where the request comes from.
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
    """What a decision depends on besides the queued requests.

    Attributes:
        now_ms: Monotonic time.
        triggering: Whether an attempt is in its triggering phase.
        pending: Pending attempts, including savepoints.
        cleaning: Snapshots being deleted.
        pause_ends_ms: When the minimum pause after the last completed snapshot ends.
    """

    now_ms: int
    triggering: bool
    pending: int
    cleaning: int
    pause_ends_ms: int


@dataclass(frozen=True)
class Start:
    """Start an attempt for this request."""

    request: TriggerRequest


@dataclass(frozen=True)
class TooSoon:
    """Drop this request: the minimum pause lasts for another `remaining_ms`."""

    request: TriggerRequest
    remaining_ms: int


@dataclass(frozen=True)
class Wait:
    """No request can start now."""


Decision = Start | TooSoon | Wait


class RequestDecider:
    """The queue of requests and the limits that delay them.

    Order: savepoints before checkpoints, users' requests before periodic ones, older before newer.
    A forced request ignores the number of pending attempts. Only savepoints are forced, so Flink's
    rule that a forced request goes first needs no rank here.

    Args:
        max_concurrent: Attempts that may be pending at once.
        force_savepoints: Whether savepoints are forced. Flink forces them unless checkpoints are
            unaligned.
        max_queued: Requests that may be queued.
    """

    def __init__(
        self,
        *,
        max_concurrent: int,
        force_savepoints: bool,
        max_queued: int = MAX_QUEUED_REQUESTS,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._force_savepoints = force_savepoints
        self._max_queued = max_queued
        self._queue: list[TriggerRequest] = []

    @property
    def waiting(self) -> tuple[TriggerRequest, ...]:
        """The queued requests, the next one first."""
        return tuple(self._queue)

    def submit(self, request: TriggerRequest) -> TriggerRequest | None:
        """Queue a request.

        Returns:
            The request that was dropped because the queue is full: the lowest-ranked one, or the new one
            if the lowest-ranked one is a user's. None if the queue was not full.
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
        remaining_ms = load.pause_ends_ms - load.now_ms
        if request.origin is TriggerOrigin.PERIODIC and not self._is_forced(request) and remaining_ms > 0:
            return TooSoon(request, remaining_ms)
        return Start(request)

    def drop_all(self) -> tuple[TriggerRequest, ...]:
        """Empty the queue and return its requests."""
        waiting = self.waiting
        self._queue.clear()
        return waiting

    def _is_forced(self, request: TriggerRequest) -> bool:
        return self._force_savepoints and request.kind.is_savepoint


def _rank(request: TriggerRequest) -> tuple[bool, bool]:
    """Lower goes first. Among equals the older one does, because a new request is queued behind its equals."""
    return request.kind is TriggerKind.CHECKPOINT, request.origin is TriggerOrigin.PERIODIC
