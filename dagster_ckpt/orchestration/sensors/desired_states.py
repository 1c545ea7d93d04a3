"""The part of the supervisor sensor that reconciles managed streams with their desired state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import ExecutionRecord
from dagster_ckpt.client.desired_state import is_steady
from dagster_ckpt.client.managed_stream import StepRun
from dagster_ckpt.client.reconciliation import Definition, Orchestrator, Step, StepRuns, reconcile_desired
from dagster_ckpt.errors import CkptError, StreamNotFoundError
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.runs.run_status import (
    DEPLOYMENT_TAG,
    RETENTION_OF_TAG,
    START_REQUEST_TAG,
    STEP_TAG,
    STREAM_ID_TAG,
    TERMINAL_FAILURE_TAG,
)
from dagster_ckpt.policies.restart import restart_description
from dagster_ckpt.stream.recorded_settings import RecordedSettings


def report_terminal_failure(
    instance: dg.DagsterInstance, catalog: Catalog, execution: ExecutionRecord, reason: str
) -> str:
    """Report a permanent failure on the stream's last run, in its tags and in the catalog; returns the message.

    The tag `dagster_ckpt/terminal_failure` tells run failure sensors that no restart follows.
    """
    failures = len(catalog.executions.failures_since_manual_start(execution.stream_id))
    message = (
        f"The stream {execution.stream_id} has failed for good after {failures} "
        f"{'failure' if failures == 1 else 'failures'}: {reason} The last one: {execution.reason}. Remove the "
        f"cause, then start the stream's job again, or run restart_stream_job for {execution.stream_id}; it continues "
        "from where it stopped."
    )
    catalog.executions.record_terminal_failure(execution.execution_id, reason)
    run = instance.get_run_by_id(execution.run_id)
    if run is not None:
        instance.add_run_tags(run.run_id, {TERMINAL_FAILURE_TAG: reason})
        instance.report_engine_event(message, run)
    return message


# Number of the next run for a tag value, or None for now.
NextAttempt = Callable[[str, str], int | None]


@dataclass(frozen=True)
class ReconcileResult:
    """The result for all managed streams.

    `runs` has no starts, which are requested in the catalog; `held`: streams that the restart strategy must not start
    now; `messages` and `alerts`: for the sensor's log.
    """

    runs: tuple[dg.RunRequest, ...]
    held: frozenset[str]
    messages: tuple[str, ...]
    alerts: tuple[str, ...]


@dataclass(frozen=True)
class StepJobs:
    """Jobs for steps that take too long for a sensor."""

    retention: str
    roll_back: str


def reconcile_desired_states(
    instance: dg.DagsterInstance,
    catalog: Catalog,
    streams: Mapping[str, Stream],
    jobs: StepJobs,
    next_attempt: NextAttempt,
) -> ReconcileResult:
    """Take one step with each managed stream that is not in its desired state.

    One in its desired state costs one read.
    """
    rows = catalog.desired_states.all()
    managed = {
        stream_id
        for stream_id, stream in streams.items()
        # Not streams that something outside Dagster starts.
        if stream.start_job is not None and (stream_id in rows or stream.desired_state is not None)
    }
    if not managed:
        return ReconcileResult((), frozenset(), (), ())
    newest = catalog.executions.latest_of(sorted(managed))
    runs: list[dg.RunRequest] = []
    held: set[str] = set()
    messages: list[str] = []
    alerts: list[str] = []
    for stream_id in sorted(managed):
        stream = streams[stream_id]
        definition = _definition(stream)
        try:
            row = rows.get(stream_id) or _first_row(catalog, stream)
            if is_steady(row, definition.declared, newest.get(stream_id), definition.code_version):
                continue
            step = reconcile_desired(catalog, row, definition, _orchestrator(instance, catalog.deployment_id))
        except CkptError as error:
            # One unreadable row must not block the others.
            alerts.append(f"{stream_id}: no action: {error}")
            continue
        messages.append(f"{stream_id}: {step.decision.reason}")
        if step.decision.holds_restart:
            held.add(stream_id)
        if step.decision.alert is not None and step.decision.alert != row.alert:
            alerts.append(f"{stream_id}: {step.decision.alert}")
        attempt = next_attempt(STEP_TAG, step.step_name) if step.run is not None else None
        if attempt is not None:
            execution = newest.get(stream_id)
            execution_id = execution.execution_id if execution is not None else ""
            ids = {"execution_id": execution_id, "deployment_id": catalog.deployment_id}
            runs.append(_run(stream, step, jobs, attempt, **ids))
    return ReconcileResult(tuple(runs), frozenset(held), tuple(messages), tuple(alerts))


def _definition(stream: Stream) -> Definition:
    # An external driver's code comes from elsewhere.
    code_version = None if stream.runs_externally else stream.code_version
    return Definition(stream.stream_id, stream.desired_state, stream.upgrade, code_version)


def _first_row(catalog: Catalog, stream: Stream) -> DesiredRecord:
    try:
        catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        settings = RecordedSettings(
            options=stream.options,
            restart=restart_description(stream.restart),
            storage=stream.options.storage,
            is_own_storage=stream.options.storage is not None,
        )
        catalog.streams.ensure(
            stream.stream_id, name=stream.name, asset_key=stream.writes, options=settings.as_record()
        )
    return catalog.desired_states.ensure(stream.stream_id, origin="the asset's definition")


def _orchestrator(instance: dg.DagsterInstance, deployment_id: str) -> Orchestrator:
    def run_is_over(run_id: str) -> bool:
        run = instance.get_run_by_id(run_id)
        return run is None or run.is_finished

    def start_request_of(run_id: str) -> str | None:
        run = instance.get_run_by_id(run_id)
        return run.tags.get(START_REQUEST_TAG) if run is not None else None

    def runs_of_step(step: str) -> StepRuns:
        runs = instance.get_runs(dg.RunsFilter(tags={STEP_TAG: step, DEPLOYMENT_TAG: deployment_id}))
        failed = [run for run in runs if run.is_finished and run.status is not dg.DagsterRunStatus.SUCCESS]
        return StepRuns(len(failed), any(run.status is dg.DagsterRunStatus.SUCCESS for run in runs))

    return Orchestrator(run_is_over, start_request_of, runs_of_step)


def _run(
    stream: Stream, step: Step, jobs: StepJobs, attempt: int, *, execution_id: str, deployment_id: str
) -> dg.RunRequest:
    tags = {STREAM_ID_TAG: stream.stream_id, DEPLOYMENT_TAG: deployment_id, STEP_TAG: step.step_name}
    config: dict[str, str | bool]
    if step.run is StepRun.PREFLIGHT and stream.start_job is not None:
        # The stream's own job has what the function needs.
        job_name, op = stream.start_job.name, stream.name
        config = {"preflight": True}
    elif step.run is StepRun.ROLL_BACK:
        job_name, op = jobs.roll_back, "roll_back_upgrade"
        config = {"stream_id": stream.stream_id}
    else:
        job_name, op = jobs.retention, "apply_retention"
        config = {"stream_id": stream.stream_id, "execution_id": execution_id, "state": "CANCELED"}
        tags[RETENTION_OF_TAG] = execution_id
    return dg.RunRequest(
        run_key=f"{step.step_name}/{attempt}",
        job_name=job_name,
        run_config={"ops": {op: {"config": config}}},
        tags=tags,
    )
