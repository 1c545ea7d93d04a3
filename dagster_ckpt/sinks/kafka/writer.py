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
from threading import Lock
from typing import TYPE_CHECKING

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.client import client_properties
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.past import Past, past_of
from dagster_ckpt.sinks.kafka.share import END, PLACE, share_writer
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned import read_plan_digest
from dagster_ckpt.spark.query.description import FOREACH_BATCH, described_field, described_options, is_described_query
from dagster_ckpt.spark.query.kafka_output import KafkaPlace, kafka_place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.records import ExecutionRecord

_LIVE_NAME = re.compile(r".*/live-(?P<generation>\d+)-(?P<token>\d+)/?")
# The columns of a row that goes to Kafka, as Spark's own sink names them. There, too, option `topic` overrides a column
# of that name.
_TYPES = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "partition": "int",
}
_INTERRUPTED = re.compile(r"Interrupted|cancelled part of cancelled job group")
_ADAPTIVE = "spark.sql.adaptive.enabled"
_HASH = "__hash"
# Nothing reads this variable of a Python worker.
_STREAM_OF_WORKER = "DAGSTER_CKPT_KAFKA_STREAM"
_environment = Lock()
# Kafka deletes the markers of a stream without batches after `offsets.retention.minutes`, 7 days by default.
_RENEWED_AFTER_S = 6 * 3600.0


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
    return writer.foreachBatch(TransactionalBatches(place, owner, live, past_of(place, owner.executions(), live)))


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
        # Of the first batch: the columns of a started query stay as they are.
        self._division: Division | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one batch, or those of its shares that are not written yet."""
        from pyspark.sql.types import StructType  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

        if self._target is None or self._division is None:
            self._division = division_of(batch, self._place.writers)
            self._target = self._transactions()
        self._target = replace(self._target, entry=read_plan_digest(self._live, batch_id))
        self._claim(self._target, batch_id)
        session, no_rows = batch.sparkSession, StructType().add("none", "integer")
        with _interrupted_in_brief(), _planned_once(session):
            shares = self._division.of(batch)
            with _workers_of_their_own(session, self._target):
                written = shares.mapInArrow(share_writer(self._target, batch_id), no_rows)
            # `collect()` would be an SQL execution within that of the batch, with a description of its plan.
            written._jdf.queryExecution().toRdd().count()

    def _claim(self, target: Transactions, batch_id: int) -> None:
        """Claim the markers before the first batch, and again after a pause in which Kafka may have deleted them."""
        now_s = time.monotonic()
        if now_s > self._renews_at_s:
            claim(target, batch_id, self._past)
            # A later batch was planned by this start, so that no topic has it.
            self._past = Past()
        self._renews_at_s = now_s + _RENEWED_AFTER_S

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


@contextmanager
def _planned_once(session: SparkSession) -> Iterator[None]:
    """Run jobs without adaptive execution, which would plan them again after their shuffle.

    Args:
        session: That of the streaming query alone.
    """
    before = session.conf.get(_ADAPTIVE)
    session.conf.set(_ADAPTIVE, "false")
    try:
        yield
    finally:
        session.conf.set(_ADAPTIVE, str(before))


@contextmanager
def _workers_of_their_own(session: SparkSession, target: Transactions) -> Iterator[None]:
    """Let the functions that are mapped meanwhile run in Python workers that no other stream uses.

    A producer is kept in its Python worker, and Spark gives a task the worker that has been idle for longest. With one
    more worker than writers, whosesoever, a batch would rarely find its producer and begin another, in up to 0.5 s.
    Spark keeps workers apart by their environment. Its value is the same after a restart, so that a session that
    starts the stream again and again uses no more of them.
    """
    context = session.sparkContext
    # Other streams of this process start their batches in threads of their own.
    with _environment:
        before = context.environment
        context.environment = {**before, _STREAM_OF_WORKER: f"{target.prefix}.{target.stream}"}
        try:
            yield
        finally:
            context.environment = before


def record_columns(batch: DataFrame) -> list[Column]:
    """The columns of a batch that Kafka takes, of those that it has.

    A column of nulls in place of one that it has not would cost: Spark asks for the size of its Arrow batch after each
    row, which takes long with a list of structs such as `headers`.

    Raises:
        OptionError: A column has another type or name than Spark's own Kafka sink takes.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    given = dict(batch.dtypes)
    if "value" not in given:
        raise OptionError(f"Kafka needs a column named value; the query has {', '.join(given)}.")
    columns: list[Column] = []
    for name, data_type in _TYPES.items():
        if name not in given:
            continue
        is_text = data_type == "binary" and given[name] == "string"
        if given[name] != data_type and not is_text:
            allowed = f"{data_type} or string" if data_type == "binary" else data_type
            raise OptionError(f"Column {name} is {given[name]}, and Kafka takes {allowed}.")
        columns.append(F.col(name).cast(data_type).alias(name))
    return columns


@dataclass(frozen=True)
class Division:
    """Divides the batches of a query among the writers.

    A record is in the same partition whenever its batch is run: records of a key share a writer, those without a key
    are divided by their content. The rows of a partition are in the order of the query's, and at its end is a row that
    says so.

    Why the row at the end: when Spark ends a task, for example because another one has failed, the rows that its Python
    worker reads just end. The worker would take them for all there are.

    Attributes:
        columns: The columns of a record, with its hash and place.
        ends: The rows at the ends.
        writers: Number of writers.
    """

    columns: list[Column]
    ends: DataFrame
    writers: int

    def of(self, batch: DataFrame) -> DataFrame:
        """One partition for each writer."""
        together = batch.select(self.columns).union(self.ends)
        return together.repartition(self.writers, _HASH).sortWithinPartitions(PLACE)


def division_of(batch: DataFrame, writers: int) -> Division:
    """Divide a query's batches as one of them.

    Raises:
        OptionError: A column has another type or name than Spark's own Kafka sink takes.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    columns = record_columns(batch)
    records = batch.select(columns)
    # Each cast for itself: without ANSI mode Spark 3.5 does not coalesce a string and a binary.
    by = F.coalesce(*(F.col(name).cast("binary") for name in ("key", "value") if name in records.columns))
    nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in records.schema]
    hashes = map(F.lit, hash_of_each_writer(batch.sparkSession, writers))
    ends = batch.sparkSession.range(0, 1, 1, 1).select(
        *nulls, F.explode(F.array(*hashes)).alias(_HASH), F.lit(END).alias(PLACE)
    )
    hash_and_place = [F.hash(by).alias(_HASH), F.monotonically_increasing_id().alias(PLACE)]
    return Division([*columns, *hash_and_place], ends, writers)


def hash_of_each_writer(session: SparkSession, writers: int) -> list[int]:
    """For each writer, an integer that Spark's hash partitioning puts into the partition of that number."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    # So many integers reach every partition for each number of writers that is allowed.
    candidates = session.range(0, 50 * writers, 1, 1).select(F.col("id").cast("int"))
    partitions = candidates.select("id", F.expr(f"pmod(hash(id), {writers})").alias("writer"))
    found = {row["writer"]: row["id"] for row in partitions.collect()}
    return [found[writer] for writer in range(writers)]
