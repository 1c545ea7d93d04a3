"""Kafka topics as sinks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.sinks.kafka.claim import place_in
from dagster_ckpt.sinks.kafka.marker import (
    Marker,
    Position,
    begins_of_batches,
    fields_of,
    newest_read,
    positions_in,
    positions_of,
    query_mark,
    undone_of,
)
from dagster_ckpt.sinks.kafka.transaction import client_properties, consumer_properties
from dagster_ckpt.sinks.kafka.undone import TopicEnd, UndoneRanges, parse, skipped_in
from dagster_ckpt.sinks.sink import FoundSink, OnRepeat, ReadOfSink, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.query.output import KafkaPlace
from dagster_ckpt.values.safe_parsing import from_json

# Names a file with properties, for processes without the query, such as the command line.
CLIENT_PROPERTIES = "DAGSTER_CKPT_KAFKA_PROPERTIES"
ISOLATION = "kafka.isolation.level"
_LOOK_S = 20.0
_POLL_S = 0.1
# A transaction with offsets is about to be committed, unless its process has died.
_PENDING, _COMMITTED_S = "UNSTABLE_OFFSET_COMMIT", 5.0
_NOT_INSTALLED = "confluent-kafka is not installed. Run: pip install 'dagster-ckpt[kafka]'."
_WRITE_AGAIN = "To write them a second time, start from a snapshot or batch-<n> with new_query_id."


class KafkaSink(Sink):
    names = re.compile(r"KafkaTable\[(?P<place>.+)\]|.*Kafka(Table|Sink|SourceProvider).*")
    noun = "topic"
    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "Kafka keeps no memory of batches: the records of the rewound ones are sent again."
    advice = "Let consumers drop repeated keys, or write with kafka_delivery(Semantic.EXACTLY_ONCE)."


class TransactionalKafkaSink(Sink):
    noun = "topic"
    on_repeat = OnRepeat.RUNS
    knows_queries = True

    @classmethod
    def of(cls, name: str) -> Self | None:
        place = place_in(name)
        return cls(name, str(place)) if place is not None else None

    def is_same(self, other: Sink) -> bool:
        if not isinstance(other, TransactionalKafkaSink):
            return False
        return self.topic.topic == other.topic.topic and self.topic.prefix == other.topic.prefix

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """Return the ids of topic and cluster: the topic's retention decides which batches it still has."""
        return topic_id(self.topic)

    def last_batch(self, query_id: str | None) -> int | None:
        if query_id is None:
            return None
        return max(
            (batch for each in markers_in_kafka(self.topic) if (batch := each.newest(query_id)) is not None),
            default=None,
        )

    def forecast(self, replay: Replay) -> SinkForecast:
        try:
            markers = markers_in_kafka(self.topic)
        except CkptError as error:
            return self.forecast_as(SinkEffect.UNREACHABLE, f"It is not known which batches the topic has: {error}")
        query_id = replay.query_id or ""
        known = [each for each in markers if each.newest(query_id) is not None]
        last = max((each.batch for each in known), default=None)
        if last is None:
            return self.forecast_as(
                SinkEffect.UNKNOWN,
                "The topic has no marker of this query: it was never written, or Kafka has deleted the consumer "
                "groups of its writers. A start that could repeat rows is refused.",
                "If it is refused, start from a snapshot or batch-<n> with new_query_id.",
            )
        left = next((each for each in known if query_id in each.earlier), None)
        if left is not None and replay.keeps_query_id:
            return self.forecast_as(
                SinkEffect.IRREVERSIBLE,
                f"The topic has batches up to {left.newest(query_id)} of this query, and then up to {left.batch} of "
                f"query {left.query}, which has replaced it.",
                _WRITE_AGAIN,
            )
        if left is None and last <= replay.to_batch:
            return self.forecast_as(SinkEffect.EXACT, f"The topic has no batch of this query after {replay.to_batch}.")
        if not replay.keeps_query_id:
            groups = consumer_groups(self.topic)
            read_by = f" Consumer groups that read it: {', '.join(groups)}." if groups else ""
            return self.forecast_as(
                SinkEffect.DUPLICATE,
                f"The topic keeps batches {replay.to_batch + 1} to {last}, and receives their rows again.{read_by}"
                if left is None
                else f"The topic keeps what it has, up to batch {left.batch} of query {left.query}, and may receive "
                f"the same rows again.{read_by}",
                "Let consumers drop repeated keys, or give the stream a new topic.",
            )
        if last == replay.in_flight:
            return self.forecast_as(
                SinkEffect.SKIP, f"The topic has batch {last}; it is replayed, and not written again."
            )
        return self.forecast_as(
            SinkEffect.IRREVERSIBLE,
            f"The topic has batches {replay.to_batch + 1} to {last}, which cannot be removed, and the same rows would "
            "be divided into other batches.",
            _WRITE_AGAIN,
        )

    def read_up_to(
        self, offset: str, own: Sequence[str], options: Mapping[str, str], *, rewound: bool, note: bytes | None = None
    ) -> ReadOfSink | None:
        if options.get(ISOLATION, "").lower() != "read_committed":
            return ReadOfSink(
                why=f"the source also reads aborted records ({ISOLATION} is not read_committed), so it is"
            )
        read = self.offsets_in(offset)
        if read is None:
            return None
        written = written_topic(self.topic, own, list(read))
        try:
            skipped = skipped_in(note, self.topic.topic)
        except ValueError as error:
            return ReadOfSink(why=f"its note of what it skipped cannot be read ({error}), and the position is")
        current = query_mark(own[-1]) if own else ""
        return ReadOfSink(*newest_read(read, written.begins, current, rewound=rewound, skipped=skipped))

    def offsets_in(self, offset: str | None) -> dict[int, int] | None:
        """Return the next offset of each partition from an offset of a source; None if it does not read the topic."""
        try:
            return {int(partition): int(at) for partition, at in from_json(offset or "")[self.topic.topic].items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    @property
    def topic(self) -> KafkaPlace:
        topic = KafkaPlace.parse(self.place or "")
        if topic is None:
            raise ValueError(self.name)
        return topic


def markers_in_kafka(place: KafkaPlace) -> list[Marker]:
    found = [_marker_of(group, commits[0]) for group, commits in _commits(place, [0]).items()]
    return [marker for marker in found if marker is not None]


@dataclass(frozen=True)
class WrittenTopic:
    """What the writers of a stream have recorded, by partition; `queries` are those that may write."""

    begins: Mapping[int, Sequence[Position]]
    undone: UndoneRanges
    queries: frozenset[str]


def written_topic(place: KafkaPlace, own: Collection[str], partitions: Sequence[int] | None = None) -> WrittenTopic:
    """Read what was recorded for a stream's query ids (`own`); default: all partitions."""
    if partitions is None:
        partitions = list(_stable_ends(place))
    commits = _commits(place, sorted({0, *partitions}), are_stable=True)
    found = {group: _marker_of(group, each[0]) for group, each in commits.items()}
    markers = {
        group: each for group, each in found.items() if each is not None and {each.query, *each.earlier} & {*own}
    }
    newest = max((each.epoch for each in markers.values()), default=None)
    # A claim commits what is undone to all of its writers.
    current = [group for group, each in markers.items() if each.epoch == newest]
    try:
        return WrittenTopic(
            {
                partition: begins_of_batches(
                    positions_in(positions_of(commits[group][partition].metadata)) for group in markers
                )
                for partition in partitions
            },
            {
                partition: max((parse(undone_of(commits[group][partition].metadata)) for group in current), key=len)
                if current
                else []
                for partition in partitions
            },
            frozenset(each.query for each in markers.values() if each.epoch == newest),
        )
    except ValueError as error:
        raise StorageAccessError(f"The positions of the writers of {place} cannot be read: {error}.") from error


def topic_end(place: KafkaPlace, own: Collection[str], query_id: str, batch: int) -> TopicEnd | None:
    """Return where the batches up to a committed one end; None if that is not recorded, or no longer.

    The query may be writing later ones. A running query may have written to a partition that was added since its
    writers counted.
    """
    # Read the ends first: what is being written begins behind them, or is among the begins.
    ends = _stable_ends(place)
    written = written_topic(place, own, list(ends))
    if written.queries != {query_id}:
        return None
    mark = query_mark(query_id)
    mine = {each: [at for at in written.begins[each] if at.query == mark] for each in ends}
    found: dict[int, int] = {}
    for partition, end in ends.items():
        if end > 0 and any(mine.values()) and not mine[partition]:
            return None
        later = [each for each in mine[partition] if each.batch > batch]
        if later and min(each.batch for each in later) != batch + 1:
            return None
        found[partition] = min([end, *(each.offset for each in later)])
    return TopicEnd(found, written.undone)


def _stable_ends(place: KafkaPlace) -> dict[int, int]:
    """Return the end of each partition, before the first record of any open transaction."""
    try:
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
        from confluent_kafka import admin as untyped
    except ImportError as error:
        raise StorageAccessError(_NOT_INSTALLED) from error
    kafka: Any = untyped
    try:
        admin = kafka.AdminClient(_settings(place))
        partitions = admin.list_topics(place.topic, timeout=_LOOK_S).topics[place.topic].partitions
        asked = {TopicPartition(place.topic, each): kafka.OffsetSpec.latest() for each in partitions}
        answers = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_LOOK_S)
        return {each.partition: int(answer.result().offset) for each, answer in answers.items()}
    except KafkaException as error:
        raise StorageAccessError(
            f"Kafka at {place.servers} did not return where {place.topic} ends: {error}."
        ) from error


