"""What can happen to a coordinator. Every `at_ms` is a monotonic time in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_ckpt.coordinator.reasons import CheckpointFailureReason
from dagster_ckpt.coordinator.request import TriggerRequest


@dataclass(frozen=True)
class QueryStarted:
    """The query runs: requests are taken and the periodic timer starts."""

    at_ms: int


@dataclass(frozen=True)
class QueryStopped:
    """The query has ended, for whatever reason: nothing more can be cut from it."""

    at_ms: int


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due at `CheckpointCoordinator.next_deadline_ms`; harmless at any other time.

    Attempts expire and the timer fires only here, so an image that was stored in time is never
    thrown away because its report and the tick arrive in a certain order.
    """

    at_ms: int


@dataclass(frozen=True)
class Triggered:
    """Somebody asks for an image."""

    at_ms: int
    request: TriggerRequest


@dataclass(frozen=True)
class CutTaken:
    """The triggering phase of an attempt is over: the consistent cut exists, the upload goes on."""

    at_ms: int
    number: int


@dataclass(frozen=True)
class AttemptCompleted:
    """An image is stored, published and can be restored from."""

    at_ms: int
    number: int


@dataclass(frozen=True)
class AttemptFailed:
    """An attempt ended without an image; reported for an aborted one too, once its work has ended.

    Attributes:
        at_ms: Monotonic time.
        number: The attempt.
        reason: Why.
        detail: The root cause, for the person who asked.
    """

    at_ms: int
    number: int
    reason: CheckpointFailureReason
    detail: str = ""


@dataclass(frozen=True)
class CleaningChanged:
    """The number of images being deleted changed.

    Attributes:
        at_ms: Monotonic time.
        pending: Deletions under way. One that failed and waits for a retry is not under way:
            counting it would let a storage without the right to delete stop all checkpoints.
    """

    at_ms: int
    pending: int


Event = QueryStarted | QueryStopped | Tick | Triggered | CutTaken | AttemptCompleted | AttemptFailed | CleaningChanged
