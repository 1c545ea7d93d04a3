"""Checkpoint attempts in progress: threads cut and upload, and the loop collects their results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from dagster_ckpt.errors import IncompleteCutError, NothingCommittedError, SnapshotAbortedError, SnapshotTooLargeError
from dagster_ckpt.runtime.checkpoint_messages import Attempt, CheckpointFailureReason
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshotting import SnapshotOrder, TakenSnapshot, take_snapshot

# Savepoints do not count towards the limit on concurrent checkpoints, as in Flink. They have these threads.
SAVEPOINT_THREADS = 4


@dataclass
class RunningAttempt:
    """An attempt that the coordinator began and that has not ended.

    Attributes:
        attempt: What the coordinator asked for.
        order: The snapshot to take.
        started_after_batch: Newest committed batch when it began; an aligned attempt waits for the next commit.
        started_at_ms: When it began, on a monotonic clock.
        aligned_only: Whether the query's mode does not allow a snapshot to include a running batch.
        cut_ordered: Whether a thread already cuts and uploads it.
        aborted: Set to make its thread stop.
    """

    attempt: Attempt
    order: SnapshotOrder
    started_after_batch: int
    started_at_ms: int
    aligned_only: bool = False
    cut_ordered: bool = False
    aborted: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class CutExists:
    """The consistent cut of an attempt exists. Its upload continues."""

    number: int


@dataclass(frozen=True)
class Stored:
    """The snapshot of an attempt is complete in storage and not yet in the catalog."""

    number: int
    taken: TakenSnapshot


@dataclass(frozen=True)
class NotStored:
    """An attempt failed. The files it had written are deleted.

    Attributes:
        number: The attempt.
        error: Why.
        after_cut: Whether it failed after its cut, while it uploaded files.
    """

    number: int
    error: Exception
    after_cut: bool = False

    @property
    def reason(self) -> CheckpointFailureReason:
        """Flink's name for what went wrong."""
        if isinstance(self.error, NothingCommittedError):
            return CheckpointFailureReason.CHECKPOINT_DECLINED_TASK_NOT_READY
        if isinstance(self.error, IncompleteCutError | SnapshotTooLargeError):
            return CheckpointFailureReason.CHECKPOINT_DECLINED
        if isinstance(self.error, OSError) and not self.after_cut:
            return CheckpointFailureReason.IO_EXCEPTION
        return CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION


@dataclass(frozen=True)
class Cleaned:
    """A deletion in the background has finished, or it failed and the snapshot stays visible in the catalog."""


Result = CutExists | Stored | NotStored | Cleaned


class AttemptThreads:
    """Runs the attempts of one execution in threads. The loop collects the results."""

    def __init__(self, stream: StreamHandle, clock: Callable[[], int]) -> None:
        self._stream = stream
        self._clock = clock
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(
            stream.options.max_concurrent + SAVEPOINT_THREADS, thread_name_prefix=f"snapshots-{stream.stream_id}"
        )

    def start(self, running: RunningAttempt, live: LiveDirectory) -> None:
        """Cut and upload in a thread."""
        running.cut_ordered = True
        self._futures.append(self._pool.submit(self._take, running, live))

    def clean(self, work: Callable[[], None]) -> None:
        """Delete something in the background. `Cleaned` follows whether or not it succeeded."""

        def clean_and_report() -> None:
            try:
                work()
            finally:
                self._results.put(Cleaned())

        self._futures.append(self._pool.submit(clean_and_report))

    def results(self) -> list[Result]:
        """The results since the last call, in order."""
        taken: list[Result] = []
        while True:
            try:
                taken.append(self._results.get_nowait())
            except Empty:
                self._futures = [future for future in self._futures if not future.done()]
                return taken

    def close(self) -> None:
        """Wait for all threads. Abort or end every attempt first.

        Queued deletions still run: no other process knows about a snapshot that was not recorded.
        """
        self._pool.shutdown(wait=True)

    def _take(self, running: RunningAttempt, live: LiveDirectory) -> None:
        number = running.attempt.number
        if running.aborted.is_set():
            self._results.put(NotStored(number, SnapshotAbortedError(f"Attempt {number} was aborted before its cut.")))
            return
        cut = threading.Event()

        def report_cut(_batch: int) -> None:
            cut.set()
            self._results.put(CutExists(number))

        try:
            taken = take_snapshot(
                self._stream,
                live,
                running.order,
                now_ms=self._clock(),
                on_cut=report_cut,
                should_abort=running.aborted.is_set,
            )
        except Exception as error:  # noqa: BLE001 - every failure is an answer to the coordinator
            self._results.put(NotStored(number, error, after_cut=cut.is_set()))
        else:
            self._results.put(Stored(number, taken))
