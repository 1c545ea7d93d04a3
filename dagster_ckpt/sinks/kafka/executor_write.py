"""The executors' part of the protocol.

Every Python worker imports this module, so it imports little and nothing of Spark.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

from dagster_ckpt.errors import RowsAtRiskError, StorageAccessError
from dagster_ckpt.sinks.kafka.marker import Marker, Transactions, replaced
from dagster_ckpt.sinks.kafka.transaction import (
    Header,
    Record,
    RecordFields,
    Session,
    kafka_errors,
    marker_before_share,
    unavailable,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_KEPT_SESSIONS = 8
# Orders the rows; the last one has END there and is no record.
PLACE = "__place"
END = 2**63 - 1
_ARCHIVE_OF_SPARK = re.compile(r"(.*/)?(pyspark|py4j-[^/]*)\.zip|.*\.jar")


@dataclass(frozen=True)
class Written:
    records: int
    # An earlier attempt had committed the share.
    was_done: bool


def write_share(target: Transactions, writer: int, batch: int, records: Iterable[RecordFields]) -> Written:
    """Send the share of one writer in one transaction.

    Raises:
        LeaseLostError: Another run owns the marker.
        RowsAtRiskError: The marker is not at the batch before.
        StorageAccessError: Kafka does not answer; the next attempt finds out whether the transaction was committed.
    """
    name = f"{target.owner}/{target.id_of(writer)}"
    session = sessions.pop(name, None)
    if session is not None and session.last != batch - 1:
        # Another worker wrote the batches in between and fenced this producer.
        session.close()
        session = None
    try:
        if session is None:
            if _checked(target, writer, batch, marker_before_share(target, writer, batch)):
                return Written(0, was_done=True)
            session = Session(target, writer)
            session.begin_epoch()
            # Only now can no other attempt of this share commit any more.
            if _checked(target, writer, batch, session.marker()):
                session.close()
                return Written(0, was_done=True)
        sent = session.send(records)
        session.commit(batch, target.entry)
    except kafka_errors() as error:
        if session is not None:
            session.abandon()
        raise unavailable(target, writer, error) from error
    except BaseException:
        if session is not None:
            session.abandon()
        raise
    _keep(name, session)
    return Written(sent, was_done=False)


def _checked(target: Transactions, writer: int, batch: int, marker: Marker | None) -> bool:
    if marker is None:
        raise RowsAtRiskError(
            f"The marker {target.id_of(writer)} of topic {target.topic} is missing: its consumer group was "
            "deleted. Nothing was written. Start the stream again."
        )
    if marker.owner != target.owner:
        raise replaced(target, writer, marker)
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


def batch_property(owner: str, batch: int, entry: str) -> tuple[str, str]:
    return f"dagster_ckpt.kafka.{owner}", f"{batch} {entry}"


def share_writer(target: Transactions) -> Callable[[Iterable[RecordBatch]], Iterator[RecordBatch]]:
    name, _ = batch_property(target.owner, 0, "")

    def write(rows: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        from pyspark import TaskContext

        context = cast("TaskContext", TaskContext.get())
        batch, _, entry = str(context.getLocalProperty(name)).partition(" ")
        write_share(replace(target, entry=entry), context.partitionId(), int(batch), records_of(rows))
        _forget_archives_of_spark()
        return iter(())

    return write


def _forget_archives_of_spark() -> None:
    """Spare the next task of this Python worker 0.1 s.

    Spark's worker calls `importlib.invalidate_caches()` before each task. Up to Python 3.12, each importer of an
    archive (`pyspark.zip`, Py4J, Spark's jar) then reads its directory again, unless it is missing from this cache.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if _ARCHIVE_OF_SPARK.fullmatch(getattr(importer, "archive", "")):
            del sys.path_importer_cache[path]


def records_of(rows: Iterable[RecordBatch]) -> Iterator[RecordFields]:
    is_whole = False
    for batch in rows:
        if not batch.num_rows:
            continue
        is_whole = batch.column(PLACE)[-1].as_py() == END
        records = batch.slice(0, batch.num_rows - is_whole)
        given = {*records.schema.names}
        value, key, headers, partition = (
            records.column(name).to_pylist() if name in given else repeat(None, records.num_rows)
            for name in Record._fields
        )
        # A `Record` for each row would take as long as queueing it.
        yield from zip(value, key, map(_headers_of, headers), partition, strict=True)
    if not is_whole:
        raise StorageAccessError(
            "Spark has ended this task before its last row. Its transaction is aborted; the next attempt writes the "
            "rows again."
        )


def _headers_of(given: Sequence[Mapping[str, Any]] | None) -> list[Header] | None:
    return [(each["key"], each["value"]) for each in given] if given else None
