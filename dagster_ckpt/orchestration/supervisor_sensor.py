"""The supervisor sensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import ExecutionRecord, RequestRecord
from dagster_ckpt.client.desired_state import is_steady
from dagster_ckpt.client.health import HealthCheck, Verdict, judge
from dagster_ckpt.client.health_facts import HealthSettings, health_facts
from dagster_ckpt.client.managed_stream import StepRun
from dagster_ckpt.client.reconciliation import (
    Definition,
    Orchestrator,
    Restart,
    Retain,
    Step,
    StepRuns,
    Wait,
    reconcile,
    reconcile_desired,
)
from dagster_ckpt.errors import CkptError, StreamNotFoundError
from dagster_ckpt.orchestration._compat import RunSlots, run_slots
from dagster_ckpt.orchestration.observed_runs import (
    Claims,
    ObservedEnd,
    Silences,
    has_left_its_run,
    observed_ends,
    report_lost_runs,
    undefined_streams,
)
from dagster_ckpt.orchestration.resources import catalog_of
from dagster_ckpt.orchestration.run_status import (
    DEPLOYMENT_TAG,
    RESTART_OF_TAG,
    RETENTION_OF_TAG,
    START_REQUEST_TAG,
    STEP_TAG,
    STREAM_ID_TAG,
    report_terminal_failure,
    run_is_over,
)
from dagster_ckpt.orchestration.stream import Stream, translator_of
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG
from dagster_ckpt.policies.restart import restart_description
from dagster_ckpt.stream.liveness import holds_lease
from dagster_ckpt.stream.recorded_settings import RecordedSettings
from dagster_ckpt.stream.start_from import set_options
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import TerminalState

# Pause before an unsuccessful run is repeated, doubled each time.
FIRST_PAUSE_MS = 10_000
LONGEST_PAUSE_MS = 600_000
# A run key has the number of the attempt before the deployment.
_RUN_KEY_TAG = "dagster/run_key"
_ATTEMPT_IN_KEY = re.compile(r"[-/](\d+)@")


def build_supervisor_sensor(
    streams: Sequence[Stream],
    retention_job: dg.JobDefinition,
    roll_back_job: dg.JobDefinition,
    *,
    health: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
) -> dg.SensorDefinition:
    """Define a sensor that reconciles streams with their desired state.

    - It restarts a failed or killed run from the latest state, according to the restart strategy.
    - It brings managed streams to their desired state and code version.
    - It launches requested starts (`restart_stream_job`).
    - It records the end of runs whose process died, and launches retention after them.
    - It reports streams that failed permanently or are no longer defined, and a run queue that is too small.

    Args:
        health: Thresholds for upgrades with `rollback_if_unhealthy`, for all or by stream id.
    """
    thresholds = health if isinstance(health, Mapping) else {stream.stream_id: health for stream in streams}
    by_stream_id = {stream.stream_id: stream for stream in streams}
    silences, undefined_since = Silences(), Silences()
    logged_advice: set[str] = set()
    held_slots = sum(stream.start_job is not None for stream in streams)
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)
    sensor_name = translator.get_sensor_name("checkpoint_supervisor_sensor")
    claims = Claims(sensor_name)

    @dg.sensor(
        name=sensor_name,
        required_resource_keys={catalog_key},
        jobs=[*(stream.start_job for stream in streams if stream.start_job is not None), retention_job, roll_back_job],
        minimum_interval_seconds=5,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Brings streams to their desired state, restarts failed ones from their latest state, launches "
        "starts that operators requested, and launches retention for runs that died before they could clean up.",
    )
    def checkpoint_supervisor_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        catalog = catalog_of(context, catalog_key)
        tick = SupervisorTick(
            context.instance, catalog, by_stream_id, retention_job.name, roll_back_job.name, health=thresholds
        )
        tick.messages.extend(report_lost_runs(context.instance, catalog, by_stream_id, silences, tick.alerts))
        # First, as it requests starts, which are launched below.
        steps, held = tick.reconcile_desired_states()
        starts = list(tick.requested_starts())
        # These replace the restart of a failed run: both would compete for the lease.
        starting = {request.tags[STREAM_ID_TAG] for request in starts} | held | tick.starting
        requests = [*steps, *starts, *tick.after_ends(except_of=starting)]
        origin = context.code_location_origin
        location = origin.location_name if origin is not None else None
        undefined = undefined_streams(
            context.instance, catalog, by_stream_id, location, silences=undefined_since, claims=claims
        )
        slots = describe_slots(run_slots(context.instance, STREAM_ID_TAG), held_slots)
        for advice in (slots, describe_monitoring(context.instance)):
            if advice is not None and advice not in logged_advice:
                logged_advice.add(advice)
                context.log.warning(advice)
        for alert in tick.alerts:
            context.log.error(alert)
        for message in tick.messages:
            context.log.info(message)
        for message in undefined:
            context.log.warning(message)
        messages = [*tick.messages, *undefined]
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None
            if requests
            else dg.SkipReason("; ".join(messages) or "no action needed: all streams are in their desired state"),
        )

    return checkpoint_supervisor_sensor


@dataclass(frozen=True)
class SupervisorTick:
    """One evaluation; `starting` are streams that a run under way is about to start."""

    instance: dg.DagsterInstance
    catalog: Catalog
    streams: Mapping[str, Stream]
    retention_job: str
    roll_back_job: str
    messages: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    starting: set[str] = field(default_factory=set)
    health: Mapping[str, HealthSettings] = field(default_factory=dict)

    def reconcile_desired_states(self) -> tuple[list[dg.RunRequest], set[str]]:
        """Take one step with each managed stream that is not in its desired state.

        Returns runs of long steps, and streams that the restart strategy must not start now.
        """
        rows = self.catalog.desired_states.all()
        managed = {
            stream_id
            for stream_id, stream in self.streams.items()
            # Otherwise something outside Dagster starts the stream.
            if stream.start_job is not None and (stream_id in rows or stream.spec.desired_state is not None)
        }
        newest = self.catalog.executions.latest_of(sorted(managed)) if managed else {}
        runs: list[dg.RunRequest] = []
        held: set[str] = set()
        for stream_id in sorted(managed):
            stream, execution = self.streams[stream_id], newest.get(stream_id)
            settings = self.health.get(stream_id) or HealthSettings()
            definition = _definition(stream, partial(_failing, self.catalog, stream, settings))
            try:
                row = rows.get(stream_id) or _first_row(self.catalog, stream)
                if is_steady(row, definition.declared, execution, definition.code_version):
                    continue
                step = reconcile_desired(self.catalog, row, definition, self._orchestrator())
            except CkptError as error:
                # One unreadable row must not block the others.
                self.alerts.append(f"{stream_id}: no action: {error}")
                continue
            decision = step.decision
            self.messages.append(f"{stream_id}: {decision.reason}")
            if decision.holds_restart:
                held.add(stream_id)
            if decision.alert is not None and decision.alert != row.alert:
                self.alerts.append(f"{stream_id}: {decision.alert}")
            attempt = self._next_attempt(STEP_TAG, step.step_name) if step.run is not None else None
            if attempt is not None:
                runs.append(self._run_of_step(stream, step, attempt, execution.execution_id if execution else ""))
        return runs, held

    def requested_starts(self) -> Iterator[dg.RunRequest]:
        for request in self.catalog.requests.starts_to_launch():
            stream = self.streams.get(request.stream_id)
            # An external program picks up the request itself.
            if stream is None or stream.start_job is None:
                continue
            run = self._run_of(request)
            if self._has_a_launcher(request) or (run is not None and not run.is_finished):
                self.starting.add(stream.stream_id)
                continue
            attempt = 0 if run is None else self._attempt_after(run, request)
            if attempt is None:
                continue
            if self._restart_is_under_way(stream.stream_id):
                # Both would compete for the lease. The start takes over once the restart has it.
                self.messages.append(f"{request.stream_id}: waiting for the restart that is under way")
                continue
            start_from = request.arguments.get("start_from")
            self.messages.append(f"{request.stream_id}: starting from {start_from} for {request.origin}")
            yield self._run(
                stream.start_job.name,
                # A re-created catalog may use the id again.
                f"start-{request.request_id}-{request.created_at_ms}/{attempt}",
                {STREAM_ID_TAG: stream.stream_id, START_REQUEST_TAG: request.request_id},
                {stream.name: set_options(request.arguments)},
            )

    def _attempt_after(self, run: dg.DagsterRun, request: RequestRecord) -> int | None:
        """Return the number of the next run for a request whose run ended without an answer; None: not now, or never.

        The request fails, unless the query has stopped for it already: then nothing else would continue the stream.
        """
        ended = f"run {run.run_id} ended {run.status.value} before it could start the stream; its log says why"
        if self.catalog.requests.give_up_start(request.request_id, ended):
            self.messages.append(f"{request.stream_id}: {ended}")
            return None
        self.messages.append(f"{request.stream_id}: {ended}. The query was stopped for it, so it is launched again")
        return self._next_attempt(START_REQUEST_TAG, request.request_id)

    def after_ends(self, *, except_of: Collection[str]) -> Iterator[dg.RunRequest]:
        others = {stream_id: stream for stream_id, stream in self.streams.items() if stream_id not in except_of}
        for end in observed_ends(self.instance, self.catalog, others, self.alerts):
            try:
                request = self._after(end)
            except CkptError as error:
                # One stream must not block the others.
                self.alerts.append(f"{end.execution.stream_id}: no action: {error}")
                continue
            if request is not None:
                yield request

    def _after(self, end: ObservedEnd) -> dg.RunRequest | None:
        stream, execution = end.stream, end.execution
        stream_id, execution_id = execution.stream_id, execution.execution_id
        if stream.start_job is None:
            self.messages.append(f"{stream_id}: not restarted, because its program is started outside Dagster")
            return None
        verdict = reconcile(
            end.recorded,
            execution.status,
            stream.spec.restart,
            self.catalog.executions.failures_since_manual_start(stream_id),
            holds_lease=holds_lease(self.catalog, stream_id, execution.run_id),
            now_ms=self.catalog.now_ms(),
            random=Random(execution_id),
        )
        self.messages.append(f"{stream_id}: {verdict.reason}")
        match verdict:
            case Restart():
                attempt = self._next_attempt(RESTART_OF_TAG, execution_id)
                if attempt is not None:
                    # Earlier attempts ended before they began an execution.
                    tags = {STREAM_ID_TAG: stream_id, RESTART_OF_TAG: execution_id}
                    return self._run(stream.start_job.name, f"restart-{execution_id}-{attempt}", tags)
            case Retain(state):
                attempt = self._next_attempt(RETENTION_OF_TAG, execution_id)
                if attempt == 0 and state is TerminalState.FAILED:
                    alert = report_terminal_failure(self.instance, self.catalog, execution, verdict.reason)
                    self.alerts.append(alert)
                if attempt is not None:
                    return self._retention(f"retention-{execution_id}-{attempt}", stream_id, execution_id, state)
            case Wait():
                pass
        return None

    def _has_a_launcher(self, request: RequestRecord) -> bool:
        """Whether a process carries out this request, or the run in progress that submitted it launches the driver."""
        run_id = request.arguments.get("run_id")
        is_launching = run_id is not None and not run_is_over(self.instance, run_id)
        return is_launching or self.catalog.requests.is_taken(request.request_id)

    def _restart_is_under_way(self, stream_id: str) -> bool:
        latest = self.catalog.executions.latest(stream_id)
        if latest is None or latest.settled:
            return False
        restarts = self.instance.get_runs(self._tagged(RESTART_OF_TAG, latest.execution_id))
        return not all(run.is_finished for run in restarts)

    def _run_of(self, request: RequestRecord) -> dg.DagsterRun | None:
        runs = self.instance.get_runs(self._tagged(START_REQUEST_TAG, request.request_id), limit=1)
        return runs[0] if runs else None

    def _next_attempt(self, tag: str, value: str) -> int | None:
        """Return the number of the next run with a tag; None while one is in progress or failed too recently."""
        attempts = self.instance.get_run_records(self._tagged(tag, value))
        if not all(record.dagster_run.is_finished for record in attempts):
            return None
        if attempts:
            pause_ms = min(FIRST_PAUSE_MS * 2 ** min(len(attempts) - 1, 20), LONGEST_PAUSE_MS)
            last_ms = max(record.update_timestamp.timestamp() for record in attempts) * 1000
            # A clock that is behind must not delay anything.
            if abs(wall_clock_ms() - last_ms) < pause_ms:
                return None
        # Runs may have been deleted, but a key that was used once starts nothing.
        keys = (record.dagster_run.tags.get(_RUN_KEY_TAG, "") for record in attempts)
        numbers = (int(match[1]) for key in keys if (match := _ATTEMPT_IN_KEY.search(key)) is not None)
        return max([len(attempts), *(number + 1 for number in numbers)])

    def _tagged(self, tag: str, value: str) -> dg.RunsFilter:
        return dg.RunsFilter(tags={tag: value, DEPLOYMENT_TAG: self.catalog.deployment_id})

    def _orchestrator(self) -> Orchestrator:
        def start_request_of(run_id: str) -> str | None:
            run = self.instance.get_run_by_id(run_id)
            return run.tags.get(START_REQUEST_TAG) if run is not None else None

        def runs_of_step(step: str) -> StepRuns:
            runs = self.instance.get_runs(self._tagged(STEP_TAG, step))
            failed = [run for run in runs if run.is_finished and run.status is not dg.DagsterRunStatus.SUCCESS]
            return StepRuns(len(failed), any(run.status is dg.DagsterRunStatus.SUCCESS for run in runs))

        def has_ended(execution: ExecutionRecord) -> bool:
            stream = self.streams[execution.stream_id]
            is_over = run_is_over(self.instance, execution.run_id)
            return is_over or has_left_its_run(self.instance, self.catalog, execution, stream)

        return Orchestrator(has_ended, start_request_of, runs_of_step)

    def _run_of_step(self, stream: Stream, step: Step, attempt: int, execution_id: str) -> dg.RunRequest:
        key, of_step = f"{step.step_name}/{attempt}", {STEP_TAG: step.step_name}
        tags = {STREAM_ID_TAG: stream.stream_id, **of_step}
        if step.run is StepRun.PREFLIGHT and stream.start_job is not None:
            # The stream's own job has the resources that its function needs.
            return self._run(stream.start_job.name, key, tags, {stream.name: {"preflight": True}})
        if step.run is StepRun.ROLL_BACK:
            return self._run(self.roll_back_job, key, tags, {"roll_back_upgrade": {"stream_id": stream.stream_id}})
        return self._retention(key, stream.stream_id, execution_id, TerminalState.CANCELED, of_step)

    def _retention(
        self, key: str, stream_id: str, execution_id: str, state: TerminalState, tags: Mapping[str, str] | None = None
    ) -> dg.RunRequest:
        config = {"stream_id": stream_id, "execution_id": execution_id, "state": state.value}
        tags = {STREAM_ID_TAG: stream_id, RETENTION_OF_TAG: execution_id, **(tags or {})}
        return self._run(self.retention_job, key, tags, {"apply_retention": config})

    def _run(
        self, job: str, key: str, tags: Mapping[str, str], ops: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dg.RunRequest:
        return dg.RunRequest(
            # Dagster skips a key that it has seen, even from another catalog.
            run_key=f"{key}@{self.catalog.deployment_id}",
            job_name=job,
            run_config={"ops": {op: {"config": config} for op, config in ops.items()}} if ops is not None else None,
            tags={DEPLOYMENT_TAG: self.catalog.deployment_id, **tags},
        )


def _definition(stream: Stream, failing: Callable[[], tuple[str, ...]]) -> Definition:
    # The code of an external driver comes from elsewhere.
    code_version = None if stream.runs_externally else stream.code_version
    return Definition(stream.stream_id, stream.spec.desired_state, stream.spec.upgrade, code_version, failing)


def _failing(catalog: Catalog, stream: Stream, settings: HealthSettings) -> tuple[str, ...]:
    """Return the failing health checks that new code may have caused."""
    now_ms = catalog.now_ms()
    facts = health_facts(catalog, {stream.stream_id: settings}, now_ms=now_ms)[stream.stream_id]
    found = judge(facts, stream.spec.options, settings, now_ms=now_ms)
    return tuple(
        each.check.value
        for each in found
        if each.check is not HealthCheck.DESIRED_STATE
        and (each.verdict is Verdict.ERROR or (each.check is HealthCheck.SOURCE_LAG and each.verdict is Verdict.WARN))
    )


def _first_row(catalog: Catalog, stream: Stream) -> DesiredRecord:
    try:
        catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        options = stream.spec.options
        settings = RecordedSettings(
            options=options,
            restart=restart_description(stream.spec.restart),
            storage=options.storage,
            is_own_storage=options.storage is not None,
        )
        catalog.streams.ensure(
            stream.stream_id, name=stream.name, asset_key=stream.writes, options=settings.as_record()
        )
    return catalog.desired_states.ensure(stream.stream_id, origin="the asset's definition")


def describe_monitoring(instance: dg.DagsterInstance) -> str | None:
    """Say what to change in dagster.yaml if nothing detects the loss of a run's container."""
    if not instance.run_launcher.supports_check_run_worker_health or instance.run_monitoring_enabled:
        return None
    return (
        f"run_monitoring.enabled is not true in dagster.yaml, so nothing notices that a run worker of "
        f"{type(instance.run_launcher).__name__} was killed: its stream would count as running, and not be restarted"
    )


def describe_slots(slots: RunSlots | None, streams: int) -> str | None:
    """Return what to change in dagster.yaml if its run slots do not suffice for the streams and one restart."""
    if slots is None:
        return None
    limits = {"concurrency.runs.max_concurrent_runs": slots.total, f"the limit of {STREAM_ID_TAG}": slots.of_streams}
    short = [f"{name} is {limit}" for name, limit in limits.items() if limit is not None and limit <= streams]
    if not short:
        return None
    return (
        f"dagster.yaml leaves no slot to spare: {' and '.join(short)}, and this code location has {streams} streams, "
        "each of which occupies a slot for as long as it runs. Runs beyond that, of streams, restarts and batch work, "
        "wait in the queue. Raise the limits: one slot per stream, some for restarts and operator jobs, and those of "
        "batch work"
    )
