"""A savepoint of a job whose query does not run: a cut of its quiet live directory."""

from __future__ import annotations

import uuid

from dagster_ckpt.catalog.records import ImageRecord, ImageTrigger, LeaseRecord
from dagster_ckpt.checkpointing.progress import BatchFigures
from dagster_ckpt.checkpointing.recording import NotRecorded, asked, provenance, record_image
from dagster_ckpt.checkpointing.snapshotting import SnapshotOrder, sharing_base, take_snapshot
from dagster_ckpt.errors import CatalogError, NothingCommittedError
from dagster_ckpt.snapshot.manifest import ImageKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamingJob, wall_clock_ms
from dagster_ckpt.stream.holding import holding
from dagster_ckpt.stream.sinks_written import sinks_written


def savepoint_of_stopped_job(
    job: StreamingJob,
    *,
    label: str | None = None,
    target_directory: str | None = None,
    schedule: str | None = None,
    trigger: ImageTrigger = ImageTrigger.MANUAL,
    lease: LeaseRecord | None = None,
) -> ImageRecord:
    """Take a savepoint of where a job stands that does not run.

    Operators need no lease: reading at a commit is safe beside any writer, and the number comes from the catalog.

    Args:
        job: The job.
        label: A name that a start can find it by.
        target_directory: Folder for it, instead of the configured one.
        schedule: Name of the schedule that asks, if one does.
        trigger: Why it is taken, where no schedule asks.
        lease: The lease of the job, where its run takes it before it starts the query.

    Raises:
        LeaseLostError: The lease is not held any more.
        NothingCommittedError: The job has no live directory, or nothing is committed in it.
        IncompleteCutError: The live directory is not whole.
        StorageAccessError: The savepoint cannot be written.
    """
    record = job.catalog.jobs.get(job.job_id)
    if record.live_directory is None:
        raise NothingCommittedError(
            f"Job {job.job_id!r} has no live directory: it never ran, or was cancelled with its state. Start it first."
        )
    image_id = str(uuid.uuid4())
    why = trigger if schedule is None else ImageTrigger.PERIODIC
    number = job.catalog.jobs.allocate_number(job.job_id, lease=lease)
    began_ms = wall_clock_ms()
    sinks = tuple(sinks_written(job))
    base = sharing_base(job)
    order = SnapshotOrder(
        ImageKind.SAVEPOINT,
        number,
        image_id,
        base=base.location if base is not None else None,
        target_directory=target_directory,
        sinks=sinks,
        label=label,
        properties=provenance(job, sinks) | asked(why, schedule),
    )
    images = job.catalog.images
    if lease is None:
        begun = images.begin_of_stopped(
            job.job_id,
            image_id=image_id,
            number=number,
            trigger=why,
            timeline=record.timeline,
            label=label,
            schedule=schedule,
        )
    else:
        begun = images.begin(
            lease,
            image_id=image_id,
            execution_id=lease.execution_id,
            kind=ImageKind.SAVEPOINT.value,
            number=number,
            trigger=why,
            timeline=record.timeline,
            label=label,
        )
    try:
        # The hold on the attempt itself says that its process lives.
        with holding(job.catalog, [begun, base], f"savepoint {image_id}"):
            snapshot = take_snapshot(job, LiveDirectory(record.live_directory), order, now_ms=began_ms)
    except BaseException as error:
        # Also one that is interrupted is no longer under way.
        reason = str(error) or type(error).__name__
        if lease is None:
            images.fail_of_stopped(image_id, reason)
        else:
            images.fail(lease, image_id, reason)
        raise
    duration_ms = wall_clock_ms() - began_ms
    recorded = record_image(job.catalog, snapshot, BatchFigures(), duration_ms=duration_ms, lease=lease)
    if isinstance(recorded, NotRecorded):
        if recorded.is_certain:
            job.store.discard(snapshot.stored.location)
        raise CatalogError(recorded.why)
    return recorded
