"""The executors' part of the protocol: the share of one writer, in one transaction.

Every Python worker of Spark imports this module, so it imports nothing of Spark and little else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.sinks.kafka.marker import Marker, Transactions, replaced
from dagster_ckpt.sinks.kafka.session import Record, Session, kafka_errors, marker_at_a_glance, unavailable

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Producers that a Python worker keeps for its next shares.
_KEPT_SESSIONS = 8
# The columns of a row that goes to Kafka, as Spark's own sink names them.
COLUMNS = ("key", "value", "headers", "topic", "partition")


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
    session = sessions.pop(name, None)
    if session is not None and session.last != batch - 1:
        # Another worker wrote the batches in between and has fenced this producer.
        session.close()
        session = None
    try:
        if session is None:
            if _checked(target, writer, batch, marker_at_a_glance(target, writer)):
                return Written(writer, 0, was_done=True)
            session = Session(target, writer)
            session.begin_epoch()
            # Asked again: only now can no other attempt of this share commit any more.
            if _checked(target, writer, batch, session.marker()):
                session.close()
                return Written(writer, 0, was_done=True)
        sent = session.send(records)
        session.commit(batch)
    except kafka_errors() as error:
        if session is not None:
            session.abandon()
        raise unavailable(target, writer, error) from error
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
            f"The marker {target.id_of(writer)} of topic {target.topic} is missing: its consumer group was "
            "deleted. Nothing was written. Start the stream again."
        )
    if marker.owner != target.owner:
        raise replaced(target, writer)
    if marker.batch not in (batch, batch - 1):
        raise RowsAtRiskError(
            f"Writer {writer} of topic {target.topic} is at batch {marker.batch}, but batch {batch} is due. "
            "Nothing was written. Start the stream again."
        )
    return marker.batch == batch


sessions: dict[str, Session] = {}


def _keep(name: str, session: Session) -> None:
    while len(sessions) >= _KEPT_SESSIONS:
        sessions.pop(next(iter(sessions))).close()
    sessions[name] = session


def share_writer(target: Transactions, batch_id: int) -> Callable[[Iterable[RecordBatch]], Iterator[RecordBatch]]:
    """The function that Spark maps over the partitions of a batch, one for each writer."""

    def write(rows: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        import pyarrow  # noqa: PLC0415 - on executors
        from pyspark import TaskContext  # noqa: PLC0415 - on executors

        context = TaskContext.get()
        writer = context.partitionId() if context is not None else 0
        done = write_share(target, writer, batch_id, _records(rows))
        yield pyarrow.RecordBatch.from_pydict(
            {
                "writer": pyarrow.array([done.writer], pyarrow.int32()),
                "records": pyarrow.array([done.records], pyarrow.int64()),
                "was_done": pyarrow.array([done.was_done], pyarrow.bool_()),
            }
        )

    return write


def _records(rows: Iterable[RecordBatch]) -> Iterator[Record]:
    for batch in rows:
        columns: list[list[Any]] = [batch.column(name).to_pylist() for name in COLUMNS]
        for key, value, headers, topic, partition in zip(*columns, strict=True):
            sent = [(each["key"], each["value"]) for each in headers] if headers else None
            yield Record(value, key, sent, topic, partition)
