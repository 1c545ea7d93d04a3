"""Attempts whose process died before the catalog knew how they ended.

A process may die between the publication of `_metadata` and the catalog's record of it, or in the middle of an upload.
Such a row says IN_PROGRESS. The next start of the stream, or housekeeping where it does not run, settles it: an image
that is whole in storage is registered, any other attempt has failed. An image that became whole after its attempt had
been recorded as failed is deleted: nothing refers to it.
"""

from __future__ import annotations

import uuid

from dagster_ckpt.catalog.records import CompletedImage, ImageRecord, ImageStatus, LeaseRecord
from dagster_ckpt.errors import CkptError, LeaseHeldError, LeaseLostError, StorageAccessError
from dagster_ckpt.snapshot.manifest import ImageKind, Manifest
from dagster_ckpt.stream.handle import StreamingJob
from dagster_ckpt.stream.holding import HOLD_TTL_MS
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import Liveness, holder_liveness, this_holder
from dagster_ckpt.stream.snapshot_names import describe_image


def settle_dead_attempts(job: StreamingJob, lease: LeaseRecord) -> list[str]:
    """Settle the attempts of every execution before the one that holds the lease, and of savepoints that nobody takes.

    Call it before that execution begins an attempt of its own. Whoever began the others can record nothing any more,
    as each of its writes needs the lease.

    Args:
        job: The job.
        lease: Its lease.

    Returns:
        What was done, a sentence each.

    Raises:
        LeaseLostError: The lease is not held any more.
        StorageAccessError: The storage cannot be reached; the rest is settled by the next start.
    """
    done = []
    for image in job.catalog.images.of_job(job.job_id, status=ImageStatus.IN_PROGRESS):
        if image.execution_id is None and _is_held(job, image):
            continue
        found = _found(job, image)
        if found is None:
            job.catalog.images.fail(lease, image.image_id, "its process died before it was whole in storage")
            done.append(f"{_name(image)} was not completed: its process died")
            continue
        location, manifest = found
        facts = CompletedImage(
            location=location,
            batch_id=manifest.header.batch_id,
            query_id=manifest.header.query_id,
            full_bytes=manifest.full_bytes,
            file_count=manifest.file_count,
            properties=dict(manifest.header.properties),
        )
        registered = job.catalog.images.complete(lease, image.image_id, facts)
        done.append(f"registered {describe_image(registered)}: it was whole, and its process died before it could")
    return done


def attempts_under_way(job: StreamingJob) -> frozenset[int]:
    """Numbers of the attempts whose process may live: whatever they have written belongs to them, however old it is.

    One of an execution lives as long as the holder of the lease is not proven to have ended. A savepoint of a stopped
    stream, which needs no lease, lives as long as its process holds it.
    """
    begun = job.catalog.images.of_job(job.job_id, status=ImageStatus.IN_PROGRESS)
    lease = job.catalog.leases.current(job.job_id) if begun else None
    has_writer = lease is not None and holder_liveness(lease) is not Liveness.ENDED
    return frozenset(
        image.number
        for image in begun
        if image.number is not None and (has_writer if image.execution_id is not None else _is_held(job, image))
    )


def _is_held(job: StreamingJob, image: ImageRecord) -> bool:
    """Whether the process that takes a savepoint without a lease may live: it holds the attempt soon after its begin.

    One that lives all the same, because the catalog was away from it for longer, finds its attempt settled and says so.
    """
    is_young = job.catalog.now_ms() - image.created_at_ms <= HOLD_TTL_MS
    return is_young or bool(job.catalog.holds.on(image.image_id))


def settle_while_stopped(job: StreamingJob) -> list[str]:
    """Settle dead attempts of a stream that does not run, and delete what was completed after it was given up.

    Does nothing while the stream runs: its start has settled what was before it.

    Raises:
        StorageAccessError: The storage cannot be reached.
    """
    if not _has_something_to_settle(job):
        return []
    try:
        acquired = acquire(job.catalog, job.job_id, this_holder(f"housekeeping-{uuid.uuid4()}", "housekeeping", None))
    except LeaseHeldError:
        return []
    with LeaseKeeper(job.catalog, acquired.record) as lease:
        try:
            done = settle_dead_attempts(job, lease.record)
            # A holder that may still live could be publishing it at this moment.
            return done + (_delete_failed(job, lease) if acquired.predecessor_ended else [])
        except LeaseLostError:
            return []


def _has_something_to_settle(job: StreamingJob) -> bool:
    begun = job.catalog.images.of_job(job.job_id, status=ImageStatus.IN_PROGRESS)
    is_dead = (image.execution_id is not None or not _is_held(job, image) for image in begun)
    return any(is_dead) or bool(_failed_but_whole(job))


def _delete_failed(job: StreamingJob, lease: LeaseKeeper) -> list[str]:
    done = []
    for location, image in _failed_but_whole(job):
        lease.check()
        job.store.discard(location)
        done.append(f"deleted {_name(image)} at {location}: its attempt had failed before it was whole")
    return done


def _failed_but_whole(job: StreamingJob) -> list[tuple[str, ImageRecord]]:
    """Checkpoints in storage whose attempt this catalog has as failed; what it does not know is left alone."""
    failed = {image.number: image for image in job.catalog.images.of_job(job.job_id, status=ImageStatus.FAILED)}
    whole = []
    for location in job.store.checkpoints():
        number = location.rstrip("/").rpartition("/chk-")[2]
        image = failed.get(int(number)) if number.isdecimal() else None
        if image is not None and image.kind == ImageKind.CHECKPOINT and _is_at(job, image, location) is not None:
            whole.append((location, image))
    return whole


def _found(job: StreamingJob, image: ImageRecord) -> tuple[str, Manifest] | None:
    """Where an image is whole in storage, or None."""
    if image.kind == ImageKind.CHECKPOINT:
        places = [each for each in job.store.checkpoints() if each.rstrip("/").endswith(f"/chk-{image.number}")]
    else:
        places = job.store.savepoints()
    for location in places:
        manifest = _is_at(job, image, location)
        if manifest is not None and not job.store.verify(location, deep=False):
            return location, manifest
    return None


def _is_at(job: StreamingJob, image: ImageRecord, location: str) -> Manifest | None:
    try:
        manifest = job.store.manifest(location)
    except StorageAccessError:
        # Nothing can be said of it: a later look settles the attempt.
        raise
    except CkptError:
        # What lies there is damaged, or of a format that this version does not know: it must not stop a start.
        return None
    return manifest if manifest.header.image_id == image.image_id else None


def _name(image: ImageRecord) -> str:
    return f"chk-{image.number}" if image.kind == ImageKind.CHECKPOINT else f"savepoint {image.label or image.image_id}"
