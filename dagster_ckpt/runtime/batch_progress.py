"""The progress of a running query."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dagster_ckpt.errors import LiveDirectoryError, StorageAccessError
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, LiveDirectory, Positions, batch_ids
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode
from dagster_ckpt.spark.checkpoint_dir.planned_batches import read_planned
from dagster_ckpt.spark.query.output import is_foreach_batch
from dagster_ckpt.spark.query.query import QueryProgress
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.snapshotting import BatchFigures
from dagster_ckpt.values.durations import Clock, monotonic_ms

# Far more than there are between two checkpoints.
REMEMBERED = 10_000


@dataclass
class BatchLog:
    total_rows: int = 0
    batches: int = 0
    latest: QueryProgress | None = None
    _batches: deque[QueryProgress] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, reports: Iterable[QueryProgress]) -> None:
        for report in reports:
            self._batches.append(report)
            self.latest = report
            self.total_rows += report.input_rows
            self.batches += 1

    def rows_after(self, batch_id: int) -> dict[int, int]:
        """Input rows of the later batches for which a replay must read the same number.

        Left out are batches of a `foreachBatch` function, which may read one several times or in part, and batches
        without rows, which the sink may already have.
        """
        newer: dict[int, int] = {}
        for report in reversed(self._batches):
            if report.batch_id <= batch_id:
                break
            if report.input_rows and not any(is_foreach_batch(sink) for sink in report.sinks):
                newer[report.batch_id] = report.input_rows
        return newer

    def figures(self, batch_id: int, *, since_batch: int | None) -> BatchFigures:
        seen = [report for report in self._batches if report.batch_id <= batch_id]
        if not seen:
            return BatchFigures()
        newest = seen[-1]
        after = -1 if since_batch is None else since_batch
        return BatchFigures(
            rows=sum(report.input_rows for report in seen if report.batch_id > after),
            state_rows=newest.state_rows,
            watermark=newest.watermark,
            lags={name: behind for source in newest.sources for name, behind in source.lags.items()},
        )


# Spark does not report planned batches, nor continuous processing right after a commit.
LOOK_AGAIN_MS = 2_000


class PositionWatch:
    """Positions in a live directory, for a loop that polls several times a second.

    On a local disk every call reads them. In object storage, where a read is two billed list requests, they are read
    again only after a report of Spark, or after `LOOK_AGAIN_MS`.
    """

    def __init__(self, live: LiveDirectory, log: BatchLog, clock: Clock = monotonic_ms) -> None:
        self._live = live
        self._log = log
        self._clock = clock
        self._seen: Positions | None = None
        self._seen_after: object = None
        self._seen_at_ms = 0

    def look(self) -> Positions:
        # A report that arrives during the read may not be covered by it.
        after, now_ms = self._log.latest, self._clock()
        self._seen = self._live.positions()
        self._seen_after, self._seen_at_ms = after, now_ms
        return self._seen

    def latest(self) -> Positions:
        is_new = self._log.latest is not self._seen_after or self._clock() >= self._seen_at_ms + LOOK_AGAIN_MS
        if self._seen is None or is_new or self._live.local_path is not None:
            return self.look()
        return self._seen


class Journal:
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
        # The newest recorded batch; at first that of the newest snapshot, because an earlier execution may have planned
        # later ones differently.
        self._newest: int | None = None

    def note(self, mode: ExecutionMode | None, *, has_ended: bool = False) -> None:
        """Record the micro-batches that Spark has planned since the last call; at the end, also the last commit."""
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
            # The query meets the same error. Without these batches in the journal, a restore rolls sinks back.
            return
        if batches:
            self._stream.catalog.journal.note(self._lease.record, batches)
            self._newest = batches[-1].batch_id
            self._counted = min(self._counted, batches[0].batch_id - 1)

    def _note_rows(self) -> None:
        if self._newest is None:
            return
        rows = {batch: rows for batch, rows in self._log.rows_after(self._counted).items() if batch <= self._newest}
        if rows:
            self._stream.catalog.journal.note_rows(self._lease.record, rows)
            self._counted = max(rows)

    def _newest_snapshot(self) -> int:
        restorable = self._stream.catalog.snapshots.restorable(self._stream.stream_id)
        return max((each.batch_id for each in restorable if each.batch_id is not None), default=-1)


class OutputGap:
    """Records in one event how long a hand-over interrupted the output.

    It lasts from the last commit of the old code to the first of the new, and includes waiting for input.
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
        """Return the gap; None if unknown, as in a rebuilt directory."""
        times: list[int | None] = []
        with suppress(FileNotFoundError, StorageAccessError):
            times = [self._live.folder.status(f"{COMMITS}/{batch}").modified_at_ms for batch in (first - 1, first)]
        known = [at_ms for at_ms in times if at_ms is not None]
        return max(0, known[1] - known[0]) if len(known) == 2 else None
