"""Methods of the client that look into the state of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.client.connection import Connection
from dagster_ckpt.operations.state_browsing import StreamState
from dagster_ckpt.operations.state_comparison import StreamStateDiff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
            operator: Number or name of an operator; None for all.
            state: Name of a state; None for all.
            spark: The session that reads; default: the one of this process.

        Raises:
            UnsupportedSparkError: The session's Spark cannot read the state.
            SparkNotFoundError: This process has no Spark session.
            SnapshotNotFoundError: There is no such snapshot.
            OptionError: There is no such operator or state.

        Example:
            >>> with client.state("orders", "before-release-42") as state:
            ...     state.rows().where("key.user_id = 7").show()
        """
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
            after: Likewise.
            operator: Number or name of an operator; None for all.
            state: Name of a state; None for all.
            spark: The session that reads; default: the one of this process.

        Raises:
            UnsupportedSparkError: The session's Spark cannot read the state.
            SparkNotFoundError: This process has no Spark session.
            SnapshotNotFoundError: There is no such snapshot.
            OptionError: There is no such operator or state.

        Example:
            >>> with client.state_diff("orders", "before-release-42", "live") as diff:
            ...     for state in diff.states:
            ...         print(state.name, state.counts)
        """
        return StreamStateDiff(self._open(stream), before, after, operator=operator, state=state, spark=spark)
