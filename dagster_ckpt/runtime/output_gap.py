"""How long a hand-over keeps the output waiting: from the last batch of the old code to the first of the new."""

from __future__ import annotations

from contextlib import suppress

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import PositionWatch
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper


class OutputGap:
    """Records the gap of a hand-over once, as an event, at the first batch that the new code commits.

    The storage dated both commits. If the stream waits for input, the gap includes that.
    """

    def __init__(
        self,
        stream: StreamHandle,
        execution_id: str,
        prepared: PreparedStart,
        lease: LeaseKeeper,
        positions: PositionWatch,
    ) -> None:
        self._catalog = stream.catalog
        self._execution_id = execution_id
        self._live = prepared.live
        self._lease = lease
        self._positions = positions
        self._last = prepared.began.commit if prepared.began is not None else None
        self._is_done = False

    def note(self) -> None:
        if self._is_done:
            return
        newest = self._positions.latest().commit
        if newest is None or newest == self._last:
            return
        first = self._last + 1 if self._last is not None else 0
        self._catalog.executions.handed_over(
            self._lease.record, self._execution_id, batch_id=first, gap_ms=self._gap_ms(first)
        )
        self._is_done = True

    def _gap_ms(self, first: int) -> int | None:
        """None if it cannot be told, such as of a directory that was rebuilt."""
        times: list[int | None] = []
        with suppress(FileNotFoundError, StorageAccessError):
            times = [self._live.folder.status(f"{COMMITS}/{batch}").modified_at_ms for batch in (first - 1, first)]
        known = [at_ms for at_ms in times if at_ms is not None]
        return max(0, known[1] - known[0]) if len(known) == 2 else None
