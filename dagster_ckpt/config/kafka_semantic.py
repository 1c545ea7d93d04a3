"""What a Kafka sink delivers, and what of it Spark's own sink can give."""

from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.config.option_description import Effect
from dagster_ckpt.config.validation import Choice


class Semantic(Enum):
    """Guarantees of a Kafka producer, as in PyFlink's `pyflink.datastream.connectors.kafka.Semantic`.

    Two of the values are tuples because they are in PyFlink, where each line but the last ends with a comma.

    Attributes:
        EXACTLY_ONCE: Rows of one batch become visible once, whatever is killed and replayed.
        AT_LEAST_ONCE: All rows are acknowledged before the batch commits; a replayed batch is written again.
        NONE: Nothing; rows may be lost or written twice.
    """

    EXACTLY_ONCE = (0,)
    AT_LEAST_ONCE = (1,)
    NONE = 2


_SEMANTIC = Choice("semantic", Semantic)
_NO_TRANSACTIONS = "Spark's Kafka sink writes without transactions, so a batch that is replayed is written again."


@dataclass(frozen=True)
class KafkaDelivery:
    """How a semantic is carried out by Spark's Kafka sink.

    Attributes:
        semantic: What was asked for.
        effect: REAL where the sink gives just that; NONE where it gives less.
        writer_options: Options for `DataStreamWriter.format("kafka").options(...)`.
        statement: What can be relied on, in plain words.
    """

    semantic: Semantic
    effect: Effect
    writer_options: dict[str, str]
    statement: str


def kafka_delivery(semantic: Semantic | str) -> KafkaDelivery:
    """Return the writer options of a semantic, and what they really guarantee.

    Spark's sink (`KafkaStreamingWrite`) has each task send its rows and flush; the batch commits after the tasks.
    That is at least once: with `acks=all` nothing that is committed is lost. It never opens a Kafka transaction, so
    exactly once cannot be had from it. `enable.idempotence` removes only the duplicates of the producer's own
    retries within one task, not those of a batch that runs again.

    Args:
        semantic: The semantic or its name.

    Raises:
        OptionError: It is the name of none.
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
