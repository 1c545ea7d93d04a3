"""Prove that a rewrite kept every row: count and hash each state store before and after, as bytes.

The hash depends on neither order nor partition. Keys and values are the bytes of Spark's own rows,
which are the same with every provider. How the files lie is proven by a cut of the new directory,
which looks up every file of every store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import STATE
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.state.raw_rows import StateStoreName
from dagster_ckpt.spark.state.skeleton import StoppedState
from dagster_ckpt.untrusted import number_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class StoreDigest:
    """The content of one store.

    Attributes:
        rows: Number of rows.
        digest: Sum of the hashes of all rows.
    """

    rows: int
    digest: int


def digest(rows: DataFrame) -> StoreDigest:
    """Count and hash the rows of a store. Runs a Spark job.

    Args:
        rows: With the columns `key_bytes`, `value_bytes` and `column_family_name`.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - only callers with a session need it

    hashed = F.xxhash64("column_family_name", "key_bytes", "value_bytes").cast("decimal(38,0)")
    found = rows.agg(F.count("*").alias("rows"), F.sum(hashed).alias("digest")).first()
    assert found is not None
    return StoreDigest(found.rows, int(found.digest or 0))


# Returns the rows of a store, as bytes.
ReadStore = Callable[[Operator, StateStoreName], "DataFrame"]


def compare_rows(
    stores: list[tuple[Operator, StateStoreName]], before: ReadStore, after: ReadStore
) -> dict[StateStoreName, StoreDigest]:
    """Compare the rows of each store before and after a rewrite. Runs Spark jobs.

    Args:
        stores: The stores.
        before: Reads one before the rewrite.
        after: Reads one after it.

    Returns:
        The content of each store.

    Raises:
        StateRewriteError: A store differs.
    """
    found = {}
    for operator, store in stores:
        was, now = digest(before(operator, store)), digest(after(operator, store))
        if was != now:
            what = f"{was.rows:,} rows before and {now.rows:,} after" if was.rows != now.rows else "other rows"
            raise StateRewriteError(
                f"The rewritten state differs from the original: {store} has {what}. The new directory was deleted, "
                "and the stream is unchanged. Please report this, with the versions of Spark and dagster-ckpt."
            )
        found[store] = now
    return found


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
