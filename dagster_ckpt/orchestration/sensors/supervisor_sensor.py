"""The supervisor sensor, a reconciler: it launches starts, restarts failed streams, cleans up after killed ones."""

from collections.abc import Iterator, Sequence
from random import Random

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, RequestRecord
from dagster_ckpt.client.reconciliation import Restart, Retain, Wait, reconcile
from dagster_ckpt.orchestration.assets.stream import Stream, translator_of
from dagster_ckpt.orchestration.resources.resources import catalog_of
from dagster_ckpt.orchestration.runs.run_status import (
    DEPLOYMENT_TAG,
    RESTART_OF_TAG,
    RETENTION_OF_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
)
from dagster_ckpt.orchestration.sensors.desired_states import (
    StepJobs,
    reconcile_desired_states,
    report_terminal_failure,
)
from dagster_ckpt.orchestration.sensors.observed_runs import (
    Silences,
    observed_ends,
    report_lost_runs,
    undefined_streams,
)
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG
from dagster_ckpt.stream.liveness import holds_lease
from dagster_ckpt.stream.start_from import set_options
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import TerminalState

# Pause before an unsuccessful run is repeated, doubled each time.
FIRST_PAUSE_MS = 10_000
LONGEST_PAUSE_MS = 600_000


def build_supervisor_sensor(
    streams: Sequence[Stream],
    retention_job: dg.JobDefinition,
    roll_back_job: dg.JobDefinition,
    *,
    name: str | None = None,
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """Define a sensor that reconciles streams with their intended state.

    - It restarts a failed or killed run from the latest state, according to the restart strategy.
    - It brings managed streams to their desired state and code version.
    - It launches requested starts (`restart_stream_job`).
    - It records the end of runs whose process died without recording it.
    - It reports streams that failed permanently or are no longer defined.
    - It launches retention for an execution that ended without cleaning up.

    Args:
        retention_job: From `build_retention_jobs`.
        roll_back_job: From `build_desired_state_jobs`.
        name: Default: `checkpoint_supervisor_sensor`, as the translator names it.
    """
    by_stream_id = {stream.stream_id: stream for stream in streams}
    silences = Silences()
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)

    @dg.sensor(
        name=name or translator.get_sensor_name("checkpoint_supervisor_sensor"),
        required_resource_keys={catalog_key},
        jobs=[*(stream.start_job for stream in streams if stream.start_job is not None), retention_job, roll_back_job],
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Brings streams to their desired state, restarts failed ones from their latest state, launches "
        "starts that operators requested, and launches retention for runs that died before they could clean up.",
    )
    def checkpoint_supervisor_sensor(
        context: dg.SensorEvaluationContext,
    ) -> dg.SensorResult:
        catalog = catalog_of(context, catalog_key)
        deployment_id = catalog.deployment_id
        messages = report_lost_runs(context.instance, catalog, by_stream_id, silences)
        # First: it requests starts, which are launched below.
        reconciled = reconcile_desired_states(
            context.instance,
            catalog,
            by_stream_id,
            StepJobs(retention_job.name, roll_back_job.name),
            lambda tag, value: _next_attempt(context.instance, deployment_id, tag, value),
        )
        messages += reconciled.messages
        for alert in reconciled.alerts:
            context.log.error(alert)
        starts = list(_starts(context.instance, catalog, by_stream_id, messages))
        # A requested start replaces the restart of a failed run: both would compete for the lease.
        starting = {request.tags[STREAM_ID_TAG] for request in starts} | reconciled.held
        others = {stream_id: stream for stream_id, stream in by_stream_id.items() if stream_id not in starting}
        requests = [*reconciled.runs, *starts, *_reconciled(context, catalog, others, retention_job.name, messages)]
        origin = context.code_location_origin
        undefined = undefined_streams(
            context.instance, catalog, by_stream_id, origin.location_name if origin is not None else None
        )
        for message in messages:
            context.log.info(message)
        for message in undefined:
            context.log.warning(message)
        messages += undefined
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None
            if requests
            else dg.SkipReason("; ".join(messages) or "no action needed: all streams are in their desired state"),
        )

    return checkpoint_supervisor_sensor


def _starts(
    instance: dg.DagsterInstance, catalog: Catalog, streams: dict[str, Stream], messages: list[str]
) -> Iterator[dg.RunRequest]:
    for request in catalog.requests.starts_to_launch():
        stream = streams.get(request.stream_id)
        # An external program picks up the request itself.
        if stream is None or stream.start_job is None or _has_a_launcher(instance, request):
            continue
        ended = _run_that_never_answered(instance, request, catalog.deployment_id)
        if ended is not None:
            catalog.requests.fail_start(request.request_id, ended)
            messages.append(f"{request.stream_id}: {ended}")
        else:
            messages.append(
                f"{request.stream_id}: starting from {request.arguments.get('start_from')} for {request.origin}"
            )
            yield _start_run(stream, request, catalog.deployment_id)


