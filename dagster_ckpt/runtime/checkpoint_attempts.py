"""Carry out what the coordinator decides about attempts.

A crash is harmless because of the order: data, metadata, catalog row, the coordinator, and only then older checkpoints.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from dagster_ckpt.catalog.event_log import failure_streak, log_transition
from dagster_ckpt.catalog.records import RequestRecord, RequestStatus, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import CatalogError, LeaseLostError, OptionError, SnapshotAbortedError, StorageAccessError
from dagster_ckpt.recovery.checkpoint_retention import discard, interrupted_deletions, subsume
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog, PositionWatch
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Alignment,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CheckpointFailureReason,
    CleaningChanged,
    CutTaken,
    Event,
)
from dagster_ckpt.runtime.coordinator import FailureTally
from dagster_ckpt.runtime.execution_end import RetryQueue, record_end
from dagster_ckpt.runtime.run_request import EndKind, QueryEnd
from dagster_ckpt.runtime.triggers import TriggerKind
from dagster_ckpt.sinks.batch_in_flight import can_replay_a_batch, guarantees
from dagster_ckpt.spark.checkpoint_dir.layout import Positions
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.snapshots import write_notes
from dagster_ckpt.stream.snapshotting import (
    NotRecorded,
    SnapshotOrder,
    TakenSnapshot,
    provenance,
    record_snapshot,
    renewable,
    sharing_base,
    take_snapshot,
    trigger_properties,
)
from dagster_ckpt.values.durations import Clock, monotonic_ms
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.tracing import PhasedSpan
from dagster_ckpt.values.validation import policy_name

STOPPED_WITH_SAVEPOINT = "stopped with a savepoint"
# As in Flink, savepoints do not count towards the limit of checkpoints.
SAVEPOINT_THREADS = 4


@dataclass
class _Running:
    attempt: Attempt
    order: SnapshotOrder
    started_after_batch: int
    started_at_ms: int
    span: PhasedSpan
    request: RequestRecord | None = None
    aligned_only: bool = False
    cut_ordered: bool = False
    alignment_ms: int | None = None
    aborted: threading.Event = field(default_factory=threading.Event)


class AttemptRunner:
    """The attempts of one execution.

    `facts` is called in the thread that talks to the JVM. `predecessor_ended` allows deleting older live directories.
    """

    def __init__(
        self,
        stream: StreamHandle,
        execution_id: str,
        prepared: PreparedStart,
        log: BatchLog,
        lease: LeaseKeeper,
        *,
        retry_queue: RetryQueue,
        facts: Callable[[], QueryFacts],
        predecessor_ended: bool,
        wall_clock: Clock,
        tally: Callable[[Attempt, CheckpointFailureReason], FailureTally | None] = lambda _attempt, _reason: None,
    ) -> None:
        self._tally = tally
        self._stream = stream
        self._catalog = stream.catalog
        self._execution_id = execution_id
        self._prepared = prepared
        self._live = prepared.live
        self._log = log
        self.positions = PositionWatch(prepared.live, log)
        self._lease = lease
        self._retry_queue = retry_queue
        self._facts = facts
        self._may_delete_older = predecessor_ended
        self._sinks_before = tuple(self._catalog.executions.last_sinks(stream.stream_id))
        self._timeline = self._catalog.streams.get(stream.stream_id).timeline
        self._wall_clock = wall_clock
        self._finished: SimpleQueue[Callable[[], Event]] = SimpleQueue()
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(
            stream.options.max_concurrent + SAVEPOINT_THREADS, thread_name_prefix=f"snapshots-{stream.stream_id}"
        )
        self._running: dict[int, _Running] = {}
        self._aborted: dict[int, CheckpointFailureReason] = {}
        self._completed: dict[int, SnapshotRecord] = {}
        # How the query ends once a stop-with-savepoint is complete.
        self.stopped: QueryEnd | None = None
        self._late: dict[int, TakenSnapshot] = {}
        self._cleaning = 0
        self._last_snapshot_batch: int | None = None
        self._began = prepared.began or Positions(None, None)
        self._proves = prepared.proves
        self._has_progressed = False
        self._input_has_ended = False

    @property
    def sinks(self) -> tuple[str, ...]:
        """Sinks in the query's last report, or at first those of the previous execution.

        While they are unknown, no snapshot is taken: a restore could not roll them back.
        """
        return self._log.latest.sinks if self._log.latest is not None else self._sinks_before

    def has_committed(self) -> bool:
        with suppress(StorageAccessError):
            return self.positions.latest().commit is not None
        return False

    def has_progressed(self) -> bool:
        """Whether this execution has planned and committed a batch, which proves the snapshot that it restored.

        If the sink has a batch that an earlier execution planned, Spark commits it without loading the state.
        """
        if self._has_progressed:
            return True
        commit, began = None, self._began
        with suppress(StorageAccessError):
            commit = self.positions.latest().commit
        if commit is None or commit <= max(-1 if at is None else at for at in (began.commit, began.offset)):
            return False
        if self._proves is not None:
            try:
                self._catalog.snapshots.proven(self._lease.record, self._proves)
                write_notes(self._stream, self._proves)
            except CatalogError:
                return False
        self._has_progressed = True
        return True

    def input_ended(self) -> bool:
        """Note the end of the input, and return whether a final checkpoint is due."""
        self._input_has_ended = True
        if not self._stream.options.is_checkpointing_enabled:
            return False
        try:
            newest = renewable(self._stream, sharing_base(self._stream))
            return newest is None or newest.batch_id != self.positions.look().commit
        except (CatalogError, StorageAccessError):
            return True

    def start(self, attempt: Attempt) -> list[Event]:
        snapshot_id = str(uuid.uuid4())
        try:
            self._running[attempt.number] = self._recorded(attempt, snapshot_id)
        except (CatalogError, StorageAccessError, OptionError) as error:
            reason = CheckpointFailureReason.IO_EXCEPTION
            self._not_triggered(attempt, reason, error)
            self._record_failure(attempt, snapshot_id, f"{reason.name}: {error}", reason)
            return [AttemptFailed(monotonic_ms(), attempt.number, reason, str(error))]
        return []

    def _recorded(self, attempt: Attempt, snapshot_id: str) -> _Running:
        request = self._catalog.requests.get(attempt.request_id) if attempt.request_id is not None else None
        arguments = request.arguments if request is not None else {}
        facts = self._facts()
        base = sharing_base(self._stream)
        is_final = self._input_has_ended and attempt.request_id is None
        trigger = SnapshotTrigger.INPUT_ENDED if is_final else _trigger(attempt, request)
        may_renew = attempt.kind is TriggerKind.CHECKPOINT and arguments.get("label") is None
        order = SnapshotOrder(
            kind=SnapshotKind.SAVEPOINT if attempt.kind.is_savepoint else SnapshotKind.CHECKPOINT,
            number=attempt.number,
            snapshot_id=snapshot_id,
            base=base.location if base is not None else None,
            target_directory=arguments.get("target_directory"),
            sinks=self.sinks,
            label=arguments.get("label"),
            properties=provenance(self._stream, self.sinks, facts)
            | trigger_properties(trigger, arguments.get("schedule")),
            renews=renewable(self._stream, base) if may_renew else None,
        )
        aligned_only = facts.mode is not None and not guarantees(facts.mode, self.sinks).unaligned
        commit = self.positions.look().commit
        # The row is written last: an earlier failure leaves none.
        self._catalog.snapshots.start(
            self._lease.record,
            snapshot_id=snapshot_id,
            execution_id=self._execution_id,
            kind=order.kind,
            number=attempt.number,
            trigger=trigger,
            timeline=self._timeline,
            label=order.label,
            request_id=attempt.request_id,
            schedule=arguments.get("schedule"),
            target_directory=order.target_directory,
        )
        span = PhasedSpan(
            order.kind.lower(), stream=self._stream.stream_id, number=attempt.number, trigger=trigger.value
        )
        span.phase("alignment")
        after = -1 if commit is None else commit
        return _Running(attempt, order, after, monotonic_ms(), span, request, aligned_only=aligned_only)

    def _not_triggered(self, attempt: Attempt, reason: CheckpointFailureReason, error: Exception) -> None:
        kind = "savepoint" if attempt.kind.is_savepoint else "checkpoint"
        stream_id, tally = self._stream.stream_id, self._tally(attempt, reason)
        streak = failure_streak(*tally) if tally is not None else ""
        message = f"Could not trigger {kind} {attempt.number} of stream {stream_id}: {reason.name}: {error}{streak}"
        log_transition(stream_id, message, level=logging.WARNING)

    def abort(self, action: Abort) -> list[Event]:
        """Abort an attempt. Its failure is returned, unless a thread works on it and reports the end."""
        running = self._running.pop(action.number, None)
        if running is None:
            return []
        running.aborted.set()
        why = f"{action.reason.name}: {action.reason.message}"
        running.span.end(why)
        self._record_failure(running.attempt, running.order.snapshot_id, why, action.reason)
        if not running.cut_ordered:
            return [AttemptFailed(monotonic_ms(), action.number, action.reason)]
        self._aborted[action.number] = action.reason
        return []

    def discard_late(self, number: int) -> None:
        taken = self._late.pop(number, None)
        if taken is not None:
            self._clean(lambda: self._discard_own(taken))

    def order_cuts(self, stop_query: Callable[[int], None]) -> None:
        """Start due cuts; before that of a stop-with-savepoint, stop the query, unless the request was withdrawn."""
        for running in list(self._running.values()):
            number, stops = running.attempt.number, running.attempt.kind is TriggerKind.STOP_WITH_SAVEPOINT
            try:
                is_due = not running.cut_ordered and self._at_boundary(running)
                is_withdrawn = is_due and stops and self._is_withdrawn(running)
            except (CatalogError, StorageAccessError):
                # The next step tries again, until the attempt expires.
                is_due = False
            if not is_due:
                continue
            running.cut_ordered, running.alignment_ms = True, monotonic_ms() - running.started_at_ms
            if is_withdrawn:
                error = SnapshotAbortedError("The request was withdrawn, the query continues.")
                self._finished.put(partial(self._not_stored, number, error, after_cut=False))
                continue
            if stops:
                stop_query(number)
            self._futures.append(self._pool.submit(self._take, running))

    def news(self) -> list[Event]:
        """Record finished attempts in the catalog, and return the events since the last call."""
        if self._log.batches:
            self.has_progressed()
        return self._finish()

    def _finish(self) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                events.append(self._finished.get_nowait()())
            except Empty:
                self._futures = [future for future in self._futures if not future.done()]
                return events

    def subsume_checkpoints(self) -> list[Event]:
        """Delete subsumed checkpoints in the background, once this execution has committed a batch."""
        if not self.has_progressed():
            return []
        protected = [running.order.base for running in self._running.values() if running.order.base is not None]
        try:
            dropped = subsume(self._stream, protected=protected)
            # A deletion that still runs would look interrupted.
            interrupted = interrupted_deletions(self._stream) if not self._cleaning else []
        except CatalogError:
            # The next completed checkpoint subsumes them.
            return []
        may_delete_older, self._may_delete_older = self._may_delete_older, False
        if not dropped and not interrupted and not may_delete_older:
            return []

        def clean() -> None:
            discard(self._stream, interrupted, reason="interrupted deletion", lease=self._lease, protected=protected)
            reason = f"subsumed, not kept by {policy_name(self._stream.options.retention_policy)}"
            discard(self._stream, dropped, reason=reason, lease=self._lease, protected=protected)
            if may_delete_older:
                delete_older_live_directories(self._stream, self._live, self._lease)

        return self._clean(clean)

    def snapshot(self, number: int) -> SnapshotRecord | None:
        return self._completed.get(number)

    def close(self, why: str) -> None:
        """Wait for all threads, and answer pending requests with `why`."""
        for running in self._running.values():
            running.aborted.set()
            running.span.end(f"the query ended: {why}")
            self._record_failure(running.attempt, running.order.snapshot_id, f"the query ended: {why}")
        self._running.clear()
        # Queued deletions still run: no other process knows a snapshot that was not recorded.
        self._pool.shutdown(wait=True)
        self._finish()
        for taken in self._late.values():
            # Housekeeping deletes what remains. An error here must not hide why the query ended.
            with suppress(StorageAccessError, CatalogError, LeaseLostError):
                self._discard_own(taken)
        self._retry_queue.retry()

    def _at_boundary(self, running: _Running) -> bool:
        attempt = running.attempt
        positions = self.positions.latest()
        if positions.commit is None:
            return False
        if attempt.alignment is Alignment.NEWEST_COMMIT:
            return True
        late = attempt.alignment_deadline_ms is not None and monotonic_ms() >= attempt.alignment_deadline_ms
        if (attempt.alignment is Alignment.CARRY_IN_FLIGHT or late) and self._may_carry(running):
            running.order = running.order.carrying_in_flight()
            return True
        nothing_runs = positions.offset is None or positions.offset <= positions.commit
        return nothing_runs or positions.commit > running.started_after_batch

    def _is_withdrawn(self, running: _Running) -> bool:
        request = self._catalog.requests.find(running.attempt.request_id)
        return request is not None and request.status is RequestStatus.WITHDRAWN

    def _may_carry(self, running: _Running) -> bool:
        if running.aligned_only:
            # In these modes a replayed batch may differ, so not even `force_unaligned` allows it.
            return False
        # A restore replays the batch: a sink that does not notice has its rows twice.
        return self._stream.options.force_unaligned or can_replay_a_batch(running.order.sinks)

    def _take(self, running: _Running) -> None:
        number, cut = running.attempt.number, threading.Event()

        def report_cut(_batch: int) -> None:
            cut.set()
            running.span.phase("write")
            self._finished.put(lambda: CutTaken(monotonic_ms(), number))

        running.span.phase("cut")
        try:
            if running.aborted.is_set():
                raise SnapshotAbortedError(f"Attempt {number} was aborted before its cut.")
            taken = take_snapshot(
                self._stream,
                self._live,
                running.order,
                now_ms=self._wall_clock(),
                on_cut=report_cut,
                should_abort=running.aborted.is_set,
            )
        except Exception as error:  # noqa: BLE001 - every failure is an answer to the coordinator
            self._finished.put(partial(self._not_stored, number, error, after_cut=cut.is_set()))
        else:
            self._finished.put(partial(self._stored, number, taken))

    def _stored(self, number: int, taken: TakenSnapshot) -> Event:
        running = self._running.get(number)
        if running is None:
            self._late[number] = taken
            self._aborted.pop(number, None)
            return AttemptCompleted(monotonic_ms(), number)
        running.span.phase("record")
        recorded = self._in_catalog(running, taken)
        if isinstance(recorded, NotRecorded):
            if recorded.is_certain:
                self._clean(lambda: self._discard_own(taken))
            return self._failed(running, CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE, recorded.why)
        del self._running[number]
        stored = taken.stored
        running.span.end(batch=taken.batch_id, full_bytes=stored.full_bytes, new_bytes=stored.incremental_bytes)
        self._completed[number] = recorded
        self._last_snapshot_batch = taken.batch_id
        if running.attempt.kind is TriggerKind.STOP_WITH_SAVEPOINT:
            lease, asked_by = self._lease.record, running.request
            end = QueryEnd(EndKind.FINISHED, STOPPED_WITH_SAVEPOINT, recorded, asked_by=asked_by)
            self.stopped = end
            # At once, as the caller waits; `Settlement.query_ended` finds out whether it was withdrawn.
            self._retry_queue.run(lambda: record_end(self._catalog, lease, self._execution_id, end, asked_by=asked_by))
        else:
            self.answer(running.attempt.request_id, RequestStatus.COMPLETED, snapshot_id=recorded.snapshot_id)
        return AttemptCompleted(monotonic_ms(), number)

    def _in_catalog(self, running: _Running, taken: TakenSnapshot) -> SnapshotRecord | NotRecorded:
        if taken.renews is not None:
            try:
                return self._catalog.snapshots.renew(
                    self._lease.record, taken.renews, attempt_id=running.order.snapshot_id
                )
            except CatalogError as error:
                return NotRecorded(str(error), is_certain=False)
        return record_snapshot(
            self._catalog,
            taken,
            self._log.figures(taken.batch_id, since_batch=self._last_snapshot_batch),
            duration_ms=monotonic_ms() - running.started_at_ms,
            lease=self._lease.record,
            after_batch=self.has_progressed(),
            alignment_ms=running.alignment_ms,
        )

    def _discard_own(self, taken: TakenSnapshot) -> None:
        if taken.renews is not None:
            # Nothing was written: the location is that of an earlier checkpoint.
            return
        self._lease.check()
        self._stream.store.discard(taken.stored.location, protected=())

    def _not_stored(self, number: int, error: Exception, *, after_cut: bool) -> Event:
        running, reason = self._running.get(number), CheckpointFailureReason.of(error, after_cut=after_cut)
        if running is not None:
            return self._failed(running, reason, str(error))
        return AttemptFailed(monotonic_ms(), number, self._aborted.pop(number, reason), str(error))

    def _failed(self, running: _Running, reason: CheckpointFailureReason, detail: str) -> Event:
        number = running.attempt.number
        self._running.pop(number, None)
        running.span.end(f"{reason.name}: {detail}")
        self._record_failure(running.attempt, running.order.snapshot_id, f"{reason.name}: {detail}", reason)
        return AttemptFailed(monotonic_ms(), number, reason, detail)

    def _record_failure(
        self, attempt: Attempt, snapshot_id: str, why: str, reason: CheckpointFailureReason | None = None
    ) -> None:
        lease, snapshots = self._lease.record, self._catalog.snapshots
        streak = self._tally(attempt, reason) if reason is not None else None
        self._retry_queue.run(lambda: snapshots.fail(lease, snapshot_id, why, streak=streak))
        self.answer(attempt.request_id, RequestStatus.FAILED, error=why)

    def answer(
        self, request_id: str | None, status: RequestStatus, *, snapshot_id: str | None = None, error: str | None = None
    ) -> None:
        if request_id is not None:
            lease, requests = self._lease.record, self._catalog.requests
            self._retry_queue.run(
                lambda: requests.resolve(lease, request_id, status, snapshot_id=snapshot_id, error=error)
            )

    def _clean(self, work: Callable[[], None]) -> list[Event]:
        def clean() -> None:
            try:
                work()
            finally:
                self._finished.put(lambda: self._cleaning_changed(-1))

        changed = self._cleaning_changed(1)
        self._futures.append(self._pool.submit(clean))
        return [changed]

    def _cleaning_changed(self, by: int) -> Event:
        self._cleaning += by
        return CleaningChanged(monotonic_ms(), self._cleaning)


def _trigger(attempt: Attempt, request: RequestRecord | None) -> SnapshotTrigger:
    if request is None or request.arguments.get("schedule") is not None:
        return SnapshotTrigger.PERIODIC
    return SnapshotTrigger.STOP if attempt.kind is TriggerKind.STOP_WITH_SAVEPOINT else SnapshotTrigger.MANUAL
