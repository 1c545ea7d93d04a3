"""Attempts, events and actions of the coordinator, and Flink's failure reasons; `at_ms` is monotonic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dagster_ckpt.checkpointing.coordinator.requests import TriggerKind, TriggerRequest
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.modes import CheckpointingMode


class Alignment(Enum):
    """Which batch a snapshot ends at, if one is running when the attempt begins.

    WAIT_FOR_COMMIT: Aligned. Wait until the running batch is committed and cut there.
    CARRY_IN_FLIGHT: Unaligned. Cut at the newest commit at once, and carry the planned offsets
        of the running batch, so that a restore replays exactly that batch.
    NEWEST_COMMIT: At least once. Cut at the newest commit at once, without the plan of the
        running batch: after a restore it may be planned anew, so its rows may be emitted
        twice, but never lost.
    """

    WAIT_FOR_COMMIT = auto()
    CARRY_IN_FLIGHT = auto()
    NEWEST_COMMIT = auto()


@dataclass(frozen=True)
class Attempt:
    """One attempt to take a snapshot. All times are on the monotonic clock of the events.

    Attributes:
        number: From the stream's counter, rising. The `n` of `chk-<n>`; a savepoint takes a number
            too, as in Flink, though its path does not show it.
        kind: What is taken.
        request_id: Whom to answer; None if the timer asked.
        alignment: What to do about a running batch.
        alignment_deadline_ms: When an attempt that waits for a commit gives up waiting and goes
            on as `CARRY_IN_FLIGHT`. None waits until the attempt expires.
        expires_at_ms: When the coordinator aborts the attempt.
    """

    number: int
    kind: TriggerKind
    request_id: str | None
    alignment: Alignment
    alignment_deadline_ms: int | None
    expires_at_ms: int


def alignment_of(options: CheckpointOptions, kind: TriggerKind) -> Alignment:
    """What an attempt does about a running batch when it begins.

    The order of the rules is that of Flink's `CheckpointOptions.forConfig`: the mode decides
    first, a savepoint is never unaligned, and an alignment timeout of 0 does not wait at all.
    """
    if options.mode is CheckpointingMode.AT_LEAST_ONCE:
        return Alignment.NEWEST_COMMIT
    if kind.is_savepoint or not options.unaligned or options.alignment_timeout_ms > 0:
        return Alignment.WAIT_FOR_COMMIT
    return Alignment.CARRY_IN_FLIGHT


def begin_attempt(
    options: CheckpointOptions, *, number: int, kind: TriggerKind, request_id: str | None, now_ms: int
) -> Attempt:
    """An attempt that begins now, with its deadlines.

    Args:
        options: The stream's checkpointing options.
        number: Number of the attempt.
        kind: What is taken.
        request_id: Whom to answer; None if the timer asked.
        now_ms: Monotonic time.
    """
    alignment = alignment_of(options, kind)
    may_turn_unaligned = alignment is Alignment.WAIT_FOR_COMMIT and options.unaligned and not kind.is_savepoint
    return Attempt(
        number=number,
        kind=kind,
        request_id=request_id,
        alignment=alignment,
        alignment_deadline_ms=now_ms + options.alignment_timeout_ms if may_turn_unaligned else None,
        expires_at_ms=now_ms + options.timeout_ms,
    )


class FailureSide(Enum):
    """Where a failure arises.

    Flink forgives a savepoint that fails on the coordinator's side, because restarting the
    query would not help, and counts one that fails on the side of the running tasks.
    """

    COORDINATOR = "coordinator"
    QUERY = "query"


class CheckpointFailureReason(Enum):
    """Why an attempt failed or a request was refused.

    Attributes:
        counts: Whether the reason counts against the tolerable checkpoint failures.
        side: Where the failure arises.
        sentence: What happened, for a log, the catalog and the person who asked.
    """

    counts: bool
    side: FailureSide
    sentence: str

    def __init__(self, counts: bool, side: FailureSide, sentence: str) -> None:
        self.counts = counts
        self.side = side
        self.sentence = sentence

    IO_EXCEPTION = (
        True,
        FailureSide.COORDINATOR,
        "The catalog or the target storage could not be used before anything was cut.",
    )
    CHECKPOINT_EXPIRED = (
        True,
        FailureSide.COORDINATOR,
        "The attempt took longer than the checkpoint timeout.",
    )
    CHECKPOINT_DECLINED = (
        True,
        FailureSide.QUERY,
        "The live directory gave no consistent cut: something that a restore needs was missing.",
    )
    CHECKPOINT_ASYNC_EXCEPTION = (
        True,
        FailureSide.QUERY,
        "The cut was made, but its files could not be stored.",
    )
    FINALIZE_CHECKPOINT_FAILURE = (
        True,
        FailureSide.COORDINATOR,
        "The files were stored, but the metadata or the catalog entry could not be written.",
    )
    CHECKPOINT_DECLINED_TASK_NOT_READY = (
        False,
        FailureSide.QUERY,
        "The query has not committed a batch yet, so there is nothing to take a snapshot of.",
    )
    MINIMUM_TIME_BETWEEN_CHECKPOINTS = (
        False,
        FailureSide.COORDINATOR,
        "The minimum pause since the last completed snapshot is not over.",
    )
    TOO_MANY_CHECKPOINT_REQUESTS = (
        False,
        FailureSide.COORDINATOR,
        "Too many requests are waiting.",
    )
    NOT_ALL_REQUIRED_TASKS_RUNNING = (
        False,
        FailureSide.COORDINATOR,
        "The query is not running.",
    )
    PERIODIC_SCHEDULER_SHUTDOWN = (
        False,
        FailureSide.COORDINATOR,
        "Periodic checkpoints are off while the query stops.",
    )
    CHECKPOINT_SUBSUMED = (
        False,
        FailureSide.COORDINATOR,
        "A newer checkpoint was completed first.",
    )
    CHECKPOINT_COORDINATOR_SUSPEND = (
        False,
        FailureSide.COORDINATOR,
        "The query is stopping or has stopped.",
    )


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
    """Delete a snapshot that was completed after its attempt had been aborted.

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

    Attempts expire and the timer fires only here, so a snapshot that was stored in time is never
    thrown away because its report and the tick arrive in a certain order.
    """

    at_ms: int


@dataclass(frozen=True)
class Triggered:
    """Somebody asks for a snapshot."""

    at_ms: int
    request: TriggerRequest


@dataclass(frozen=True)
class CutTaken:
    """The triggering phase of an attempt is over: the consistent cut exists, the upload goes on."""

    at_ms: int
    number: int


@dataclass(frozen=True)
class AttemptCompleted:
    """A snapshot is stored, published and can be restored from."""

    at_ms: int
    number: int


@dataclass(frozen=True)
class AttemptFailed:
    """An attempt ended without a snapshot; reported for an aborted one too, once its work has ended.

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
    """The number of snapshots being deleted changed.

    Attributes:
        at_ms: Monotonic time.
        pending: Deletions under way. One that failed and waits for a retry is not under way:
            counting it would let a storage without the right to delete stop all checkpoints.
    """

    at_ms: int
    pending: int


Event = QueryStarted | QueryStopped | Tick | Triggered | CutTaken | AttemptCompleted | AttemptFailed | CleaningChanged
