"""Trial: run one batch of a described query on a copy of a live directory, without output.

Spark checks whether it can continue from a state only while it plans and runs a batch. The copy is
therefore cut one batch before the newest commit: exactly that batch is replayed with its state,
whether or not there is new data. A source learns that a batch is committed only when the next one
is planned, so Trigger.Once leaves its data alone.
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
# Substrings of Spark's message if the data of the replayed batch no longer exists, which says
# nothing about the state.
_DATA_GONE = ("FILE_NOT_EXIST", "FileNotFoundException", "OffsetOutOfRange", "KAFKA_DATA_LOSS", "does not exist")


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    Attributes:
        batch_id: The batch that was run, or None if none could be run.
        error: Spark's error message, or None if the batch succeeded.
        rows: Number of rows that its sources read; None if Spark did not report it.
    """

    batch_id: int | None
    error: str | None = None
    rows: int | None = None

    @property
    def data_is_gone(self) -> bool:
        """Whether it failed because the sources no longer have the data."""
        return self.error is not None and any(word in self.error for word in _DATA_GONE)


def copy_for_trial(live: LiveDirectory, target: LiveDirectory, *, before_last_batch: bool) -> bool:
    """Copy a live directory for a trial, with hard links if both are local.

    Args:
        live: The directory, of a running or a stopped query.
        target: The copy, which must not exist.
        before_last_batch: Copy its state before the newest batch, so that this batch is replayed.

    Returns:
        False if Spark no longer retains the necessary files: nothing was copied.

    Raises:
        LiveDirectoryError: The directory is incomplete at its newest batch.
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
    # So that it can run in the same session as the original.
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
) -> Trial:
    """Run one batch of a query in a copy of a live directory, and discard its rows.

    Args:
        describe: Returns the described, unstarted writer, which is not changed.
        scratch: The copy, which is modified.
        name: Name of the query in Spark.
        replays: The copy has a batch to replay. Otherwise a batch is planned for the available
            data, if any.
        timeout_s: Time limit of the batch.
        interrupted: Polled while it runs; True ends it.

    Returns:
        The result; a failing description and a timeout are reported as errors too.
    """
    before = scratch.positions().commit
    try:
        writer = _without_output(describe()).queryName(name)
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
    """The rows that a batch has read. Spark reports them a moment after its commit."""
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
    """Another writer of the same rows, which discards them."""
    # The described writer may be the one that the stream's query is started with.
    frame: DataFrame = writer._df
    mode = str(described_field(writer._jwrite, "outputMode"))
    return frame.writeStream.outputMode(mode).format("noop")


# Large enough for schemas of a few hundred columns.
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
    """Spark's message, preceded by an explanation for users who do not know Spark's internals."""
    known = next((words for condition, words in _REASONS.items() if condition in error), None)
    message = _message(error)
    return f"{known} (Spark: {message})" if known is not None else f"the new code failed: {message}"


def _message(error: str) -> str:
    """Spark's complete message, including the schemas that it compares, without locations in its code."""
    lines = [line.strip() for line in error.splitlines()]
    said = [line for line in lines if line and not line.startswith(("at ", "... "))]
    return without_secrets("\n".join(said))[:_MAX_MESSAGE]
