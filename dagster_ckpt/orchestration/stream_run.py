"""The body of a streaming asset's op.

A user's cancel, a timeout and a server shutdown look the same from inside, so the run's status as Dagster recorded it,
and never the signal, decides whether the stream was canceled or failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import dagster as dg
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    ExecutionStatus,
    LeaseRecord,
    RequestStatus,
    SnapshotStatus,
    StartCause,
)
from dagster_ckpt.client.launching import hand_over, hands_over
from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.client.spares import prepared_spare
from dagster_ckpt.errors import CkptError, RecoveryExhaustedError
from dagster_ckpt.orchestration._compat import (
    DagsterExecutionInterruptedError,
    capture_interrupts,
    check_captured_interrupt,
    plan_outside_runs,
)
from dagster_ckpt.orchestration.downstream import batch_inputs_of
from dagster_ckpt.orchestration.metadata import markdown_table
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.restart_in_run import can_restart_in_run, restarting_in_run
from dagster_ckpt.orchestration.run_status import (
    CRASHED,
    PARENT_RUN_ID_TAG,
    RESTART_OF_TAG,
    RETRY_NUMBER_TAG,
    ROOT_RUN_ID_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
    RunWatch,
    StepContext,
    canceled_by_user,
    has_time_limit,
    refuse_overridden_resources,
    report_canceling,
    report_terminal_failure,
    run_failure,
    run_is_over,
    run_tags,
    start_cause,
    transitions_in_run_log,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.stream import StreamSpec, asset_names, open_stream
from dagster_ckpt.policies.upgrade import UnexpectedRows
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.execution_end import settle_run
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest
from dagster_ckpt.runtime.start import start_stream_query
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.query import SupervisedQuery, jvm_pid
from dagster_ckpt.spark.query.session import active_in_thread, application_of, apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import refuse_while_written
from dagster_ckpt.stream.liveness import UNSEEN_JVM
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import rounded_duration, size, utc_time
from dagster_ckpt.values.redaction import cause_to_show, without_secrets

RUN_KEY = "dagster_ckpt/run"
SNAPSHOTS_KEY = "dagster_ckpt/last_snapshots"
SHOWN_SNAPSHOTS = 5

_LOG = logging.getLogger(__name__)


def run_stream(
    context: StepContext,
    spec: StreamSpec,
    resources: DeploymentResources,
    describe: Callable[[], DataStreamWriter],
    *,
    check: Callable[[StepContext], None],
) -> Generator[Any, None, Outcome | None]:
    """Carry out `StreamResource.run`. `check` validates the op and its run before anything starts."""

    def work() -> _Ended:
        with transitions_in_run_log(context, spec.stream_id):
            return _run_to_its_end(context, spec, resources, describe, check)

    # An interrupt inside a py4j call would hang the next one.
    with capture_interrupts():
        try:
            if spec.restart_in_run and can_restart_in_run(context):
                is_preflight = bool(context.op_execution_context.op_config.get("preflight"))
                prepare = partial(_stand_by, resources) if spec.standby and not is_preflight else None
                handle = partial(_handle_of_this_step, context, spec, resources)
                ended = restarting_in_run(context, handle, work, prepare=prepare)
            else:
                if spec.standby:
                    context.log.warning("This run has no spare process, because its process is not that of a restart.")
                ended = work()
        except dg.Failure as failure:
            run = context.instance.get_run_by_id(context.run.run_id)
            if run is not None and run.is_finished:
                # A failure would overwrite a forced CANCELED; an interrupted run keeps its status.
                raise DagsterExecutionInterruptedError(failure.description) from failure
            raise
    for observation in ended.observations:
        context.log_event(observation)
    yield from ()
    return ended.outcome


def _stand_by(resources: DeploymentResources) -> Callable[[], bool]:
    """Start Spark in a spare process; return a check that it is still of use."""
    with capture_interrupts():
        spark = resources.spark_session
        # Again: creating a session replaces the SIGINT handler.
        with capture_interrupts():
            apply_state_backend(spark, resources.state_backend.backend())
            lives = prepared_spare(spark)
    return lambda: lives() and not check_captured_interrupt()


@dataclass(frozen=True)
class _Ended:
    outcome: Outcome | None
    observations: tuple[dg.AssetObservation, ...] = ()


def _run_to_its_end(
    context: StepContext,
    spec: StreamSpec,
    resources: DeploymentResources,
    describe: Callable[[], DataStreamWriter],
    check: Callable[[StepContext], None],
) -> _Ended:
    # A run from the asset's page has no tags yet.
    context.instance.add_run_tags(context.run.run_id, {STREAM_ID_TAG: spec.stream_id})
    plan_outside_runs(context.instance, [each.key for each in _written(context)])
    watch = RunWatch(context.instance, context.run.run_id, signalled=check_captured_interrupt)
    try:
        check(context)
        refuse_overridden_resources(context)
        config = StreamRunConfig.from_op_config(context.op_execution_context.op_config)
        handle = _handle_of_this_step(context, _with_run_config(spec, config), resources)
        context.instance.add_run_tags(context.run.run_id, run_tags(handle.catalog, spec.stream_id))
        step = _Step(context, handle, resources, describe, watch, spec.unexpected_rows)
        done = step.preflight(config) if config.preflight else step.run(config)
    except CkptError as error:
        if isinstance(error, RecoveryExhaustedError):
            last = handle.catalog.executions.latest(handle.stream_id)
            if last is not None:
                report_terminal_failure(context.instance, handle.catalog, last, str(error))
        _refuse_start(context, resources, error)
        raise run_failure(str(error), type(error).__name__) from cause_to_show(error)
    except Exception as error:  # noqa: BLE001 - raised again, as the cause of a failure
        # A retry by Dagster would start in this same process.
        raise run_failure(f"The stream crashed: {_describe_error(error)}", CRASHED) from cause_to_show(error)
    if isinstance(done, PreflightRecord):
        check_preflight(context, handle, done)
        return _Ended(None)
    return _Ended(done, _settle(context, handle, done, watch))


def _refuse_start(context: StepContext, resources: DeploymentResources, error: CkptError) -> None:
    asked = context.run.tags.get(START_REQUEST_TAG)
    if asked is not None:
        with suppress(CkptError):
            resources.checkpoint_catalog.catalog().requests.fail_start(asked, f"{type(error).__name__}: {error}")


def _describe_error(error: Exception) -> str:
    message = f"{type(error).__name__}: {error}"
    if not isinstance(error, ConnectionError | Py4JNetworkError):
        return message
    return (
        f"{message}. The JVM of the Spark session has ended: it was killed, or ran out of memory (see "
        "spark.driver.memory). The restart strategy decides about a restart."
    )


def _with_run_config(spec: StreamSpec, config: StreamRunConfig) -> StreamSpec:
    if config.checkpointing is None:
        return spec
    return replace(spec, options=spec.options.overridden(config.checkpointing.model_dump()))


def _handle_of_this_step(context: StepContext, spec: StreamSpec, resources: DeploymentResources) -> StreamHandle:
    step = context.op_execution_context
    written = _written(context)
    return open_stream(
        spec,
        resources,
        name=step.op_handle.name,
        writes=asset_names([each.key for each in written]) or step.op_handle.name,
        code_version=written[0].code_version if written else None,
    )


def _written(context: StepContext) -> list[dg.AssetSpec]:
    step = context.op_execution_context
    return list(step.assets_def.specs) if step.has_assets_def else []


@dataclass(frozen=True)
class _Step:
    context: StepContext
    handle: StreamHandle
    resources: DeploymentResources
    describe: Callable[[], DataStreamWriter]
    watch: RunWatch
    unexpected: UnexpectedRows | None

    def preflight(self, config: StreamRunConfig) -> PreflightRecord:
        with self._in_session():
            return preflight(
                self.handle,
                self.describe,
                start_from=config.parsed().of_state,
                interrupted=self.watch.should_stop,
                report=self.context.log.info,
            )

    def run(self, config: StreamRunConfig) -> Outcome:
        context, handle = self.context, self.handle
        asked, start_from = context.run.tags.get(START_REQUEST_TAG), self._start_from(config)
        request = handle.catalog.requests.find(asked)
        was_answered = request is not None and request.status in (RequestStatus.COMPLETED, RequestStatus.FAILED)
        if not hands_over(handle, asked):
            refuse_while_written(handle.catalog, handle.stream_id, holder_is_over=self._holder_is_over)
        with self._in_session():
            # Only to check it: the start describes the query again.
            checked = QueryToStart(self.describe).described
            hand_over(
                handle,
                asked,
                checked,
                start_from,
                unexpected=self.unexpected,
                interrupted=self.watch.should_stop,
                report=context.log.info,
            )
        to_start = QueryToStart(self.describe)

        def start(live: LiveDirectory) -> SupervisedQuery:
            return start_stream_query(handle, to_start.take(), live)

        before = handle.catalog.executions.of_run(context.run.run_id)
        started = [each for each in before if each.stream_id == handle.stream_id]
        cause = start_cause(context.run.tags, has_started=bool(started))
        restart_of = started[0].execution_id if started else context.run.tags.get(RESTART_OF_TAG)
        with self._in_session() as spark:
            return execute_stream(
                handle,
                RunRequest(
                    run_id=context.run.run_id,
                    start_query=start,
                    describe=to_start.described,
                    start_from=start_from,
                    cause=cause,
                    start_request_id=asked,
                    start_was_answered=was_answered,
                    restart_of=restart_of if cause is StartCause.RESTART_NEW_RUN else None,
                    jvm_pid=jvm_pid(spark) or UNSEEN_JVM,
                    interrupted=self.watch.should_stop,
                    interrupted_as=lambda: _interrupted_as(context),
                    application=application_of(spark),
                    is_launched=True,
                    batch_inputs=batch_inputs_of(
                        context.op_execution_context, handle.catalog, [each.key for each in _written(context)]
                    ),
                    holder_is_over=self._holder_is_over,
                ),
            )

    @contextmanager
    def _in_session(self) -> Iterator[SparkSession]:
        spark = self.resources.spark_session
        apply_state_backend(spark, self.resources.state_backend.backend())
        # Again: creating a session replaces the SIGINT handler.
        with capture_interrupts(), active_in_thread(spark):
            yield spark

    def _holder_is_over(self, lease: LeaseRecord) -> bool:
        return run_is_over(self.context.instance, lease.run_id)

    def _start_from(self, config: StreamRunConfig) -> StartFrom:
        """Return where to start; a restart in this run, or a retry of a started one, does not rewind again."""
        tags = self.context.run.tags
        before: set[str | None] = {self.context.run.run_id}
        if RETRY_NUMBER_TAG in tags:
            before |= {tags.get(PARENT_RUN_ID_TAG), tags.get(ROOT_RUN_ID_TAG)}
        executions = self.handle.catalog.executions.of_stream(self.handle.stream_id)
        if any(each.run_id in before and each.live_directory for each in executions):
            self.context.log.info("this run has started the stream before: it continues from the latest state")
            return StartFrom()
        return config.parsed()


def check_preflight(context: StepContext, handle: StreamHandle, result: PreflightRecord) -> None:
    """Fail the run after a refusal, so that alerts on failed runs fire."""
    if not result.passed:
        raise run_failure(
            f"Code version {result.code_version} cannot continue from the state of {handle.stream_id}: "
            f"{result.reason}. Nothing was changed.",
            "PREFLIGHT_REFUSED",
        )
    context.log.info(f"code version {result.code_version} passed: {result.reason}")


def _settle(
    context: StepContext, handle: StreamHandle, outcome: Outcome, watch: RunWatch
) -> tuple[dg.AssetObservation, ...]:
    """Apply retention if the end is certain, and end the step; return what to report of its assets."""
    end = outcome.end
    # Before retention, which deletes what the report lists.
    report = run_report(handle, outcome)
    if end.kind is EndKind.INTERRUPTED:
        context.log.info(f"stopped: {watch.reason}" if watch.reason else end.reason)
        _end_interrupted(context, handle, outcome, report)
    if end.kind is EndKind.CANCEL_REQUESTED:
        report_canceling(context, end.reason)
        settle_run(handle, outcome)
        raise run_failure(f"The stream was canceled: {end.reason}", "CANCELED", report)
    if end.kind is EndKind.LEASE_LOST:
        raise run_failure(end.reason, "LEASE_LOST", report)
    settle_run(handle, outcome)
    if end.kind is EndKind.FAILED:
        last = handle.catalog.executions.get(outcome.execution_id)
        report_terminal_failure(context.instance, handle.catalog, last, outcome.terminal_failure or end.reason)
        raise run_failure(f"The stream failed and will not be restarted: {end.reason}", "FAILED", report)
    description = f"run ended: {end.kind.name}"
    written = _written(context) if report else ()
    return tuple(dg.AssetObservation(each.key, description=description, metadata=report) for each in written)


def _end_interrupted(
    context: StepContext, handle: StreamHandle, outcome: Outcome, report: Mapping[str, Any]
) -> NoReturn:
    canceled = canceled_by_user(context)
    if canceled is not None:
        if canceled is dg.DagsterRunStatus.CANCELING:
            settle_run(handle, outcome, is_canceled=True)
        # Otherwise the supervisor sensor applies retention.
        raise run_failure("The stream was canceled: its run was terminated.", "CANCELED", report)
    # After a time limit a run is CANCELING, then FAILURE; the supervisor sensor settles it.
    raise run_failure(
        "The stream's process was asked to stop; the supervisor sensor decides whether it is restarted. To keep it "
        f"down: dagster-ckpt stop {handle.stream_id} --no-savepoint",
        "INTERRUPTED",
        report,
    )


def _interrupted_as(context: StepContext) -> ExecutionStatus | None:
    if canceled_by_user(context) is not None:
        return ExecutionStatus.CANCELED
    # A time limit looks like a user until the run has ended.
    return None if has_time_limit(context.instance, context.run.tags) else ExecutionStatus.FAILED


def run_report(stream: StreamHandle, outcome: Outcome) -> dict[str, Any]:
    """Describe the run; nothing if the catalog cannot be read, which must not change the end."""
    try:
        return _report_of(stream, outcome)
    except CkptError as error:
        _LOG.warning("The run ends without a report: %s", error)
        return {}


def _report_of(stream: StreamHandle, outcome: Outcome) -> dict[str, Any]:
    execution = stream.catalog.executions.get(outcome.execution_id)
    taken = stream.catalog.history.of_execution(stream.stream_id, execution.execution_id, limit=SHOWN_SNAPSHOTS)
    ended_at_ms = execution.ended_at_ms or stream.catalog.now_ms()
    facts = {
        "end": f"{outcome.end.kind.name}: {without_secrets(outcome.end.reason)}",
        "started": utc_time(execution.started_at_ms),
        "ran for": rounded_duration(ended_at_ms - execution.started_at_ms),
        "started from": _origin(execution),
        "newest batch": (execution.progress or {}).get("batch_id", "none"),
        "snapshots": f"{taken.completed:,} completed, {size(taken.new_bytes)} written",
        "failed attempts": taken.failed,
    }
    rows = [
        (
            describe_snapshot(each),
            each.status.value if each.status is not SnapshotStatus.COMPLETED else "",
            size(each.full_bytes),
            size(each.incremental_bytes),
            "-" if each.duration_ms is None else rounded_duration(each.duration_ms),
        )
        for each in taken.newest
    ]
    return {
        RUN_KEY: dg.MetadataValue.md(markdown_table(("", ""), facts.items())),
        SNAPSHOTS_KEY: dg.MetadataValue.md(markdown_table(("newest first", "", "size", "new", "took"), rows)),
    }


def _origin(execution: ExecutionRecord) -> str:
    recovery = execution.recovery or {}
    kind, batch_id = str(recovery.get("kind", "unknown")), recovery.get("to_batch")
    return kind if batch_id is None else f"{kind} after batch {batch_id}"
