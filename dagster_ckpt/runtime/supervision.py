"""The loop around one running query: it passes events to the coordinator and carries out its decisions.

It runs in one thread, the only one that talks to the JVM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from random import Random
from typing import Any

from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestRecord, RequestStatus, SnapshotRecord
from dagster_ckpt.errors import CatalogError, LeaseLostError, LiveDirectoryError, StorageAccessError
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog, Journal, OutputGap
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.checkpoint_messages import (
    Abort,
    Action,
    AttemptCompleted,
    AttemptFailed,
    Discard,
    Event,
    FailQuery,
    InputEnded,
    Progressed,
    QueryStarted,
    QueryStopped,
    Refuse,
    StartAttempt,
    StopQuery,
    Tick,
    Triggered,
)
from dagster_ckpt.runtime.coordinator import CheckpointCoordinator
from dagster_ckpt.runtime.execution_end import RetryQueue, record_end
from dagster_ckpt.runtime.run_request import REQUEST_POLL_MS, EndKind, QueryEnd
from dagster_ckpt.runtime.stall import LONGEST_CALL_MS, JvmWatch, QueryInactivity, StallDetector
from dagster_ckpt.runtime.triggers import TriggerKind, TriggerOrigin, TriggerRequest
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.spark.query.query import STARTING, SupervisedQuery
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import SINK_IDS, seen_sinks
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.liveness import jvm_of
from dagster_ckpt.values.durations import Clock, monotonic_ms, rounded_duration

POLL_S = 0.25
FINISH_POLL_S = 0.02
HEARTBEAT_MS = 2_000
# Longer than the usual time between two signs of activity.
REPORT_AFTER_MS = 60_000
# The first batch may create a table.
LOOKS_AT_SINKS = 3
# A stalled query may not react to an interrupt either.
STOP_STALLED_MS = 60_000
# An interrupted batch is run again by the next query, which readers wait for.
FINISH_BATCH_MS = 2_000


_TRIGGERS = {
    RequestKind.CHECKPOINT: TriggerKind.CHECKPOINT,
    RequestKind.SAVEPOINT: TriggerKind.SAVEPOINT,
    RequestKind.STOP_WITH_SAVEPOINT: TriggerKind.STOP_WITH_SAVEPOINT,
}


class Supervisor:
    def __init__(
        self,
        stream: StreamHandle,
        execution_id: str,
        prepared: PreparedStart,
        query: SupervisedQuery,
        lease: LeaseKeeper,
        *,
        interrupted: Callable[[], bool],
        predecessor_ended: bool,
        hands_over: bool,
        wall_clock: Clock,
    ) -> None:
        self._wall_clock = wall_clock
        self._stream_id = stream.stream_id
        self._stall_timeout_ms = stream.stall_timeout_ms
        self._catalog = stream.catalog
        self._execution_id = execution_id
        self._query = query
        self._lease = lease
        self._interrupted = interrupted
        self._log = BatchLog()
        self._stall_detector = StallDetector(monotonic_ms())
        self._still = QueryInactivity(STARTING, is_idle=False, stalled_for_ms=0)
        self._retry_queue = RetryQueue()
        self._coordinator = CheckpointCoordinator(
            stream.options, first_number=self._catalog.streams.get(stream.stream_id).next_number, random=Random()
        )
        self._attempts = AttemptRunner(
            stream,
            execution_id,
            prepared,
            self._log,
            lease,
            retry_queue=self._retry_queue,
            facts=query.facts,
            predecessor_ended=predecessor_ended,
            wall_clock=wall_clock,
            tally=self._coordinator.failure_tally,
        )
        self._jvm_watch = JvmWatch(
            self._stream_id,
            jvm_of(lease.record),
            lambda: query.call,
            limit_ms=min(self._stall_timeout_ms or LONGEST_CALL_MS, LONGEST_CALL_MS),
        )
        self._gap = OutputGap(stream, execution_id, prepared, lease, self._attempts.positions) if hands_over else None
        self._journal = Journal(stream, prepared.live, lease, self._attempts.positions, self._log)
        noted = self._catalog.executions.get(execution_id).progress or {}
        self._sink_ids: dict[str, Any] = dict(noted.get(SINK_IDS) or {})
        self._looked_after: set[int] = set()
        self._end: QueryEnd | None = None
        self._is_ready = False
        self._input_has_ended = False
        self._savepoint_to_stop_with: int | None = None
        self._stop_requested: list[RequestRecord] = []
        self._taken: set[str] = set()
        self._next_heartbeat_ms = 0
        self._next_request_poll_ms = 0

    def run(self) -> QueryEnd:
        """Supervise the query, which is stopped on return."""
        try:
            with self._jvm_watch:
                return self._until_the_end()
        except Exception:
            if self._jvm_watch.ended is None:
                raise
            self._end = QueryEnd(EndKind.STALLED, self._jvm_watch.ended)
            return self._end
        finally:
            self._close()

    def _until_the_end(self) -> QueryEnd:
        while self._end is None:
            try:
                self._step()
            except LeaseLostError as error:
                self._end = QueryEnd(EndKind.LEASE_LOST, str(error))
        return self._end

    def _step(self) -> None:
        terminated = self._wait()
        self._note_progress(is_last=terminated)
        if self._lease.lost is not None:
            self._end = QueryEnd(EndKind.LEASE_LOST, str(self._lease.lost))
        elif self._interrupted():
            self._end = QueryEnd(EndKind.INTERRUPTED, "the process was asked to stop")
        elif terminated and (error := self._query.exception()) is not None:
            self._end = QueryEnd(EndKind.FAILED, error, trace=self._query.trace())
        elif self._stall_timeout_ms is not None and self._still.is_over(self._stall_timeout_ms):
            self._end = QueryEnd(EndKind.STALLED, f"{_describe_stall(self._still)}. It was stopped")
        else:
            self._coordinate(input_ended=terminated)

    def _wait(self) -> bool:
        if self._is_stopped:
            time.sleep(POLL_S)
            return False
        return self._query.wait(POLL_S)

    def _coordinate(self, *, input_ended: bool) -> None:
        now_ms = monotonic_ms()
        if not self._is_ready and self._attempts.sinks and self._attempts.has_committed():
            self._is_ready = True
            self._handle(QueryStarted(now_ms))
        if input_ended:
            self._input_has_ended = True
            self._handle(InputEnded(now_ms, final_is_due=self._attempts.input_ended()))
        if now_ms >= self._next_request_poll_ms:
            self._next_request_poll_ms = now_ms + REQUEST_POLL_MS
            self._retry_queue.retry()
            with suppress(CatalogError):
                self._take_requests()
            with suppress(CatalogError):
                self._journal.note(self._query.facts().mode)
            if self._gap is not None:
                with suppress(CatalogError, StorageAccessError):
                    self._gap.note()
        for event in self._attempts.news():
            self._handle(event)
            if isinstance(event, AttemptCompleted):
                for cleaning in self._attempts.subsume_checkpoints():
                    self._handle(cleaning)
        self._handle(Progressed(monotonic_ms(), self._wall_clock(), self._log.batches, self._log.total_rows))
        deadline_ms = self._coordinator.next_deadline_ms
        if deadline_ms is not None and monotonic_ms() >= deadline_ms:
            self._handle(Tick(monotonic_ms()))
        self._attempts.order_cuts(self._stop_for_savepoint)
        if self._input_has_ended and not (self._coordinator.pending or self._coordinator.waiting):
            # The final checkpoint, if any, is complete, or its failure is tolerated.
            self._end = self._end or QueryEnd(
                EndKind.ENDED_BY_ITSELF, "the query has processed all its input and ended"
            )

    def _handle(self, event: Event) -> None:
        inbox = deque([event])
        while inbox:
            handled = inbox.popleft()
            for action in self._coordinator.handle(handled):
                inbox.extend(self._do(action))
            if (
                isinstance(handled, AttemptFailed | AttemptCompleted)
                and handled.number == self._savepoint_to_stop_with
                and self._end is None
            ):
                # A savepoint that completed too late is discarded, so it does not end the query either.
                why = handled.detail if isinstance(handled, AttemptFailed) else "it was completed too late"
                self._end = QueryEnd(
                    EndKind.SAVEPOINT_FAILED, f"the savepoint of the stop request failed, the query continues: {why}"
                )

    def _do(self, action: Action) -> list[Event]:
        match action:
            case StartAttempt(attempt=attempt):
                return self._attempts.start(attempt)
            case Abort():
                return self._attempts.abort(action)
            case Discard(number=number):
                self._attempts.discard_late(number)
            case Refuse(request_id=request_id, reason=reason, detail=detail):
                self._attempts.answer(request_id, RequestStatus.FAILED, error=f"{reason.name}: {detail}")
            case FailQuery(reason=reason, detail=detail):
                self._end = self._end or QueryEnd(EndKind.FAILED, f"{reason.name}: {detail}")
            case StopQuery():
                self._end = self._attempts.stopped
        return []

    @property
    def _is_stopped(self) -> bool:
        return self._savepoint_to_stop_with is not None or self._input_has_ended

    def _stop_for_savepoint(self, number: int) -> None:
        self._query.stop()
        self._savepoint_to_stop_with = number

    def _note_progress(self, *, is_last: bool) -> None:
        if not self._is_stopped:
            self._log.note(self._query.recent_progress())
        now_ms = monotonic_ms()
        # A query may end between two heartbeats.
        if now_ms < self._next_heartbeat_ms and not is_last:
            return
        self._next_heartbeat_ms = now_ms + HEARTBEAT_MS
        before, self._still = self._still, self._inactivity()
        if self._still.is_over(REPORT_AFTER_MS) and not before.is_over(REPORT_AFTER_MS):
            stack = "".join(f"\n  at {frame}" for frame in self._query.stack())
            log_message(self._stream_id, f"{_describe_stall(self._still)}. Its thread is{stack or ' not visible'}")
        # The lease, not an unavailable catalog, decides whether this process is still the writer.
        with suppress(CatalogError):
            self._beat()

    def _note_sinks(self) -> None:
        """Note the first batches' sinks, which the start may not have known."""
        latest = self._log.latest
        if latest is None or latest.batch_id in self._looked_after or len(self._looked_after) == LOOKS_AT_SINKS:
            return
        self._looked_after.add(latest.batch_id)
        unknown = [sink for sink in sinks_of(latest.sinks) if (self._sink_ids.get(sink.name) or {}).get("id") is None]
        self._sink_ids |= seen_sinks(unknown, ())

    def _beat(self) -> None:
        self._note_sinks()
        latest = self._log.latest
        self._catalog.executions.heartbeat(
            self._lease.record,
            self._execution_id,
            {
                "batch_id": latest.batch_id if latest else None,
                "query_id": self._query.query_id,
                "batch_ms": latest.duration_ms if latest else None,
                "input_rows": self._log.total_rows,
                "state_rows": latest.state_rows if latest else None,
                "state_memory": latest.state_memory if latest else None,
                "watermark": latest.watermark if latest else None,
                "sinks": list(self._attempts.sinks),
                SINK_IDS: self._sink_ids,
                # Before the first batch Spark may still be planning the query.
                "plan_fingerprint": self._query.facts().plan_fingerprint if latest else None,
                "sources": [asdict(source) for source in latest.sources] if latest else [],
                "rows_per_second": latest.rows_per_second if latest else None,
                "idle": self._is_stopped or self._query.is_idle(),
                "activity": self._still.as_record(),
            },
        )

    def _inactivity(self) -> QueryInactivity:
        if self._is_stopped:
            doing = "Ended, before its final checkpoint" if self._input_has_ended else "Stopped for a savepoint"
            return QueryInactivity(doing, is_idle=True, stalled_for_ms=0)
        latest = self._log.latest
        return self._stall_detector.note(
            self._query.activity(),
            batch=latest.batch_id if latest else None,
            tasks=self._query.tasks,
            now_ms=monotonic_ms(),
        )

    def _take_requests(self) -> None:
        lease = self._lease.record
        # A stop whose answer was lost comes first: it may have been recorded.
        unanswered = [*self._stop_requested, *self._catalog.requests.unanswered(self._stream_id)]
        for request in unanswered:
            end = QueryEnd.requested_by(request)
            if end is not None:
                self._stop_requested = [request]
                if record_end(self._catalog, lease, self._execution_id, end, asked_by=request):
                    self._end = end
                    return
                self._stop_requested = []
                continue
            kind = _TRIGGERS.get(request.kind)
            if kind is not None and self._is_ready and request.request_id not in self._taken and self._take(request):
                self._handle(Triggered(monotonic_ms(), TriggerRequest(request.request_id, kind, TriggerOrigin.USER)))

    def _take(self, request: RequestRecord) -> bool:
        """Whether to carry out a request, which is accepted, or answered if a predecessor carried it out."""
        # By a predecessor, or the catalog's answer to this process was lost.
        is_accepted = request.status is RequestStatus.ACCEPTED
        done = self._done_by_predecessor(request) if is_accepted else None
        if not is_accepted and not self._catalog.requests.accept(self._lease.record, request.request_id):
            return False
        self._taken.add(request.request_id)
        if done is not None:
            self._attempts.answer(request.request_id, RequestStatus.COMPLETED, snapshot_id=done.snapshot_id)
        return done is None

    def _done_by_predecessor(self, request: RequestRecord) -> SnapshotRecord | None:
        taken = self._catalog.snapshots.of_request(self._stream_id, request.request_id)
        done = [snapshot for snapshot in taken if snapshot.completed_at_ms is not None]
        if done and request.kind is RequestKind.STOP_WITH_SAVEPOINT:
            # A query that was restarted after its savepoint has not stopped.
            before = self._catalog.executions.of_stream(self._stream_id)
            stopped = {each.execution_id for each in before if each.status is ExecutionStatus.FINISHED}
            done = [snapshot for snapshot in done if snapshot.execution_id in stopped]
        return done[0] if done else None

    def _close(self) -> None:
        try:
            if self._jvm_watch.ended is None:
                self._stop_query()
        finally:
            # Even if the JVM has died and the query cannot be stopped.
            self._handle(QueryStopped(monotonic_ms()))
            self._attempts.close(self._end.reason if self._end else "the supervising process failed")

    def _stop_query(self) -> None:
        if self._savepoint_to_stop_with is None:
            kind = self._end.kind if self._end is not None else None
            try:
                if kind is EndKind.SUSPENDED:
                    self._finish_batch()
            finally:
                self._query.stop(within_ms=STOP_STALLED_MS if kind is EndKind.STALLED else None)
        with suppress(CatalogError, LeaseLostError):
            self._journal.note(self._query.facts().mode, has_ended=True)

    def _finish_batch(self) -> None:
        positions, deadline_ms = self._attempts.positions, monotonic_ms() + FINISH_BATCH_MS
        with suppress(LiveDirectoryError, StorageAccessError):
            planned = positions.look().offset
            while planned is not None and self._lease.lost is None and monotonic_ms() < deadline_ms:
                commit = positions.latest().commit
                if (commit is not None and commit >= planned) or self._query.wait(FINISH_POLL_S):
                    return
                self._log.note(self._query.recent_progress())


def _describe_stall(still: QueryInactivity) -> str:
    tasks = "" if still.tasks is None else f", with no running task in its {still.tasks.jobs} active Spark jobs"
    return f"the query was stalled at {still.doing!r} for {rounded_duration(still.stalled_for_ms)}{tasks}"
