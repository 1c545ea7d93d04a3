"""Refusing a start whose state backend cannot read the state that is there."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.errors import StateBackendChangeError
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.lifecycle.recovery import RecoveryKind, RecoveryPlan
from dagster_ckpt.options import PinnedState, backend_change
from dagster_ckpt.spark import LiveDirectory, check_pinned_provider, pinned_state


def check_backend(job: StreamingJob, plan: RecoveryPlan) -> Sequence[str]:
    """Hold the job's state backend against the state that the plan starts from, before anything is changed.

    Args:
        job: The job; where it has no backend nothing is checked.
        plan: What is about to be done.

    Returns:
        What Spark keeps of the settings the query was begun with, each as a sentence for the run's log.

    Raises:
        StateBackendChangeError: The backend cannot read the state.
        LiveDirectoryError: What says so is damaged.
    """
    if job.backend is None:
        return ()
    change = backend_change(_pinned(job, plan), job.backend)
    if change.refused is not None:
        _check_log(job, plan)
        raise StateBackendChangeError(f"Job {job.job_id!r} cannot be started. {change.refused}")
    return change.kept


def _pinned(job: StreamingJob, plan: RecoveryPlan) -> PinnedState:
    if plan.kind is RecoveryKind.START_EMPTY:
        return PinnedState(None)
    if plan.kind is RecoveryKind.RESTORE and plan.image is not None and plan.image.location is not None:
        provider = job.store.manifest(plan.image.location).header.properties.get("state_store_provider")
        return PinnedState(provider if isinstance(provider, str) else None)
    live = job.catalog.jobs.get(job.job_id).live_directory
    return PinnedState(None) if live is None else pinned_state(LiveDirectory(live))


def _check_log(job: StreamingJob, plan: RecoveryPlan) -> None:
    # A damaged name is no change of the backend: a recovery goes back to the next point, a change is refused.
    live = job.catalog.jobs.get(job.job_id).live_directory
    if plan.kind is not RecoveryKind.RESTORE and live is not None:
        check_pinned_provider(LiveDirectory(live))
