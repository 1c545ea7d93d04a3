"""Starts a query that writes to Kafka in transactions: Spark's sink is replaced by `foreachBatch`.

Why `foreachBatch`: every supported version of Spark has it, and it gets the number of the batch. A
streaming writer of Spark 4's Python data sources is not given that number before its tasks have
finished, so its tasks could not commit it.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.sinks.kafka.batch_job import BatchJob, refuse_shared_threads
from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.client import client_properties
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.past import KEPT_FOR_MS, Past, past_of
from dagster_ckpt.sinks.kafka.session import await_topic
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import read_plan_digest
from dagster_ckpt.spark.query.description import described_field, described_options, is_described_query, session_of
from dagster_ckpt.spark.query.output import FOREACH_BATCH, KafkaPlace, kafka_place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.records import ExecutionRecord

_LIVE_NAME = re.compile(r".*/live-(?P<generation>\d+)-(?P<token>\d+)/?")
_INTERRUPTED = re.compile(r"Interrupted|cancelled part of cancelled job group")


@dataclass(frozen=True)
class StreamOwner:
    """Whose query it is.

    Attributes:
        deployment: Id of the deployment.
        stream: Id of the stream.
        executions: Returns the executions of the stream, the newest first.
    """

    deployment: str
    stream: str
    executions: Callable[[], Sequence[ExecutionRecord]] = tuple


def with_transactions(writer: DataStreamWriter, owner: StreamOwner, live: LiveDirectory) -> DataStreamWriter:
    """Let a query write to Kafka in transactions, if its options ask for that; any other query is left as it is.

    Args:
        writer: The described query.
        owner: Whose query it is.
        live: The live directory that it is about to start in.

    Raises:
        OptionError: An option is missing or wrong, or extra `kafka` is not installed.
        StorageAccessError: Kafka may have deleted the markers during a pause, and does not answer.
    """
    if not is_described_query(writer):
        return writer
    place = kafka_place(described_options(writer))
    if place is None:
        return writer
    source = str(described_field(writer._jwrite, "source")).lower()
    if source not in ("kafka", FOREACH_BATCH):
        raise OptionError(
            f"kafka.transactional.id is an option of format kafka, but the query writes {source!r}. Remove it."
        )
    try:
        import confluent_kafka  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise OptionError("Transactions need confluent-kafka. Run: pip install 'dagster-ckpt[kafka]'.") from error
    refuse_shared_threads(session_of(writer))
    past = past_of(place, owner.executions(), live, now_ms=time.time() * 1000)
    if past.may_lack_markers:
        # Once Spark has planned a batch, a start without markers is refused: the batch may be in the topic.
        await_topic(client_properties(place.client), place.topic)
    return writer.foreachBatch(TransactionalBatches(place, owner, live, past))


class TransactionalBatches:
    """Writes each batch of one started query.

    Args:
        place: Where it writes.
        owner: Whose query it is.
        live: Its live directory.
        past: What the catalog knows of earlier starts.
    """

    def __init__(self, place: KafkaPlace, owner: StreamOwner, live: LiveDirectory, past: Past) -> None:
        self._place = place
        self._owner = owner
        self._live = live
        self._past = past
        self._renews_at_s = 0.0
        self._client = client_properties(place.client)
        self._target: Transactions | None = None
        self._job: BatchJob | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one batch, or those of its shares that are not written yet."""
        if self._target is None or self._job is None:
            self._target = self._transactions()
            self._job = BatchJob(batch, self._target)
        self._target = replace(self._target, entry=read_plan_digest(self._live, batch_id))
        self._claim(self._target, batch_id)
        with _interrupted_in_brief():
            self._job.run(batch, batch_id, self._target.entry)

    def _claim(self, target: Transactions, batch_id: int) -> None:
        """Claim the markers before the first batch, and again after a pause in which Kafka may have deleted them."""
        now_s = time.monotonic()
        if now_s > self._renews_at_s:
            claim(target, batch_id, self._past)
            # A later batch was planned by this start, so that no topic has it.
            self._past = Past()
        self._renews_at_s = now_s + KEPT_FOR_MS / 1000

    def _transactions(self) -> Transactions:
        query_id = live_query_id(self._live)
        if query_id is None:
            raise LiveDirectoryError(
                f"{self._live.url} contains no query id, so its batches cannot be written exactly "
                "once. Restore a snapshot."
            )
        match = _LIVE_NAME.fullmatch(self._live.url)
        return Transactions(
            client=self._client,
            topic=self._place.topic,
            prefix=self._place.prefix,
            writers=self._place.writers,
            deployment=self._owner.deployment,
            stream=self._owner.stream,
            query_id=query_id,
            epoch=Epoch(int(match["token"]), int(match["generation"])) if match else Epoch(),
            owner=uuid.uuid4().hex,
        )


@contextmanager
def _interrupted_in_brief() -> Iterator[None]:
    """Shorten the error of a job that ended because its query is stopped.

    Spark looks for the interruption in the text of the error, stack traces included, with a regular expression that
    overflows the stack (`PROXY_ERROR` in StreamExecution): a stop then prints a thousand lines.
    """
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    try:
        yield
    except Py4JJavaError as error:
        said = "\n".join(str(error).splitlines()[:2])
        if not _INTERRUPTED.search(said):
            raise
        raise RuntimeError(f"{Py4JJavaError.__module__}.{Py4JJavaError.__name__}: {said}") from None