def _has_a_launcher(instance: dg.DagsterInstance, request: RequestRecord) -> bool:
    """Whether a run in progress submitted this request and launches the driver itself."""
    run_id = request.arguments.get("run_id")
    run = instance.get_run_by_id(run_id) if run_id is not None else None
    return run is not None and not run.is_finished


def _run_that_never_answered(instance: dg.DagsterInstance, request: RequestRecord, deployment_id: str) -> str | None:
    """Why a run launched for a request ended before its stream could answer, or None."""
    runs = instance.get_runs(
        dg.RunsFilter(tags={START_REQUEST_TAG: request.request_id, DEPLOYMENT_TAG: deployment_id}), limit=1
    )
    if not runs or not runs[0].is_finished:
        return None
    return f"run {runs[0].run_id} ended {runs[0].status.value} before it could start the stream; its log says why"


def _start_run(stream: Stream, request: RequestRecord, deployment_id: str) -> dg.RunRequest:
    assert stream.start_job is not None
    return dg.RunRequest(
        # One run per request, however often it is evaluated.
        run_key=f"start-{request.request_id}",
        job_name=stream.start_job.name,
        run_config={"ops": {stream.name: {"config": set_options(request.arguments)}}},
        tags={
            STREAM_ID_TAG: stream.stream_id,
            DEPLOYMENT_TAG: deployment_id,
            START_REQUEST_TAG: request.request_id,
        },
    )


def _reconciled(
    context: dg.SensorEvaluationContext,
    catalog: Catalog,
    streams: dict[str, Stream],
    retention_job: str,
    messages: list[str],
) -> Iterator[dg.RunRequest]:
    """Restart an ended execution, apply retention, or wait."""
    for end in observed_ends(context.instance, catalog, streams):
        stream, execution = end.stream, end.execution
        if stream.start_job is None:
            messages.append(f"{execution.stream_id}: not restarted, because its program is started outside Dagster")
            continue
        verdict = reconcile(
            end.recorded,
            execution.status,
            stream.restart,
            catalog.executions.failures_since_manual_start(execution.stream_id),
            holds_lease=holds_lease(catalog, execution.stream_id, execution.run_id),
            now_ms=catalog.now_ms(),
            random=Random(execution.execution_id),
        )
        messages.append(f"{execution.stream_id}: {verdict.reason}")
        if isinstance(verdict, Restart):
            attempt = _next_attempt(context.instance, catalog.deployment_id, RESTART_OF_TAG, execution.execution_id)
            if attempt is not None:
                yield _restart(stream, execution, attempt, catalog.deployment_id)
        elif isinstance(verdict, Retain):
            attempt = _next_attempt(context.instance, catalog.deployment_id, RETENTION_OF_TAG, execution.execution_id)
            if attempt == 0 and verdict.state is TerminalState.FAILED:
                context.log.error(report_terminal_failure(context.instance, catalog, execution, verdict.reason))
            if attempt is not None:
                yield _retention(retention_job, execution, verdict, attempt, catalog.deployment_id)
        else:
            assert isinstance(verdict, Wait)


def _next_attempt(instance: dg.DagsterInstance, deployment_id: str, tag: str, value: str) -> int | None:
    """Number of the next run with a tag, or None while one is in progress or failed too recently."""
    attempts = instance.get_run_records(dg.RunsFilter(tags={tag: value, DEPLOYMENT_TAG: deployment_id}))
    if not all(record.dagster_run.is_finished for record in attempts):
        return None
    if attempts:
        pause_ms = min(FIRST_PAUSE_MS * 2 ** min(len(attempts) - 1, 20), LONGEST_PAUSE_MS)
        last_ms = max(record.update_timestamp.timestamp() for record in attempts) * 1000
        # A clock that is behind must not delay anything.
        if abs(wall_clock_ms() - last_ms) < pause_ms:
            return None
    return len(attempts)


def _restart(stream: Stream, execution: ExecutionRecord, attempts_before: int, deployment_id: str) -> dg.RunRequest:
    assert stream.start_job is not None
    return dg.RunRequest(
        # It ended before it could begin an execution.
        run_key=f"restart-{execution.execution_id}-{attempts_before}",
        job_name=stream.start_job.name,
        tags={
            STREAM_ID_TAG: stream.stream_id,
            DEPLOYMENT_TAG: deployment_id,
            RESTART_OF_TAG: execution.execution_id,
        },
    )


def _retention(
    retention_job: str, execution: ExecutionRecord, verdict: Retain, attempts_before: int, deployment_id: str
) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"retention-{execution.execution_id}-{attempts_before}",
        job_name=retention_job,
        run_config={
            "ops": {
                "apply_retention": {
                    "config": {
                        "stream_id": execution.stream_id,
                        "execution_id": execution.execution_id,
                        "state": verdict.state.value,
                    }
                }
            }
        },
        tags={
            STREAM_ID_TAG: execution.stream_id,
            DEPLOYMENT_TAG: deployment_id,
            RETENTION_OF_TAG: execution.execution_id,
        },
    )
