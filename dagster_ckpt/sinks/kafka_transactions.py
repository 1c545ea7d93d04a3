"""The protocol of the transactional Kafka sink: one transaction for each writer and batch.

A batch is divided among a fixed number of writers. Each sends its share of the rows in one Kafka
transaction, which also commits the *marker* of that writer: the offset of a consumer group of its
own, with the query's id and the newest batch whose share is written. Rows and marker become visible
together or not at all, so a share that runs again finds its batch in the marker and writes nothing.

Two mechanisms fence a process that was replaced and does not know it yet:

- `transactional.id` names stream and writer. A successor's `init_transactions` aborts what its
  predecessor has not committed, and the predecessor's producer can commit nothing any more.
- The marker names its *owner*. Every start of a query first claims all markers (`claim`). A share
  whose marker has another owner is refused, also if its process opens a new producer. A claim is
  refused if the marker belongs to a later live directory: a predecessor that may still live never
  shares a live directory with its successor.

This module needs `confluent-kafka` and nothing of Spark, and is imported by Spark's executors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar, cast

from dagster_ckpt.errors import LeaseLostError, OptionError, RowsAtRiskError, StorageAccessError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer

_T = TypeVar("_T")

# A call to the broker is repeated for this long: longer than a broker needs to restart, shorter than the default of
# `transaction.timeout.ms`.
PATIENCE_S = 30.0
_CALL_S = 10.0
_ABORT_S = 5.0
# A claim that another one has fenced is repeated: the one with the later live directory wins.
_CLAIMS = 3
# Producers that a Python worker keeps for its next shares.
_KEPT_SESSIONS = 8
_POLL_EVERY = 2000

Header = tuple[str, bytes | None]


@dataclass(frozen=True)
class Record:
    """One record to send.

    Attributes:
        value: Its value.
        key: Its key.
        headers: Its headers.
        topic: Its topic; None is the topic of the sink.
        partition: Its partition; None leaves it to the partitioner.
    """

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] | None = None
    topic: str | None = None
    partition: int | None = None


@dataclass(frozen=True, order=True)
class Epoch:
    """Which of two live directories of a stream is the later one.

    Attributes:
        token: Token of the lease under which it was created.
        generation: Its number.
    """

    token: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Transactions:
    """Everything that a share needs to know of its sink and of the run that writes it.

    Attributes:
        client: Properties of the client, as librdkafka names them; they may contain secrets.
        topic: The topic. Its partition 0 names the markers.
        prefix: Beginning of the ids of transactions and groups; deployments that share a cluster have different ones.
        writers: Number of writers.
        deployment: Id of the deployment.
        stream: Id of the stream.
        query_id: Id of the query.
        epoch: The live directory that it runs in.
        owner: Identifies this start of the query.
    """

    client: Mapping[str, str] = field(repr=False)
    topic: str
    prefix: str
    writers: int
    deployment: str
    stream: str
    query_id: str
    epoch: Epoch
    owner: str

    def id_of(self, writer: int) -> str:
        """The `transactional.id` of a writer, and the name of the consumer group that holds its marker."""
        return f"{self.prefix}.{self.stream}.{writer}"


@dataclass(frozen=True)
class Marker:
    """What a writer has committed together with its newest share.

    Attributes:
        batch: The newest batch whose share it has written.
        query: Id of the query.
        deployment: Id of the deployment.
        token: See `Epoch`.
        generation: See `Epoch`.
        owner: The start of the query that may write.
        writers: Number of writers.
    """

    batch: int
    query: str
    deployment: str
    token: int
    generation: int
    owner: str
    writers: int

    @property
    def epoch(self) -> Epoch:
        """The live directory of its owner."""
        return Epoch(self.token, self.generation)

    def as_metadata(self) -> str:
        """The metadata of the committed offset."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "batch"})

    @staticmethod
    def of(group: str, offset: int, metadata: str | None) -> Marker | None:
        """Parse a committed offset; None if the group has none.

        Raises:
            OptionError: The group is not one of this sink.
        """
        if offset < 0:
            return None
        try:
            told = json.loads(metadata or "")
            return Marker(
                offset - 1,
                str(told["query"]),
                str(told["deployment"]),
                int(told["token"]),
                int(told["generation"]),
                str(told["owner"]),
                int(told["writers"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"Consumer group {group!r} has committed offset {offset} with metadata {metadata!r}, which this sink "
                "did not write. The names of its groups begin with kafka.transactional.id: give the sink one that "
                "no other application uses."
            ) from error


@dataclass(frozen=True)
class Written:
    """What became of a share.

    Attributes:
        writer: The writer.
        records: Number of records sent.
        was_done: Whether an earlier attempt had committed it.
    """

    writer: int
    records: int
    was_done: bool


def claim(target: Transactions, first: int) -> None:
    """Make this start of the query the owner of every marker, before its first batch. Run on the driver.

    Args:
        target: The sink and the run.
        first: The first batch that the run writes; some of the writers may have written it before.

    Raises:
        LeaseLostError: A later live directory of the stream owns a marker: this process was replaced.
        RowsAtRiskError: The topic has batches that the query does not have, or it is unknown which shares of the
            batch it has.
        OptionError: Another deployment uses the same ids.
        StorageAccessError: Kafka does not answer.
    """
    for attempt in range(1, _CLAIMS + 1):
        sessions: list[Session] = []
        try:
            _claim(target, first, sessions)
        except _kafka_errors() as error:
            if attempt == _CLAIMS or not _is_fenced(error):
                raise _unavailable(target, len(sessions) - 1, error) from error
        else:
            return
        finally:
            for session in sessions:
                session.close()


def _claim(target: Transactions, first: int, sessions: list[Session]) -> None:
    found: list[Marker | None] = []
    writers = target.writers
    while len(sessions) < writers:
        writer = len(sessions)
        # Looked at before, so that a process that was replaced does not disturb its successor.
        _refuse_others(target, writer, _marker_at_a_glance(target, writer))
        session = Session(target, writer)
        sessions.append(session)
        session.begin_epoch()
        marker = session.marker()
        _refuse_others(target, writer, marker)
        found.append(marker)
        # Earlier runs may have had more writers.
        writers = max(writers, marker.writers if marker is not None else 0)
    position = _position(target, found, first)
    for session, marker in zip(sessions, found, strict=True):
        keeps = position is None and marker is not None
        session.commit(marker.batch if keeps and marker is not None else first - 1 if position is None else position)


def _position(target: Transactions, found: Sequence[Marker | None], first: int) -> int | None:
    """The batch that all markers get; None if the shares of the batch in flight differ, so that each marker stays."""
    known = {
        writer: marker for writer, marker in enumerate(found) if marker is not None and marker.query == target.query_id
    }
    ahead = max((marker.batch for marker in known.values()), default=-1)
    if ahead > first:
        raise RowsAtRiskError(
            f"Topic {target.topic} has batches up to {ahead} of query {target.query_id}, and the query is about to "
            f"write batch {first}: it went back, and a topic cannot. Nothing was written. {_WRITE_AGAIN}"
        )
    if ahead < first:
        return first - 1
    writers = max(marker.writers for marker in known.values())
    done = [writer for writer, marker in known.items() if marker.batch == first]
    if len(done) >= writers:
        return first
    missing = sorted({*range(writers)} - {*done})
    if writers == target.writers and all(writer in known for writer in missing):
        return None
    raise RowsAtRiskError(
        f"Writers {done} of topic {target.topic} have written their share of batch {first}, and it is not known that "
        f"writers {missing} can still write theirs. Nothing was written. "
        + (
            f"The stream ran with {writers} writers: start it once more with as many, as {target.writers} would share "
            "the rows differently."
            if writers != target.writers
            else "Kafka deletes the offsets of a group that is unused for offsets.retention.minutes. Compare the topic "
            f"with the rows of the batch. {_WRITE_AGAIN}"
        )
    )


_WRITE_AGAIN = "To write these rows a second time, start from a snapshot or batch-<n> with new_query_id."


def _refuse_others(target: Transactions, writer: int, marker: Marker | None) -> None:
    if marker is None:
        return
    if marker.query != target.query_id and marker.deployment != target.deployment:
        raise OptionError(
            f"Transactions {target.id_of(writer)} on topic {target.topic} belong to deployment {marker.deployment}, "
            f"and this is deployment {target.deployment}. Nothing was written. Give the sink a kafka.transactional.id "
            "of its own."
        )
    if marker.epoch > target.epoch:
        raise _replaced(target, writer)


def _replaced(target: Transactions, writer: int) -> LeaseLostError:
    return LeaseLostError(
        f"Writer {writer} of topic {target.topic} belongs to a later run of stream {target.stream!r}: this process was "
        "replaced. Nothing was written."
    )


def write_share(target: Transactions, writer: int, batch: int, records: Iterable[Record]) -> Written:
    """Send the share of one writer in one transaction. Run by an executor.

    Args:
        target: The sink and the run.
        writer: The writer.
        batch: The batch.
        records: The rows of the share: the same, in any order, whenever the batch is run.

    Raises:
        LeaseLostError: Another run owns the marker.
        RowsAtRiskError: The marker is not at the batch before.
        StorageAccessError: Kafka does not answer; the transaction was not committed, or is found by the next attempt.
    """
    name = f"{target.owner}/{target.id_of(writer)}"
    session = _sessions.pop(name, None)
    if session is not None and session.last != batch - 1:
        # Another worker wrote the batches in between and has fenced this producer.
        session.close()
        session = None
    try:
        if session is None:
            if _checked(target, writer, batch, _marker_at_a_glance(target, writer)):
                return Written(writer, 0, was_done=True)
            session = Session(target, writer)
            session.begin_epoch()
            # Asked again: only now can no other attempt of this share commit any more.
            if _checked(target, writer, batch, session.marker()):
                session.close()
                return Written(writer, 0, was_done=True)
        sent = session.send(records)
        session.commit(batch)
    except _kafka_errors() as error:
        if session is not None:
            session.abandon()
        raise _unavailable(target, writer, error) from error
    except BaseException:
        if session is not None:
            session.abandon()
        raise
    _keep(name, session)
    return Written(writer, sent, was_done=False)


def _checked(target: Transactions, writer: int, batch: int, marker: Marker | None) -> bool:
    """Whether the share is written already."""
    if marker is None:
        raise RowsAtRiskError(
            f"The marker {target.id_of(writer)} of topic {target.topic} is gone. Nothing was written. Start the "
            "stream again; somebody has deleted the consumer group."
        )
    if marker.owner != target.owner:
        raise _replaced(target, writer)
    if marker.batch not in (batch, batch - 1):
        raise RowsAtRiskError(
            f"Writer {writer} of topic {target.topic} is at batch {marker.batch}, and batch {batch} is to be written. "
            "Nothing was written. Start the stream again."
        )
    return marker.batch == batch


class Session:
    """A producer of one writer.

    Args:
        target: The sink and the run.
        writer: The writer.
    """

    def __init__(self, target: Transactions, writer: int) -> None:
        self._target = target
        self._id = target.id_of(writer)
        self.last: int | None = None
        self._is_open = False
        self._markers = _marker_consumer(target, self._id)
        self._producer: Producer = _producer(target, self._id)

    def begin_epoch(self) -> None:
        """Fence earlier producers of the same writer, and end what they have not committed."""
        _patiently(lambda: self._producer.init_transactions(_CALL_S))

    def marker(self) -> Marker | None:
        """The marker, which no other producer can change any more."""
        return _committed(self._markers, self._target.topic, self._id)

    def send(self, records: Iterable[Record]) -> int:
        """Begin a transaction and send records."""
        producer, topic = self._producer, self._target.topic
        producer.begin_transaction()
        self._is_open = True
        sent = 0
        for record in records:
            _send(producer, topic, record)
            sent += 1
            if sent % _POLL_EVERY == 0:
                producer.poll(0)
        return sent

    def commit(self, batch: int) -> None:
        """Commit the open transaction together with the marker; without an open one, the marker alone."""
        from confluent_kafka import TopicPartition  # noqa: PLC0415 - an extra

        producer, target = self._producer, self._target
        if not self._is_open:
            producer.begin_transaction()
            self._is_open = True
        marker = Marker(
            batch,
            target.query_id,
            target.deployment,
            target.epoch.token,
            target.epoch.generation,
            target.owner,
            target.writers,
        )
        offset = TopicPartition(target.topic, 0, batch + 1, marker.as_metadata())
        group = self._markers.consumer_group_metadata()
        _patiently(lambda: producer.send_offsets_to_transaction([offset], group, _CALL_S))
        _patiently(lambda: producer.commit_transaction(_CALL_S))
        self._is_open = False
        self.last = batch

    def abandon(self) -> None:
        """End a failed share; what it sent is never visible."""
        if self._is_open:
            # The successor's init_transactions does it otherwise; until then consumers would wait.
            with suppress(Exception):
                _bounded(lambda: self._producer.abort_transaction(_ABORT_S), 2 * _ABORT_S)
        self.close()

    def close(self) -> None:
        """Close the connections."""
        producer, markers = self._producer, self._markers

        def closed() -> None:
            markers.close()
            producer.purge()

        with suppress(Exception):
            _bounded(closed, 2 * _ABORT_S)


_sessions: dict[str, Session] = {}


def _keep(name: str, session: Session) -> None:
    while len(_sessions) >= _KEPT_SESSIONS:
        _sessions.pop(next(iter(_sessions))).close()
    _sessions[name] = session


def _send(producer: Producer, topic: str, record: Record) -> None:
    while True:
        try:
            producer.produce(
                record.topic or topic,
                value=record.value,
                key=record.key,
                partition=-1 if record.partition is None else record.partition,
                headers=list(record.headers) if record.headers else None,
            )
        except BufferError:
            producer.poll(0.1)
        else:
            return


def _marker_at_a_glance(target: Transactions, writer: int) -> Marker | None:
    """The newest marker that is committed; an open transaction, which may be a dead process's, is not waited for."""
    group = target.id_of(writer)
    consumer = _marker_consumer(target, group, isolation="read_uncommitted")
    try:
        return _committed(consumer, target.topic, group)
    finally:
        consumer.close()


def _committed(consumer: Consumer, topic: str, group: str) -> Marker | None:
    from confluent_kafka import TopicPartition  # noqa: PLC0415 - an extra

    (found,) = _patiently(lambda: consumer.committed([TopicPartition(topic, 0)], timeout=_CALL_S))
    if found.error is not None:
        raise _error_of(found.error)
    return Marker.of(group, found.offset, found.metadata)


def _marker_consumer(target: Transactions, group: str, *, isolation: str = "read_committed") -> Consumer:
    from confluent_kafka import Consumer as KafkaConsumer  # noqa: PLC0415 - an extra

    # With read_committed the broker answers only once no transaction on the group is pending (KIP-447).
    settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    consumer_only = {name: value for name, value in target.client.items() if name not in PRODUCER_ONLY}
    return _created(lambda: KafkaConsumer({**consumer_only, **settings}))


def _producer(target: Transactions, transactional_id: str) -> Producer:
    from confluent_kafka import Producer as KafkaProducer  # noqa: PLC0415 - an extra

    # Spark's own sink uses the partitioner of the Java client: a key stays in its partition.
    defaults = {"partitioner": "murmur2_random", "linger.ms": "20"}
    return _created(lambda: KafkaProducer({**defaults, **target.client, "transactional.id": transactional_id}))


# Properties that librdkafka would report as of no use to a consumer.
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


def _created(create: Callable[[], _T]) -> _T:
    try:
        return create()
    except _kafka_errors() as error:
        raise OptionError(
            f"The Kafka client refuses its configuration: {error}. The transactional sink uses librdkafka: give "
            "options below `kafka.` under its names (docs/sinks.md#kafka-exactly-once)."
        ) from error


def _patiently(call: Callable[[], _T]) -> _T:
    """Repeat a call that may be repeated; the broker may be restarting."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _bounded(call, PATIENCE_S)
        except _kafka_errors() as error:
            reason = reason_of(error)
            if reason is None or reason.fatal() or reason.txn_requires_abort() or not _may_repeat(reason):
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _bounded(call: Callable[[], _T], limit_s: float) -> _T:
    """Abandon a call that does not return: librdkafka's own limits do not hold after a broker was killed.

    Raises:
        KafkaException: It has not returned; its producer can only be abandoned.
    """
    from confluent_kafka import KafkaError as Reason  # noqa: PLC0415 - an extra

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
    # A lookup that timed out has changed nothing; calls of the producer say themselves whether they can be repeated.
    return reason.retriable() or reason.name() in ("_TIMED_OUT", "_TRANSPORT", "_WAIT_COORD", "NOT_COORDINATOR")


def reason_of(error: Exception) -> KafkaError | None:
    """The error that an exception of the client carries."""
    from confluent_kafka import KafkaError as Reason  # noqa: PLC0415 - an extra

    first = error.args[0] if error.args else None
    return first if isinstance(first, Reason) else None


def _is_fenced(error: Exception) -> bool:
    reason = reason_of(error)
    return reason is not None and reason.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "_FATAL")


def _unavailable(target: Transactions, writer: int, error: Exception) -> StorageAccessError:
    if _is_fenced(error):
        what = "another attempt of the same share, or a later run, has replaced its producer"
    else:
        what = "Kafka did not answer, or refused"
    return StorageAccessError(
        f"Writer {writer} of topic {target.topic}: {what}: {error}. Its transaction was aborted, or the next attempt "
        "finds it committed."
    )


def _error_of(reason: KafkaError) -> Exception:
    from confluent_kafka import KafkaException  # noqa: PLC0415 - an extra

    return KafkaException(reason)


def _kafka_errors() -> type[Exception]:
    from confluent_kafka import KafkaException  # noqa: PLC0415 - an extra

    return KafkaException
