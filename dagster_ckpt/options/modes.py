"""The modes a streaming job is checkpointed in, and the states it can end in."""

from enum import Enum, StrEnum


class CheckpointingMode(Enum):
    """The guarantee a restored query gives, as in Flink's `CheckpointingMode`.

    Attributes:
        EXACTLY_ONCE: An image is cut at a committed micro-batch. After a restore the next batch has
            the same offsets and the same state as an uninterrupted run.
        AT_LEAST_ONCE: An image is cut without waiting for a batch boundary. The batch that was running
            may be planned anew after a restore: its rows may be seen twice, and are never lost.
    """

    EXACTLY_ONCE = 0
    AT_LEAST_ONCE = 1


class ExternalizedCheckpointCleanup(Enum):
    """Which checkpoints outlive the job that took them; savepoints always do.

    The whole table, by state at the end, is in `dagster_ckpt.options.retention`.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only where the job failed.
        RETAIN_ON_CANCELLATION: Kept where the job was cancelled, failed or was suspended.
        NO_EXTERNALIZED_CHECKPOINTS: Never kept.
    """

    DELETE_ON_CANCELLATION = 0
    RETAIN_ON_CANCELLATION = 1
    NO_EXTERNALIZED_CHECKPOINTS = 2


class ExternalizedCheckpointRetention(Enum):
    """The name Flink 1.20 gives to `ExternalizedCheckpointCleanup`; the members mean the same.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only where the job failed.
        RETAIN_ON_CANCELLATION: Kept where the job was cancelled, failed or was suspended.
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
    """How one execution of a job ended.

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
