"""Enums of checkpointing, checkpoint retention, streams and Kafka delivery."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum

from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.validation import Choice, Effect


class CheckpointingMode(Enum):
    """The guarantee of a restored query, as in Flink's `CheckpointingMode`.

    Attributes:
        EXACTLY_ONCE: Snapshots are taken at committed micro-batches: the next batch is as in an uninterrupted run.
        AT_LEAST_ONCE: Snapshots do not wait for a batch boundary: rows of the running batch may be processed twice,
            but are never lost.
    """

    EXACTLY_ONCE = 0
    AT_LEAST_ONCE = 1


class ExternalizedCheckpointCleanup(Enum):
    """Which checkpoints outlive the stream that took them; savepoints always do.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only if the stream failed.
        RETAIN_ON_CANCELLATION: Kept if the stream was canceled, failed or was suspended.
        NO_EXTERNALIZED_CHECKPOINTS: Never kept.
    """

    DELETE_ON_CANCELLATION = 0
    RETAIN_ON_CANCELLATION = 1
    NO_EXTERNALIZED_CHECKPOINTS = 2


class ExternalizedCheckpointRetention(Enum):
    """Flink 1.20's name for `ExternalizedCheckpointCleanup`.

    Attributes:
        DELETE_ON_CANCELLATION: Kept only if the stream failed.
        RETAIN_ON_CANCELLATION: Kept if the stream was canceled, failed or was suspended.
        NO_EXTERNALIZED_CHECKPOINTS: Never kept.
    """

    DELETE_ON_CANCELLATION = 0
    RETAIN_ON_CANCELLATION = 1
    NO_EXTERNALIZED_CHECKPOINTS = 2


class TimeCharacteristic(Enum):
    """The clock of time-dependent operations, as in Flink.

    Attributes:
        ProcessingTime: The machine's clock.
        IngestionTime: When a row entered the query.
        EventTime: A column of the row, with a watermark.
    """

    ProcessingTime = 0
    IngestionTime = 1
    EventTime = 2


class TerminalState(StrEnum):
    """How one execution of a stream ended.

    Attributes:
        FINISHED: There is nothing to resume.
        CANCELED: A user stopped it.
        FAILED: No further restart is allowed.
        SUSPENDED: The next execution resumes from here, as after a bounded `availableNow` run.
    """

    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"


class SnapshotKind(StrEnum):
    """Who owns a snapshot: the stream that took it, or the user who requested it."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"


class RecoveryClaimMode(StrEnum):
    """Who owns the savepoint that a start names, as in Flink (before 1.20 `RestoreMode`).

    Attributes:
        NO_CLAIM: The stream never deletes the savepoint. You may delete it after the stream's next checkpoint.
        CLAIM: The stream owns the savepoint and deletes it like any of its checkpoints.
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
                "Claim mode LEGACY is not supported: the stream would depend on a snapshot that it does not own and "
                "that its owner may delete (Flink deprecates LEGACY for that reason). Use NO_CLAIM: you may delete "
                "the snapshot once the stream has completed a checkpoint. Or use CLAIM: the stream deletes it."
            )
        raise OptionError(f"claim_mode is {value!r}. Give NO_CLAIM or CLAIM.")


class DesiredState(StrEnum):
    """The state that the supervisor sensor reconciles a stream to, like `job.state` of the Flink operator.

    Attributes:
        RUNNING: The stream runs with the loaded code.
        SUSPENDED: The stream does not run; it was stopped with a savepoint and everything is kept.
        CANCELED: The stream does not run; its cleanup option decides which checkpoints are kept.

    Example:
        >>> client.set_desired_state("orders", DesiredState.SUSPENDED)
    """

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    CANCELED = "CANCELED"


class Semantic(Enum):
    """Guarantees of a Kafka producer, as in `pyflink.datastream.connectors.kafka`, where two values are tuples.

    Attributes:
        EXACTLY_ONCE: Rows become visible exactly once.
        AT_LEAST_ONCE: Rows are acknowledged before the batch commits; a replayed batch is written again.
        NONE: Rows may be lost or written twice.
    """

    EXACTLY_ONCE = (0,)
    AT_LEAST_ONCE = (1,)
    NONE = 2


# Writer options of exactly-once delivery: the prefix of transaction ids, and the transactions per batch.
TRANSACTIONAL_ID = "kafka.transactional.id"
KAFKA_WRITERS = "kafka.transaction.writers"
MOST_KAFKA_WRITERS = 1000
_ID = re.compile(r"[\w.-]+")

_SEMANTIC = Choice("semantic", Semantic)
_NO_TRANSACTIONS = "Spark's Kafka sink writes without transactions, so a batch that is replayed is written again."


@dataclass(frozen=True)
class KafkaDelivery:
    """How a semantic is implemented, with the actual guarantee as text."""

    semantic: Semantic
    effect: Effect
    writer_options: dict[str, str]
    statement: str


def kafka_delivery(
    semantic: Semantic | str, *, transactional_id: str = "dagster-ckpt", writers: int = 1
) -> KafkaDelivery:
    """Return the writer options for a semantic, and the guarantee they provide.

    Spark's own sink (`KafkaStreamingWrite`) flushes each task's rows before the batch commits: at-least-once with
    `acks=all`. `enable.idempotence` removes only duplicates of retries within a task.

    For exactly-once, `dagster_ckpt` replaces Spark's sink when it starts the query; without it, the query fails.

    Args:
        transactional_id: EXACTLY_ONCE: prefix of transaction and consumer group ids, unique among the deployments that
            share a Kafka cluster.
        writers: EXACTLY_ONCE: parallel transactions of a batch. One makes a batch visible as a whole.

    Example:
        >>> kafka_delivery("AT_LEAST_ONCE").writer_options
        {'kafka.acks': 'all', 'kafka.enable.idempotence': 'true'}
    """
    requested = _SEMANTIC.checked(semantic)
    if requested is Semantic.NONE:
        sent = {"kafka.acks": "0", "kafka.enable.idempotence": "false", "kafka.retries": "0"}
        return KafkaDelivery(
            requested,
            Effect.REAL,
            sent,
            "Rows are sent without waiting for an acknowledgment: they may be lost or repeated.",
        )
    acknowledged = {"kafka.acks": "all", "kafka.enable.idempotence": "true"}
    if requested is Semantic.AT_LEAST_ONCE:
        statement = f"All in-sync replicas have every row before the batch commits; none is lost. {_NO_TRANSACTIONS}"
        return KafkaDelivery(requested, Effect.REAL, acknowledged, statement)
    if not _ID.fullmatch(transactional_id):
        raise OptionError(f"transactional_id is {transactional_id!r}. Use letters, digits, '.', '_' and '-'.")
    if not 1 <= writers <= MOST_KAFKA_WRITERS:
        raise OptionError(f"writers is {writers}, but must be 1 to {MOST_KAFKA_WRITERS}.")
    transactional = {**acknowledged, TRANSACTIONAL_ID: transactional_id, KAFKA_WRITERS: str(writers)}
    statement = (
        "Rows of a batch become visible once to consumers with `isolation.level=read_committed`, whichever process is "
        "killed: each transaction also commits the number of its batch, and a batch that is replayed is not written "
        "again. Conditions: `dagster_ckpt` starts the query, extra `kafka` is installed, and a replayed batch has the "
        "same rows, so that no column is random. A rewind cannot cut the topic: it is refused, or writes the rows "
        "again with `new_query_id`."
    )
    return KafkaDelivery(requested, Effect.REAL, transactional, statement)
