"""Keeping images: tagging a checkpoint, releasing what was kept, and promoting a checkpoint to a savepoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from io import BytesIO
from typing import Any

from dagster_ckpt.catalog.records import CompletedImage, ImageRecord, ImageStatus, ImageTrigger
from dagster_ckpt.errors import ImageCorruptError, ImageNotFoundError, RequestFailedError
from dagster_ckpt.recovery.prepare import image_location
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import ImageKind
from dagster_ckpt.snapshot.reuse import Source, SourceFile
from dagster_ckpt.snapshot.store import StoredImage
from dagster_ckpt.stream.handle import StreamingJob, wall_clock_ms
from dagster_ckpt.stream.holding import holding
from dagster_ckpt.stream.snapshot_names import describe_image, is_named, is_owned_by_job
from dagster_ckpt.stream.start_from import checked_label


def tag_checkpoint(job: StreamingJob, reference: str, *, label: str | None, origin: str) -> ImageRecord:
    """Keep an image: the job deletes it neither when it is subsumed nor at its end, until it is released.

    It takes nobody's place in `num_retained`.

    Args:
        job: The job; it may run.
        reference: Id, number (`chk-7`), label or location of an image that the catalog lists.
        label: A name to start from later, or None.
        origin: Who keeps it.

    Raises:
        ImageNotFoundError: There is no such image any more.
        OptionError: The label means another starting point.
    """
    checked_label(label)
    image = _find(job, reference)
    job.catalog.holds.tag(image.image_id, label=label, holder=origin)
    return job.catalog.images.get(image.image_id)


def release_checkpoint(job: StreamingJob, reference: str) -> ImageRecord:
    """Give what was kept back to the job, which deletes it as it does any other checkpoint.

    A savepoint that was taken before a rewind becomes the job's own. A savepoint of a person is never released so: who
    does not need it any more deletes its folder.

    Raises:
        ImageNotFoundError: There is no such image any more.
        RequestFailedError: It is not kept.
    """
    image = _find(job, reference)
    released = job.catalog.holds.release_tag(image.image_id)
    if image.trigger is ImageTrigger.REWIND and not is_owned_by_job(image):
        job.catalog.images.give_to_job(image.image_id)
        released = True
    if not released:
        raise RequestFailedError(
            f"{describe_image(image)} of job {job.job_id!r} is not tagged, and was not taken before a rewind: there "
            "is nothing to release."
        )
    return job.catalog.images.get(image.image_id)


def promote_checkpoint(
    job: StreamingJob, reference: str, *, label: str | None = None, target_directory: str | None = None
) -> ImageRecord:
    """Make a savepoint of a checkpoint: self-contained, and never deleted by the job.

    On one disk its bytes are linked, within one object store they are copied by the store itself.

    Args:
        job: The job; it may run.
        reference: Id, number (`chk-7`), label or location of an image that the catalog lists.
        label: A name to start from later.
        target_directory: Folder for it, instead of the configured one.

    Raises:
        ImageNotFoundError: There is no such image any more.
        ImageCorruptError: It misses data or was altered; there is no savepoint then.
        OptionError: The label means another starting point.
        StorageAccessError: The savepoint cannot be written.
    """
    checked_label(label)
    image = _find(job, reference)
    image_id, number = str(uuid.uuid4()), job.catalog.jobs.allocate_number(job.job_id)
    began_ms = wall_clock_ms()
    begun = job.catalog.images.begin_of_stopped(
        job.job_id,
        image_id=image_id,
        number=number,
        trigger=ImageTrigger.MANUAL,
        timeline=image.timeline,
        label=label,
    )
    try:
        with holding(job.catalog, [image, begun], f"promotion to savepoint {image_id}"):
            named = {"label": label} if label is not None else {}
            said = {"image_id": image_id, "number": number, "properties": named}
            stored, properties = _write(job, image, said, target_directory)
    except BaseException as error:
        job.catalog.images.fail_of_stopped(image_id, str(error) or type(error).__name__)
        raise
    facts = CompletedImage(
        stored.location,
        batch_id=image.batch_id,
        query_id=image.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        rows=None,
        state_rows=image.state_rows,
        watermark=image.watermark,
        duration_ms=wall_clock_ms() - began_ms,
        properties=properties,
    )
    return job.catalog.images.complete_of_stopped(image_id, facts)


def _write(
    job: StreamingJob, image: ImageRecord, said: Mapping[str, Any], target: str | None
) -> tuple[StoredImage, dict[str, object]]:
    location = image_location(image)
    problems = job.store.verify(location)
    if problems:
        raise ImageCorruptError(f"{location} cannot be promoted: {problems[0]}. Promote another checkpoint.")
    manifest = job.store.manifest(location)
    taken = {name: value for name, value in manifest.header.properties.items() if name not in ("label", "schedule")}
    properties = {**taken, "trigger": ImageTrigger.MANUAL.value, **said["properties"]}
    header = manifest.header.model_copy(update={**said, "kind": ImageKind.SAVEPOINT, "properties": properties})

    def read(entry: FileEntry) -> BytesIO:
        found: list[bytes] = []

        def keep(_entry: FileEntry, chunks: Iterable[bytes]) -> None:
            found.extend(chunks)

        job.store.extract(location, keep, only=entry.path.__eq__)
        return BytesIO(b"".join(found))

    # A name that no other content has: bytes that the store can link or copy itself are not even read.
    sources: list[Source] = [
        SourceFile(entry.path, entry.size, entry.identity, partial(read, entry), entry.token)
        for entry in manifest.files
    ]
    stored = job.store.write_savepoint(header, sources, target_directory=target, base=location)
    return stored, properties


def _find(job: StreamingJob, reference: str) -> ImageRecord:
    listed = job.catalog.images.of_job(job.job_id, status=ImageStatus.COMPLETED)
    found = next((image for image in listed if is_named(image, reference)), None)
    if found is None:
        known = ", ".join(describe_image(image) for image in listed[:8]) or "none"
        raise ImageNotFoundError(f"Job {job.job_id!r} has no image {reference!r}. It has: {known}. Name one of these.")
    return found