def _marker_of(group: str, committed: Any) -> Marker | None:
    has_fields = fields_of(committed.metadata) is not None
    return Marker.of(group, committed.offset, committed.metadata) if has_fields else None


def _commits(
    place: KafkaPlace, partitions: Sequence[int], *, are_stable: bool = False, of_writers: bool = True
) -> dict[str, dict[int, Any]]:
    """Return what groups have committed, by group and partition.

    Args:
        are_stable: Wait for pending transactions, whose records a reader may already have seen.
        of_writers: Ask the groups with markers, or all others.
    """
    try:
        from confluent_kafka import (
            ConsumerGroupTopicPartitions,
            KafkaException,
            TopicPartition,
        )
        from confluent_kafka.admin import AdminClient
    except ImportError as error:
        raise StorageAccessError(_NOT_INSTALLED) from error
    down: list[str] = []

    def noted(reason: Any) -> None:
        if reason.name() == "_ALL_BROKERS_DOWN":
            down.append(str(reason))

    try:
        admin = AdminClient(_settings(place) | {"error_cb": noted})
        listing = admin.list_consumer_groups(request_timeout=_LOOK_S)
        while not listing.done() and not down:
            admin.poll(_POLL_S)
        if down and not listing.done():
            raise StorageAccessError(f"No broker of {place.servers} answers: {down[0]}.")
        listed = [each.group_id for each in listing.result().valid]
        groups = [group for group in listed if may_hold_marker(place, group) == of_writers]
        found: dict[str, dict[int, Any]] = {}
        deadline = time.monotonic() + _COMMITTED_S
        while left := [group for group in groups if group not in found]:
            asked = [
                ConsumerGroupTopicPartitions(group, [TopicPartition(place.topic, each) for each in partitions])
                for group in left
            ]
            # Send all requests before awaiting an answer: the client takes one group a call.
            sent = [
                admin.list_consumer_group_offsets([each], require_stable=are_stable, request_timeout=_LOOK_S)
                for each in asked
            ]
            for group, answers in zip(left, sent, strict=True):
                (answer,) = answers.values()
                commits = answer.result().topic_partitions
                errors = [each.error for each in commits if each.error is not None]
                if not errors:
                    found[group] = {each.partition: each for each in commits}
                elif time.monotonic() > deadline or {each.name() for each in errors} != {_PENDING}:
                    raise KafkaException(errors[0])
            time.sleep(_POLL_S if len(found) < len(groups) else 0)
    except KafkaException as error:
        raise StorageAccessError(
            f"Kafka at {place.servers} did not return the offsets of the sink's markers: {error}. "
            "Start again when it answers."
        ) from error
    return found


