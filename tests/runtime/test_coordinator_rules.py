"""The single rules: which reasons count, the failure counter, the first delay, a decider's queue."""

from dataclasses import replace
from random import Random

import pytest

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import OptionError
from dagster_ckpt.runtime.checkpoint_messages import (
    AttemptCompleted,
    CheckpointFailureReason,
    CutTaken,
    QueryStarted,
    StartAttempt,
    Tick,
)
from dagster_ckpt.runtime.coordinator import (
    UNLIMITED,
    CheckpointCoordinator,
    FailureCounter,
    FailureTally,
)
from dagster_ckpt.runtime.triggers import Load, RequestDecider, Start, TriggerKind, TriggerOrigin, TriggerRequest

COUNTED = {
    CheckpointFailureReason.IO_EXCEPTION,
    CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION,
    CheckpointFailureReason.CHECKPOINT_DECLINED,
    CheckpointFailureReason.CHECKPOINT_EXPIRED,
    CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE,
}
IDLE = Load(now_ms=0, triggering=False, pending=0, cleaning=0, pause_ends_ms=0)


@pytest.mark.parametrize("reason", CheckpointFailureReason)
def test_exactly_the_listed_reasons_count_against_a_checkpoint(reason: CheckpointFailureReason) -> None:
    assert FailureCounter(0).exceeded_by(1, TriggerKind.CHECKPOINT, reason) is (reason in COUNTED)


@pytest.mark.parametrize("reason", CheckpointFailureReason)
def test_no_reason_counts_against_a_stop_with_savepoint(reason: CheckpointFailureReason) -> None:
    assert not FailureCounter(0).exceeded_by(1, TriggerKind.STOP_WITH_SAVEPOINT, reason)


def test_every_reason_is_a_member_of_its_own_with_a_sentence() -> None:
    # Members of an Enum that have equal values would silently be one.
    assert len(CheckpointFailureReason) == len(CheckpointFailureReason.__members__)
    assert all(reason.message.endswith(".") for reason in CheckpointFailureReason)


def test_the_same_number_counts_once_and_an_old_one_not_at_all() -> None:
    counter = FailureCounter(1)
    declined = CheckpointFailureReason.CHECKPOINT_DECLINED
    counter.succeeded(4)
    assert not counter.exceeded_by(4, TriggerKind.CHECKPOINT, declined)
    assert not counter.exceeded_by(5, TriggerKind.CHECKPOINT, declined)
    assert not counter.exceeded_by(5, TriggerKind.CHECKPOINT, declined)
    assert counter.consecutive == 1
    assert counter.exceeded_by(6, TriggerKind.CHECKPOINT, declined)


@pytest.mark.parametrize("kind", TriggerKind)
@pytest.mark.parametrize("reason", CheckpointFailureReason)
def test_the_tally_of_a_failure_is_what_the_counter_then_holds(
    kind: TriggerKind, reason: CheckpointFailureReason
) -> None:
    counter = FailureCounter(2)
    counter.succeeded(4)
    counter.exceeded_by(5, TriggerKind.CHECKPOINT, CheckpointFailureReason.CHECKPOINT_DECLINED)
    counts = FailureCounter(0).exceeded_by(1, kind, reason)
    for number, is_new in ((4, False), (5, True), (6, True)):
        before = counter.consecutive
        tally = counter.tally(number, kind, reason)
        assert counter.consecutive == before
        assert (tally is not None) is (is_new and counts)
        counter.exceeded_by(number, kind, reason)
        if tally is not None:
            assert (tally.consecutive, tally.tolerable) == (counter.consecutive, 2)


def test_a_failure_has_no_tally_where_every_failure_is_tolerated() -> None:
    counter = FailureCounter(UNLIMITED)
    assert counter.tally(1, TriggerKind.CHECKPOINT, CheckpointFailureReason.IO_EXCEPTION) is None


def test_the_failure_of_an_attempt_is_tallied_by_its_number_and_its_kind() -> None:
    options = CheckpointOptions(interval=100, tolerable_failures=3)
    coordinator = CheckpointCoordinator(options, first_number=7, random=Random(0))
    coordinator.handle(QueryStarted(0))
    attempts = []
    for at_ms in (200, 400):
        attempts += [each.attempt for each in coordinator.handle(Tick(at_ms)) if isinstance(each, StartAttempt)]
        coordinator.handle(CutTaken(at_ms, attempts[-1].number))
        if at_ms == 200:
            coordinator.handle(AttemptCompleted(at_ms, attempts[-1].number))
    completed, pending = attempts
    declined = CheckpointFailureReason.CHECKPOINT_DECLINED

    assert coordinator.failure_tally(pending, declined) == FailureTally(1, 3)
    assert coordinator.failure_tally(completed, declined) is None
    assert coordinator.failure_tally(replace(pending, kind=TriggerKind.STOP_WITH_SAVEPOINT), declined) is None


@pytest.mark.parametrize("again", [3, 4])
def test_a_success_that_is_no_newer_does_not_end_a_streak_of_failures(again: int) -> None:
    counter = FailureCounter(2)
    counter.succeeded(4)
    counter.exceeded_by(5, TriggerKind.CHECKPOINT, CheckpointFailureReason.CHECKPOINT_DECLINED)
    counter.succeeded(again)
    assert counter.consecutive == 1


def test_the_first_delay_is_spread_over_the_time_from_the_pause_to_the_interval() -> None:
    options = CheckpointOptions(interval=100, min_pause=90)
    seen = set()
    for seed in range(200):
        coordinator = CheckpointCoordinator(options, first_number=1, random=Random(seed))
        coordinator.handle(QueryStarted(1000))
        seen.add(coordinator.next_deadline_ms)
    assert seen == set(range(1090, 1101))


def test_options_that_contradict_each_other_are_refused() -> None:
    options = CheckpointOptions(unaligned=True, max_concurrent=2)
    with pytest.raises(OptionError, match="max concurrent checkpoints is 2"):
        CheckpointCoordinator(options, first_number=1, random=Random(0))


def test_a_forced_savepoint_starts_with_all_slots_taken_and_a_checkpoint_does_not() -> None:
    busy = Load(now_ms=0, triggering=False, pending=1, cleaning=0, pause_ends_ms=0)
    decider = RequestDecider(max_concurrent=1, force_savepoints=True)
    checkpoint = TriggerRequest("c", TriggerKind.CHECKPOINT, TriggerOrigin.USER)
    savepoint = TriggerRequest("s", TriggerKind.SAVEPOINT, TriggerOrigin.USER)
    decider.submit(checkpoint)
    decider.submit(savepoint)
    assert decider.decide(busy) == Start(savepoint)
    assert decider.waiting == (checkpoint,)
    decider.decide(busy)
    assert decider.waiting == (checkpoint,)
    assert decider.decide(IDLE) == Start(checkpoint)


def test_a_full_queue_of_periodic_requests_keeps_the_older_ones() -> None:
    decider = RequestDecider(max_concurrent=1, force_savepoints=True, max_queued=2)
    requests = [TriggerRequest(f"p-{i}", TriggerKind.CHECKPOINT, TriggerOrigin.PERIODIC) for i in range(3)]
    assert [decider.submit(request) for request in requests] == [None, None, requests[2]]
    assert decider.waiting == tuple(requests[:2])
