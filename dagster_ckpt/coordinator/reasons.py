"""Why an image was not taken, in the words of Flink.

The members carry the names of Flink's `CheckpointFailureReason`, so that whoever knows Flink
knows what they mean and which of them its `CheckpointFailureManager` counts against the
tolerable failures. The sentences say what each one is for a Spark query.
"""

from __future__ import annotations

from enum import Enum


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
        "The query has not committed a batch yet, so there is nothing to take an image of.",
    )
    MINIMUM_TIME_BETWEEN_CHECKPOINTS = (
        False,
        FailureSide.COORDINATOR,
        "The minimum pause since the last completed image is not over.",
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
