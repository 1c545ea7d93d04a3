"""What triggers a snapshot."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from enum import Enum, auto
from random import Random

from dagster_ckpt.policies.trigger import GuardedTrigger, MinPause, TriggerPolicy, TriggerProgress


class TriggerKind(Enum):
    """The kind of snapshot to take. After the cut of `STOP_WITH_SAVEPOINT`, no batch starts."""

    CHECKPOINT = auto()
    SAVEPOINT = auto()
    STOP_WITH_SAVEPOINT = auto()

    @property
    def is_savepoint(self) -> bool:
        return self is not TriggerKind.CHECKPOINT


class TriggerOrigin(Enum):
    """A user's request ignores the minimum pause, a periodic one does not."""

    USER = auto()
    PERIODIC = auto()


@dataclass(frozen=True)
class TriggerRequest:
    """A request for a snapshot; those of the coordinator itself have no id."""

    request_id: str | None
    kind: TriggerKind
    origin: TriggerOrigin

    @property
    def is_timer(self) -> bool:
        return self.request_id is None and self.origin is TriggerOrigin.PERIODIC


TIMER_REQUEST = TriggerRequest(None, TriggerKind.CHECKPOINT, TriggerOrigin.PERIODIC)
# As a user's request, it is not delayed by the minimum pause.
FINAL_REQUEST = TriggerRequest(None, TriggerKind.CHECKPOINT, TriggerOrigin.USER)


MAX_QUEUED_REQUESTS = 1000
"""As in Flink."""


@dataclass(frozen=True)
class Load:
    now_ms: int
    triggering: bool
    pending: int
    cleaning: int
    pause_ends_ms: int


@dataclass(frozen=True)
class Start:
    request: TriggerRequest


@dataclass(frozen=True)
class TooSoon:
    request: TriggerRequest
    remaining_ms: int


@dataclass(frozen=True)
class Wait: ...


Decision = Start | TooSoon | Wait


class RequestDecider:
    """The queue of requests and the limits that delay them.

    Order: savepoints before checkpoints, users' requests before periodic ones, older before newer. A forced request
    ignores the number of pending attempts. As in Flink, savepoints are forced unless checkpoints are unaligned; since
    they come first anyway, being forced needs no rank.
    """

    def __init__(self, *, max_concurrent: int, force_savepoints: bool, max_queued: int = MAX_QUEUED_REQUESTS) -> None:
        self._max_concurrent = max_concurrent
        self._force_savepoints = force_savepoints
        self._max_queued = max_queued
        self._queue: list[TriggerRequest] = []

    @property
    def waiting(self) -> tuple[TriggerRequest, ...]:
        return tuple(self._queue)

    def submit(self, request: TriggerRequest) -> TriggerRequest | None:
        """Queue a request. A full queue drops and returns the lowest-ranked one or, if that is a user's, this one."""
        is_full = len(self._queue) >= self._max_queued
        if is_full and self._queue[-1].origin is TriggerOrigin.USER:
            return request
        insort(self._queue, request, key=_rank)
        return self._queue.pop() if is_full else None

    def decide(self, load: Load) -> Decision:
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
        waiting = self.waiting
        self._queue.clear()
        return waiting

    def _is_forced(self, request: TriggerRequest) -> bool:
        return self._force_savepoints and request.kind.is_savepoint


def _rank(request: TriggerRequest) -> tuple[bool, bool]:
    return request.kind is TriggerKind.CHECKPOINT, request.origin is TriggerOrigin.PERIODIC


class PeriodicTrigger:
    """Fires when its policy says so; without a policy, never. Off until it is started."""

    def __init__(self, policy: TriggerPolicy | None, *, min_pause_ms: int, random: Random) -> None:
        self._policy = GuardedTrigger(policy) if policy is not None else None
        self._pause = MinPause(min_pause_ms)
        self._random = random
        self._progress: TriggerProgress | None = None
        self._before_firing: TriggerProgress | None = None
        # Since the query started; the policy sees them since the last firing.
        self._batches = self._rows = self._batches_before = self._rows_before = 0
        self._not_before_ms = 0
        self._last_completed_ms: int | None = None
        self._wall_ahead_ms = 0

    def start(self, now_ms: int) -> None:
        self._progress = TriggerProgress(now_ms, now_ms, now_ms, self._random.random())
        self._before_firing = None
        self._batches_before, self._rows_before, self._not_before_ms = self._batches, self._rows, now_ms

    def stop(self) -> None:
        self._progress = None

    def progressed(self, now_ms: int, *, wall_ms: int, batches: int, rows: int) -> None:
        self._batches, self._rows, self._wall_ahead_ms = batches, rows, wall_ms - now_ms

    def completed(self, now_ms: int) -> None:
        self._last_completed_ms = now_ms

    def due_at_ms(self, now_ms: int) -> int | None:
        """When the next checkpoint is due; None while the timer is off, or if the policy cannot say."""
        progress = self._progress_at(now_ms)
        if self._policy is None or progress is None:
            return None
        due_ms = self._policy.due_at_ms(progress)
        return None if due_ms is None else max(due_ms, self._not_before_ms)

    def fires(self, now_ms: int) -> bool:
        """Whether a checkpoint is due; if so, the policy counts from here."""
        due_ms = self.due_at_ms(now_ms)
        if self._progress is None or due_ms is None or now_ms < due_ms:
            return False
        self._before_firing = replace(self._progress, batches=self._batches_before, rows=self._rows_before)
        self._progress = replace(self._progress, last_due_ms=due_ms, last_triggered_ms=now_ms)
        self._batches_before, self._rows_before = self._batches, self._rows
        return True

    def postpone(self, until_ms: int) -> None:
        """Undo the last firing, which came too soon, and fire again at this time."""
        self._not_before_ms = until_ms
        if self._progress is not None and self._before_firing is not None:
            self._batches_before, self._rows_before = self._before_firing.batches, self._before_firing.rows
            self._progress = self._before_firing

    def pause_ends_ms(self, now_ms: int) -> int:
        progress = TriggerProgress(now_ms, now_ms, now_ms, last_completed_ms=self._last_completed_ms)
        return self._pause.due_at_ms(progress) or 0

    def _progress_at(self, now_ms: int) -> TriggerProgress | None:
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
