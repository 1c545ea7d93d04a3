"""Divides the rows of a batch among the writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.sinks.kafka.share import END, PLACE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# The columns of a row that goes to Kafka, as Spark's own sink names them. There, too, option `topic` overrides a column
# of that name.
_TYPES = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "partition": "int",
}
_HASH = "__hash"


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
        columns: The columns of a record, with its place, and with its hash if there are several writers.
        ends: The rows at the ends.
        writers: Number of writers.
    """

    columns: list[Column]
    ends: DataFrame
    writers: int

    def of(self, batch: DataFrame) -> DataFrame:
        """One partition for each writer."""
        records = batch.select(self.columns)
        if self.writers == 1:
            # The end is added behind the shuffle, which saves a task before it.
            return records.repartition(1).sortWithinPartitions(PLACE).union(self.ends).coalesce(1)
        return records.union(self.ends).repartition(self.writers, _HASH).sortWithinPartitions(PLACE)


def division_of(batch: DataFrame, writers: int) -> Division:
    """Divide a query's batches as one of them.

    Raises:
        OptionError: A column has another type or name than Spark's own Kafka sink takes.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    columns = record_columns(batch)
    records = batch.select(columns)
    nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in records.schema]
    place, end = F.monotonically_increasing_id().alias(PLACE), F.lit(END).alias(PLACE)
    one_row = batch.sparkSession.range(0, 1, 1, 1)
    if writers == 1:
        return Division([*columns, place], one_row.select(*nulls, end), writers)
    # Each cast for itself: without ANSI mode Spark 3.5 does not coalesce a string and a binary.
    by = F.coalesce(*(F.col(name).cast("binary") for name in ("key", "value") if name in records.columns))
    hashes = map(F.lit, hash_of_each_writer(batch.sparkSession, writers))
    ends = one_row.select(*nulls, F.explode(F.array(*hashes)).alias(_HASH), end)
    return Division([*columns, F.hash(by).alias(_HASH), place], ends, writers)


def hash_of_each_writer(session: SparkSession, writers: int) -> list[int]:
    """For each writer, an integer that Spark's hash partitioning puts into the partition of that number."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    # Enough integers to reach every partition, for each number of writers that is allowed.
    candidates = session.range(0, 50 * writers, 1, 1).select(F.col("id").cast("int"))
    partitions = candidates.select("id", F.expr(f"pmod(hash(id), {writers})").alias("writer"))
    found = {row["writer"]: row["id"] for row in partitions.collect()}
    return [found[writer] for writer in range(writers)]
