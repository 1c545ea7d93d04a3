"""Writes the journal of planned batches while a query runs: see `catalog/journal.py`."""

from __future__ import annotations

from dataclasses import replace

from dagster_ckpt.checkpointing.progress import PositionWatch
from dagster_ckpt.errors import LiveDirectoryError, StorageAccessError
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.planned import read_planned
from dagster_ckpt.spark.query.execution_mode import ExecutionMode
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper


class Journal:
    """Keeps the journal of one execution up to date.

    Args:
        stream: The stream.
        live: The live directory in which its query runs.
        lease: The lease of the stream.
        positions: Positions in that directory, whose reads cost requests in object storage.
    """

    def __init__(self, stream: StreamHandle, live: LiveDirectory, lease: LeaseKeeper, positions: PositionWatch) -> None:
        self._stream = stream
        self._live = live
        self._lease = lease
        self._positions = positions
        # Every batch after this one is still to be recorded. At first it is that of the newest snapshot: an earlier
        # execution may have planned the batch in flight differently.
        self._newest: int | None = None

    def note(self, mode: ExecutionMode | None, *, has_ended: bool = False) -> None:
        """Record the batches that Spark has planned since the last call.

        Args:
            mode: How the query runs. Only micro-batches that Spark logs one after the other can be
                replayed.
            has_ended: The query has ended: also record whether its newest batch is committed.

        Raises:
            LeaseLostError: The lease is no longer held.
            CatalogError: The catalog is unavailable; the next call tries again.
        """
        if mode is not ExecutionMode.MICRO_BATCH or not self._stream.options.max_replayed_batches:
            return
        if self._newest is None:
            self._newest = self._newest_snapshot()
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

    def _newest_snapshot(self) -> int:
        restorable = self._stream.catalog.snapshots.restorable(self._stream.stream_id)
        return max((each.batch_id for each in restorable if each.batch_id is not None), default=-1)
