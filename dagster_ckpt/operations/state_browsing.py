"""Read and compare the state of a stream at a snapshot or in the live directory, as Spark DataFrames.

Both read temporary copies, which they own until `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dagster_ckpt.errors import NothingCommittedError, OptionError, SparkNotFoundError
from dagster_ckpt.operations.description import find_snapshot
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory, snapshot_location
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.state.diff import StateDifference, differences, paired
from dagster_ckpt.state.reading import StateFrame, StateName, StateReader, require_state_reader
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, holding

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LIVE = "live"


class _Copies:
    """Temporary copies, which are deleted by `close`."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def close(self) -> None:
        """Delete the copies, and release their snapshots."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamState(_Copies):
    """The state of a stream after one batch, in a temporary copy that this object owns.

    Frames are lazy: use them before `close`, or inside a `with` block. The snapshot cannot be deleted
    until then.

    Attributes:
        states: The selected states.
        batch_id: The batch after which the state is read.
        snapshot: The snapshot; None for the live directory.
        live: The copy.
        spark: The session that reads it.
        reader: Reads the copy.
    """

    def __init__(
        self,
        stream: StreamHandle,
        snapshot: str,
        *,
        spark: SparkSession | None = None,
        operator: int | str | None = None,
        state: str | None = None,
    ) -> None:
        """Copy the state.

        Args:
            stream: The stream; it may be running and is not changed.
            snapshot: `live`, `latest`, or the id, number (`chk-7`), label or location of a snapshot.
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
        super().__init__()
        self.spark = spark if spark is not None else session_of_process()
        require_state_reader(self.spark)
        try:
            self.live = self._open.enter_context(scratch_directory(stream))
            self.snapshot = None if snapshot == LIVE else find_snapshot(stream.catalog, stream.stream_id, snapshot)
            if self.snapshot is None:
                self.batch_id = clone(_live_directory(stream), self.live, is_scratch=True).batch_id
            else:
                self._open.enter_context(holding(stream.catalog, [self.snapshot], "reader of state"))
                restore_into(stream, snapshot_location(self.snapshot), self.live, is_scratch=True)
                self.batch_id = _batch_of(self.live)
            self.reader = StateReader(self.spark, self.live, self.batch_id)
            self.states = tuple(self.reader.select(operator, state))
        except BaseException:
            self.close()
            raise

    def frame(self, name: StateName | None = None) -> StateFrame:
        """The rows of one state.

        Args:
            name: One of `states`; None if only one is selected.

        Raises:
            OptionError: Several are selected, or none.
            LiveDirectoryError: Spark cannot read it.
        """
        return self.reader.frame(name if name is not None else self._only())

    def rows(self, operator: int | str | None = None, state: str | None = None) -> DataFrame:
        """The rows of one state: columns `key`, `value` and `partition`, and `map_key` for a map.

        Args:
            operator: Number or name of the operator, if several are selected.
            state: Name of the state, if several are selected.

        Raises:
            OptionError: This selects several, or none.
            LiveDirectoryError: Spark cannot read it.
        """
        found = [name for name in self.reader.select(operator, state) if name in self.states]
        return self.reader.frame(self._only(found)).rows

    def __str__(self) -> str:
        if self.snapshot is not None:
            return describe_snapshot(self.snapshot)
        return f"the live directory at batch {self.batch_id}"

    def _only(self, found: list[StateName] | None = None) -> StateName:
        names = list(self.states) if found is None else found
        if len(names) == 1:
            return names[0]
        listed = "; ".join(map(str, self.states))
        raise OptionError(
            f"{len(names)} states are selected. Name one by operator and state. There are: {listed}."
            if self.states
            else "The query keeps no state, so there are no rows to read."
        )


class StreamStateDiff(_Copies):
    """What two points of a stream differ in, by operator and state.

    Partitions and state backends are left out, so a snapshot and its rescaled or converted copy do
    not differ.

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
        """Copy both points, each as `StreamState` does, with its arguments and errors."""
        super().__init__()
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


def session_of_process() -> SparkSession:
    """The active Spark session of this process.

    Raises:
        SparkNotFoundError: It has none.
    """
    found = active_session()
    if found is None:
        raise SparkNotFoundError(
            "This process has no Spark session, and Spark reads the state. Pass one with spark=..., such as "
            "SparkSession.builder.getOrCreate()."
        )
    return found


def _live_directory(stream: StreamHandle) -> LiveDirectory:
    url = stream.catalog.streams.get(stream.stream_id).live_directory
    if url is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or was canceled with its state. Name a "
            "snapshot instead."
        )
    return LiveDirectory(url)


def _batch_of(live: LiveDirectory) -> int:
    commit = live.positions().commit
    if commit is None:
        raise NothingCommittedError(f"{live.url} has no committed batch, so there is no state to read.")
    return commit
