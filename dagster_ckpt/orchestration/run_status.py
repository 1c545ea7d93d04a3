"""The Dagster run of a stream.

A process gets no signal, and would write on for weeks, if its run worker is killed, or if its run is forcibly marked as
ended or is terminated while the code server is down. So `RunWatch` polls the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import PACKAGE_LOGGER
from dagster_ckpt.catalog.records import ExecutionRecord, StartCause
from dagster_ckpt.driver import forwarded_log
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration._compat import changed_fields
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.recovery.stream_graph import reached
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity
from dagster_ckpt.values.durations import Clock, monotonic_ms
from dagster_ckpt.values.redaction import without_secrets

StepContext = dg.OpExecutionContext | dg.AssetExecutionContext

STREAM_ID_TAG = "dagster_ckpt/stream_id"
# Another deployment may have a stream of the same id.
DEPLOYMENT_TAG = "dagster_ckpt/deployment"
# The op of an operator job that the run executes.
OPERATION_TAG = "dagster_ckpt/operation"
# The failed execution that the run restarts.
RESTART_OF_TAG = "dagster_ckpt/restart_of"
RETENTION_OF_TAG = "dagster_ckpt/retention_of"
START_REQUEST_TAG = "dagster_ckpt/start_request"
# The step towards a desired state that the run performs.
STEP_TAG = "dagster_ckpt/step"
TERMINAL_FAILURE_TAG = "dagster_ckpt/terminal_failure"
UNFINISHED = [
    status
    for status in dg.DagsterRunStatus
    if status not in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
]
RETRY_NUMBER_TAG = "dagster/retry_number"
PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"
MAX_RETRIES_TAG = "dagster/max_retries"

END_KEY = "dagster_ckpt/end"
CRASHED = "CRASHED"


def run_tags(catalog: Catalog, stream_id: str) -> dict[str, str]:
    return {STREAM_ID_TAG: stream_id, DEPLOYMENT_TAG: catalog.deployment_id}


def has_time_limit(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> bool:
    tag = tags.get("dagster/max_runtime")
    limit = float(tag) if tag else float(instance.run_monitoring_max_runtime_seconds)
    return limit > 0


def canceled_by_user(context: StepContext) -> dg.DagsterRunStatus | None:
    """Return the status of a run that a user terminated; None if a time limit may have."""
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is None or has_time_limit(context.instance, context.run.tags):
        return None
    return run.status if run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED) else None


def report_canceling(context: StepContext, reason: str) -> None:
    """Let the run end as canceled, unless others run in it and would be canceled, too."""
    if not goes_on_without(context.instance, context.run, context.op_execution_context.op.name):
        context.instance.report_run_canceling(context.run, message=reason)


def run_failure(description: str, kind: str, report: Mapping[str, Any] | None = None) -> dg.Failure:
    """Make a failure that Dagster never retries; `kind` names the end for alerts."""
    metadata = {END_KEY: kind, **(report or {})}
    return dg.Failure(without_secrets(description), metadata=metadata, allow_retries=False)


def run_is_over(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a run is recorded as ended, or deleted; its process may still be alive."""
    run = instance.get_run_by_id(run_id)
    return run is None or run.is_finished


def goes_on_without(instance: dg.DagsterInstance, run: dg.DagsterRun, op_name: str) -> bool:
    """Whether a run has steps that neither need a stream's step nor are needed by it."""
    if run.execution_plan_snapshot_id is None:
        return False
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    steps = {step.key: step for step in plan.steps if step.key in plan.step_keys_to_execute}
    own = {key for key in steps if key.rpartition(".")[2] == op_name}
    needs = [(key, other) for key, step in steps.items() for each in step.inputs for other in each.upstream_step_keys]
    needed = [(other, key) for key, other in needs]
    return bool(own) and not steps.keys() <= reached(own, needs) | reached(own, needed)


def start_cause(tags: Mapping[str, str], *, has_started: bool = False) -> StartCause:
    """Return MANUAL also for a re-executed run, RESTART_NEW_RUN also for a retry or a restart within the run."""
    if RETRY_NUMBER_TAG in tags or has_started:
        return StartCause.RESTART_NEW_RUN
    # A re-executed run inherits the tags of the original.
    if RESTART_OF_TAG in tags and PARENT_RUN_ID_TAG not in tags:
        return StartCause.RESTART_NEW_RUN
    return StartCause.MANUAL


def report_terminal_failure(
    instance: dg.DagsterInstance, catalog: Catalog, execution: ExecutionRecord, reason: str
) -> str:
    """Record on the stream's last run and in the catalog that it failed for good; return the message.

    The tag `dagster_ckpt/terminal_failure` shows run failure sensors that no restart follows.
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


@dataclass(frozen=True)
class RunWorker:
    pid: int
    seen_at_ms: int


def worker_of(instance: dg.DagsterInstance, run_id: str) -> RunWorker | None:
    """Find a run's process in the run's log ("Started process for run (pid: 42)")."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event is not None else None
        if pid is not None and str(pid.value).isdigit():
            return RunWorker(int(str(pid.value)), int(entry.timestamp * 1000))
    return None


