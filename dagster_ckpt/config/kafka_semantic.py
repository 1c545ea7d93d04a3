"""Delivery guarantees of a Kafka sink, and which of them Spark's Kafka sink supports."""

from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.config.option_description import Effect
from dagster_ckpt.config.validation import Choice


class Semantic(Enum):
    """Guarantees of a Kafka producer, as in PyFlink's `pyflink.datastream.connectors.kafka.Semantic`.

    Two of the values are tuples, as in PyFlink, where each line except the last ends with a comma.

    Attributes:
        EXACTLY_ONCE: Rows of one batch become visible exactly once, even after failures and
            replays.
        AT_LEAST_ONCE: All rows are acknowledged before the batch commits; a replayed batch is
            written again.
        NONE: No guarantee; rows may be lost or written twice.
    """

    EXACTLY_ONCE = (0,)
    AT_LEAST_ONCE = (1,)
    NONE = 2


_SEMANTIC = Choice("semantic", Semantic)
_NO_TRANSACTIONS = "Spark's Kafka sink writes without transactions, so a batch that is replayed is written again."


@dataclass(frozen=True)
class KafkaDelivery:
    """How Spark's Kafka sink implements a semantic.

    Attributes:
        semantic: The requested semantic.
        effect: REAL if the sink provides it; NONE if it provides less.
        writer_options: Options for `DataStreamWriter.format("kafka").options(...)`.
        statement: The actual guarantee, as a sentence.
    """

    semantic: Semantic
    effect: Effect
    writer_options: dict[str, str]
    statement: str


def kafka_delivery(semantic: Semantic | str) -> KafkaDelivery:
    """Return the writer options for a semantic, and the guarantee they actually provide.

    Spark's sink (`KafkaStreamingWrite`) makes each task send its rows and flush; the batch commits
    after the tasks. This provides at-least-once delivery: with `acks=all` no committed row is lost.
    The sink never opens a Kafka transaction, so it cannot provide exactly-once.
    `enable.idempotence` removes only the duplicates of the producer's own retries within one task,
    not those of a batch that runs again.

    Args:
        semantic: The semantic or its name.

    Raises:
        OptionError: It is not the name of a semantic.
        OptionTypeError: It is neither a semantic nor a string.

    Example:
        >>> kafka_delivery("AT_LEAST_ONCE").writer_options
        {'kafka.acks': 'all', 'kafka.enable.idempotence': 'true'}
    """
    asked = _SEMANTIC.named(semantic)
    if asked is Semantic.NONE:
        sent = {"kafka.acks": "0", "kafka.enable.idempotence": "false", "kafka.retries": "0"}
        return KafkaDelivery(
            asked, Effect.REAL, sent, "Rows are sent and not waited for: they may be lost or repeated."
        )
    acknowledged = {"kafka.acks": "all", "kafka.enable.idempotence": "true"}
    if asked is Semantic.AT_LEAST_ONCE:
        statement = f"All in-sync replicas have every row before the batch commits; none is lost. {_NO_TRANSACTIONS}"
        return KafkaDelivery(asked, Effect.REAL, acknowledged, statement)
    statement = (
        f"Not exactly once: this is at least once. {_NO_TRANSACTIONS} State and offsets are exactly once all the same. "
        "For rows that are seen once, give each row a key that a consumer can recognize, or write them in foreachBatch "
        "with a transactional producer of your own that stores the batch number in the same transaction."
    )
    return KafkaDelivery(asked, Effect.NONE, acknowledged, statement)
