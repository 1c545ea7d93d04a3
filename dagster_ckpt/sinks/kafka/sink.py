"""Kafka topics: Spark's own sink, which writes without transactions and remembers no batch, and the transactional one.

The package's docstring explains the protocol of the latter.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Self

from dagster_ckpt.errors import CkptError
from dagster_ckpt.sinks.kafka.client import markers_in_kafka, topic_id
from dagster_ckpt.sinks.kafka.marker import Marker
from dagster_ckpt.sinks.kafka.past import place_in
from dagster_ckpt.sinks.sink import FoundSink, OnRepeat, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.query.output import KafkaPlace

# Spark's name for its own sink contains the class of the table, and no topic; `kafka_sink_name` adds that.
_NAME = re.compile(r"KafkaTable\[(?P<place>.+)\]|.*Kafka(Table|Sink|SourceProvider).*")
_WRITE_AGAIN = "To write them a second time, start from a snapshot or batch-<n> with new_query_id."


class KafkaSink(Sink):
    """Kafka topics, written by Spark's own sink."""

    noun = "topic"
    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "Kafka keeps no memory of batches: the records of the rewound ones are sent again."
    advice = "Let consumers drop repeated keys, or write with kafka_delivery(Semantic.EXACTLY_ONCE)."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _NAME.fullmatch(name)
        return cls(name, match["place"]) if match else None


class TransactionalKafkaSink(Sink):
    """A Kafka topic, written in transactions that also commit the number of the batch."""

    noun = "topic"
    on_repeat = OnRepeat.RUNS
    # Each stream has its own transactions and markers.
    knows_queries = True

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        place = place_in(name)
        return cls(name, str(place)) if place is not None else None

    def is_same(self, other: Sink) -> bool:
        """Whether both are one topic with the same ids, even if other brokers of the cluster are named."""
        if not isinstance(other, TransactionalKafkaSink):
            return False
        return self._topic.topic == other._topic.topic and self._topic.prefix == other._topic.prefix

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """See `Sink.look`. Whether the topic still has the records of a batch is up to its retention."""
        return topic_id(self._topic)

    def last_batch(self, query_id: str | None) -> int | None:
        """The newest batch of which the topic has at least the share of one writer; others may be missing."""
        if query_id is None:
            return None
        return max((batch for each in self._markers() if (batch := each.newest(query_id)) is not None), default=None)

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        try:
            markers = self._markers()
        except CkptError as error:
            return SinkForecast(
                self.name, SinkEffect.UNREACHABLE, f"It is not known which batches the topic has: {error}"
            )
        query_id = replay.query_id or ""
        known = [each for each in markers if each.newest(query_id) is not None]
        last = max((each.batch for each in known), default=None)
        if last is None:
            return SinkForecast(
                self.name,
                SinkEffect.UNKNOWN,
                "The topic has no marker of this query: it was never written, or Kafka has deleted the consumer "
                "groups of its writers. A start that could repeat rows is refused.",
                "If it is refused, start from a snapshot or batch-<n> with new_query_id.",
            )
        left = next((each for each in known if query_id in each.earlier), None)
        if left is not None and replay.keeps_query_id:
            return SinkForecast(
                self.name,
                SinkEffect.IRREVERSIBLE,
                f"The topic has batches up to {left.newest(query_id)} of this query, and then up to {left.batch} of "
                f"query {left.query}, with which the stream was started in its place.",
                _WRITE_AGAIN,
            )
        if left is None and last <= replay.to_batch:
            return SinkForecast(
                self.name, SinkEffect.EXACT, f"The topic has no batch of this query after {replay.to_batch}."
            )
        if not replay.keeps_query_id:
            return SinkForecast(
                self.name,
                SinkEffect.DUPLICATE,
                f"The topic keeps batches {replay.to_batch + 1} to {last}, and receives their rows again."
                if left is None
                else f"The topic keeps what it has, up to batch {left.batch} of query {left.query}, and may receive "
                "the same rows again.",
                "Let consumers drop repeated keys, or give the stream a new topic.",
            )
        if last == replay.in_flight:
            return SinkForecast(
                self.name, SinkEffect.SKIP, f"The topic has batch {last}; it is replayed, and not written again."
            )
        return SinkForecast(
            self.name,
            SinkEffect.IRREVERSIBLE,
            f"The topic has batches {replay.to_batch + 1} to {last}, which cannot be removed, and the same rows would "
            "be divided into other batches.",
            _WRITE_AGAIN,
        )

    def _markers(self) -> list[Marker]:
        return markers_in_kafka(self._topic)

    @property
    def _topic(self) -> KafkaPlace:
        topic = KafkaPlace.parse(self.place or "")
        if topic is None:
            raise ValueError(self.name)
        return topic
