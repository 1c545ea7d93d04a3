"""Runs whose process is gone and whose end nobody recorded.

Dagster learns of the death of a run's process from the code server that started it, or from a launcher that can
look (Kubernetes, Docker). The default launcher cannot: where everything went down at once, by a reboot or with
the code server, the run stays STARTED for ever and its stream would never come back. Here is the missing look.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

import dagster as dg

from dagster_ckpt.catalog import Catalog, ExecutionRecord
from dagster_ckpt.lifecycle.evidence import has_provably_ended
from dagster_ckpt.orchestration.run_worker import RunWorker, worker_of
from dagster_ckpt.orchestration.tags import JOB_ID_TAG

# A heartbeat comes every two seconds; a run with one so young needs no look.
LIVELY_MS = 15_000
# Where the machine of a run cannot be seen, it is given up after so long without a sign of life.
SILENCE_MS = 180_000


def report_lost_runs(
    instance: dg.DagsterInstance, catalog: Catalog, job_ids: Collection[str], *, now_ms: int
) -> list[str]:
    """Record the end of the streams' runs that cannot record it themselves any more.

    A run is lost when its process is not there, no lease of it is being renewed, and it either ran on this machine or
    has given no sign of life for three minutes. It ends as CANCELED where it was being terminated, else as FAILURE.

    Args:
        instance: The Dagster instance.
        catalog: The catalog.
        job_ids: The streams to look after.
        now_ms: Wall clock.

    Returns:
        A sentence for each run that was lost.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        # Dagster's own monitoring looks after such runs.
        return []
    lively = catalog.executions.lively_run_ids(now_ms - LIVELY_MS)
    under_way = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
    told = []
    quiet = [run_id for run_id in instance.get_run_ids(dg.RunsFilter(statuses=under_way)) if run_id not in lively]
    for run in instance.get_runs(dg.RunsFilter(run_ids=quiet)) if quiet else ():
        # It may have ended since: then nobody is to record it once more.
        if run.tags.get(JOB_ID_TAG) not in job_ids or run.status not in under_way:
            continue
        worker = worker_of(instance, run.run_id)
        if worker is None or not _is_lost(catalog, run, worker, now_ms):
            continue
        told.append(_report(instance, run, worker))
    return told


def _is_lost(catalog: Catalog, run: dg.DagsterRun, worker: RunWorker, now_ms: int) -> bool:
    if worker.is_alive_here():
        return False
    lease = catalog.leases.current(run.tags[JOB_ID_TAG])
    if (
        lease is not None
        and lease.run_id == run.run_id
        and not lease.expired
        and not has_provably_ended(lease, jvm_grace_s=0)
    ):
        return False
    executions = catalog.executions.of_run(run.run_id)
    if executions and executions[0].host == socket.gethostname():
        return True
    return now_ms - _last_sign_ms(worker, executions) > SILENCE_MS


def _last_sign_ms(worker: RunWorker, executions: list[ExecutionRecord]) -> int:
    return max(worker.seen_at_ms, *(execution.heartbeat_at_ms for execution in executions), 0)


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
