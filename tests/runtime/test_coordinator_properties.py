"""What holds after any sequence of events whatsoever."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CheckpointFailureReason,
    CleaningChanged,
    CutTaken,
    Discard,
    Event,
    FailQuery,
    QueryStarted,
    QueryStopped,
    Refuse,
    StartAttempt,
    StopQuery,
    Tick,
    Triggered,
)
from dagster_ckpt.runtime.coordinator import CheckpointCoordinator
from dagster_ckpt.runtime.triggers import TriggerKind, TriggerOrigin, TriggerRequest

REPORTED = [
    CheckpointFailureReason.IO_EXCEPTION,
    CheckpointFailureReason.CHECKPOINT_DECLINED,
    CheckpointFailureReason.CHECKPOINT_DECLINED_TASK_NOT_READY,
    CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION,
    CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE,
]
option_values = st.builds(
    lambda interval, pause, timeout, unaligned, concurrent, tolerable: CheckpointOptions(
        interval=interval,
        min_pause=pause,
        timeout=timeout,
        unaligned=unaligned,
        max_concurrent=1 if unaligned else concurrent,
        tolerable_failures=tolerable,
    ),
    st.none() | st.integers(10, 300),
    st.integers(0, 200),
    st.integers(10, 500),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 3),
)


class AnyHistory(RuleBasedStateMachine):
    """Drives a coordinator like a runner does, and keeps its own simple books beside it."""

    @initialize(options=option_values, first_number=st.integers(1, 1000), seed=st.integers(0, 2**32))
    def create(self, options: CheckpointOptions, first_number: int, seed: int) -> None:
        self.options = options
        self.coordinator = CheckpointCoordinator(options, first_number=first_number, random=Random(seed))
        self.now_ms = 0
        self.last_number = first_number - 1
        self.begun: dict[int, Attempt] = {}
        self.pending: set[int] = set()
        self.uncut: set[int] = set()
        self.aborted: set[int] = set()
        self.asked: list[str] = []
        self.answers: Counter[str] = Counter()
        self.counted_in_a_row = 0
        self.last_completed = 0
        self.is_running = False

    def _answer(self, request_id: str | None) -> None:
        if request_id is not None:
            self.answers[request_id] += 1

    def _ended(self, number: int) -> None:
        self.pending.remove(number)
        self.uncut.discard(number)
        self._answer(self.begun[number].request_id)

    def _counts(self, number: int, reason: CheckpointFailureReason) -> bool:
        kind = self.begun[number].kind
        return reason.counts and kind is not TriggerKind.STOP_WITH_SAVEPOINT

    def _do(self, event: Event) -> None:
        ending = False
        for action in self.coordinator.handle(event):
            match action:
                case StartAttempt(attempt):
                    assert self.is_running
                    assert not ending
                    assert attempt.number > self.last_number
                    assert not self.uncut, "two attempts in the triggering phase"
                    if attempt.kind is TriggerKind.CHECKPOINT or self.options.unaligned:
                        assert len(self.pending) < self.options.max_concurrent
                    self.last_number = attempt.number
                    self.begun[attempt.number] = attempt
                    self.pending.add(attempt.number)
                    self.uncut.add(attempt.number)
                case Abort(number, reason):
                    self._ended(number)
                    self.aborted.add(number)
                    self.counted_in_a_row += self._counts(number, reason)
                    if reason is CheckpointFailureReason.CHECKPOINT_SUBSUMED:
                        assert self.begun[number].kind is TriggerKind.CHECKPOINT
                case Refuse(request_id, _, detail):
                    assert detail
                    self._answer(request_id)
                case Discard(number):
                    assert isinstance(event, AttemptCompleted)
                    assert event.number == number
                case FailQuery():
                    assert self.is_running
                    assert self.counted_in_a_row > self.options.tolerable_failures
                    self.counted_in_a_row = 0
                    self.is_running, ending = False, True
                case StopQuery(number):
                    assert self.begun[number].kind is TriggerKind.STOP_WITH_SAVEPOINT
                    self.is_running, ending = False, True

    @rule(waited_ms=st.integers(0, 400))
    def time_passes(self, waited_ms: int) -> None:
        self.now_ms += waited_ms

    @rule()
    def tick(self) -> None:
        deadline_ms = self.coordinator.next_deadline_ms
        if deadline_ms is not None:
            self.now_ms = max(self.now_ms, deadline_ms)
        self._do(Tick(self.now_ms))
        deadline_ms = self.coordinator.next_deadline_ms
        assert deadline_ms is None or deadline_ms > self.now_ms

    @rule()
    def start(self) -> None:
        self.is_running = True
        self._do(QueryStarted(self.now_ms))

    @rule()
    def stop(self) -> None:
        self.is_running = False
        self._do(QueryStopped(self.now_ms))
        assert self.coordinator.next_deadline_ms is None

    @rule(kind=st.sampled_from(TriggerKind), origin=st.sampled_from(TriggerOrigin))
    def ask(self, kind: TriggerKind, origin: TriggerOrigin) -> None:
        # Nothing periodic asks for a savepoint.
        origin = origin if kind is TriggerKind.CHECKPOINT else TriggerOrigin.USER
        request_id = f"r-{len(self.asked)}"
        self.asked.append(request_id)
        self._do(Triggered(self.now_ms, TriggerRequest(request_id, kind, origin)))

    @precondition(lambda self: self.uncut)
    @rule()
    def cut(self) -> None:
        number = self.uncut.pop()
        self._do(CutTaken(self.now_ms, number))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pending)))
        self._ended(number)
        self.counted_in_a_row = 0 if number >= self.last_completed else self.counted_in_a_row
        self.last_completed = max(self.last_completed, number)
        self._do(AttemptCompleted(self.now_ms, number))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), reason=st.sampled_from(REPORTED))
    def fail(self, data: st.DataObject, reason: CheckpointFailureReason) -> None:
        number = data.draw(st.sampled_from(sorted(self.pending)))
        self._ended(number)
        self.counted_in_a_row += self._counts(number, reason)
        self._do(AttemptFailed(self.now_ms, number, reason, "broken"))

    @precondition(lambda self: self.aborted)
    @rule(data=st.data(), reason=st.sampled_from(REPORTED))
    def report_an_aborted_one(self, data: st.DataObject, reason: CheckpointFailureReason) -> None:
        number = data.draw(st.sampled_from(sorted(self.aborted)))
        self.aborted.remove(number)
        if data.draw(st.booleans()):
            actions = self.coordinator.handle(AttemptCompleted(self.now_ms, number))
            assert [type(action) for action in actions] == [Discard]
        else:
            assert self.coordinator.handle(AttemptFailed(self.now_ms, number, reason)) == []

    @rule(deletions=st.integers(0, 5))
    def clean(self, deletions: int) -> None:
        self._do(CleaningChanged(self.now_ms, deletions))

    @invariant()
    def the_books_agree(self) -> None:
        assert {attempt.number for attempt in self.coordinator.pending} == self.pending

    @invariant()
    def checkpoints_never_exceed_the_limit(self) -> None:
        checkpoints = [a for a in self.coordinator.pending if a.kind is TriggerKind.CHECKPOINT]
        assert len(checkpoints) <= self.options.max_concurrent

    @invariant()
    def every_request_is_answered_once_or_still_open(self) -> None:
        open_ids = {request.request_id for request in self.coordinator.waiting}
        open_ids |= {attempt.request_id for attempt in self.coordinator.pending}
        for request_id in self.asked:
            assert self.answers[request_id] == (0 if request_id in open_ids else 1)

    def teardown(self) -> None:
        if hasattr(self, "coordinator"):
            self.stop()
            assert all(self.answers[request_id] == 1 for request_id in self.asked)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40)
