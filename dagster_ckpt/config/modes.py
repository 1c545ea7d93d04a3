"""Checkpointing modes, retention on cancellation, and the states a stream can end in or be asked for."""

from __future__ import annotations

from enum import Enum, StrEnum

from dagster_ckpt.errors import OptionError


class CheckpointingMode(Enum):
    """The guarantee a restored query gives, as in Flink's `CheckpointingMode`.

    Attributes:
        EXACTLY_ONCE: A snapshot is cut at a committed micro-batch. After a restore the next batch has
            the same offsets and the same state as an uninterrupted run.
        AT_LEAST_ONCE: A snapshot is cut without waiting for a batch boundary. The batch that was running
            may be planned anew after a restore: its rows may be seen twice, and are never lost.
    """

    EXACTLY_ONCE = 0
    AT_LEAST_ONCE = 1


class ExternalizedCheckpointCleanup(Enum):
    """Which checkpoints outlive the stream that took them; savepoints always do.

    The whole table, by state at the end, is in `dagster_ckpt.policies.retention`.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only where the stream failed.
        RETAIN_ON_CANCELLATION: Kept where the stream was cancelled, failed or was suspended.
        NO_EXTERNALIZED_CHECKPOINTS: Never kept.
    """

    DELETE_ON_CANCELLATION = 0
    RETAIN_ON_CANCELLATION = 1
    NO_EXTERNALIZED_CHECKPOINTS = 2


class ExternalizedCheckpointRetention(Enum):
    """The name Flink 1.20 gives to `ExternalizedCheckpointCleanup`; the members mean the same.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only where the stream failed.
        RETAIN_ON_CANCELLATION: Kept where the stream was cancelled, failed or was suspended.
        NO_EXTERNALIZED_CHECKPOINTS: Never kept.
    """

    DELETE_ON_CANCELLATION = 0
    RETAIN_ON_CANCELLATION = 1
    NO_EXTERNALIZED_CHECKPOINTS = 2


class TimeCharacteristic(Enum):
    """Which clock time-dependent operations go by, as in Flink's `TimeCharacteristic`.

    Attributes:
        ProcessingTime: The clock of the machine that runs the operation.
        IngestionTime: The time a row entered the query, stamped at the source.
        EventTime: A column of the row, with a watermark.
    """

    ProcessingTime = 0
    IngestionTime = 1
    EventTime = 2


class TerminalState(StrEnum):
    """How one execution of a stream ended.

    Attributes:
        FINISHED: The stream has ended for good; there is nothing to resume.
        CANCELED: A person stopped it.
        FAILED: It failed, and the restart strategy gave up.
        SUSPENDED: It stopped and will go on from here, as a bounded `availableNow` run does.
    """

    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"


class RecoveryClaimMode(StrEnum):
    """Who owns the snapshot that a start names, as in Flink's `RecoveryClaimMode` (before 1.20 `RestoreMode`).

    Flink's third mode, LEGACY, is not offered: asking for it is an `OptionError` that says why.

    Attributes:
        NO_CLAIM: The savepoint stays a person's: the stream never deletes it, and may lose it at once, because the
            next checkpoint holds all it needs itself.
        CLAIM: The savepoint becomes the stream's own: it counts among the retained snapshots and is deleted like a
            checkpoint, once newer ones have taken its place or at the stream's end.
    """

    NO_CLAIM = "NO_CLAIM"
    CLAIM = "CLAIM"

    @classmethod
    def _missing_(cls, value: object) -> RecoveryClaimMode:
        word = str(value).strip().upper()
        if word in cls.__members__:
            return cls[word]
        if word == "LEGACY":
            raise OptionError(
                "Claim mode LEGACY is not offered: the stream would depend on a snapshot that it does not own and that "
                "anybody may delete (Flink deprecates it for that reason). Use NO_CLAIM, after which the snapshot may "
                "be "
                "deleted once a checkpoint is complete, or CLAIM, after which the stream deletes it itself."
            )
        raise OptionError(f"claim_mode is {value!r}. Give NO_CLAIM or CLAIM.")


class DesiredState(StrEnum):
    """What the supervisor sensor brings a stream to (`job.state` of the Flink Kubernetes Operator, and a third).

    RUNNING: It runs, with the code that is loaded.
    SUSPENDED: It does not run; it was stopped with a savepoint, and everything is kept.
    CANCELED: It does not run; its checkpoints are kept or deleted as its clean-up option says.
    """

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    CANCELED = "CANCELED"
