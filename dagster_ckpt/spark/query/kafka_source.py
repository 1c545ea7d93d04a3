"""Kafka sources of a described query: which offsets their topics still have."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.safe_parsing import from_json

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Topic to partition to offset, as in Spark's offset log.
TopicOffsets = Mapping[str, Mapping[str, int]]

_KAFKA = "kafka."
_ANSWER_S = 30
# A missing answer only leaves the identity unknown.
_ASK_S = 10
_IS_GONE = "UnknownTopicOrPartitionException"
_POLICY = ("cleanup.policy", "retention.ms", "retention.bytes")


@dataclass(frozen=True)
class KafkaSource:
    """A Kafka source; `options` are those of its client, and may contain secrets."""

    options: Mapping[str, str] = field(repr=False)
    topics: frozenset[str] = frozenset()
    pattern: str | None = None

    @property
    def servers(self) -> str:
        return self.options.get("bootstrap.servers", "")


@dataclass(frozen=True)
class ReadTopics:
    topics: frozenset[str]
    pattern: str | None
    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    policies: Mapping[str, TopicPolicy] = field(default_factory=dict)


@dataclass(frozen=True)
class TopicPolicy:
    """When a topic deletes records.

    Attributes:
        is_compacted: It replaces a record by a newer one with its key.
        retention_ms: It deletes older records, and no others; -1: none. None if its size also decides.
    """

    is_compacted: bool
    retention_ms: int | None

    @staticmethod
    def of(config: Mapping[str, str]) -> TopicPolicy:
        policies = config["cleanup.policy"]
        deletes, has_limit = "delete" in policies, int(config["retention.bytes"]) >= 0
        retention_ms = int(config["retention.ms"]) if deletes else -1
        return TopicPolicy("compact" in policies, None if deletes and has_limit else retention_ms)


def kafka_source(leaf: Any) -> KafkaSource | None:
    if str(leaf.getClass().getSimpleName()) != "StreamingRelationV2" or str(leaf.sourceName()) != "kafka":
        return None
    options = {str(name): str(value) for name, value in dict(leaf.extraOptions().asCaseSensitiveMap()).items()}
    mine = {name.lower(): text for name, text in options.items()}
    return KafkaSource(
        {name.removeprefix(_KAFKA): text for name, text in mine.items() if name.startswith(_KAFKA)},
        _topics(mine),
        mine.get("subscribepattern"),
    )


def _topics(options: Mapping[str, str]) -> frozenset[str]:
    named = {each.strip() for each in options.get("subscribe", "").split(",") if each.strip()}
    try:
        assigned = from_json(options.get("assign", "{}"))
    except ValueError:
        assigned = {}
    return frozenset(named | {str(topic) for topic in assigned})


def topics_of(writer: DataStreamWriter, source: KafkaSource) -> ReadTopics:
    known = ReadTopics(source.topics, source.pattern)
    try:
        with _admin(writer, source) as (jvm, client):
            seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
            cluster = str(client.describeCluster().clusterId().get(_ASK_S, seconds))
            known = replace(known, cluster_id=cluster)
            ids: dict[str, str] = {}
            policies: dict[str, TopicPolicy] = {}
            names = _topic_names(jvm, client, source, _ASK_S)
            configs = _configs(jvm, client, names)
            for name, answer in _described(jvm, client, names):
                # The topic may not exist yet, or its configuration may not be shown to this user.
                with suppress(Exception):
                    ids[name] = str(answer.get(_ASK_S, seconds).topicId())
                    config = configs[name].get(_ASK_S, seconds)
                    policies[name] = TopicPolicy.of({key: str(config.get(key).value()) for key in _POLICY})
            return replace(known, topic_ids=ids, policies=policies)
    except StorageAccessError:
        return known


def may_match(pattern: str, topic: str) -> bool:
    """Whether a pattern may match; one that only Java understands may match any topic."""
    try:
        return re.fullmatch(pattern, topic) is not None
    except re.error:
        return True


def kept_offsets(
    writer: DataStreamWriter, source: KafkaSource, partitions: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], range | None]:
    with _admin(writer, source) as (jvm, client):
        specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        found: dict[tuple[str, int], range | None] = {}
        existing = _partitions(jvm, client, {topic for topic, _ in partitions})
        for each in partitions:
            # Kafka's client waits for a partition that a topic does not have until the answer times out.
            first = _offset(jvm, client, each, specs.earliest()) if each in existing else None
            end = _offset(jvm, client, each, specs.latest()) if first is not None else None
            found[each] = range(first, end) if first is not None and end is not None else None
        return found


def offsets_at(
    writer: DataStreamWriter, source: KafkaSource, partitions: Sequence[tuple[str, int]], at_ms: int
) -> dict[tuple[str, int], int]:
    """Return the first offset at or after a time (ms since the epoch) by partition; its end if there is none.

    Partitions that no longer exist are left out.
    """
    with _admin(writer, source) as (jvm, client):
        specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        found: dict[tuple[str, int], int] = {}
        for each in _partitions(jvm, client, {topic for topic, _ in partitions}):
            if each not in partitions:
                continue
            offset = _offset(jvm, client, each, specs.forTimestamp(at_ms))
            if offset is None or offset < 0:
                offset = _offset(jvm, client, each, specs.latest())
            if offset is not None:
                found[each] = offset
        return found


def end_offsets(writer: DataStreamWriter, source: KafkaSource, *, earliest: bool) -> dict[str, dict[str, int]]:
    with _admin(writer, source) as (jvm, client):
        spec = jvm.org.apache.kafka.clients.admin.OffsetSpec
        found: dict[str, dict[str, int]] = {}
        for name, number in _partitions(jvm, client, _topic_names(jvm, client, source, _ANSWER_S)):
            offset = _offset(jvm, client, (name, number), spec.earliest() if earliest else spec.latest())
            if offset is not None:
                found.setdefault(name, {})[str(number)] = offset
        return found


def _topic_names(jvm: Any, client: Any, source: KafkaSource, wait_s: int) -> set[str]:
    if source.pattern is None:
        return set(source.topics)
    listed = client.listTopics().names().get(wait_s, jvm.java.util.concurrent.TimeUnit.SECONDS)
    matches = jvm.java.util.regex.Pattern.matches
    return {str(each) for each in listed if matches(source.pattern, str(each))}


def _partitions(jvm: Any, client: Any, topics: Collection[str]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name, pending in _described(jvm, client, topics):
        described = _answer_if_it_exists(jvm, pending)
        if described is not None:
            found += [(name, int(each.partition())) for each in described.partitions()]
    return found


def _described(jvm: Any, client: Any, names: Collection[str]) -> list[tuple[str, Any]]:
    asked = jvm.java.util.ArrayList()
    for name in sorted(names):
        asked.add(name)
    return sorted((str(name), answer) for name, answer in dict(client.describeTopics(asked).topicNameValues()).items())


def _configs(jvm: Any, client: Any, topics: Collection[str]) -> dict[str, Any]:
    resource = jvm.org.apache.kafka.common.config.ConfigResource
    keys = {name: resource(resource.Type.TOPIC, name) for name in topics}
    asked = jvm.java.util.ArrayList()
    for key in keys.values():
        asked.add(key)
    answers = client.describeConfigs(asked).values()
    return {name: answers.get(key) for name, key in keys.items()}


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
    except Exception as error:
        raise StorageAccessError(
            f"Kafka at {source.servers} did not return the offsets of its topics: "
            f"{without_secrets(_first_line(error))}. Make it reachable from the driver, then try again."
        ) from error


def _offset(jvm: Any, client: Any, partition: tuple[str, int], spec: Any) -> int | None:
    key = jvm.org.apache.kafka.common.TopicPartition(*partition)
    asked = jvm.java.util.HashMap()
    asked.put(key, spec)
    answer = _answer_if_it_exists(jvm, client.listOffsets(asked).partitionResult(key))
    return int(answer.offset()) if answer is not None else None


def _answer_if_it_exists(jvm: Any, pending: Any) -> Any | None:
    try:
        return pending.get(_ANSWER_S, jvm.java.util.concurrent.TimeUnit.SECONDS)
    except Exception as error:
        if _IS_GONE in str(error):
            return None
        raise


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Exception" in line), lines[0] if lines else type(error).__name__)
