"""Deleting the savepoints of a schedule that its history has no room for."""

from __future__ import annotations

from dagster_ckpt.catalog.records import ImageRecord, ImageStatus, JobRecord
from dagster_ckpt.policies.savepoint_history import SavepointHistory, ScheduledSavepoint, leaving_history
from dagster_ckpt.recovery.retention import RetentionReport, discard
from dagster_ckpt.snapshot.manifest import ImageKind
from dagster_ckpt.stream.handle import StreamingJob
from dagster_ckpt.stream.snapshot_names import describe_image


def apply_savepoint_history(job: StreamingJob, schedule: str, history: SavepointHistory) -> RetentionReport:
    """Delete what the history of one schedule has no room for; by mark, bytes, forget, as every image is deleted.

    Ages are those by the catalog's clock, which has dated the savepoints; their order is that of their numbers.

    Only savepoints that this schedule took are looked at: never one that a person took, one of another schedule, or
    one that a start has claimed (it is a checkpoint to the job). The preferred savepoint and the one that the current
    timeline began with stay.

    Args:
        job: The job.
        schedule: Name of the schedule.
        history: Its limits.

    Returns:
        What was deleted, and what was kept with the reason. What could not be deleted stays DELETING in the catalog and
        is tried again by `housekeeping`.
    """
    record = job.catalog.jobs.get(job.job_id)
    taken = {
        image.image_id: image
        for image in job.catalog.images.of_job(job.job_id, kind=ImageKind.SAVEPOINT.value, status=ImageStatus.COMPLETED)
        if image.schedule == schedule and not image.claimed
    }
    # Ids are listed newest first, by number.
    savepoints = [
        ScheduledSavepoint(image.image_id, image.completed_at_ms or 0, _held_because(image, record))
        for image in reversed(taken.values())
    ]
    report = RetentionReport(
        kept=tuple(
            f"{describe_image(taken[savepoint.image_id])}: {savepoint.held_because}"
            for savepoint in savepoints
            if savepoint.held_because is not None
        )
    )
    for leaving in leaving_history(savepoints, history, now_ms=job.catalog.now_ms()):
        reason = f"history of {schedule}: {leaving.reason}"
        report = report.and_then(discard(job, [taken[leaving.image_id]], reason=reason, lease=None))
    return report


def _held_because(image: ImageRecord, job: JobRecord) -> str | None:
    if image.image_id == job.preferred_savepoint_id:
        return "it is the preferred savepoint"
    if image.image_id == job.restored_image_id:
        return "the current timeline began with it"
    return None
