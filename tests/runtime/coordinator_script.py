"""The language of the contract cases: one line for an event, one line for an action."""

from collections.abc import Callable
from random import Random

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Action,
    AttemptCompleted,
    AttemptFailed,
    CheckpointFailureReason,
    CleaningChanged,
    CutTaken,
    Discard,
    Event,
    FailQuery,
    InputEnded,
    QueryStarted,
    QueryStopped,
    Refuse,
    StartAttempt,
    StopQuery,
    Tick,
    Triggered,
)
from dagster_ckpt.runtime.triggers import TriggerKind, TriggerOrigin, TriggerRequest

_REQUESTS = {
    "checkpoint": (TriggerKind.CHECKPOINT, TriggerOrigin.USER),
    "savepoint": (TriggerKind.SAVEPOINT, TriggerOrigin.USER),
    "stop": (TriggerKind.STOP_WITH_SAVEPOINT, TriggerOrigin.USER),
    "periodic": (TriggerKind.CHECKPOINT, TriggerOrigin.PERIODIC),
}
_PLAIN: dict[str, Callable[[int], Event]] = {
    "started": QueryStarted,
    "ended": InputEnded,
    "stopped": QueryStopped,
    "tick": Tick,
}
_NUMBERED: dict[str, Callable[[int, int], Event]] = {
    "cut": CutTaken,
    "completed": AttemptCompleted,
    "cleaning": CleaningChanged,
}


class FixedDelay(Random):
    """Draws the same first delay of the periodic trigger every time."""

    def __init__(self, delay_ms: int, options: CheckpointOptions) -> None:
        super().__init__(0)
        pause_ms = options.effective_min_pause_ms
        period_ms = max(options.interval or 0, pause_ms)
        # Without a case's own delay, of a stream without an interval too, the first one is due at the earliest time.
        assert delay_ms == 0 or pause_ms <= delay_ms <= period_ms, f"{delay_ms} is not within {pause_ms}..{period_ms}"
        self._share = max(0, delay_ms - pause_ms + 0.5) / (period_ms - pause_ms + 1)

    def random(self) -> float:
        return self._share


def event(at_ms: int, line: str) -> Event:
    """What `line` says has happened, e.g. "savepoint s-1", "cut 3", "failed 3 IO_EXCEPTION"."""
    word, *rest = line.split()
    if line == "ended where it was saved":
        return InputEnded(at_ms, final_is_due=False)
    if word in _REQUESTS:
        return Triggered(at_ms, TriggerRequest(rest[0], *_REQUESTS[word]))
    if word in _PLAIN:
        return _PLAIN[word](at_ms)
    number = int(rest[0])
    if word == "failed":
        return AttemptFailed(at_ms, number, CheckpointFailureReason[rest[1]], " ".join(rest[2:]))
    return _NUMBERED[word](at_ms, number)


def told(action: Action) -> str:
    """An action as the cases write it."""
    match action:
        case StartAttempt(attempt):
            whom = f" for {attempt.request_id}" if attempt.request_id else ""
            return f"begin {attempt.number} {attempt.kind.name.lower()}{whom}"
        case Abort(number, reason):
            return f"abort {number} {reason.name}"
        case Discard(number, reason):
            return f"discard {number} {reason.name}"
        case Refuse(request_id, reason, _):
            return f"refuse {request_id or 'timer'} {reason.name}"
        case FailQuery(reason, _):
            return f"fail query {reason.name}"
        case StopQuery(number):
            return f"stop query {number}"
