"""Compare the state of a stream at two points: snapshots, or a snapshot and the live directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dagster_ckpt.operations.state_browsing import StreamState
from dagster_ckpt.spark.state.diff import StateDifference, differences, paired
from dagster_ckpt.stream.handle import StreamHandle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StreamStateDiff:
    """What two points of a stream differ in, by operator and state.

    Owns temporary copies of both until `close`. Partitions and state backends are left out, so a
    snapshot and its rescaled or converted copy do not differ.

    Attributes:
        before: The first.
        after: The second.
    """

    def __init__(
        self,
        stream: StreamHandle,
        before: str,
        after: str,
        *,
        spark: SparkSession | None = None,
        operator: int | str | None = None,
        state: str | None = None,
    ) -> None:
        """Copy both.

        Args:
            stream: The stream; it may be running and is not changed.
            before: As the snapshot of `StreamState`.
            after: Likewise.
            spark: The session that reads; default: the one of this process.
            operator: Number or name of an operator; None for all.
            state: Name of a state; None for all.

        Raises:
            UnsupportedSparkError: This version of Spark cannot read the state.
            SparkNotFoundError: This process has no session.
            SnapshotNotFoundError: There is no such snapshot.
            NothingCommittedError: The stream has not committed a batch yet.
            OptionError: There is no such operator or state.
        """
        with ExitStack() as opened:
            self.before, self.after = (
                opened.enter_context(StreamState(stream, point, spark=spark, operator=operator, state=state))
                for point in (before, after)
            )
            self._open = opened.pop_all()

    @cached_property
    def states(self) -> Sequence[StateDifference]:
        """The differences of each state, also of those without any; nothing is computed yet.

        Raises:
            LiveDirectoryError: Spark cannot read a state.
        """
        return differences(self.before.reader, self.after.reader, paired(self.before.states, self.after.states))

    @property
    def is_empty(self) -> bool:
        """Whether the two have the same rows everywhere; reads both."""
        return all(state.is_empty for state in self.states)

    def close(self) -> None:
        """Delete the copies, and release the snapshots."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
