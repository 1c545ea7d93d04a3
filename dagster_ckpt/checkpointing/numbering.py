"""The number of a job's next image: above every number that is in use, whatever the catalog remembers."""

from __future__ import annotations

import re

from dagster_ckpt.catalog.records import ImageRecord, LeaseRecord
from dagster_ckpt.stream.handle import StreamingJob

_CHECKPOINT = re.compile(r"chk-(\d+)")


def count_beyond_what_is_used(job: StreamingJob, restored: ImageRecord | None, lease: LeaseRecord) -> int:
    """Raise a job's counter above its stored checkpoints and the image that it is restored from.

    A catalog that was lost, or brought back from a backup, counts from below what is stored, and a number is never
    written twice: every checkpoint would fail until the counter had caught up. Flink likewise goes on from the number
    of the checkpoint that it restored.

    Args:
        job: The job, registered in the catalog.
        restored: The image that an execution starts from, if it does.
        lease: The lease of the job.

    Returns:
        The next number.

    Raises:
        LeaseLostError: The lease is not held any more.
    """
    names = (location.rstrip("/").rpartition("/")[2] for location in job.store.checkpoints())
    used = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    if restored is not None and restored.number is not None:
        used.append(restored.number)
    counted = job.catalog.jobs.get(job.job_id).next_number
    beyond = max(used, default=0) + 1
    if beyond > counted:
        job.catalog.jobs.count_from(lease, beyond)
    return max(beyond, counted)
