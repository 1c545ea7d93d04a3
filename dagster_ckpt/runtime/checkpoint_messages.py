"""Messages between the coordinator and its driver; times are monotonic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import IncompleteCutError, NothingCommittedError, SnapshotAbortedError, SnapshotTooLargeError
from dagster_ckpt.runtime.triggers import TriggerKind, TriggerRequest
from dagster_ckpt.values.modes import CheckpointingMode


class Alignment(Enum):
    """Where the cut is taken if a batch is running when the attempt begins.

    WAIT_FOR_COMMIT: Aligned: at the commit of the running batch.
    CARRY_IN_FLIGHT: Unaligned: at the newest commit, with the planned offsets of the running batch, which a restore
    replays exactly.
    NEWEST_COMMIT: At least once: at the newest commit. A restore may plan the running batch differently, so its
    rows may be emitted twice.
    """

    WAIT_FOR_COMMIT = auto()
    CARRY_IN_FLIGHT = auto()
    NEWEST_COMMIT = auto()


@dataclass(frozen=True)
class Attempt:
    """One attempt at a snapshot; at its alignment deadline, if any, it continues as `CARRY_IN_FLIGHT`."""

    number: int
    kind: TriggerKind
    request_id: str | None
    alignment: Alignment
    alignment_deadline_ms: int | None
    expires_at_ms: int


def alignment_of(options: CheckpointOptions, kind: TriggerKind) -> Alignment:
    """Choose the alignment as Flink's `CheckpointOptions.forConfig` does."""
    if options.mode is CheckpointingMode.AT_LEAST_ONCE:
        return Alignment.NEWEST_COMMIT
    if kind.is_savepoint or not options.unaligned or options.alignment_timeout > 0:
        return Alignment.WAIT_FOR_COMMIT
    return Alignment.CARRY_IN_FLIGHT


def new_attempt(
    options: CheckpointOptions, *, number: int, kind: TriggerKind, request_id: str | None, now_ms: int
) -> Attempt:
    alignment = alignment_of(options, kind)
    may_turn_unaligned = alignment is Alignment.WAIT_FOR_COMMIT and options.unaligned and not kind.is_savepoint
    return Attempt(
        number=number,
        kind=kind,
        request_id=request_id,
        alignment=alignment,
        alignment_deadline_ms=now_ms + options.alignment_timeout if may_turn_unaligned else None,
        expires_at_ms=now_ms + options.timeout,
    )


class FailureSide(Enum):
    """Where an attempt failed. As in Flink, a savepoint counts only on the query's side, where a restart may help."""

    COORDINATOR = "coordinator"
    QUERY = "query"


class CheckpointFailureReason(Enum):
    """Why an attempt failed or a request was refused, and whether it `counts` against the tolerable failures."""

    counts: bool
    side: FailureSide
    message: str

    def __init__(self, counts: bool, side: FailureSide, message: str) -> None:
        self.counts = counts
        self.side = side
        self.message = message

    @staticmethod
    def of(error: Exception, *, after_cut: bool) -> CheckpointFailureReason:
        match error:
            case NothingCommittedError():
                return CheckpointFailureReason.CHECKPOINT_DECLINED_TASK_NOT_READY
            case IncompleteCutError() | SnapshotTooLargeError() | SnapshotAbortedError():
                return CheckpointFailureReason.CHECKPOINT_DECLINED
            case OSError() if not after_cut:
                return CheckpointFailureReason.IO_EXCEPTION
            case _:
                return CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION

    IO_EXCEPTION = (
        True,
        FailureSide.COORDINATOR,
        "The catalog or the target storage was unavailable before the snapshot was cut.",
    )
    CHECKPOINT_EXPIRED = (True, FailureSide.COORDINATOR, "The attempt took longer than the checkpoint timeout.")
    CHECKPOINT_DECLINED = (
        True,
        FailureSide.QUERY,
        "No consistent cut was possible: a file that a restore needs is missing in the live directory, or damaged.",
    )
    CHECKPOINT_ASYNC_EXCEPTION = (True, FailureSide.QUERY, "The cut was made, but its files could not be stored.")
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
        "The minimum pause since the last completed snapshot has not elapsed.",
    )
    TOO_MANY_CHECKPOINT_REQUESTS = (False, FailureSide.COORDINATOR, "Too many requests are waiting.")
    NOT_ALL_REQUIRED_TASKS_RUNNING = (False, FailureSide.COORDINATOR, "The query is not running.")
    PERIODIC_SCHEDULER_SHUTDOWN = (
        False,
        FailureSide.COORDINATOR,
        "Periodic checkpoints are off while the query stops.",
    )
    CHECKPOINT_SUBSUMED = (False, FailureSide.COORDINATOR, "A newer checkpoint was completed first.")
    CHECKPOINT_COORDINATOR_SUSPEND = (False, FailureSide.COORDINATOR, "The query is stopping or has stopped.")


@dataclass(frozen=True)
class StartAttempt:
    attempt: Attempt


@dataclass(frozen=True)
class Abort:
    """End a pending attempt, delete what it wrote, and answer its request with the reason.

    The driver still reports its end: `AttemptFailed`, or `AttemptCompleted`, which a `Discard` answers.
    """

    number: int
    reason: CheckpointFailureReason


@dataclass(frozen=True)
class Discard:
    """Delete the snapshot of an aborted attempt, as Flink discards late acknowledgements."""

    number: int
    reason: CheckpointFailureReason


@dataclass(frozen=True)
class Refuse:
    request_id: str | None
    reason: CheckpointFailureReason
    detail: str


@dataclass(frozen=True)
class FailQuery:
    reason: CheckpointFailureReason
    detail: str


@dataclass(frozen=True)
class StopQuery:
    number: int


Action = StartAttempt | Abort | Discard | Refuse | FailQuery | StopQuery


@dataclass(frozen=True)
class _At:
    at_ms: int


@dataclass(frozen=True)
class QueryStarted(_At):
    """Requests are accepted from now on."""


@dataclass(frozen=True)
class QueryStopped(_At):
    """No snapshot of the query can be taken any more."""


@dataclass(frozen=True)
class InputEnded(_At):
    """The query has processed all its input; a final checkpoint is due if none has its end (FLIP-147)."""

    final_is_due: bool = True


@dataclass(frozen=True)
class Tick(_At):
    """Time has passed: due at `CheckpointCoordinator.next_deadline_ms`, harmless at any other time.

    Attempts expire only here, so a snapshot stored in time is never discarded because its report arrives late.
    """


@dataclass(frozen=True)
class Progressed(_At):
    """Figures for trigger policies; `wall_ms` is since the epoch."""

    wall_ms: int
    batches: int
    rows: int


@dataclass(frozen=True)
class Triggered(_At):
    request: TriggerRequest


@dataclass(frozen=True)
class CutTaken(_At):
    number: int


@dataclass(frozen=True)
class AttemptCompleted(_At):
    number: int


@dataclass(frozen=True)
class AttemptFailed(_At):
    number: int
    reason: CheckpointFailureReason
    detail: str = ""


@dataclass(frozen=True)
class CleaningChanged(_At):
    """The number of snapshots being deleted changed.

    Those that wait for a retry do not count: a storage that denies deletions would stop all checkpoints.
    """

    pending: int


Event = (
    QueryStarted
    | QueryStopped
    | InputEnded
    | Tick
    | Progressed
    | Triggered
    | CutTaken
    | AttemptCompleted
    | AttemptFailed
    | CleaningChanged
)
