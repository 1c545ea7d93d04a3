"""The rows of state stores as bytes, read by executors: what a rewrite copies and compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.logs import COMPRESSION_CODEC, DEFAULT_CODEC
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.checkpoint_dir.state.formats import HEAP
from dagster_ckpt.state.heap import HeapStore
from dagster_ckpt.state.reading import session_like
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.state.skeleton import StoppedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT_VERSION = "spark.sql.streaming.stateStore.checkpointFormatVersion"


class StateStoreName(NamedTuple):
    """One state store of a query.

    Attributes:
        operator_id: Number of the operator in the plan.
        operator: Spark's name for it.
        store: Name of the store; a join has four.
    """

    operator_id: int
    operator: str
    store: str

    def __str__(self) -> str:
        return f"{self.store} of operator {self.operator_id} ({self.operator})"


def stores_of(operators: Sequence[Operator]) -> list[StateStoreName]:
    """Every state store of some operators."""
    return [StateStoreName(each.number, each.name, store) for each in operators for store in each.stores]


def state_session(spark: SparkSession, shape: StateShape) -> SparkSession:
    """A session that reads or writes state of this shape.

    It is like another one (`session_like`), but adaptive execution, which might merge partitions, is
    off.
    """
    session = session_like(spark, str(shape.checkpoint_format))
    session.conf.set("spark.sql.adaptive.enabled", "false")
    # Starts the coordinator that state stores report to, as in `require_state_reader`.
    _ = session.streams.active
    return session


def rows_of(session: SparkSession, state: StoppedState, operator: Operator, store: StateStoreName) -> DataFrame:
    """The rows of a store as bytes, in one partition for each of the state.

    Rows of RocksDB have a partition key too: see `RowChange`.

    Args:
        session: See `state_session`.
        state: The state to read.
        operator: The operator.
        store: Its store.

    Raises:
        StateRewriteError: There are directories of more or fewer partitions than are in use.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - only callers with a session need it

    assert state.stored is not None
    shape = state.stored.shape
    partitions = 1 if operator.single_partition else shape.partitions
    if shape.provider == HEAP:
        codec = state.offsets.conf.get(COMPRESSION_CODEC, DEFAULT_CODEC)
        heap = HeapStore(state.live.folder, operator.number, store.store, state.batch_id + 1, codec)
        return heap.rows(session, partitions).withColumn("column_family_name", F.lit("default"))
    jvm: Any = session.sparkContext._jvm
    options = jvm.org.apache.spark.sql.execution.datasources.v2.state.StateSourceOptions
    reader = session.read.format("statestore").option("batchId", state.batch_id).option("operatorId", operator.number)
    # Its name may change between releases, and an unknown option would be ignored.
    reader = reader.option(options.INTERNAL_ONLY_READ_ALL_COLUMN_FAMILIES(), "true")
    rows = reader.option("storeName", store.store).load(state.live.spark_location)
    found = rows._jdf.queryExecution().toRdd().getNumPartitions()
    if found != partitions:
        raise StateRewriteError(
            f"{state.live.url}: {store} has {found} directories of partitions, but {partitions} are in use. Take a "
            "snapshot, and rewrite that."
        )
    return rows
