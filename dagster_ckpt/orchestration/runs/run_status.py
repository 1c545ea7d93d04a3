"""What Dagster records about a run: status, worker process and time limit; and detection of lost runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.orchestration.runs.run_config import (
    PARENT_RUN_ID_TAG,
    RESTART_OF_TAG,
    RETRY_NUMBER_TAG,
    STREAM_ID_TAG,
)
from dagster_ckpt.stream.handle import Clock, monotonic_ms
from dagster_ckpt.stream.liveness import LIVELY_MS, Liveness, run_liveness


def has_time_limit(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> bool:
    """Whether Dagster's run monitoring applies a time limit to a run with these tags."""
    tag = tags.get("dagster/max_runtime")
    limit = float(tag) if tag else float(instance.run_monitoring_max_runtime_seconds)
    return limit > 0


def canceled_by_user(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> dg.DagsterRunStatus | None:
    """The status of a run that a user terminated; None if no user did, or if a time limit may have."""
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is None or has_time_limit(context.instance, context.run.tags):
        return None
    return run.status if run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED) else None


def start_cause(tags: Mapping[str, str], *, has_started: bool = False) -> StartCause:
    """What started a run: a user (also by re-executing one), or a restart (also one of Dagster's retries).

    Args:
        tags: The tags of the run.
        has_started: Whether a previous process already started the stream in this run.
    """
    if RETRY_NUMBER_TAG in tags or has_started:
        return StartCause.RESTART_NEW_RUN
    # A re-executed run inherits the tags of the original.
    if RESTART_OF_TAG in tags and PARENT_RUN_ID_TAG not in tags:
        return StartCause.RESTART_NEW_RUN
    return StartCause.MANUAL


@dataclass(frozen=True)
class RunWorker:
    """A run's process, which executes its steps or starts a process for each.

    Attributes:
        pid: Its process id on its machine.
        seen_at_ms: When it logged that id, in ms since the epoch.
    """

    pid: int
    seen_at_ms: int


def worker_of(instance: dg.DagsterInstance, run_id: str) -> RunWorker | None:
    """The process of a run, or None if none has started.

    Every launcher's process or its executor logs it first: "Started process for run (pid: 42)".
    """
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event is not None else None
        if pid is not None and str(pid.value).isdigit():
            return RunWorker(int(str(pid.value)), int(entry.timestamp * 1000))
    return None


class Silences:
    """How long runs have shown no sign of life, timed by this process because machines' clocks may differ.

    Args:
        clock: Monotonic time in milliseconds.
    """

    def __init__(self, clock: Clock = monotonic_ms) -> None:
        self._clock = clock
        self._since: dict[str, tuple[int, int]] = {}

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all other runs: they have shown a sign of life, or have ended."""
        self._since = {run_id: since for run_id, since in self._since.items() if run_id in run_ids}

    def of(self, run_id: str, last_sign: int) -> int:
        """Milliseconds since a run was first seen with no newer sign of life than this one."""
        seen, since_ms = self._since.get(run_id, (None, 0))
        if seen != last_sign:
            since_ms = self._clock()
            self._since[run_id] = (last_sign, since_ms)
        return self._clock() - since_ms


def report_lost_runs(
    instance: dg.DagsterInstance, catalog: Catalog, stream_ids: Collection[str], silences: Silences
) -> list[str]:
    """Record the end of runs of these streams that can no longer record it themselves.

    A run is lost if its process does not exist, none of its leases is being renewed, and it is
    either proven to have ended or has shown no sign of life for three minutes. It is recorded as
    CANCELED if it was being terminated, else as FAILURE.

    Args:
        instance: The Dagster instance.
        catalog: The catalog.
        stream_ids: The streams to check.
        silences: State kept between calls.

    Returns:
        A message for each lost run.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        # Dagster's own monitoring covers such runs.
        return []
    lively = catalog.executions.lively_run_ids(catalog.now_ms() - LIVELY_MS)
    under_way = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
    told = []
    quiet = [run_id for run_id in instance.get_run_ids(dg.RunsFilter(statuses=under_way)) if run_id not in lively]
    silences.keep(quiet)
    for run in instance.get_runs(dg.RunsFilter(run_ids=quiet)) if quiet else ():
        # It may have ended in the meantime; its end must not be recorded twice.
        if run.tags.get(STREAM_ID_TAG) not in stream_ids or run.status not in under_way:
            continue
        worker = worker_of(instance, run.run_id)
        if worker is None or not _is_lost(catalog, run, worker, silences):
            continue
        told.append(_report(instance, run, worker))
    return told


def _is_lost(catalog: Catalog, run: dg.DagsterRun, worker: RunWorker, silences: Silences) -> bool:
    heartbeats = (execution.heartbeat_at_ms for execution in catalog.executions.of_run(run.run_id))
    liveness = run_liveness(
        catalog,
        run.run_id,
        run.tags[STREAM_ID_TAG],
        pid=worker.pid,
        seen_at_ms=worker.seen_at_ms,
        silent_ms=silences.of(run.run_id, max(heartbeats, default=0)),
    )
    return liveness is not Liveness.ALIVE


def _report(instance: dg.DagsterInstance, run: dg.DagsterRun, worker: RunWorker) -> str:
    message = (
        f"The process of this run, {worker.pid}, is gone and could not record its end: its machine was restarted, or "
        "it was killed together with its code server."
    )
    if run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message=message)
    else:
        instance.report_run_failed(run, message=message)
    return f"{run.tags[STREAM_ID_TAG]}: run {run.run_id} is lost, process {worker.pid} is gone"
