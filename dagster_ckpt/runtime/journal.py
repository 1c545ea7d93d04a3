"""Writes the journal of planned batches while a query runs: see `catalog/journal.py`."""

from __future__ import annotations

from dataclasses import replace

from dagster_ckpt.errors import LiveDirectoryError, StorageAccessError
from dagster_ckpt.spark.checkpoint_dir.known_query import ExecutionMode
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.planned_batches import read_planned
from dagster_ckpt.stream.batch_progress import BatchLog, PositionWatch
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper


class Journal:
    """Keeps the journal of one execution up to date.

    Args:
        stream: The stream.
        live: The live directory in which its query runs.
        lease: The lease of the stream.
        positions: Positions in that directory, whose reads cost requests in object storage.
        log: The query's reports, with the rows of each batch.
    """

    def __init__(
        self, stream: StreamHandle, live: LiveDirectory, lease: LeaseKeeper, positions: PositionWatch, log: BatchLog
    ) -> None:
        self._stream = stream
        self._live = live
        self._lease = lease
        self._positions = positions
        self._log = log
        # Every batch up to this one has its rows in the journal, or was planned before this execution.
        self._counted = -1
        # Every batch after this one is still to be recorded. At first it is that of the newest snapshot: an earlier
        # execution may have planned the batch in flight differently.
        self._newest: int | None = None

    def note(self, mode: ExecutionMode | None, *, has_ended: bool = False) -> None:
        """Record the batches that Spark has planned since the last call.

        Also if none may be replayed: with a lost live directory, only the journal names the input of these batches.

        Args:
            mode: How the query runs. Only micro-batches that Spark logs one after the other can be
                replayed.
            has_ended: The query has ended: also record whether its newest batch is committed.

        Raises:
            LeaseLostError: The lease is no longer held.
            CatalogError: The catalog is unavailable; the next call tries again.
        """
        if mode is not ExecutionMode.MICRO_BATCH:
            return
        if self._newest is None:
            self._newest = self._newest_snapshot()
        self._note_batches(has_ended=has_ended)
        self._note_rows()

    def _note_batches(self, *, has_ended: bool) -> None:
        if self._newest is None:
            return
        newest = self._newest - 1 if has_ended else self._newest
        try:
            positions = self._positions.look() if has_ended else self._positions.latest()
            if positions.offset is None or positions.offset <= newest:
                return
            commit = positions.commit if has_ended else None
            new = [batch for batch in batch_ids(self._live.folder, OFFSETS) if batch > newest]
            batches = [replace(each, is_committed=each.batch_id == commit) for each in read_planned(self._live, new)]
        except (LiveDirectoryError, StorageAccessError):
            # The query meets that too. Without its batches in the journal, a restore rolls sinks back.
            return
        if batches:
            self._stream.catalog.journal.note(self._lease.record, batches)
            self._newest = batches[-1].batch_id
            self._counted = min(self._counted, batches[0].batch_id - 1)

    def _note_rows(self) -> None:
        """Record the rows of batches that have committed since; a replay has to read as many."""
        if self._newest is None:
            return
        rows = {batch: rows for batch, rows in self._log.rows_after(self._counted).items() if batch <= self._newest}
        if rows:
            self._stream.catalog.journal.note_rows(self._lease.record, rows)
            self._counted = max(rows)

    def _newest_snapshot(self) -> int:
        restorable = self._stream.catalog.snapshots.restorable(self._stream.stream_id)
        return max((each.batch_id for each in restorable if each.batch_id is not None), default=-1)
