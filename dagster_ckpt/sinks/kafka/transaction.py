"""Calls of the Kafka client."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.sinks.kafka.marker import (
    Marker,
    Position,
    Transactions,
    metadata_of,
    positions_of,
    query_mark,
    undone_of,
    with_position,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

_T = TypeVar("_T")

# Longer than a broker needs to restart, shorter than the default of `transaction.timeout.ms`.
PATIENCE_S = 30.0
_CALL_S = 10.0
_ABORT_S = 5.0
_POLL_EVERY = 2000

_RENAMED = {
    "max.request.size": "message.max.bytes",
}
# Options of the Java client that do not affect what is written.
_DROPPED = frozenset(
    {"key.serializer", "value.serializer", "max.block.ms", "buffer.memory", "client.dns.lookup", "metadata.max.idle.ms"}
)
_LOGIN = re.compile(r"""(?P<name>username|password)\s*=\s*(?P<quote>["'])(?P<value>.*?)(?P=quote)""")
_JAVA_ONLY = {
    "ssl.truststore.location": "ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "ssl.ca.location (a PEM file needs no password)",
    "ssl.truststore.type": "ssl.ca.location (a PEM file)",
    "sasl.client.callback.handler.class": "sasl.oauthbearer.config",
    "sasl.login.callback.handler.class": "sasl.oauthbearer.config",
}
# librdkafka warns of these for a consumer.
PRODUCER_ONLY = frozenset(
    {
        "acks",
        "batch.num.messages",
        "batch.size",
        "compression.codec",
        "compression.level",
        "compression.type",
        "delivery.timeout.ms",
        "enable.idempotence",
        "linger.ms",
        "max.in.flight.requests.per.connection",
        "message.timeout.ms",
        "partitioner",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "request.required.acks",
        "request.timeout.ms",
        "retries",
        "sticky.partitioning.linger.ms",
        "transaction.timeout.ms",
    }
)

Header = tuple[str, bytes | None]


class Record(NamedTuple):
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] | None = None
    partition: int | None = None


RecordFields = tuple[bytes | None, bytes | None, Sequence[Header] | None, int | None]


class Session:
    def __init__(self, target: Transactions, writer: int) -> None:
        self._target = target
        self._id = target.id_of(writer)
        self.last: int | None = None
        self.earlier: Mapping[str, int] = {}
        # Where batches begin, and where the next one does, by partition.
        self._positions: dict[int, str] = {}
        self._begins: dict[int, int] = {}
        self._undone: dict[int, str] = {}
        self._is_open = False
        self._markers = _marker_consumer(target, self._id)
        self._producer: Producer = _producer(target, self._id)
        self._count = 0

    def begin_epoch(self) -> None:
        """Fence earlier producers of the writer."""
        # Connect first: otherwise librdkafka misses the coordinator, and looks again after half a second.
        _patiently(lambda: self._producer.list_topics(self._target.topic, _CALL_S))
        _patiently(lambda: self._producer.init_transactions(_CALL_S))

    def marker(self) -> Marker | None:
        """Read the marker, which no other producer can change after `begin_epoch`."""
        committed = _commits(self._markers, self._target.topic, range(self._partitions()))
        found = Marker.of(self._id, committed[0].offset, committed[0].metadata)
        self.earlier = found.earlier if found is not None else {}
        self._positions = {each.partition: positions_of(each.metadata) for each in committed}
        self._undone = {each.partition: undone_of(each.metadata) for each in committed}
        return found

    @property
    def positions(self) -> Mapping[int, str]:
        return self._positions

    @property
    def undone(self) -> Mapping[int, str]:
        return self._undone

    def _partitions(self) -> int:
        if not self._count:
            self._count_partitions()
        return self._count

    def _count_partitions(self) -> None:
        """Count again before each share: partitions may be added, and are never removed."""
        topic = self._target.topic
        found = _patiently(lambda: self._producer.list_topics(topic, _CALL_S)).topics[topic].partitions
        self._count = max(self._count, len(found))

    @cached_property
    def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return _created(lambda: AdminClient(consumer_properties(self._target.client)))

    def ends(self) -> dict[int, int]:
        from confluent_kafka import TopicPartition
        from confluent_kafka import admin as untyped

        kafka: Any = untyped
        admin, latest = self._admin, kafka.OffsetSpec.latest()
        asked = {TopicPartition(self._target.topic, each): latest for each in range(self._partitions())}

        def ends() -> dict[int, int]:
            answers = admin.list_offsets(asked, request_timeout=_CALL_S)
            return {each.partition: int(answer.result().offset) for each, answer in answers.items()}

        return _patiently(ends)

    def send(self, records: Iterable[RecordFields]) -> int:
        producer, topic = self._producer, self._target.topic
        self._count_partitions()
        self._begins = self.ends()
        producer.begin_transaction()
        self._is_open = True
        produce = producer.produce
        sent = 0
        for record in records:
            value, key, headers, partition = record
            if headers or partition is not None:
                _send(producer, topic, record)
            else:
                # The path of most rows: `_send` with all arguments takes half as long again.
                try:
                    produce(topic, value, key)
                except BufferError:
                    _send(producer, topic, record)
            sent += 1
            if sent % _POLL_EVERY == 0:
                producer.poll(0)
        return sent

    def commit(self, batch: int, entry: str, undone: Mapping[int, str] | None = None) -> None:
        """Commit the open transaction together with the marker; without one, the marker alone.

        `undone` replaces what the writer knew.
        """
        from confluent_kafka import TopicPartition

        producer, target = self._producer, self._target
        if not self._is_open:
            producer.begin_transaction()
            self._is_open = True
        epoch = (target.epoch.token, target.epoch.generation)
        query, count = query_mark(target.query_id), len(self._begins)
        positions = self._positions | {
            partition: with_position(self._positions.get(partition, ""), Position(batch, at, epoch, query), count)
            for partition, at in self._begins.items()
        }
        ends = self.ends() if undone is not None else self._begins
        self._undone = dict(undone) if undone is not None else self._undone
        marker = Marker(
            batch,
            target.query_id,
            target.deployment,
            target.stream,
            target.epoch.token,
            target.epoch.generation,
            target.owner,
            target.writers,
            entry,
            self.earlier,
            positions.get(0, ""),
            self._undone.get(0, ""),
        )
        offsets = [TopicPartition(target.topic, 0, batch + 1, marker.as_metadata())]
        for partition, at in ends.items():
            if partition != 0:
                metadata = metadata_of(positions.get(partition, ""), self._undone.get(partition, ""))
                offsets.append(TopicPartition(target.topic, partition, at, metadata))
        group = self._markers.consumer_group_metadata()
        _flush(producer)
        _patiently(lambda: producer.send_offsets_to_transaction(offsets, group, _CALL_S))
        _patiently(lambda: producer.commit_transaction(_CALL_S))
        self._is_open = False
        self._positions, self._begins = positions, {}
        self.last = batch

    def abandon(self) -> None:
        if self._is_open:
            # Otherwise consumers wait for a successor's `init_transactions`.
            with suppress(Exception):
                _bounded(lambda: self._producer.abort_transaction(_ABORT_S), 2 * _ABORT_S)
        self.close()

    def close(self) -> None:
        producer, markers = self._producer, self._markers

        def closed() -> None:
            markers.close()
            producer.purge()

        with suppress(Exception):
            _bounded(closed, 2 * _ABORT_S)


