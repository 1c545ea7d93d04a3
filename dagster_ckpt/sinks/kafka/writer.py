"""Write the batches of a query to Kafka in transactions, with `foreachBatch` in place of Spark's sink.

A streaming writer of Spark 4's Python data sources learns the batch number only when its tasks have finished.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.sinks.kafka.claim import KEPT_FOR_MS, Past, claim, claim_from_another_query, past_of
from dagster_ckpt.sinks.kafka.executor_write import END, PLACE, batch_property, share_writer
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.transaction import await_topic, client_properties
from dagster_ckpt.sinks.kafka.undone import TopicEnd
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import read_plan_digest
from dagster_ckpt.spark.query.description import described_field, described_options, is_described_query, session_of
from dagster_ckpt.spark.query.output import FOREACH_BATCH, KafkaPlace, kafka_place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.records import ExecutionRecord

_LIVE_NAME = re.compile(r".*/live-(?P<generation>\d+)-(?P<token>\d+)/?")
_INTERRUPTED = re.compile(r"Interrupted|cancelled part of cancelled job group")
_ADAPTIVE = "spark.sql.adaptive.enabled"
# Keeps the Python workers of streams apart.
_STREAM_OF_WORKER = "DAGSTER_CKPT_KAFKA_STREAM"
_environment = Lock()
# Without a column `topic`: as in Spark's own sink, the option overrides it.
_TYPES = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "partition": "int",
}
_HASH = "__hash"


@dataclass(frozen=True)
class StreamOwner:
    """The stream that writes.

    Attributes:
        executions: Newest first.
        restored: Where the batches before a given one end in the topic, if a snapshot that was restored records it.
    """

    deployment: str
    stream: str
    executions: Callable[[], Sequence[ExecutionRecord]] = tuple
    went_back: Callable[[], bool] = bool
    restored: Callable[[KafkaPlace, int], TopicEnd | None] = lambda *_: None


def with_transactions(writer: DataStreamWriter, owner: StreamOwner, live: LiveDirectory) -> DataStreamWriter:
    """Let a query write to Kafka in transactions, if its options ask for that.

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
        import confluent_kafka  # noqa: F401 - an extra
    except ImportError as error:
        raise OptionError("Transactions need confluent-kafka. Run: pip install 'dagster-ckpt[kafka]'.") from error
    refuse_shared_threads(session_of(writer))
    past = past_of(place, owner.executions(), live, now_ms=time.time() * 1000)
    if past.may_lack_markers:
        # Before a batch is planned: after that, a start without markers is refused, as the topic may have the batch.
        await_topic(client_properties(place.client), place.topic)
    # Before its first batch, a new query has no id.
    if live_query_id(live) is None or not (past.is_new and owner.went_back()):
        return writer.foreachBatch(TransactionalBatches(place, owner, live, past))
    commit = live.positions().commit
    first = 0 if commit is None else commit + 1
    batches = TransactionalBatches(place, owner, live, replace(past, restored=owner.restored(place, first)))
    # Even before the first batch, readers can then continue behind what the query undoes.
    batches.claim_before_the_first_batch(first)
    return writer.foreachBatch(batches)


