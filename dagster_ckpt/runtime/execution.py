"""Running a stream in this process: lease, recovery, supervision, restarts in place."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import ExecutionStatus, LeaseRecord, RequestStatus, SnapshotRecord, StartCause
from dagster_ckpt.catalog.time_limits import DEFAULT_TTL_MS
from dagster_ckpt.checkpointing.numbering import count_beyond_what_is_used
from dagster_ckpt.errors import (
    CatalogError,
    LeaseLostError,
    LiveDirectoryError,
    PlanChangedError,
    QueryStalledError,
    RecoveryExhaustedError,
    RestartWithdrawnError,
    RowsAtRiskError,
    SharedSinkError,
    SnapshotNotFoundError,
    StartStoppedError,
    StateAtRiskError,
    StateBackendChangeError,
    StatePartitionsError,
)
from dagster_ckpt.policies.restart import FailureHistory, RestartAt
from dagster_ckpt.recovery.damage import Damage, damage_in, damage_of
from dagster_ckpt.recovery.dead_attempts import settle_dead_attempts
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan
from dagster_ckpt.recovery.plan_check import check_backend, check_plan
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.recovery.recovery_points import live_point, point_of_origin
from dagster_ckpt.recovery.rewind_preview import RewindPreview, preview_rewind, refuse_loss
from dagster_ckpt.recovery.safety_savepoint import keep_way_back
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.runtime.start_watch import StartWatch
from dagster_ckpt.runtime.supervision import ENDS_BY_REQUEST, EndKind, QueryEnd, Supervisor
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.application import SparkApplication
from dagster_ckpt.spark.query.output import NamedOutput, named_output
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.plan_description import PlanDescription
from dagster_ckpt.spark.query.query import SupervisedQuery
from dagster_ckpt.stream.fencing import fence_predecessor, refuse_a_fenced_directory
from dagster_ckpt.stream.handle import Clock, StreamHandle, monotonic_ms, wall_clock_ms
from dagster_ckpt.stream.holding import holding
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import check_places, claim_live_folder
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

StartQuery = Callable[[LiveDirectory], SupervisedQuery]

# A start that cannot be done as asked; none of these goes away by trying again.
_REFUSALS = (
    *(SnapshotNotFoundError, LiveDirectoryError, RowsAtRiskError, SharedSinkError, StateAtRiskError),
    *(PlanChangedError, StateBackendChangeError, StatePartitionsError),
)
_STATUS = {
    EndKind.FINISHED: ExecutionStatus.FINISHED,
    EndKind.ENDED_BY_ITSELF: ExecutionStatus.SUSPENDED,
    EndKind.SUSPENDED: ExecutionStatus.SUSPENDED,
    EndKind.FAILED: ExecutionStatus.FAILED,
    EndKind.SAVEPOINT_FAILED: ExecutionStatus.SUSPENDED,
    EndKind.STOOD_STILL: ExecutionStatus.FAILED,
}


@dataclass(frozen=True)
class RunRequest:
    """How a stream is to be run in this process.

    Attributes:
        run_id: Id of the surrounding run, as its orchestrator knows it.
        start_query: Starts the query on a live directory.
        describe: The query that `start_query` will start next, described; asked for before anything is changed. None:
            nothing is known of it before it runs.
        start_from: Where to begin.
        cause: Whether a person or a restart began this run.
        start_request_id: The catalog request this run answers, if any.
        restart_of: The execution that this run was launched to restart, if any.
        jvm_pid: Pid of the JVM that works for this process, where it is on this machine.
        application: The Spark application of this process.
        interrupted: True once the process was told to stop.
        was_canceled: Asked once `interrupted` has ended it: whether a person cancelled the run.
        holder_is_over: Says of a lease holder whether its run is recorded as over.
        report: Told one sentence at each step, for the run's log.
        ttl_ms: Life of the lease without a renewal.
        wall_clock: Time that records carry.
    """

    run_id: str
    start_query: StartQuery
    describe: Callable[[], DataStreamWriter] | None = None
    start_from: StartFrom = field(default_factory=StartFrom)
    cause: StartCause = StartCause.MANUAL
    start_request_id: str | None = None
    restart_of: str | None = None
    jvm_pid: int | None = None
    application: SparkApplication | None = None
    interrupted: Callable[[], bool] = lambda: False
    was_canceled: Callable[[], bool] = lambda: False
    holder_is_over: Callable[[LeaseRecord], bool] = lambda _lease: False
    report: Callable[[str], None] = lambda _sentence: None
    ttl_ms: int = DEFAULT_TTL_MS
    wall_clock: Clock = wall_clock_ms


@dataclass(frozen=True)
class Outcome:
    """How the run came to its end.

    Attributes:
        end: The end of the last query.
        execution_id: The last execution.
        gave_up: Why the restart strategy does not let a failed query start again, in its words.
        savepoint: The savepoint the stream was stopped with, if any.
    """

    end: QueryEnd
    execution_id: str
    gave_up: str | None = None

    @property
    def savepoint(self) -> SnapshotRecord | None:
        """The savepoint the stream was stopped with, if any."""
        return self.end.savepoint


def execute_stream(stream: StreamHandle, request: RunRequest) -> Outcome:
    """Run a stream until it ends, is stopped, is cancelled, or may not be restarted any more.

    The last execution is ended in the catalog, but settled only where nothing is left to do
    for it: the caller knows how the surrounding run was recorded, and applies retention.

    Raises:
        LeaseHeldError: Another execution of the stream is alive.
        RestartWithdrawnError: The start was taken back, or the stream cancelled or suspended before this restart began.
        LeaseLostError: Another execution took the lease before the query was started; what is its own is untouched.
        SnapshotNotFoundError: The snapshot to start from does not exist.
        LiveDirectoryError: The stream's state is lost and nothing to restore it from was named.
        StateBackendChangeError: The stream's state backend cannot read the state it would start from.
        PlanChangedError: The query keeps other state than what it would go on from, and nobody accepted that.
        RowsAtRiskError: A sink could lose rows by the rewind, and `accept_loss` was not given.
        QueryStalledError: The query stood still for longer than the stream allows. It was stopped.
        StorageAccessError: The checkpoint storage cannot be written.
    """
    record = stream.register()
    execution_id = str(uuid.uuid4())
    holder = this_holder(execution_id, request.run_id, request.jvm_pid)
    acquired = acquire(
        stream.catalog,
        stream.stream_id,
        holder,
        ttl_ms=request.ttl_ms,
        holder_is_over=request.holder_is_over,
        interrupted=request.interrupted,
        above=stream.token_in_use(record),
    )
    with LeaseKeeper(stream.catalog, acquired.record, ttl_ms=request.ttl_ms) as lease:
        _refuse_withdrawn(stream, request)
        return _Run(stream, request, acquired, lease).until_the_end(execution_id)


def _refuse_withdrawn(stream: StreamHandle, request: RunRequest) -> None:
    """Refuse what was taken back while the run that does it was on its way, or waited for its turn."""
    asked = stream.catalog.requests.find(request.start_request_id) if request.start_request_id is not None else None
    if asked is not None and asked.status is RequestStatus.WITHDRAWN:
        raise RestartWithdrawnError(
            f"Stream {stream.stream_id!r} is not started, nothing was changed: the start that {asked.origin} had "
            "asked for was "
            "taken back. Ask again to have it run."
        )
    before = stream.catalog.executions.get(request.restart_of) if request.restart_of is not None else None
    if before is not None and before.status in (ExecutionStatus.CANCELED, ExecutionStatus.SUSPENDED):
        raise RestartWithdrawnError(
            f"Stream {stream.stream_id!r} is not restarted, nothing was changed: {before.reason}. Start it to have it "
            "run."
        )


class _Run:
    """The executions of one run: the first, and those that restart it in place."""

    def __init__(self, stream: StreamHandle, request: RunRequest, acquired: AcquiredLease, lease: LeaseKeeper) -> None:
        self._stream = stream
        self._request = request
        self._lease = lease
        self._acquired = acquired
        self._predecessor_ended = acquired.predecessor_ended
        self._gave_up: str | None = None
        self._watch = StartWatch(stream.catalog, stream.stream_id, request.interrupted)

    def until_the_end(self, execution_id: str) -> Outcome:
        start_from = self._request.start_from
        cause = self._request.cause
        while True:
            end = self._execute(execution_id, start_from, cause)
            status = _STATUS.get(end.kind)
            if end.kind is EndKind.INTERRUPTED and self._request.was_canceled():
                # While the lease is held: a successor that waits for it would take this for a process that died.
                status = ExecutionStatus.CANCELED
            if status is not None:
                settled = end.kind in (EndKind.SUSPENDED, EndKind.SAVEPOINT_FAILED)
                try:
                    self._stream.catalog.executions.end(
                        self._lease.record, execution_id, status, end.reason, settled=settled
                    )
                except LeaseLostError as error:
                    end = QueryEnd(EndKind.LEASE_LOST, str(error))
            if end.kind is EndKind.LEASE_LOST:
                self._note_loss(execution_id, end.reason)
            if end.kind is EndKind.STOOD_STILL:
                # What it waited for is in this process or its JVM, where the next query would wait for it as well.
                raise QueryStalledError(
                    f"Stream {self._stream.stream_id!r}: {end.reason}. It was stopped; its restart strategy says "
                    "whether a new "
                    "process goes on."
                )
            if end.kind is EndKind.SAVEPOINT_FAILED:
                self._request.report(end.reason)
            elif end.kind is EndKind.FAILED:
                stopped = self._await_restart(execution_id, end)
                if stopped is not None:
                    return Outcome(stopped, execution_id, self._gave_up)
            else:
                return Outcome(end, execution_id)
            # A restart goes on from where the query stopped, wherever the run began.
            execution_id, start_from, cause = str(uuid.uuid4()), StartFrom(), StartCause.RESTART_IN_PLACE
            self._predecessor_ended = True

    def _execute(self, execution_id: str, start_from: StartFrom, cause: StartCause) -> QueryEnd:
        stream = self._stream
        watch = self._watch = StartWatch(stream.catalog, stream.stream_id, self._request.interrupted)

        def still_mine() -> None:
            watch()
            self._lease.check()

        stream.catalog.executions.begin(
            self._lease.record,
            execution_id,
            run_id=self._request.run_id,
            cause=cause,
            holder=this_holder(execution_id, self._request.run_id, self._request.jvm_pid),
            code_version=stream.code_version,
        )
        try:
            check_places(stream, start_from, predecessor_ended=self._predecessor_ended)
            if not self._predecessor_ended:
                fence_predecessor(
                    stream,
                    self._acquired,
                    still_mine=still_mine,
                    own_jvm_pid=self._request.jvm_pid,
                    report=self._request.report,
                )
            for message in settle_dead_attempts(stream, self._lease.record):
                self._request.report(message)
            watch()
            if cause is StartCause.MANUAL:
                stream.catalog.recoveries.forget(self._lease.record)
            plan, prepared, query = self._start(execution_id, start_from, cause)
        except StartStoppedError as stopped:
            if watch.end is None:
                raise
            return self._end_start(execution_id, watch.end, watch.request_id, str(stopped))
        except Exception as error:
            self._refuse(execution_id, error, cause)
            raise
        try:
            end = self._supervise(execution_id, plan, prepared, query)
        except Exception as error:
            # Such as a JVM that was killed: nothing in this process can go on, a new run can.
            self._fail(execution_id, f"{type(error).__name__}: {error}")
            raise
        if end.kind is EndKind.FAILED:
            self._note_damage(execution_id, prepared.live, damage_in(end.trace or end.reason))
        return end

    def _start(
        self, execution_id: str, start_from: StartFrom, cause: StartCause
    ) -> tuple[RecoveryPlan, PreparedStart, SupervisedQuery]:
        """Start the query on the best point that there is: where one turns out to be damaged, on the next one."""
        stream = self._stream
        output = named_output(self._request.describe()) if self._request.describe is not None else None
        while True:
            facts = recovery_facts(
                stream,
                start_from,
                predecessor_ended=self._predecessor_ended,
                is_automatic=cause is not StartCause.MANUAL,
                output=output,
            )
            plan = plan_recovery(facts)
            prepared: PreparedStart | None = None
            try:
                with holding(stream.catalog, [plan.snapshot], f"start of execution {execution_id}"):
                    prepared = self._prepare(execution_id, facts, plan, start_from, output)
                    refuse_a_fenced_directory(prepared.live)
                    self._watch()
                    return plan, prepared, self._request.start_query(prepared.live)
            except Exception as error:
                damage = damage_of(error)
                # What a person named is not replaced by something else.
                if damage is None or plan.point is None or start_from.point is not StartPoint.LATEST:
                    raise
                if prepared is None:
                    self._note_failure(execution_id, plan.point, damage, plan.to_batch, plan=plan)
                else:
                    self._note_damage(execution_id, prepared.live, damage)

    def _note_damage(self, execution_id: str, live: LiveDirectory, damage: Damage | None) -> None:
        """Remember that the query could not go on in a live directory, so that the next start does something else."""
        if damage is None:
            return
        with suppress(LeaseLostError):
            self._note_failure(execution_id, live_point(live.url), damage, None)
            record = self._stream.catalog.streams.get(self._stream.stream_id)
            origin = point_of_origin(record.origin) if record.live_directory == live.url else None
            if origin is not None:
                # Made again it may be whole; where it fails alike once more, it was made so.
                at_batch = record.origin.batch_id if record.origin is not None else None
                self._note_failure(execution_id, origin, replace(damage, is_certain=False), at_batch)

    def _note_failure(
        self, execution_id: str, point: str, damage: Damage, batch_id: int | None, *, plan: RecoveryPlan | None = None
    ) -> None:
        self._stream.catalog.recoveries.failed(
            self._lease.record,
            execution_id,
            point,
            error=damage.error,
            detail=damage.detail,
            is_certain=damage.is_certain,
            batch_id=batch_id,
            rewound_batches=plan.rewound_batches if plan is not None else None,
            rewound_ms=plan.rewound_ms if plan is not None else None,
        )
        self._request.report(f"a recovery failed at {point}: {damage.error}: {damage.detail}")

    def _prepare(
        self,
        execution_id: str,
        facts: RecoveryFacts,
        plan: RecoveryPlan,
        start_from: StartFrom,
        output: NamedOutput | None,
    ) -> PreparedStart:
        stream = self._stream
        self._weigh(preview_rewind(stream, facts, plan, output), accept_loss=start_from.accept_loss)
        stream.store.check_access()
        claim_live_folder(stream)
        count_beyond_what_is_used(stream, plan.snapshot, self._lease.record)
        for message in check_backend(stream, plan):
            self._request.report(message)
        query_plan = self._check_plan(plan, accept=start_from.accept_plan_change)
        self._watch()
        kept = keep_way_back(stream, facts, plan, start_from, self._lease.record)
        if kept is not None:
            self._request.report(kept)
        refuse_shared_folder(stream, output)
        self._watch()
        prepared = prepare(stream, plan, self._lease, output, watch=self._watch)
        self._report_start(prepared)
        # What takes long may have outlived the lease: a successor may be at work in these very places.
        self._lease.check()
        stream.catalog.streams.note_plan(self._lease.record, query_plan.as_record() if query_plan is not None else None)
        self._note_output(execution_id, output)
        # Once more, as two that start at the same moment see each other only now.
        refuse_shared_folder(stream, output)
        return prepared

    def _supervise(
        self,
        execution_id: str,
        plan: RecoveryPlan,
        prepared: PreparedStart,
        query: SupervisedQuery,
    ) -> QueryEnd:
        stream = self._stream
        application = self._request.application
        try:
            stream.catalog.executions.running(
                self._lease.record,
                execution_id,
                live_directory=prepared.live.url,
                recovery=plan.as_record(),
                application=application.as_record() if application is not None else None,
            )
            if "fork_of" in (stream.catalog.streams.get(stream.stream_id).pending_restore or {}):
                stream.catalog.streams.restore_finished(self._lease.record)
            self._answer_start_request(RequestStatus.COMPLETED, None)
            supervisor = Supervisor(
                stream,
                execution_id,
                prepared,
                query,
                self._lease,
                interrupted=self._request.interrupted,
                predecessor_ended=self._predecessor_ended,
                wall_clock=self._request.wall_clock,
                report=self._request.report,
            )
        except Exception:
            # Nobody else knows of it yet, and it must not outlive the lease.
            query.stop()
            raise
        return supervisor.run()

    def _end_start(self, execution_id: str, end: QueryEnd, request_id: str | None, told: str) -> QueryEnd:
        """Record that a start was stopped before its query was started, and answer those who wait for it."""
        self._request.report(told)
        try:
            self._answer_start_request(RequestStatus.FAILED, told)
            if request_id is not None:
                status = _STATUS.get(end.kind, ExecutionStatus.CANCELED)
                # Before the operator is told: see `Supervisor`.
                self._stream.catalog.executions.end(
                    self._lease.record, execution_id, status, end.reason, settled=end.kind is EndKind.SUSPENDED
                )
                # It is decided now: see `_stop_asked_for`.
                with suppress(CatalogError):
                    self._stream.catalog.requests.resolve(self._lease.record, request_id, RequestStatus.COMPLETED)
        except LeaseLostError as error:
            return QueryEnd(EndKind.LEASE_LOST, str(error))
        return end

    def _refuse(self, execution_id: str, error: Exception, cause: StartCause) -> None:
        reason = f"{type(error).__name__}: {error}"
        # What is refused is over; anything else is for the restart strategy.
        is_over = isinstance(error, _REFUSALS)
        self._fail(execution_id, reason, settled=is_over)
        self._answer_start_request(RequestStatus.FAILED, reason)
        if is_over and (cause is not StartCause.MANUAL or isinstance(error, RecoveryExhaustedError)):
            # Nobody waits for this start, and no other one follows.
            self._stream.catalog.executions.gave_up(execution_id, reason)

    def _fail(self, execution_id: str, reason: str, *, settled: bool = False) -> None:
        """Record that an execution failed.

        Raises:
            LeaseLostError: Another one is the writer by now. What went wrong before went wrong for that: what this one
                read was its successor's.
        """
        try:
            self._stream.catalog.executions.end(
                self._lease.record, execution_id, ExecutionStatus.FAILED, reason, settled=settled
            )
        except LeaseLostError:
            self._note_loss(execution_id, reason)
            raise

    def _note_loss(self, execution_id: str, reason: str) -> None:
        # All that is left to say, of its own execution only; a successor that has begun has said so already.
        with suppress(CatalogError):
            self._stream.catalog.executions.end_unheld(execution_id, ExecutionStatus.FAILED, reason)

    def _note_output(self, execution_id: str, output: NamedOutput | None) -> None:
        """Say where the query is about to write, as it may be killed before it reports that itself."""
        if output is not None and output.folder is not None:
            sinks = [f"FileSink[{output.folder}]"]
            self._stream.catalog.executions.heartbeat(self._lease.record, execution_id, {"sinks": sinks})

    def _weigh(self, preview: RewindPreview, *, accept_loss: bool) -> None:
        for message in preview.messages():
            self._request.report(message)
        refuse_loss(self._stream, preview, accept_loss=accept_loss)

    def _check_plan(self, recovery: RecoveryPlan, *, accept: bool) -> PlanDescription | None:
        describe = self._request.describe
        plan = plan_of_writer(describe()) if describe is not None else None
        for message in check_plan(self._stream, recovery, plan, self._lease.record, accept=accept):
            self._request.report(message)
        return plan

    def _await_restart(self, execution_id: str, end: QueryEnd) -> QueryEnd | None:
        """Wait until the restart strategy lets a failed query start again; returns the end if it does not."""
        # The catalog has dated the failures; the pause is measured by a clock that never goes back.
        now_ms = self._stream.catalog.now_ms()
        failures = self._stream.catalog.executions.failures_since_manual_start(self._stream.stream_id)
        decision = self._stream.restart.decide(FailureHistory(tuple(failures) or (now_ms,)), now_ms, Random())
        self._request.report(f"the query failed: {end.reason}")
        self._request.report(decision.reason)
        if not isinstance(decision, RestartAt):
            self._gave_up = decision.reason
            return end
        until_ms = monotonic_ms() + decision.at_ms - now_ms
        while monotonic_ms() < until_ms:
            if self._request.interrupted():
                return QueryEnd(EndKind.INTERRUPTED, "the process was told to stop before the restart")
            if self._lease.lost is not None:
                return QueryEnd(EndKind.LEASE_LOST, str(self._lease.lost))
            stopped = self._stop_asked_for(execution_id)
            if stopped is not None:
                return stopped
            time.sleep(0.1)
        return self._stop_asked_for(execution_id)

    def _stop_asked_for(self, execution_id: str) -> QueryEnd | None:
        """Between two restarts: do what a CANCEL or SUSPEND asks for that no running query answers."""
        catalog = self._stream.catalog
        try:
            pending = catalog.requests.pending(self._stream.stream_id)
            request = next((each for each in pending if each.kind in ENDS_BY_REQUEST), None)
            if request is None:
                return None
            kind, status = ENDS_BY_REQUEST[request.kind]
            reason = f"{request.kind.value.lower()} asked for by {request.origin}, between two restarts"
            settled = kind is EndKind.SUSPENDED
            catalog.executions.stopped(self._lease.record, execution_id, status, reason, settled=settled)
            # It is decided now. Who asks sees that the run is over where this is not recorded.
            with suppress(CatalogError):
                catalog.requests.resolve(self._lease.record, request.request_id, RequestStatus.COMPLETED)
        except LeaseLostError as error:
            return QueryEnd(EndKind.LEASE_LOST, str(error))
        except CatalogError:
            return None
        return QueryEnd(kind, reason)

    def _report_start(self, prepared: PreparedStart) -> None:
        for path in prepared.rolled_back:
            self._request.report(f"rolled back the file sink {path}")
        for sink in prepared.may_repeat:
            self._request.report(f"this sink cannot be rolled back and gets the rewound batches again: {sink}")

    def _answer_start_request(self, status: RequestStatus, error: str | None) -> None:
        if self._request.start_request_id is not None:
            self._stream.catalog.requests.resolve(
                self._lease.record, self._request.start_request_id, status, error=error
            )
