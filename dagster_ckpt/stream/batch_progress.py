"""The progress of a running query: figures per batch, and positions in its live directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.query.output import is_foreach_batch
from dagster_ckpt.spark.query.progress import QueryProgress
from dagster_ckpt.stream.handle import Clock, monotonic_ms

# Number of batches remembered: far more than there are between two checkpoints in practice.
REMEMBERED = 10_000


@dataclass(frozen=True)
class BatchFigures:
    """Figures of the query up to one batch.

    Attributes:
        rows: Input rows since the previous snapshot, as far as this execution saw them.
        state_rows: Rows in all state stores.
        watermark: Event-time watermark as ISO-8601, or None if the query has none.
        lags: Records waiting in each partition of the Kafka topics that it reads.
    """

    rows: int | None = None
    state_rows: int | None = None
    watermark: str | None = None
    lags: Mapping[str, int] = field(default_factory=dict)

    def properties(self) -> dict[str, object]:
        """What a snapshot's row in the catalog records of the sources."""
        return {"records_behind": dict(self.lags)} if self.lags else {}


@dataclass
class BatchLog:
    """The progress reports of one execution's batches, each recorded once."""

    total_rows: int = 0
    batches: int = 0
    latest: QueryProgress | None = None
    _batches: deque[QueryProgress] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, reports: Iterable[QueryProgress]) -> None:
        """Record reports of batches that ran, oldest first."""
        for report in reports:
            self._batches.append(report)
            self.latest = report
            self.total_rows += report.input_rows
            self.batches += 1

    def rows_after(self, batch_id: int) -> dict[int, int]:
        """The rows that each batch after one has read, as far as a replay of the batch reads the same.

        A function that gets each batch may read it several times, or in part.
        """
        newer: dict[int, int] = {}
        for report in reversed(self._batches):
            if report.batch_id <= batch_id:
                break
            if not any(is_foreach_batch(sink) for sink in report.sinks):
                newer[report.batch_id] = report.input_rows
        return newer

    def figures(self, batch_id: int, *, since_batch: int | None) -> BatchFigures:
        """Figures at a batch.

        Args:
            batch_id: The batch of the snapshot.
            since_batch: The batch of the previous snapshot; None counts from the start of the execution.
        """
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


# Spark reports a batch right after its commit is visible. This interval covers what it does not
# report in time: a batch that was only planned, and the batches of continuous processing.
LOOK_AGAIN_MS = 2_000


class PositionWatch:
    """Positions in a live directory, for a loop that polls several times a second.

    On a local disk a read costs microseconds and happens on every call. In object storage it is two
    list requests, which are billed: there it happens only when Spark has reported another batch or
    some time has passed.

    Args:
        live: The live directory.
        log: The query's reports.
        clock: Monotonic time in ms.
    """

    def __init__(self, live: LiveDirectory, log: BatchLog, clock: Clock = monotonic_ms) -> None:
        self._live = live
        self._log = log
        self._clock = clock
        self._seen: Positions | None = None
        self._seen_after: object = None
        self._seen_at_ms = 0

    def look(self) -> Positions:
        """Read the current positions.

        Raises:
            StorageAccessError: The directory cannot be reached.
        """
        # A report that arrives during the read may not be covered by it.
        after, now_ms = self._log.latest, self._clock()
        self._seen = self._live.positions()
        self._seen_after, self._seen_at_ms = after, now_ms
        return self._seen

    def latest(self) -> Positions:
        """The current positions; if a read costs requests, those after the last reported batch.

        Raises:
            StorageAccessError: The directory cannot be reached.
        """
        is_new = self._log.latest is not self._seen_after or self._clock() >= self._seen_at_ms + LOOK_AGAIN_MS
        if self._seen is None or is_new or self._live.local_path is not None:
            return self.look()
        return self._seen
