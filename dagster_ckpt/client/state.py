"""Methods of the client that read, compare and edit the state of streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_ckpt.client.connection import Connection, given_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.client.debugging import BatchDebug
    from dagster_ckpt.client.derived_savepoint import EditedState, RemainingState
    from dagster_ckpt.client.state_browsing import StreamState, StreamStateDiff
    from dagster_ckpt.state.editing import StateEdit

_LOG = logging.getLogger(__name__)


class StateMethods(Connection):
    """State as data."""

    def state(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        operator: int | str | None = None,
        state: str | None = None,
        spark: SparkSession | None = None,
    ) -> StreamState:
        """Read the state of a stream as Spark DataFrames, from a temporary copy.

        Args:
            stream: The stream; it may be running and is not changed.
            snapshot: The snapshot, or `live` for the newest committed batch of the live directory.
            operator: Number or name; None for all.
            state: Name; None for all.
            spark: Default: the session of this process.

        Raises:
            UnsupportedSparkError: The session's Spark cannot read the state.
            SparkNotFoundError: This process has no Spark session.
            NothingCommittedError: No batch is committed yet.
            OptionError: There is no such operator or state.

        Example:
            >>> with client.state("orders", "before-release-42") as state:
            ...     state.rows().where("key.user_id = 7").show()
        """
        from dagster_ckpt.client.state_browsing import StreamState

        return StreamState(self._open(stream), snapshot, operator=operator, state=state, spark=spark)

    def state_diff(
        self,
        stream: str,
        before: str,
        after: str,
        *,
        operator: int | str | None = None,
        state: str | None = None,
        spark: SparkSession | None = None,
    ) -> StreamStateDiff:
        """Compare the state of a stream at two points: rows added, removed and changed, by operator and state.

        Args:
            stream: The stream; it may be running and is not changed.
            before: A snapshot, or `live`.
            after: A snapshot, or `live`.
            operator: Number or name; None for all.
            state: Name; None for all.
            spark: As in `state`.

        Example:
            >>> with client.state_diff("orders", "before-release-42", "live") as diff:
            ...     for state in diff.states:
            ...         print(state.name, state.counts)
        """
        from dagster_ckpt.client.state_browsing import StreamStateDiff

        return StreamStateDiff(self._open(stream), before, after, operator=operator, state=state, spark=spark)

    def debug_batch(
        self,
        stream: str,
        batch: int,
        query: Callable[[SparkSession], DataStreamWriter],
        *,
        spark: SparkSession | None = None,
        timeout_s: float = 3_600.0,
        report: Callable[[str], None] = _LOG.info,
    ) -> BatchDebug:
        """Run one batch of a stream again, with its original plan and state, into memory. Nothing of it is changed.

        Its state comes from the live directory or the newest snapshot before it, in a temporary copy; batches between
        are replayed there first. Not the sink, but the result gets the output.

        Args:
            stream: The stream; it may be running.
            batch: Number of the batch. The newest may have failed.
            query: Describes the query, as the function that `run_stream` takes; other code is tried by passing it.
            spark: Default: the session of this process.
            timeout_s: For each batch that is run.
            report: Called with a message per step.

        Raises:
            OptionError: The batch was not planned yet, or `query` describes no query.
            RestoreError: No state before it is left, or the plans of the batches between are not recorded.
            InputGoneError: A source no longer has what the batch read.
            LiveDirectoryError: A batch between could not be replayed.
            SparkNotFoundError: This process has no Spark session.

        Example:
            >>> with client.debug_batch("orders", batch=812, query=orders) as debug:
            ...     debug.input.show()
            ...     debug.state_changes[0].rows.show()
            ...     debug.difference.show()
        """
        from dagster_ckpt.client.debugging import BatchDebug

        return BatchDebug(self._open(stream), batch, query, spark=spark, timeout_s=timeout_s, report=report)

    def remaining_state(self, stream: str, savepoint: str) -> RemainingState:
        """Find what still contains the state from before an edit: snapshots, live directories, temporary copies.

        `savepoint` is the one with the edited state. Changes nothing; the stream may be running.

        Raises:
            OptionError: Its state was not edited.

        Example:
            >>> for message in client.remaining_state("orders", "forgotten-4711").messages():
            ...     print(message)
        """
        from dagster_ckpt.client.derived_savepoint import remaining_state

        return remaining_state(self._open(stream), savepoint)

    def edit_state(
        self,
        stream: str,
        edits: StateEdit | Sequence[StateEdit],
        *,
        reason: str,
        snapshot: str = "latest",
        label: str | None = None,
        target_directory: str | None = None,
        spark: SparkSession | None = None,
        report: Callable[[str], None] = _LOG.info,
    ) -> EditedState:
        """Create a savepoint from a snapshot, with edited rows in its state. Nothing else is changed.

        Start the stream from the savepoint to continue with the edited state.

        Args:
            stream: The stream; it may be running.
            edits: Keys to forget and rows to write.
            reason: Why, as the savepoint records it.
            snapshot: `latest`, or an id, number (chk-7), label or location.
            spark: Default: the session of this process.
            report: Called with a message per step, and every few seconds.

        Raises:
            UnsupportedSparkError: Writing state needs Spark 4.2.
            StateRewriteError: The state cannot be edited like this; nothing was written.
            OptionError: Reason, label or operator is wrong.

        Example:
            >>> made = client.edit_state("orders", StateEdit(forget="user_id = 7"), reason="request 4711")
            >>> client.restart("orders", start_from=made.savepoint.snapshot_id)
        """
        from dagster_ckpt.client.derived_savepoint import edit_state
        from dagster_ckpt.state.editing import StateEdit

        return edit_state(
            self._open(stream),
            [edits] if isinstance(edits, StateEdit) else list(edits),
            snapshot=snapshot,
            reason=reason,
            origin=self._origin,
            label=label,
            target_directory=given_folder(target_directory),
            spark=spark,
            report=report,
        )
