"""Rolling an upgrade back: the job's state and its sinks go back to where the code before had stopped."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.errors import (
    ImageCorruptError,
    ImageNotFoundError,
    RequestFailedError,
    RestoreError,
    SharedSinkError,
    SinkRollbackError,
    StorageAccessError,
)
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.fencing import fence_predecessor
from dagster_ckpt.stream.handle import StreamingJob
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.sinks_written import sinks_of_image
from dagster_ckpt.stream.snapshot_names import describe_image
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

# What trying again does not change: a person has to say where the job goes on.
_FINAL = (ImageNotFoundError, ImageCorruptError, RestoreError, SharedSinkError)


def roll_back(
    job: StreamingJob, *, run_id: str, report: Callable[[str], None] = lambda _sentence: None
) -> UpgradeRecord:
    """Bring a job whose upgrade did not work back to the image from before; its next start goes on there.

    May be cut off anywhere and done again: the upgrade says so only once it is done.

    Args:
        job: The job; it must not run.
        run_id: Who does it, as the lease shows it meanwhile.
        report: Told what is done.

    Returns:
        The upgrade, ROLLED_BACK or ROLLBACK_FAILED.

    Raises:
        RequestFailedError: No upgrade of the job waits for it.
        LeaseHeldError: The job runs.
        LeaseLostError: The job was started meanwhile.
        StorageAccessError: Something could not be read or written; try again.
    """
    row = job.catalog.desired_states.find(job.job_id)
    upgrade = row.upgrade if row is not None else None
    if row is None or upgrade is None or upgrade.phase is not UpgradePhase.RESTORING or upgrade.image_id is None:
        raise RequestFailedError(
            f"No upgrade of job {job.job_id!r} waits to be rolled back. To go back to an image use restart_stream_job."
        )
    holder = this_holder(f"rollback-{uuid.uuid4()}", run_id, None)
    acquired = acquire(job.catalog, job.job_id, holder)
    with LeaseKeeper(job.catalog, acquired.record) as lease:
        fence_predecessor(job, acquired, still_mine=lease.check, report=report)
        try:
            source = _restore(job, upgrade.image_id, lease, report)
        except _FINAL as error:
            reason = f"{upgrade.reason}; it is stopped, and cannot be rolled back: {error}"
            after = replace(upgrade, phase=UpgradePhase.ROLLBACK_FAILED, reason=reason)
        else:
            reason = f"rolled back to {source}, because: {upgrade.reason}"
            after = replace(upgrade, phase=UpgradePhase.ROLLED_BACK, reason=reason)
        alert = f"code version {after.to_version}: {reason}"
        job.catalog.desired_states.advance(
            row, upgrade=after, alert=alert, request_id=row.request_id, lease=lease.record
        )
    return after


def _restore(job: StreamingJob, image_id: str, lease: LeaseKeeper, report: Callable[[str], None]) -> str:
    facts = recovery_facts(job, StartFrom(StartPoint.NAMED, image_id), predecessor_ended=True)
    plan = plan_recovery(facts)
    # The code before is about to start, which wrote the image: what the new code wrote elsewhere is left.
    output = NamedOutput.of_sinks(sinks_of_image(job, plan.image)) if plan.image is not None else None
    preview = preview_rewind(job, facts, plan, output)
    for sentence in preview.sentences():
        report(sentence)
    refuse_loss(job, preview, accept_loss=False)
    try:
        prepared = prepare(job, plan, lease, output)
    except SinkRollbackError as error:
        # Refusals came before: a file could not be read or written, and the next try goes on there.
        raise StorageAccessError(str(error)) from error
    for path in prepared.rolled_back:
        report(f"rolled back the file sink {path}")
    return describe_image(job.catalog.images.get(image_id))