def await_topic(client: Mapping[str, str], topic: str) -> None:
    """Wait for the topic, which a cluster may create on demand."""
    from confluent_kafka import Producer as KafkaProducer

    producer = _created(lambda: KafkaProducer(dict(client)))
    deadline = time.monotonic() + _CALL_S
    while True:
        try:
            found = producer.list_topics(topic, timeout=_CALL_S).topics[topic]
        except kafka_errors() as error:
            raise StorageAccessError(
                f"Kafka did not answer whether topic {topic} exists: {error}. Nothing was written. Start the stream "
                "again when Kafka answers."
            ) from error
        if found.error is None and found.partitions:
            return
        if time.monotonic() > deadline:
            raise StorageAccessError(
                f"Topic {topic} does not exist ({found.error}), and the cluster does not create it on demand. "
                "Nothing was written. Create the topic, then start the stream again."
            )
        time.sleep(0.2)


def _send(producer: Producer, topic: str, record: RecordFields) -> None:
    """Queue a record; a queue that stays full fails the task, which Spark retries."""
    value, key, headers, partition = record
    options: dict[str, Any] = {}
    if headers:
        options["headers"] = list(headers)
    if partition is not None:
        options["partition"] = partition
    deadline: float | None = None
    while True:
        try:
            producer.produce(topic, value, key, **options)
        except BufferError:
            now = time.monotonic()
            deadline = deadline or now + PATIENCE_S
            if now > deadline:
                raise
            producer.poll(0.1)
        else:
            return


def _flush(producer: Producer) -> None:
    left = len(producer)
    deadline = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < deadline:
        now_left = producer.flush(1.0)
        if now_left < left:
            left, deadline = now_left, time.monotonic() + PATIENCE_S


def marker_at_a_glance(target: Transactions, writer: int) -> Marker | None:
    """Return the newest committed marker, without waiting for a transaction, perhaps of a dead process."""
    return _looked_up(target, writer, "read_uncommitted")


def marker_before_share(target: Transactions, writer: int, batch: int) -> Marker | None:
    """Return the marker, without a wait if a glance shows a later run, or this batch or the one before of this run.

    Any other glance may be stale: `commit_transaction` returns before its marker is seen.
    """
    seen = marker_at_a_glance(target, writer)
    if seen is not None and (seen.is_later(target) or (seen.owner == target.owner and seen.batch >= batch - 1)):
        return seen
    # The wait is brief, because the claim has ended transactions of dead processes.
    return _looked_up(target, writer, "read_committed")


def _looked_up(target: Transactions, writer: int, isolation: str) -> Marker | None:
    group = target.id_of(writer)
    consumer = _marker_consumer(target, group, isolation=isolation)
    try:
        (found,) = _commits(consumer, target.topic, [0])
        return Marker.of(group, found.offset, found.metadata)
    finally:
        consumer.close()


