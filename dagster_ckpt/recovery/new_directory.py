"""Build a new live directory for a start, through a temporary copy if its state is rewritten.

Nothing here knows the catalog: until `prepare.py` switches the stream to the directory, a crash
leaves only directories that no stream uses, which a later start deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.sinks.in_flight import refuse_skipped_batch
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.state.rewriting import Rewritten, rewrite_state
from dagster_ckpt.state.shape import StateShape

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class StateRewrite:
    """How a start rewrites the state that it continues from.

    Attributes:
        spark: The session that does it.
        shape: How the state will be stored.
        report: Called with the progress every few seconds.
    """

    spark: SparkSession
    shape: StateShape
    report: Callable[[str], None] = lambda _message: None


class Building:
    """Builds the new live directory; if its state is rewritten, from a temporary copy.

    Args:
        live: The directory.
        rewrite: How to rewrite the state, if at all.
        watch: See `prepare`.
    """

    def __init__(self, live: LiveDirectory, rewrite: StateRewrite | None, watch: Watch) -> None:
        self.live = live
        self.watch = watch
        self.rewritten: Rewritten | None = None
        self._rewrite = rewrite

    @property
    def rewrites(self) -> bool:
        """Whether the state is rewritten."""
        return self._rewrite is not None

    def fill(self, fill: Callable[[LiveDirectory], None]) -> None:
        """Create the directory.

        Args:
            fill: Creates the directory that it gets.
        """
        if self._rewrite is None:
            fill(self.live)
            return
        source = self.live.sibling(".source")
        try:
            fill(source)
            self.rewrite(source)
        finally:
            source.delete()

    def rewrite(self, source: LiveDirectory) -> None:
        """Create the directory from one in which no query runs, with rewritten state."""
        rewrite = self._rewrite
        assert rewrite is not None
        self.rewritten = rewrite_state(
            rewrite.spark, source, self.live, shape=rewrite.shape, watch=self.watch, report=rewrite.report
        )

    def check_in_flight(self, sinks: Sequence[str], *, roll_back_tables: bool) -> None:
        """Check that no sink would skip the batch in flight, whose state a rewrite leaves behind.

        Args:
            sinks: The query's sinks.
            roll_back_tables: Whether this process may roll a table back.

        Raises:
            RowsAtRiskError: A sink would, and cannot be rolled back. The directory was deleted.
        """
        if self.rewritten is None:
            return
        try:
            refuse_skipped_batch(self.live, sinks, roll_back_tables=roll_back_tables)
        except RowsAtRiskError:
            self.live.delete()
            raise
