"""Read the state of every operator with Spark's own readers, to prove that it can be loaded.

Sources: `state-metadata` and `statestore`
(https://spark.apache.org/docs/latest/streaming/structured-streaming-state-data-source.html).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_commit_entry
from dagster_ckpt.spark.versions import Feature, release_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, Row, SparkSession

_JOIN = "symmetricHashJoin"
_T = TypeVar("_T")


@dataclass(frozen=True)
class StateRows:
    """One state of an operator, and its number of rows.

    Attributes:
        operator_id: Number of the operator in the plan.
        operator: Spark's name for it.
        state: Name of the store; the side for a join, the variable for transformWithState.
        partitions: Number of partitions.
        rows: Number of rows after the batch.
    """

    operator_id: int
    operator: str
    state: str
    partitions: int
    rows: int


def count_state_rows(spark: SparkSession, live: LiveDirectory, batch_id: int) -> list[StateRows]:
    """Read every state of every operator; empty for a stateless query.

    Args:
        spark: A session, in which no query runs in this directory.
        live: The directory.
        batch_id: The committed batch after which to read the state.

    Raises:
        LiveDirectoryError: Spark cannot read a state.
        UnsupportedSparkError: This version of Spark has no reader for it.
    """
    # Spark fails for a query without state.
    if not live.folder.list(STATE):
        return []
    release = release_of(spark.version)
    release.require(Feature.STATE_READER, "A verification that reads the state")
    session = spark.newSession()
    commit = f"{COMMITS}/{batch_id}"
    if parse_commit_entry(live.folder.read(commit), f"{live.url}/{commit}").state_ids is not None:
        release.require(Feature.STATE_READER_FORMAT_2, "A verification that reads this state")
        # A query reads this from its commit log, but the readers take it from the session.
        session.conf.set("spark.sql.streaming.stateStore.checkpointFormatVersion", "2")
    rows = _attempt(
        lambda: session.read.format("state-metadata").load(live.spark_location).collect(), live, "the operators"
    )
    counted = []
    for operator in {row.operatorId: row for row in sorted(rows, key=lambda row: row.operatorId)}.values():
        names = [row.stateStoreName for row in rows if row.operatorId == operator.operatorId]
        for state, options in _states(operator, names):
            reader = session.read.format("statestore").option("batchId", batch_id)
            reader = reader.option("operatorId", operator.operatorId).options(**options)
            what = f"{state} of operator {operator.operatorId} ({operator.operatorName})"
            number = _attempt(partial(_count, reader, live), live, what)
            counted.append(StateRows(operator.operatorId, operator.operatorName, state, operator.numPartitions, number))
    return counted


def _count(reader: DataFrameReader, live: LiveDirectory) -> int:
    return reader.load(live.spark_location).count()


def _states(operator: Row, stores: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The readable states of an operator, with the reader's options for each."""
    if operator.operatorName.startswith(_JOIN):
        # A join stores each row several times; the reader combines them to the rows of a side.
        yield from ((side, {"joinSide": side}) for side in ("left", "right"))
        return
    properties = json.loads(operator.operatorProperties or "{}")
    variables = properties.get("stateVariables")
    if variables is None:
        yield from ((store, {"storeName": store}) for store in stores)
        return
    for variable in variables if isinstance(variables, list) else json.loads(variables):
        name = variable["stateName"]
        # Spark's internal variables, such as its timers, cannot be read by name.
        if not name.startswith("$"):
            yield name, {"stateVarName": name}
    if properties.get("timeMode", "NoTime") not in ("NoTime", "None"):
        yield "timers", {"readRegisteredTimers": "true"}


def _attempt(read: Callable[[], _T], live: LiveDirectory, what: str) -> _T:
    # Imported here, because it takes a second and only callers with a session need it.
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        return read()
    except (PySparkException, Py4JError) as error:
        first = str(error).strip().partition("\n")[0]
        raise LiveDirectoryError(
            f"{live.url}: Spark cannot read the state, {what}: {first} Use another snapshot; if all fail in the same "
            "way, the session differs from the query's (Spark version, state store provider)."
        ) from error
