"""Images that the catalog does not list: a savepoint that was moved, an image whose recording was cut off."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.records import ImageRecord, ImageStatus, ImageTrigger
from dagster_ckpt.config.modes import RecoveryClaimMode
from dagster_ckpt.config.redaction import refuse_user_info
from dagster_ckpt.errors import ImageNotFoundError, OptionError
from dagster_ckpt.snapshot.manifest import ImageHeader
from dagster_ckpt.stream.handle import StreamingJob
from dagster_ckpt.stream.snapshot_names import is_named
from dagster_ckpt.stream.start_from import StartFrom, is_location

# Property of an image: the deployment whose catalog recorded it.
DEPLOYMENT = "deployment_id"


def unlisted_image(job: StreamingJob, start_from: StartFrom, listed: Sequence[ImageRecord]) -> ImageRecord | None:
    """The image at a location that a start names, or None where it names a listed one, or no location.

    Args:
        job: The job to be started.
        start_from: What was asked for.
        listed: The images that the catalog lists.

    Raises:
        ImageNotFoundError: The image is of another job or another deployment, or is to be claimed.
        ImageCorruptError: Its metadata is truncated or altered.
        StorageAccessError: The location cannot be reached.
    """
    location = (start_from.reference or "").rstrip("/").removesuffix("/_metadata")
    if not is_location(location) or any(is_named(image, location) for image in listed):
        return None
    try:
        header = job.store.manifest(location).header
    except ImageNotFoundError:
        # The plan's own refusal says which images there are.
        return None
    if start_from.claim_mode is RecoveryClaimMode.CLAIM:
        raise ImageNotFoundError(
            f"{location} cannot be claimed by job {job.job_id!r}: the catalog does not list it, so nobody could say "
            "who else starts from it. Start from it with NO_CLAIM; once a checkpoint is complete it may be deleted."
        )
    if header.job_id != job.job_id:
        raise ImageNotFoundError(
            f"{location} is an image of job {header.job_id!r}, not of {job.job_id!r}. A restore rolls back the file "
            "sinks that the image names, and those are the other job's. Name an image of this job. To go on from it as "
            "a query of its own use fork_stream_job, or, if it is another deployment's, import_stream_job."
        )
    of_deployment = header.properties.get(DEPLOYMENT)
    if of_deployment != job.catalog.deployment_id:
        raise ImageNotFoundError(
            f"{location} is an image of job {header.job_id!r} in "
            + (f"deployment {of_deployment}" if of_deployment else "a deployment that it does not name")
            + f", and this catalog is the record of deployment {job.catalog.deployment_id}. Nothing was changed: the "
            "sinks that the image names are the other deployment's. To go on from it as a query of its own, with sinks "
            "of its own, use import_stream_job (import_image). If this catalog takes the place of one that was "
            "lost, let it go on as the record of that deployment first: "
            f"Catalog(url).take_over_deployment({str(of_deployment)!r})."
        )
    return _record(header, location, timeline=job.catalog.jobs.get(job.job_id).timeline)


def foreign_image(job: StreamingJob, location: str) -> ImageRecord:
    """The image of another deployment at a location.

    Args:
        job: The job that is to go on from it, whose storage can reach the location.
        location: URL of the image's folder, or of the `_metadata` in it.

    Raises:
        OptionError: That is no location, or it names a user.
        ImageNotFoundError: There is no image, or it is of this deployment.
        ImageCorruptError: Its metadata is truncated or altered.
        StorageAccessError: The location cannot be reached.
    """
    refuse_user_info("The location of the image", location)
    folder = location.strip().rstrip("/").removesuffix("/_metadata")
    if not is_location(folder):
        raise OptionError(
            f"{location!r} is no location of an image, and this catalog knows no other name of another deployment's. "
            "Give the URL of its folder."
        )
    header = job.store.manifest(folder).header
    if header.properties.get(DEPLOYMENT) == job.catalog.deployment_id or job.catalog.images.by_id([header.image_id]):
        raise ImageNotFoundError(
            f"{folder} is an image of job {header.job_id!r} of this very deployment. Start job {header.job_id!r} from "
            "it, or let another job go on from it by fork_stream_job."
        )
    return _record(header, folder, timeline=0)


def _record(header: ImageHeader, location: str, *, timeline: int) -> ImageRecord:
    return ImageRecord(
        image_id=header.image_id,
        job_id=header.job_id,
        execution_id=None,
        kind=header.kind.value,
        number=header.number,
        status=ImageStatus.COMPLETED,
        trigger=ImageTrigger.UNKNOWN,
        timeline=timeline,
        location=location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        properties=dict(header.properties),
        created_at_ms=header.created_at_ms,
    )
