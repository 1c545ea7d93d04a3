"""The sinks that a stream writes to, as it stands: what its executions reported, and what it was restored from."""

from __future__ import annotations

from dagster_ckpt.catalog.records import ImageRecord
from dagster_ckpt.catalog.recovery_records import OriginKind
from dagster_ckpt.stream.handle import StreamingJob


def sinks_written(job: StreamingJob) -> list[str]:
    """The sinks that its newest execution wrote to, or where it was restored and not started since, its image's.

    Raises:
        JobNotFoundError: It was never registered.
    """
    record = job.catalog.jobs.get(job.job_id)
    origin = record.origin
    if origin is not None and origin.kind is OriginKind.DIRECTORY:
        origin = origin.earlier
    reported = job.catalog.executions.last_sinks(job.job_id)
    if origin is None or not origin.sinks:
        return reported
    if any(each.live_directory == record.live_directory for each in job.catalog.executions.of_job(job.job_id)):
        return reported
    return list(origin.sinks)


def sinks_of_image(job: StreamingJob, image: ImageRecord) -> tuple[str, ...]:
    """The sinks that a query wrote to when an image of it was taken, as Spark names them.

    Raises:
        ImageCorruptError: The image cannot be read.
        StorageAccessError: It cannot be reached.
    """
    properties = image.properties or (job.store.manifest(image.location).header.properties if image.location else {})
    noted, others = properties.get("sinks"), properties.get("other_sinks")
    files = [f"FileSink[{sink['path']}]" for sink in noted] if isinstance(noted, list) else []
    return (*files, *(str(sink) for sink in (others if isinstance(others, list) else ())))
