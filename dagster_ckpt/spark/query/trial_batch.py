"""Trial: run one batch of a described query on a copy of a live directory, without output.

Spark checks only in a batch whether it can continue from a state. So the copy is cut one batch before the newest
commit, and that batch is replayed. Trigger.Once plans no further batch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError, LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.inspect import retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from dagster_ckpt.spark.query.description import described_field
from dagster_ckpt.spark.query.query import SupervisedQuery
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_WAIT_S = 0.25
_REPORT_S = 10.0
_DATA_GONE = ("FILE_NOT_EXIST", "FileNotFoundException", "OffsetOutOfRange", "KAFKA_DATA_LOSS", "does not exist")


@dataclass(frozen=True)
class Trial:
    """`batch_id` is None if no batch could be run, `error` if it succeeded, `rows` (read) if not reported."""

    batch_id: int | None
    error: str | None = None
    rows: int | None = None

    @property
    def data_is_gone(self) -> bool:
        """Its sources lack the data, which says nothing about the state."""
        return self.error is not None and any(word in self.error for word in _DATA_GONE)


def copy_for_trial(live: LiveDirectory, target: LiveDirectory, *, before_last_batch: bool) -> bool:
    """Hard links if both are local. False if Spark no longer retains the necessary files.

    `before_last_batch` copies the state before the newest batch.
    """
    retained = retained_batches(live)
    if before_last_batch and (len(retained) < 2 or retained[-2] != retained[-1] - 1):
        return False
    try:
        clone(live, target, at_batch=retained[-2] if before_last_batch else None, is_scratch=True)
    except LiveDirectoryError:
        if not before_last_batch:
            raise
        return False
    # As a start does.
    widen_schemas(target.folder, target.positions().commit or 0, nullcontext)
    # To run beside the original in one session.
    give_query_id(target, str(uuid.uuid4()))
    return True


def run_trial(
    describe: Callable[[], DataStreamWriter],
    scratch: LiveDirectory,
    name: str,
    *,
    replays: bool,
    timeout_s: float,
    interrupted: Callable[[], bool] = lambda: False,
    keeps_output: bool = False,
) -> Trial:
    """Run one batch of a query in a copy of a live directory, and discard its rows unless `keeps_output`.

    A failing description and a timeout are results too. With `replays` the copy has a batch to replay, otherwise one is
    planned for the available data. `interrupted` is polled.
    """
    before = scratch.positions().commit
    try:
        described = describe()
        writer = (described if keeps_output else _without_output(described)).queryName(name)
        writer = writer.trigger(once=True) if replays else writer.trigger(availableNow=True)
        query = SupervisedQuery(writer.option("checkpointLocation", scratch.spark_location).start())
    except CkptError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of the new code is the result
        return Trial(None, str(error))
    deadline = time.monotonic() + timeout_s
    try:
        while not query.wait(_WAIT_S) and scratch.positions().commit == before:
            if interrupted() or time.monotonic() >= deadline:
                return Trial(None, f"the batch did not complete within {timeout_s:.0f} s")
        failure = query.exception()
        after = scratch.positions().commit
        rows = _rows(query, after) if replays and failure is None and after != before else None
    finally:
        query.stop()
    return Trial(after if after != before else None, failure, rows)


def _rows(query: SupervisedQuery, batch_id: int | None) -> int | None:
    """Spark reports them a moment after the batch's commit."""
    deadline = time.monotonic() + _REPORT_S
    while time.monotonic() < deadline:
        has_ended = query.wait(_WAIT_S)
        found = query.progress()
        if found is not None and found.batch_id == batch_id:
            return found.input_rows
        if has_ended:
            break
    return None


def _without_output(writer: DataStreamWriter) -> DataStreamWriter:
    # The stream's query may start with this writer.
    frame: DataFrame = writer._df
    mode = str(described_field(writer._jwrite, "outputMode"))
    return frame.writeStream.outputMode(mode).format("noop")


_MAX_MESSAGE = 20_000
_REASONS = {
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE": (
        "the keys of the state differ from those that the new code groups or joins by"
    ),
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE": "the values of the state differ from those of the new code",
    "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION": "the new code cannot read the values of the state",
    "STATE_STORE_STATE_SCHEMA": "the schema of the state differs from that of the new code",
    (
        "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA"
    ): "the stateful operators of the new code differ from those of the state, or are in another order",
    "STATE_STORE_UNSUPPORTED_OPERATION": "the state store cannot do what the new code needs",
    "CANNOT_LOAD_STATE_STORE": "the state cannot be loaded",
    "UNRESOLVED_COLUMN": "the new code names a column that its input does not have",
}


def describe_trial_error(error: str) -> str:
    known = next((words for condition, words in _REASONS.items() if condition in error), None)
    message = _message(error)
    return f"{known} (Spark: {message})" if known is not None else f"the new code failed: {message}"


def _message(error: str) -> str:
    lines = [line.strip() for line in error.splitlines()]
    said = [line for line in lines if line and not line.startswith(("at ", "... "))]
    return without_secrets("\n".join(said))[:_MAX_MESSAGE]