def consumer_groups(place: KafkaPlace) -> list[str]:
    """Return the groups that commit offsets, which Spark's source does not; empty if Kafka does not say."""
    try:
        commits = _commits(place, list(_stable_ends(place)), of_writers=False)
    except CkptError:
        return []
    return sorted(group for group, each in commits.items() if any(committed.offset >= 0 for committed in each.values()))


def topic_id(place: KafkaPlace) -> FoundSink | None:
    """Return the id, which a re-created topic changes; None without the client or with Kafka before 2.8."""
    try:
        from confluent_kafka import KafkaError, KafkaException, TopicCollection
        from confluent_kafka.admin import AdminClient
    except ImportError:
        return None
    try:
        admin = AdminClient(_settings(place))
        asked = admin.describe_topics(TopicCollection([place.topic]), request_timeout=_LOOK_S)
        of_cluster = admin.describe_cluster(request_timeout=_LOOK_S)
        found = asked[place.topic].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return FoundSink(None)
        raise StorageAccessError(
            f"Kafka at {place.servers} did not say which topic {place.topic} is: {error}. Start again when it answers."
        ) from error
    cluster = None
    with suppress(KafkaException):
        cluster = of_cluster.result().cluster_id or None
    identity = str(found.topic_id)
    return FoundSink(identity, cluster=cluster) if identity.strip("A=") else None


def _settings(place: KafkaPlace) -> dict[str, Any]:
    given = client_properties(place.client) | _from_file()
    return consumer_properties(given) | {"socket.connection.setup.timeout.ms": "5000"}


def may_hold_marker(place: KafkaPlace, group: str) -> bool:
    # As `Transactions.id_of` names it.
    return bool(re.fullmatch(rf"{re.escape(place.prefix)}\..+:{re.escape(place.topic)}:\d+", group))


def _from_file() -> dict[str, str]:
    path = os.environ.get(CLIENT_PROPERTIES)
    if path is None:
        return {}
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}