def _commits(consumer: Consumer, topic: str, partitions: Iterable[int]) -> list[TopicPartition]:
    from confluent_kafka import TopicPartition as Partition

    asked = [Partition(topic, each) for each in partitions]
    found = _patiently(lambda: consumer.committed(asked, timeout=_CALL_S))
    for each in found:
        if each.error is not None:
            raise _error_of(each.error)
    return sorted(found, key=lambda each: each.partition)


def _marker_consumer(target: Transactions, group: str, *, isolation: str = "read_committed") -> Consumer:
    from confluent_kafka import Consumer as KafkaConsumer

    # With read_committed the broker waits for pending transactions on the group (KIP-447).
    settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    return _created(lambda: KafkaConsumer({**consumer_properties(target.client), **settings}))


def consumer_properties(client: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in client.items() if name not in PRODUCER_ONLY}


def _producer(target: Transactions, transactional_id: str) -> Producer:
    from confluent_kafka import Producer as KafkaProducer

    # The partitioner of the Java client, which Spark's own sink uses.
    defaults = {
        "partitioner": "murmur2_random",
        "linger.ms": "5",
        "batch.num.messages": "2000",
        "message.max.bytes": "1048576",
        # The default maximum of brokers, because a whole backlog may be one share.
        "transaction.timeout.ms": "900000",
        "log_level": "5",
    }
    return _created(lambda: KafkaProducer({**defaults, **target.client, "transactional.id": transactional_id}))


def _created(create: Callable[[], _T]) -> _T:
    try:
        return create()
    except kafka_errors() as error:
        raise OptionError(
            f"The Kafka client refuses its configuration: {error}. The transactional sink uses librdkafka: give "
            "options below `kafka.` under its names (docs/sinks.md#kafka-exactly-once)."
        ) from error


def _patiently(call: Callable[[], _T]) -> _T:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _bounded(call, 1.5 * _CALL_S)
        except kafka_errors() as error:
            reason = reason_of(error)
            if reason is None or reason.fatal() or reason.txn_requires_abort() or not _may_repeat(reason):
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _bounded(call: Callable[[], _T], limit_s: float) -> _T:
    """Limit a call, since limits of librdkafka do not hold after a broker was killed."""
    from confluent_kafka import KafkaError as Reason

    done: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            done.put((None, error))

    Thread(target=run, daemon=True, name="kafka-call").start()
    try:
        result, error = done.get(timeout=limit_s)
    except Empty:
        raise _error_of(Reason(Reason._FAIL, f"a call did not return within {limit_s:.0f} s")) from None
    if error is not None:
        raise error
    return cast("_T", result)


def _may_repeat(reason: KafkaError) -> bool:
    # A lookup that timed out changed nothing; a producer's errors say whether to retry.
    return reason.retriable() or reason.name() in ("_TIMED_OUT", "_TRANSPORT", "_WAIT_COORD", "NOT_COORDINATOR")


def reason_of(error: Exception) -> KafkaError | None:
    from confluent_kafka import KafkaError as Reason

    first = error.args[0] if error.args else None
    return first if isinstance(first, Reason) else None


def is_fenced(error: Exception) -> bool:
    reason = reason_of(error)
    return reason is not None and reason.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "_FATAL")


def unavailable(target: Transactions, writer: int | None, error: Exception) -> StorageAccessError:
    if is_fenced(error):
        what = (
            "another attempt of the same share, or a later run, has replaced its producer, or the transaction took "
            "longer than kafka.transaction.timeout.ms"
        )
    else:
        what = "Kafka did not answer, or refused"
    return StorageAccessError(
        f"{'A claim' if writer is None else f'Writer {writer}'} of topic {target.topic}: {what}: {error}. Its "
        "transaction was aborted, or the next attempt finds it committed."
    )


def _error_of(reason: KafkaError) -> Exception:
    from confluent_kafka import KafkaException

    return KafkaException(reason)


def kafka_errors() -> type[Exception]:
    from confluent_kafka import KafkaException

    return KafkaException


def client_properties(options: Mapping[str, str]) -> dict[str, str]:
    properties: dict[str, str] = {}
    for name, value in options.items():
        if name in _JAVA_ONLY:
            raise OptionError(
                f"kafka.{name} is an option of the Java client, and the transactional sink uses librdkafka. Give "
                f"kafka.{_JAVA_ONLY[name]} instead."
            )
        if name == "sasl.jaas.config":
            properties |= _login(value)
        elif name not in _DROPPED:
            properties[_RENAMED.get(name, name)] = value
    return properties


def _login(jaas: str) -> dict[str, str]:
    found = {match["name"]: match["value"] for match in _LOGIN.finditer(jaas)}
    if set(found) != {"username", "password"}:
        raise OptionError(
            "kafka.sasl.jaas.config names no username and password. Give the transactional sink kafka.sasl.username "
            "and kafka.sasl.password, or the properties of librdkafka for your mechanism."
        )
    return {f"sasl.{name}": value for name, value in found.items()}
