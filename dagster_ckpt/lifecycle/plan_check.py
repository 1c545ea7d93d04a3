"""Holding the plan of the code about to run against the plan that made the state it is to go on from."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_ckpt.catalog import JobRecord, LeaseRecord
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.lifecycle.plan_change import plan_differences, refuse_plan_change
from dagster_ckpt.lifecycle.recovery import RecoveryKind, RecoveryPlan, describe_image
from dagster_ckpt.spark import PlanDescription, read_plan


@dataclass(frozen=True)
class PlanChange:
    """How a plan differs from the one that made a state.

    Attributes:
        differences: What is different, each as one line.
        came_from: What the state is, for a person.
        fingerprint: That of the new plan.
        is_accepted: Whether a person has accepted exactly this plan beforehand.
    """

    differences: tuple[str, ...]
    came_from: str
    fingerprint: str
    is_accepted: bool


def plan_change(record: JobRecord, recovery: RecoveryPlan, new: PlanDescription | None) -> PlanChange | None:
    """Compare the plan of a query that is about to start with that of the state it would go on from.

    Args:
        record: The job.
        recovery: Where it would begin.
        new: The plan of the query; None where that cannot be seen.

    Returns:
        None where the state means to both the same, where there is none, or where one of the plans is not known.
    """
    image = recovery.image if recovery.kind is RecoveryKind.RESTORE else None
    came_from = describe_image(image) if image is not None else "its live directory"
    is_empty = recovery.kind is RecoveryKind.START_EMPTY
    old = None if is_empty else read_plan(image.plan if image is not None else record.plan)
    differences = plan_differences(old, new) if old is not None and new is not None else ()
    if new is None or not differences:
        return None
    return PlanChange(differences, came_from, new.fingerprint, record.accepted_plan == new.fingerprint)


def check_plan(
    job: StreamingJob, recovery: RecoveryPlan, new: PlanDescription | None, lease: LeaseRecord, *, accept: bool
) -> tuple[str, ...]:
    """Let a start pass only if its code means by the state what the code before meant, or a person accepts the change.

    What is accepted holds for the restarts of a start that fails before it is recorded.

    Args:
        job: The job.
        recovery: Where it is about to begin; nothing is changed yet.
        new: The plan of the query that is about to start.
        lease: The lease of the job.
        accept: A person says that a change is meant.

    Returns:
        What was accepted, each as a sentence for the run's log.

    Raises:
        PlanChangedError: The plan is another one, and nobody accepted that.
    """
    change = plan_change(job.catalog.jobs.get(job.job_id), recovery, new)
    if change is None:
        return ()
    if accept:
        job.catalog.jobs.accept_plan(job.job_id, change.fingerprint, lease=lease)
    elif not change.is_accepted:
        refuse_plan_change(job.job_id, change.differences, came_from=change.came_from, fingerprint=change.fingerprint)
    return tuple(f"accepted change of the plan: {difference}" for difference in change.differences)
