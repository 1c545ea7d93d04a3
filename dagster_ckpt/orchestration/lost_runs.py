"""Runs whose process is gone and whose end nobody recorded.

Dagster learns of the death of a run's process from the code server that started it, or from a launcher that can
look (Kubernetes, Docker). The default launcher cannot: where everything went down at once, by a reboot or with
the code server, the run stays STARTED for ever and its stream would never come back. Here is the missing look.
"""

from __future__ import annotations

from collections.abc import Collection

import dagster as dg

from dagster_ckpt.catalog import Catalog
from dagster_ckpt.lifecycle.job import Clock, monotonic_ms
from dagster_ckpt.lifecycle.liveness import LIVELY_MS, Liveness, run_liveness
from dagster_ckpt.orchestration.run_worker import RunWorker, worker_of
from dagster_ckpt.orchestration.tags import JOB_ID_TAG


class Silences:
    """How long nothing new has been seen of runs, by the looks of this process: the machines' clocks may differ.

    Args:
        clock: Milliseconds that only grow.
    """

    def __init__(self, clock: Clock = monotonic_ms) -> None:
        self._clock = clock
        self._since: dict[str, tuple[int, int]] = {}

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all other runs: they have given a sign of life, or are over."""
        self._since = {run_id: since for run_id, since in self._since.items() if run_id in run_ids}

    def of(self, run_id: str, last_sign: int) -> int:
        """Milliseconds since a run was first seen with no newer sign of life than this one."""
        seen, since_ms = self._since.get(run_id, (None, 0))
        if seen != last_sign:
            since_ms = self._clock()
            self._since[run_id] = (last_sign, since_ms)
        return self._clock() - since_ms


def report_lost_runs(
    instance: dg.DagsterInstance, catalog: Catalog, job_ids: Collection[str], silences: Silences
) -> list[str]:
    """Record the end of the streams' runs that cannot record it themselves any more.

    A run is lost when its process is not there, no lease of it is being renewed, and it either is proven to have ended
    or has given no sign of life for three minutes of looks. It ends as CANCELED where it was being terminated, else as
    FAILURE.

    Args:
        instance: The Dagster instance.
        catalog: The catalog.
        job_ids: The streams to look after.
        silences: What is remembered from look to look.

    Returns:
        A sentence for each run that was lost.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        # Dagster's own monitoring looks after such runs.
        return []
    lively = catalog.executions.lively_run_ids(catalog.now_ms() - LIVELY_MS)
    under_way = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
    told = []
    quiet = [run_id for run_id in instance.get_run_ids(dg.RunsFilter(statuses=under_way)) if run_id not in lively]
    silences.keep(quiet)
    for run in instance.get_runs(dg.RunsFilter(run_ids=quiet)) if quiet else ():
        # It may have ended since: then nobody is to record it once more.
        if run.tags.get(JOB_ID_TAG) not in job_ids or run.status not in under_way:
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
        run.tags[JOB_ID_TAG],
        pid=worker.pid,
        seen_at_ms=worker.seen_at_ms,
        silent_ms=silences.of(run.run_id, max(heartbeats, default=0)),
    )
    return liveness is not Liveness.ALIVE


def _report(instance: dg.DagsterInstance, run: dg.DagsterRun, worker: RunWorker) -> str:
    sentence = (
        f"The process of this run, {worker.pid}, is gone and could not record its end: its machine was restarted, or "
        "it was killed together with its code server."
    )
    if run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message=sentence)
    else:
        instance.report_run_failed(run, message=sentence)
    return f"{run.tags[JOB_ID_TAG]}: run {run.run_id} is lost, process {worker.pid} is gone"
