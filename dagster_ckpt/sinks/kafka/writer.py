"""Starts a query that writes to Kafka in transactions: Spark's sink is replaced by `foreachBatch`.

Why `foreachBatch`: every supported version of Spark has it, and it gets the number of the batch. A
streaming writer of Spark 4's Python data sources is not given that number before its tasks have
finished, so its tasks could not commit it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.client import client_properties
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.share import share_writer, write_share
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import FOREACH_BATCH, described_field, described_options, is_described_query
from dagster_ckpt.spark.query.kafka_output import KafkaPlace, kafka_place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_LIVE_NAME = re.compile(r".*/live-(?P<generation>\d+)-(?P<token>\d+)/?")
# The columns of a row that goes to Kafka, as Spark's own sink names them.
_TYPES = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "topic": "string",
    "partition": "int",
}
_INTERRUPTED = re.compile(r"Interrupted|cancelled part of cancelled job group")
_SETTINGS = {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"}
_WRITTEN = "writer int, records long, was_done boolean"


@dataclass(frozen=True)
class StreamOwner:
    """Whose query it is.

    Attributes:
        deployment: Id of the deployment.
        stream: Id of the stream.
    """

    deployment: str
    stream: str


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
    return writer.foreachBatch(TransactionalBatches(place, owner, live))


class TransactionalBatches:
    """Writes each batch of one started query.

    Args:
        place: Where it writes.
        owner: Whose query it is.
        live: Its live directory.
    """

    def __init__(self, place: KafkaPlace, owner: StreamOwner, live: LiveDirectory) -> None:
        self._place = place
        self._owner = owner
        self._live = live
        self._client = client_properties(place.client)
        self._target: Transactions | None = None
        # Of the first batch: those of a started query stay as they are.
        self._columns: list[Column] = []

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one batch, or those of its shares that are not written yet."""
        if self._target is None:
            self._columns = record_columns(batch)
            target = self._transactions()
            claim(target, batch_id)
            self._target = target
        with _interrupted_in_brief(), _for_few_rows(batch.sparkSession):
            shares = divided(batch.select(self._columns), self._place.writers).persist()
            try:
                rows = rows_by_share(shares)
                written = shares.mapInArrow(share_writer(self._target, batch_id, rows), _WRITTEN).collect()
            finally:
                shares.unpersist()
        # Spark may run no task for an empty partition; its marker moves all the same.
        for writer in {*range(self._place.writers)} - {row["writer"] for row in written}:
            write_share(self._target, writer, batch_id, (), rows.get(writer, 0))

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
def _for_few_rows(session: SparkSession) -> Iterator[None]:
    """Run jobs without adaptive execution, which would plan them again after their shuffle, and count in one task.

    Args:
        session: That of the streaming query alone.
    """
    before = {name: session.conf.get(name) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            session.conf.set(name, str(old))


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


def divided(records: DataFrame, writers: int) -> DataFrame:
    """One partition for each writer; a record is in the same one whenever its batch is run.

    Records of a key share a writer, those without a key are divided by their content.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    if writers == 1:
        return records.repartition(1)
    by = [name for name in ("key", "value") if name in records.columns]
    return records.repartition(writers, F.coalesce(*by))


def rows_by_share(shares: DataFrame) -> dict[int, int]:
    """Number of rows of each partition that has any.

    A Python worker cannot tell the end of its rows from the end of its task: when Spark ends a task, for example
    because another one has failed, the rows just end. The writer of a share has to know how many there are.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    counted = shares.groupBy(F.spark_partition_id().alias("writer")).agg(F.count(F.lit(1)).alias("number"))
    return {row["writer"]: row["number"] for row in counted.collect()}
