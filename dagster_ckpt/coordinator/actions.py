"""What a coordinator wants done. Whoever drives it carries these out in their order."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_ckpt.coordinator.attempt import Attempt
from dagster_ckpt.coordinator.reasons import CheckpointFailureReason


@dataclass(frozen=True)
class Begin:
    """Start an attempt, and report its cut and its end."""

    attempt: Attempt


@dataclass(frozen=True)
class Abort:
    """End a pending attempt, remove what it wrote, and answer its request with the reason.

    Its end is still to be reported, by `AttemptFailed` or, if it could not be ended in time, by
    `AttemptCompleted`, which is then answered by `Discard`.
    """

    number: int
    reason: CheckpointFailureReason


@dataclass(frozen=True)
class Discard:
    """Delete an image that was completed after its attempt had been aborted.

    Its request was answered by the `Abort`; Flink likewise discards late acknowledgements.
    """

    number: int
    reason: CheckpointFailureReason


@dataclass(frozen=True)
class Refuse:
    """Answer a request for which no attempt was begun; None is the coordinator's own timer."""

    request_id: str | None
    reason: CheckpointFailureReason
    detail: str


@dataclass(frozen=True)
class FailQuery:
    """Fail the query, so that the restart strategy takes over."""

    reason: CheckpointFailureReason
    detail: str


@dataclass(frozen=True)
class StopQuery:
    """Stop the query for good: the savepoint of this number is complete."""

    number: int


Action = Begin | Abort | Discard | Refuse | FailQuery | StopQuery
