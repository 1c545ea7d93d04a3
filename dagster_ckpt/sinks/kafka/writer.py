"""Starts a query that writes to Kafka in transactions: Spark's sink is replaced by `foreachBatch`.

Why `foreachBatch`: every supported version of Spark has it, and it gets the number of the batch. A
streaming writer of Spark 4's Python data sources is not given that number before its tasks have
finished, so its tasks could not commit it.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.client import client_properties
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.share import COLUMNS, share_writer, write_share
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import FOREACH_BATCH, described_field, described_options, is_described_query
from dagster_ckpt.spark.query.kafka_output import KafkaPlace, kafka_place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
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

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one batch, or those of its shares that are not written yet."""
        if self._target is None:
            target = self._transactions()
            claim(target, batch_id)
            self._target = target
        shares = divided(records_of(batch), self._place.writers)
        written = shares.mapInArrow(share_writer(self._target, batch_id), _WRITTEN).collect()
        # Spark may run no task for an empty partition; its marker moves all the same.
        for writer in {*range(self._place.writers)} - {row["writer"] for row in written}:
            write_share(self._target, writer, batch_id, ())

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


def records_of(batch: DataFrame) -> DataFrame:
    """The columns of a batch that Kafka takes.

    Raises:
        OptionError: A column has another type or name than Spark's own Kafka sink takes.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    given = dict(batch.dtypes)
    if "value" not in given:
        raise OptionError(f"Kafka needs a column named value; the query has {', '.join(given)}.")
    columns: list[Column] = []
    for name in COLUMNS:
        data_type = _TYPES[name]
        is_text = data_type == "binary" and given.get(name) == "string"
        if name in given and given[name] != data_type and not is_text:
            allowed = f"{data_type} or string" if data_type == "binary" else data_type
            raise OptionError(f"Column {name} is {given[name]}, and Kafka takes {allowed}.")
        columns.append((F.col(name) if name in given else F.lit(None)).cast(data_type).alias(name))
    return batch.select(*columns)


def divided(records: DataFrame, writers: int) -> DataFrame:
    """One partition for each writer; a record is in the same one whenever its batch is run.

    Records of a key share a writer, those without a key are divided by their content.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    if writers == 1:
        return records.repartition(1)
    return records.repartition(writers, F.coalesce("key", "value"))