LOOK_EVERY_MS = 5_000


_END_REASONS = {
    dg.DagsterRunStatus.CANCELING: "its run is being terminated",
    dg.DagsterRunStatus.CANCELED: "its run is recorded as CANCELED",
    dg.DagsterRunStatus.FAILURE: "its run is recorded as FAILURE",
    dg.DagsterRunStatus.SUCCESS: "its run is recorded as SUCCESS",
}


class RunWatch:
    """Determines whether a stream should stop, and why.

    `signalled`: a signal asked the process to stop.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        run_id: str,
        *,
        signalled: Callable[[], bool],
        clock: Clock = monotonic_ms,
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._signalled = signalled
        self._clock = clock
        self._parent = _run_worker_above(worker_of(instance, run_id))
        self._next_look_ms = clock() + LOOK_EVERY_MS
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        return self._reason

    def should_stop(self) -> bool:
        if self._reason is None:
            self._reason = self._look()
        return self._reason is not None

    def _look(self) -> str | None:
        if self._signalled():
            return "a signal"
        if self._parent is not None and self._parent.liveness() is Liveness.ENDED:
            return f"the process of its run, {self._parent.pid}, has ended"
        if self._clock() < self._next_look_ms:
            return None
        self._next_look_ms = self._clock() + LOOK_EVERY_MS
        try:
            run = self._instance.get_run_by_id(self._run_id)
        except Exception:  # noqa: BLE001 - a temporarily unavailable database must not end a stream
            return None
        return "its run was deleted" if run is None else _END_REASONS.get(run.status)


def _run_worker_above(worker: RunWorker | None) -> ProcessIdentity | None:
    """The run's process, if it is the parent of this one (multiprocess executor)."""
    if worker is None or worker.pid == os.getpid() or worker.pid != os.getppid():
        return None
    return ProcessIdentity.of(worker.pid)


_DEPLOYMENT = (CheckpointCatalogResource, CheckpointStorageResource, StateBackendResource)


def refuse_retry_policy(context: StepContext) -> None:
    """Refuse a RetryPolicy: Dagster would retry the op after a cancel (dagster-io/dagster#15026)."""
    step = context.op_execution_context
    if step.job_def.get_retry_policy_for_handle(step.op_handle) is not None:
        raise OptionError(
            f"{step.op_def.name} has a RetryPolicy, its own or that of job {step.job_name}: Dagster would start the "
            "stream again after a cancel. Remove it; restarts come from the stream's restart_strategy."
        )


def refuse_run_retries(context: StepContext) -> None:
    step = context.op_execution_context
    retries = _run_retries(step)
    if retries > 0:
        raise OptionError(
            f"Dagster would retry this run of {step.op_def.name} up to {retries} times, beside the stream's "
            f'restart_strategy. Start it with the stream\'s own job, or tag run or job {MAX_RETRIES_TAG}: "0".'
        )


def refuse_required_outputs(context: StepContext) -> None:
    op_def = context.op_execution_context.op_def
    required = [out.name for out in op_def.output_defs if out.is_required and not out.dagster_type.is_nothing]
    if required:
        raise OptionError(
            f"The outputs {required} of {op_def.name} are required, but a stream yields none: its checkpoints are "
            "reported by the catalog sensor. Give @dg.asset output_required=False, each AssetSpec of a @dg.multi_asset "
            "skippable=True, and an op dg.Out(is_required=False)."
        )


def refuse_overridden_resources(context: StepContext) -> None:
    """Refuse a run config that changes catalog, storage or live directories.

    Equal values pass: the launchpad can fill them in.
    """
    step = context.op_execution_context
    overrides = cast("Mapping[str, Mapping[str, object]]", step.run.run_config.get("resources", {}))
    for key, given in overrides.items():
        definition = step.job_def.resource_defs.get(key)
        changed = changed_fields(definition, given, _DEPLOYMENT) if definition is not None else []
        if changed:
            raise OptionError(
                f"The config of this run sets {' and '.join(changed)} of resource {key} differently than its code "
                "location does. A stream belongs to the catalog, storage and live directories of its deployment: with "
                "others, nothing would prevent a second run from writing at the same time. Nothing was changed. "
                f"Remove resources.{key} from the config; to work with another deployment, use a code location with "
                "its resources."
            )


def _run_retries(context: dg.OpExecutionContext) -> int:
    tag = context.run.tags.get(MAX_RETRIES_TAG)
    if tag is not None:
        return int(tag) if tag.isdecimal() else 0
    instance = context.instance
    return instance.run_retries_max_retries if instance.run_retries_enabled else 0


@contextmanager
def transitions_in_run_log(context: StepContext, stream_id: str | None = None) -> Iterator[None]:
    """Show transitions of a stream, or of all, in the run's log.

    Does nothing if Dagster captures this package's logger itself (`managed_python_loggers`).
    """
    managed = context.instance.managed_python_loggers
    if any(name == "root" or name.split(".")[0] == PACKAGE_LOGGER for name in managed):
        yield
        return
    with forwarded_log(context.log.log, stream_id=stream_id):
        yield
