"""Decide when to take a snapshot, and when too many have failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from random import Random
from typing import NamedTuple

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Action,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CleaningChanged,
    CutTaken,
    Discard,
    Event,
    FailQuery,
    FailureSide,
    InputEnded,
    Progressed,
    QueryStarted,
    QueryStopped,
    Refuse,
    StartAttempt,
    StopQuery,
    Tick,
    Triggered,
    new_attempt,
)
from dagster_ckpt.runtime.checkpoint_messages import CheckpointFailureReason as Reason
from dagster_ckpt.runtime.triggers import (
    FINAL_REQUEST,
    TIMER_REQUEST,
    Load,
    PeriodicTrigger,
    RequestDecider,
    Start,
    TooSoon,
    TriggerKind,
    TriggerOrigin,
    TriggerRequest,
    Wait,
)

UNLIMITED = 2**31 - 1
"""From this number on, failures are not counted (Java's `Integer.MAX_VALUE`, as in Flink)."""


class FailureTally(NamedTuple):
    consecutive: int
    tolerable: int


class FailureCounter:
    """Counts consecutive failures; one more than `tolerable` fails the query."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._counted: set[int] = set()
        self._last_success: int | None = None

    @property
    def consecutive(self) -> int:
        return len(self._counted)

    def exceeded_by(self, number: int, kind: TriggerKind, reason: Reason) -> bool:
        """Count a failure, and return whether it exceeds the tolerated number, which restarts the counter."""
        if self.tally(number, kind, reason) is None:
            return False
        self._counted.add(number)
        if len(self._counted) <= self._tolerable:
            return False
        self._counted.clear()
        return True

    def tally(self, number: int, kind: TriggerKind, reason: Reason) -> FailureTally | None:
        """The count with this failure, before it is recorded; None if it does not count."""
        if self._tolerable >= UNLIMITED or not _counts(kind, reason):
            return None
        if self._last_success is not None and number <= self._last_success:
            return None
        return FailureTally(len(self._counted | {number}), self._tolerable)

    def succeeded(self, number: int) -> None:
        if self._last_success is None or number > self._last_success:
            self._last_success = number
            self._counted.clear()


def _counts(kind: TriggerKind, reason: Reason) -> bool:
    match kind:
        case TriggerKind.CHECKPOINT:
            return reason.counts
        case TriggerKind.SAVEPOINT:
            return reason.counts and reason.side is FailureSide.QUERY
        case TriggerKind.STOP_WITH_SAVEPOINT:
            # In Flink, tasks block in a synchronous savepoint, so a failed one must fail the job. Here nothing in the
            # query waits.
            return False


class PendingAttempts:
    def __init__(self) -> None:
        self._pending: dict[int, Attempt] = {}
        self._aborted: dict[int, Reason] = {}
        self._triggering: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(self._pending.values())

    @property
    def is_triggering(self) -> bool:
        return self._triggering is not None

    @property
    def next_expiry_ms(self) -> int | None:
        return min((attempt.expires_at_ms for attempt in self._pending.values()), default=None)

    def add(self, attempt: Attempt) -> None:
        self._pending[attempt.number] = attempt
        self._triggering = attempt.number

    def cut_taken(self, number: int) -> None:
        if self._triggering == number:
            self._triggering = None

    def end(self, number: int) -> Attempt | None:
        self.cut_taken(number)
        return self._pending.pop(number, None)

    def abort(self, which: Callable[[Attempt], bool], reason: Reason) -> tuple[Attempt, ...]:
        """Remove matching attempts, oldest first, and keep the reason until their work has ended."""
        chosen = tuple(attempt for attempt in self._pending.values() if which(attempt))
        for attempt in chosen:
            self.end(attempt.number)
            self._aborted[attempt.number] = reason
        return chosen

    def abort_settled(self, number: int) -> Reason | None:
        return self._aborted.pop(number, None)


def subsumed_by(completed: Attempt) -> Callable[[Attempt], bool]:
    """Match older checkpoints. A savepoint subsumes none: since FLIP-193 its user may delete it."""
    return lambda attempt: (
        completed.kind is attempt.kind is TriggerKind.CHECKPOINT and attempt.number < completed.number
    )


class CheckpointCoordinator:
    """Flink's `CheckpointCoordinator` for one streaming query, across its restarts.

    It has no thread, I/O or clock. The driver carries out the returned actions in order, and sends a `Tick` at
    `next_deadline_ms`. A request is answered exactly once: by `Refuse`, by the `Abort` of its attempt, or by the driver
    when it reports the end of a pending attempt.
    """

    def __init__(self, options: CheckpointOptions, *, first_number: int, random: Random) -> None:
        options = options.in_effect()
        self._options = options
        self._next_number = first_number
        self._decider = RequestDecider(max_concurrent=options.max_concurrent, force_savepoints=not options.unaligned)
        self._timer = PeriodicTrigger(
            options.trigger_policy, min_pause_ms=options.effective_min_pause_ms, random=random
        )
        self._failures = FailureCounter(options.tolerable_failures)
        self._pending = PendingAttempts()
        self._is_running = False
        self._input_has_ended = False
        self._stop_request: TriggerRequest | None = None
        self._cleaning = 0
        self._now_ms = 0

    @property
    def next_deadline_ms(self) -> int | None:
        deadlines = (self._timer.due_at_ms(self._now_ms), self._pending.next_expiry_ms)
        return min((at_ms for at_ms in deadlines if at_ms is not None), default=None)

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def pending(self) -> tuple[Attempt, ...]:
        return self._pending.attempts

    @property
    def waiting(self) -> tuple[TriggerRequest, ...]:
        return self._decider.waiting

    def failure_tally(self, attempt: Attempt, reason: Reason) -> FailureTally | None:
        return self._failures.tally(attempt.number, attempt.kind, reason)

    @property
    def consecutive_failures(self) -> int:
        return self._failures.consecutive

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions to carry out in this order; a late event happens now."""
        self._now_ms = max(self._now_ms, event.at_ms)
        return list(chain(self._react(event), self._start_waiting()))

    def _react(self, event: Event) -> Iterator[Action]:
        match event:
            case QueryStarted():
                self._query_started()
            case QueryStopped():
                yield from self._query_stopped()
            case InputEnded(final_is_due=final_is_due):
                yield from self._input_ended(final_is_due=final_is_due)
            case Tick():
                yield from self._expire()
                yield from self._fire_timer()
            case Progressed(wall_ms=wall_ms, batches=batches, rows=rows):
                self._timer.progressed(self._now_ms, wall_ms=wall_ms, batches=batches, rows=rows)
            case Triggered(request=request):
                yield from self._triggered(request)
            case CutTaken(number=number):
                self._pending.cut_taken(number)
            case AttemptCompleted(number=number):
                yield from self._completed(number)
            case AttemptFailed(number=number, reason=reason, detail=detail):
                yield from self._failed(number, reason, detail)
            case CleaningChanged(pending=pending):
                self._cleaning = pending

    # Lifecycle of the query

    def _query_started(self) -> None:
        if self._is_running:
            return
        self._is_running, self._input_has_ended = True, False
        self._timer.start(self._now_ms)

    def _query_stopped(self) -> Iterator[Action]:
        self._is_running = False
        yield from self._suspend()

    def _input_ended(self, *, final_is_due: bool) -> Iterator[Action]:
        # With the timer, a query whose checkpoints take longer than its interval would never end.
        self._input_has_ended = True
        self._timer.stop()
        if final_is_due and self._is_running and self._stop_request is None:
            yield from self._submit(FINAL_REQUEST)

    def _suspend(self) -> Iterator[Action]:
        self._timer.stop()
        self._stop_request = None
        yield from self._abort(lambda _attempt: True, Reason.CHECKPOINT_COORDINATOR_SUSPEND)
        for request in self._decider.drop_all():
            yield _refuse(request, Reason.CHECKPOINT_COORDINATOR_SUSPEND, "The request was still waiting.")

    def _end_query(self, action: FailQuery | StopQuery) -> Iterator[Action]:
        self._is_running = False
        yield action
        yield from self._suspend()

    # Requests

    def _triggered(self, request: TriggerRequest) -> Iterator[Action]:
        if not self._is_running:
            yield _refuse(
                request, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, "Submit the request again when the query is running."
            )
        elif request.origin is TriggerOrigin.PERIODIC and self._stop_request is not None:
            yield _refuse(request, Reason.PERIODIC_SCHEDULER_SHUTDOWN, "A stop-with-savepoint is in progress.")
        elif self._is_known(request):
            return
        elif request.kind is TriggerKind.STOP_WITH_SAVEPOINT:
            yield from self._stop_requested(request)
        else:
            yield from self._submit(request)

    def _is_known(self, request: TriggerRequest) -> bool:
        waiting = (queued.request_id for queued in self._decider.waiting)
        begun = (attempt.request_id for attempt in self._pending.attempts)
        return request.request_id in chain(waiting, begun)

    def _stop_requested(self, request: TriggerRequest) -> Iterator[Action]:
        if self._stop_request is not None:
            yield _refuse(
                request,
                Reason.TOO_MANY_CHECKPOINT_REQUESTS,
                f"Stop-with-savepoint {self._stop_request.request_id} is in progress; only one can run at a time.",
            )
            return
        yield from self._suspend()
        self._stop_request = request
        yield from self._submit(request)

    def _submit(self, request: TriggerRequest) -> Iterator[Action]:
        dropped = self._decider.submit(request)
        if dropped is not None:
            yield _refuse(
                dropped,
                Reason.TOO_MANY_CHECKPOINT_REQUESTS,
                "It had the lowest priority; submit it again when the queue is shorter.",
            )

    # Time passes

    def _expire(self) -> Iterator[Action]:
        expired = self._pending.abort(lambda attempt: attempt.expires_at_ms <= self._now_ms, Reason.CHECKPOINT_EXPIRED)
        for attempt in expired:
            yield Abort(attempt.number, Reason.CHECKPOINT_EXPIRED)
        for attempt in expired:
            detail = f"The timeout is {self._options.timeout} ms."
            yield from self._attempt_lost(attempt, Reason.CHECKPOINT_EXPIRED, detail)

    def _fire_timer(self) -> Iterator[Action]:
        # Unlike Flink's, this timer queues at most one request: a long savepoint would otherwise be followed by a burst
        # of checkpoints of the same commit.
        if self._timer.fires(self._now_ms) and TIMER_REQUEST not in self._decider.waiting:
            yield from self._submit(TIMER_REQUEST)

    # Ends of attempts

    def _completed(self, number: int) -> Iterator[Action]:
        aborted_because = self._pending.abort_settled(number)
        if aborted_because is not None:
            yield Discard(number, aborted_because)
        attempt = self._pending.end(number)
        if attempt is None:
            return
        self._failures.succeeded(number)
        self._timer.completed(self._now_ms)
        yield from self._abort(subsumed_by(attempt), Reason.CHECKPOINT_SUBSUMED)
        if attempt.kind is TriggerKind.STOP_WITH_SAVEPOINT:
            yield from self._end_query(StopQuery(number))

    def _failed(self, number: int, reason: Reason, detail: str) -> Iterator[Action]:
        self._pending.abort_settled(number)
        attempt = self._pending.end(number)
        if attempt is not None:
            yield from self._attempt_lost(attempt, reason, detail)

    def _attempt_lost(self, attempt: Attempt, reason: Reason, detail: str) -> Iterator[Action]:
        if attempt.kind is TriggerKind.STOP_WITH_SAVEPOINT:
            # Without its savepoint the query continues as before.
            self._stop_request = None
            if not self._input_has_ended:
                self._timer.start(self._now_ms)
        exceeded = self._failures.exceeded_by(attempt.number, attempt.kind, reason)
        if exceeded and self._is_running:
            message = " ".join(part for part in (reason.message, detail) if part)
            yield from self._end_query(
                FailQuery(
                    reason,
                    f"Exceeded checkpoint tolerable failure threshold ({self._options.tolerable_failures} in a row "
                    f"are tolerated). The last one was attempt {attempt.number}: {message}",
                )
            )

    def _abort(self, which: Callable[[Attempt], bool], reason: Reason) -> Iterator[Action]:
        for attempt in self._pending.abort(which, reason):
            yield Abort(attempt.number, reason)

    # Starts of attempts

    def _start_waiting(self) -> Iterator[Action]:
        while True:
            match self._decider.decide(self._load()):
                case Start(request=request):
                    yield self._start(request)
                case TooSoon(request=request, remaining_ms=remaining_ms):
                    if request.is_timer:
                        self._timer.postpone(self._now_ms + remaining_ms)
                    yield _refuse(request, Reason.MINIMUM_TIME_BETWEEN_CHECKPOINTS, f"It ends in {remaining_ms} ms.")
                case Wait():
                    return

    def _load(self) -> Load:
        return Load(
            now_ms=self._now_ms,
            triggering=self._pending.is_triggering,
            pending=len(self._pending),
            cleaning=self._cleaning,
            pause_ends_ms=self._timer.pause_ends_ms(self._now_ms),
        )

    def _start(self, request: TriggerRequest) -> StartAttempt:
        attempt = new_attempt(
            self._options,
            number=self._next_number,
            kind=request.kind,
            request_id=request.request_id,
            now_ms=self._now_ms,
        )
        self._next_number += 1
        self._pending.add(attempt)
        return StartAttempt(attempt)


def _refuse(request: TriggerRequest, reason: Reason, advice: str) -> Refuse:
    return Refuse(request.request_id, reason, f"{reason.message} {advice}")
