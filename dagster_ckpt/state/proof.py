"""Prove that a rewrite kept every row: count and hash each state store before and after, as bytes.

The hash does not depend on the order, and is taken for each partition: a row in the wrong one is
lost to the query. Keys and values are the bytes of Spark's own rows, which are the same with every
provider. How the files lie is proven by a cut of the new directory, which looks up every file of
every store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import STATE
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.state.raw_rows import StateStoreName
from dagster_ckpt.state.skeleton import StoppedState
from dagster_ckpt.values.untrusted import number_in

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True)
class StoreDigest:
    """The content of one store.

    Attributes:
        rows: Number of rows.
        digest: Sum of the hashes of all rows.
    """

    rows: int
    digest: int


def digests(rows: DataFrame, partition: Column) -> dict[int, StoreDigest]:
    """Count and hash the rows of a store in each partition that has any. Runs a Spark job.

    Args:
        rows: With the columns `key_bytes`, `value_bytes` and `column_family_name`.
        partition: The partition that a row belongs to.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - only callers with a session need it

    hashed = F.xxhash64("column_family_name", "key_bytes", "value_bytes").cast("decimal(38,0)")
    placed = rows.select(partition.alias("partition"), hashed.alias("hash")).groupBy("partition")
    found = placed.agg(F.count("*").alias("rows"), F.sum("hash").alias("digest")).collect()
    return {row.partition: StoreDigest(row.rows, int(row.digest)) for row in found}


@dataclass(frozen=True)
class PlacedRows:
    """The rows that a store is to have.

    Attributes:
        rows: The rows, as bytes.
        partition: The partition in which the query will look for a row.
    """

    rows: DataFrame
    partition: Column


def compare_rows(
    stores: list[tuple[Operator, StateStoreName]],
    wanted: Callable[[Operator, StateStoreName], PlacedRows],
    written: Callable[[Operator, StateStoreName], DataFrame],
) -> dict[StateStoreName, StoreDigest]:
    """Compare the rows of each store with those that it is to have, partition by partition. Runs Spark jobs.

    Args:
        stores: The stores.
        wanted: Returns the rows that a store is to have.
        written: Reads a store after the rewrite.

    Returns:
        The content of each store.

    Raises:
        StateRewriteError: A store differs.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - only callers with a session need it

    found = {}
    for operator, store in stores:
        asked = wanted(operator, store)
        was = digests(asked.rows, asked.partition)
        now = digests(written(operator, store), F.spark_partition_id())
        if was != now:
            raise StateRewriteError(
                f"The rewritten state is not that of before: {store} has {_difference(was, now)}. The new directory "
                "was deleted, and the stream is unchanged. Please report this, with the versions of Spark and "
                "dagster-ckpt."
            )
        found[store] = _total(now)
    return found


def _difference(was: Mapping[int, StoreDigest], now: Mapping[int, StoreDigest]) -> str:
    before, after = _total(was), _total(now)
    if before.rows != after.rows:
        return f"{before.rows:,} rows before and {after.rows:,} after"
    return "other rows" if before != after else "rows in partitions in which Spark does not look for them"


def _total(partitions: Mapping[int, StoreDigest]) -> StoreDigest:
    each = partitions.values()
    return StoreDigest(sum(one.rows for one in each), sum(one.digest for one in each))


def check_directories(rewritten: StoppedState, partitions: int) -> None:
    """Check that the new state has a directory for each partition, and no other one.

    That each has every file that a resume needs was checked by the cut.

    Args:
        rewritten: The new state.
        partitions: Number of partitions that it is to have.

    Raises:
        StateRewriteError: There are fewer or more.
    """
    for operator in rewritten.operators:
        names = rewritten.live.folder.list(f"{STATE}/{operator.number}")
        found = {number for name in names if (number := number_in(name)) is not None}
        expected = 1 if operator.single_partition else partitions
        if found != set(range(expected)):
            raise StateRewriteError(
                f"The rewritten state of operator {operator.number} ({operator.name}) has {len(found)} directories of "
                f"partitions instead of {expected}. The new directory was deleted, and the stream is unchanged. Please "
                "report this, with the versions of Spark and dagster-ckpt."
            )
