"""Kafka sources of a described query: which offsets their topics still have.

The JVM's own Kafka client is asked, the one that Spark's connector brings, with the options of the
source: it needs no further configuration, and no other library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster_ckpt.config.redaction import without_secrets
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.query.description import session_of, streaming_leaves

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Topic to partition to offset, as in Spark's offset log.
TopicOffsets = Mapping[str, Mapping[str, int]]

_KAFKA = "kafka."
_ANSWER_S = 30
_IS_GONE = "UnknownTopicOrPartitionException"


@dataclass(frozen=True)
class KafkaSource:
    """One Kafka source of a described query.

    Attributes:
        options: The options of its client, which may contain secrets.
    """

    options: Mapping[str, str] = field(repr=False)

    @property
    def servers(self) -> str:
        """`bootstrap.servers`."""
        return self.options.get("bootstrap.servers", "")


def kafka_sources(writer: DataStreamWriter) -> list[KafkaSource | None]:
    """The sources of a described query in the order of its offset log; None for each that is not Kafka.

    Empty if the query cannot be inspected (Spark Connect).
    """
    return [_kafka_source(leaf) for leaf in streaming_leaves(writer)]


def _kafka_source(leaf: Any) -> KafkaSource | None:
    if str(leaf.getClass().getSimpleName()) != "StreamingRelationV2" or str(leaf.sourceName()) != "kafka":
        return None
    options = {str(name): str(value) for name, value in dict(leaf.extraOptions().asCaseSensitiveMap()).items()}
    return KafkaSource(
        {name.lower().removeprefix(_KAFKA): text for name, text in options.items() if name.lower().startswith(_KAFKA)}
    )


def kept_offsets(
    writer: DataStreamWriter, source: KafkaSource, partitions: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], range | None]:
    """The offsets that each partition still has; None for a partition that no longer exists.

    Args:
        writer: The described query.
        source: The source.
        partitions: Topics and partitions.

    Raises:
        StorageAccessError: Kafka does not answer.
    """
    with _admin(writer, source) as (jvm, client):
        specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        found: dict[tuple[str, int], range | None] = {}
        for each in partitions:
            first = _offset(jvm, client, each, specs.earliest())
            end = _offset(jvm, client, each, specs.latest()) if first is not None else None
            found[each] = range(first, end) if first is not None and end is not None else None
        return found


def offsets_at(
    writer: DataStreamWriter, source: KafkaSource, partitions: Sequence[tuple[str, int]], at_ms: int
) -> dict[tuple[str, int], int]:
    """The offset of the first record of each partition that is not older than a time; without one, its end.

    Args:
        writer: The described query.
        source: The source.
        partitions: Topics and partitions.
        at_ms: The time, in ms since the epoch.

    Raises:
        StorageAccessError: Kafka does not answer.
    """
    with _admin(writer, source) as (jvm, client):
        specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        found: dict[tuple[str, int], int] = {}
        for each in partitions:
            offset = _offset(jvm, client, each, specs.forTimestamp(at_ms))
            if offset is None or offset < 0:
                offset = _offset(jvm, client, each, specs.latest())
            found[each] = offset or 0
        return found


@contextmanager
def _admin(writer: DataStreamWriter, source: KafkaSource) -> Iterator[tuple[Any, Any]]:
    jvm: Any = session_of(writer)._jvm
    settings = jvm.java.util.HashMap()
    for name, value in source.options.items():
        settings.put(name, value)
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
        try:
            yield jvm, client
        finally:
            client.close(jvm.java.time.Duration.ofSeconds(1))
    except Exception as error:  # py4j raises what the client raises
        raise StorageAccessError(
            f"Kafka at {source.servers} did not return the offsets of its topics: "
            f"{without_secrets(_first_line(error))}. Make it reachable from the driver, then try again."
        ) from error


def _offset(jvm: Any, client: Any, partition: tuple[str, int], spec: Any) -> int | None:
    key = jvm.org.apache.kafka.common.TopicPartition(*partition)
    asked = jvm.java.util.HashMap()
    asked.put(key, spec)
    answer = client.listOffsets(asked).partitionResult(key)
    try:
        return int(answer.get(_ANSWER_S, jvm.java.util.concurrent.TimeUnit.SECONDS).offset())
    except Exception as error:
        if _IS_GONE in str(error):
            return None
        raise


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Exception" in line), lines[0] if lines else type(error).__name__)