class TransactionalBatches:
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
        if self._target is None or self._job is None:
            self._target = self._transactions()
            self._job = BatchJob(batch, self._target)
        self._target = replace(self._target, entry=read_plan_digest(self._live, batch_id))
        self._claim(self._target, batch_id)
        with _interrupted_in_brief():
            self._job.run(batch, batch_id, self._target.entry)

    def claim_before_the_first_batch(self, first: int) -> None:
        claim_from_another_query(self._transactions(), first, self._past)

    def _claim(self, target: Transactions, batch_id: int) -> None:
        """Claim before the first batch, and after a pause in which Kafka may have deleted the markers."""
        now_s = time.monotonic()
        if now_s > self._renews_at_s:
            claim(target, batch_id, self._past)
            # Later batches are planned by this start, so no topic has them yet.
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

    Spark's regular expression for it (`PROXY_ERROR` in StreamExecution) overflows the stack, which would print a
    thousand lines.
    """
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        said = "\n".join(str(error).splitlines()[:2])
        if not _INTERRUPTED.search(said):
            raise
        raise RuntimeError(f"{Py4JJavaError.__module__}.{Py4JJavaError.__name__}: {said}") from None


class BatchJob:
    """Writes the batches of one started query, whose columns stay as they are.

    Planning costs as much as the transaction of 10,000 rows (25 ms), so each batch gets a copy of the physical plan
    with its own rows at the bottom; its number and plan's digest are a job property.
    """

    def __init__(self, batch: DataFrame, target: Transactions) -> None:
        from pyspark.sql.types import StructType

        self._owner = target.owner
        session, rows = batch.sparkSession, _without_rows(batch)
        with _planned_once(session), _workers_of_their_own(session, target):
            shares = division_of(rows, target.writers).of(rows)
            written = shares.mapInArrow(share_writer(target), StructType().add("none", "integer"))
            node: Any = written._jdf.queryExecution().executedPlan()
        # From top to bottom; the rows are the first child.
        self._above: list[tuple[Any, Any]] = []
        while (children := node.children().toList()).size():
            self._above.append((node, children.tail()))
            node = children.head()
        self._scan = node
        self._output, _, *self._others = [node.productElement(number) for number in range(node.productArity())]

    def run(self, batch: DataFrame, batch_id: int, entry: str) -> None:
        node = self._scan.copy(self._output, _rows_of(batch), *self._others)
        for parent, siblings in reversed(self._above):
            # Scala's name of `::`.
            node = parent.withNewChildren(getattr(siblings, "$colon$colon")(node))
        batch.sparkSession.sparkContext.setLocalProperty(*batch_property(self._owner, batch_id, entry))
        # `collect()` would be an SQL execution of its own.
        node.execute().count()


def refuse_shared_threads(session: SparkSession) -> None:
    from py4j.clientserver import ClientServer

    if not isinstance(session.sparkContext._gateway, ClientServer):
        raise OptionError(
            "PYSPARK_PIN_THREAD is false, so Python threads share threads of the JVM, and the number of a batch could "
            "reach another batch's tasks. Kafka's transactions need it: remove the variable, or set it "
            "to true, and start the driver again."
        )


def _without_rows(batch: DataFrame) -> DataFrame:
    """Return an empty batch with nullable columns; references to rows would keep their shuffle files."""
    from pyspark.sql import DataFrame

    jvm_session: Any = batch.sparkSession._jsparkSession
    no_rows = jvm_session.emptyDataFrame().queryExecution().toRdd()
    columns = batch._jdf.schema().asNullable()
    return DataFrame(jvm_session.internalCreateDataFrame(no_rows, columns, False), batch.sparkSession)


def _rows_of(batch: DataFrame) -> Any:
    execution: Any = batch._jdf.queryExecution()
    plan = execution.analyzed()
    return plan.rdd() if plan.nodeName() == "LogicalRDD" else execution.toRdd()


@contextmanager
def _planned_once(session: SparkSession) -> Iterator[None]:
    """Disable adaptive execution, which would plan the jobs again after their shuffle."""
    before = session.conf.get(_ADAPTIVE)
    session.conf.set(_ADAPTIVE, "false")
    try:
        yield
    finally:
        session.conf.set(_ADAPTIVE, str(before))


@contextmanager
def _workers_of_their_own(session: SparkSession, target: Transactions) -> Iterator[None]:
    """Run the functions mapped meanwhile in Python workers that no other stream uses.

    A producer stays in its Python worker. With more workers than writers, a batch would rarely find its producer, since
    Spark gives a task the worker idle for longest, and start another, in up to 0.5 s. Spark keeps workers apart by
    environment.
    """
    context = session.sparkContext
    # Other streams of this process have threads of their own.
    with _environment:
        before = context.environment
        context.environment = {**before, _STREAM_OF_WORKER: f"{target.prefix}.{target.stream}"}
        try:
            yield
        finally:
            context.environment = before


def record_columns(batch: DataFrame) -> list[Column]:
    """Leave out columns that the batch lacks.

    As nulls, they would make Spark ask for the size of its Arrow batch after each row, which takes long with structs
    such as `headers`.
    """
    from pyspark.sql import functions as F

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
    """Divides the batches of a query among the writers, the same way whenever a batch is run.

    Records of a key share a writer, those without a key are divided by content. Rows keep their order. A last row marks
    the end: when Spark ends a task early, its Python worker only sees that no more rows come.
    """

    columns: list[Column]
    ends: DataFrame
    writers: int

    def of(self, batch: DataFrame) -> DataFrame:
        records = batch.select(self.columns)
        if self.writers == 1:
            # The end is added behind the shuffle, which saves a task.
            return records.repartition(1).sortWithinPartitions(PLACE).union(self.ends).coalesce(1)
        return records.union(self.ends).repartition(self.writers, _HASH).sortWithinPartitions(PLACE)


def division_of(batch: DataFrame, writers: int) -> Division:
    from pyspark.sql import functions as F

    columns = record_columns(batch)
    records = batch.select(columns)
    nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in records.schema]
    place, end = F.monotonically_increasing_id().alias(PLACE), F.lit(END).alias(PLACE)
    one_row = batch.sparkSession.range(0, 1, 1, 1)
    if writers == 1:
        return Division([*columns, place], one_row.select(*nulls, end), writers)
    # Without ANSI mode, Spark 3.5 does not coalesce a string and a binary.
    by = F.coalesce(*(F.col(name).cast("binary") for name in ("key", "value") if name in records.columns))
    hashes = map(F.lit, hash_of_each_writer(batch.sparkSession, writers))
    ends = one_row.select(*nulls, F.explode(F.array(*hashes)).alias(_HASH), end)
    return Division([*columns, F.hash(by).alias(_HASH), place], ends, writers)


def hash_of_each_writer(session: SparkSession, writers: int) -> list[int]:
    from pyspark.sql import functions as F

    candidates = session.range(0, 50 * writers, 1, 1).select(F.col("id").cast("int"))
    partitions = candidates.select("id", F.expr(f"pmod(hash(id), {writers})").alias("writer"))
    found = {row["writer"]: row["id"] for row in partitions.collect()}
    return [found[writer] for writer in range(writers)]
