"""The doctor at a job's live directory: what is wrong, how far back it is good, and which image to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.records import ImageRecord
from dagster_ckpt.errors import CkptError, NothingCommittedError, StorageAccessError
from dagster_ckpt.operations.verification import verify_image
from dagster_ckpt.recovery.snapshot_choice import ImageChoice, choose_image
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.against_snapshot import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.stream.handle import StreamingJob


@dataclass(frozen=True)
class JobExamination:
    """What the doctor says of a job.

    Attributes:
        job_id: The job.
        diagnosis: Of its live directory.
        choice: The image to use, should it be given up.
    """

    job_id: str
    diagnosis: Diagnosis
    choice: ImageChoice

    @property
    def sentences(self) -> list[str]:
        """The outcome for a person, in a few sentences."""
        diagnosis = self.diagnosis
        if diagnosis.can_resume:
            first = "Spark can go on in the live directory as it is; no image is needed."
        else:
            first = "Spark cannot go on in the live directory as it is."
        good = diagnosis.good_back_to
        if good is None:
            second = "No committed batch in it is whole."
        elif good == diagnosis.batch_id:
            second = f"It is whole after its newest committed batch, {good}."
        else:
            second = (
                f"It is whole after batch {good} (start_from=batch-{good}); the newest commit is {diagnosis.batch_id}."
            )
        return [first, second, self.choice.sentence]

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "job_id": self.job_id,
            "sentences": self.sentences,
            **self.diagnosis.as_record(),
            "image": self.choice.as_record(),
        }


def examine_live_directory(
    job: StreamingJob, *, url: str | None = None, deep: bool = True, deep_images: bool = False
) -> JobExamination:
    """Examine a job's live directory, whether a query runs in it or not; nothing is changed.

    Args:
        job: The job.
        url: Another directory than the job's own, such as an old `live-<k>-<token>` or a copy.
        deep: Read the content of every state file that a resume needs.
        deep_images: Compare every byte of the image that is named with its digest; otherwise lengths and completeness.

    Raises:
        JobNotFoundError: The job was never started.
        NothingCommittedError: The job has no live directory.
        StorageAccessError: Something cannot be reached, so nothing can be said of it.
    """
    record = job.catalog.jobs.get(job.job_id)
    location = url or record.live_directory
    if location is None:
        raise NothingCommittedError(
            f"Job {job.job_id!r} has no live directory: it never ran, or was cancelled with its state. Start it first, "
            "or give the directory."
        )
    images = job.catalog.images.restorable(job.job_id)
    diagnosis = diagnose(
        LiveDirectory(location),
        sinks=job.catalog.executions.last_sinks(job.job_id),
        expected_query_id=images[0].query_id if images else None,
        deep=deep,
        snapshot=_known_snapshot(job, images) if deep else None,
    )

    def problems(image: ImageRecord) -> Sequence[str]:
        return _problems(job, image, deep=deep_images)

    reported = job.catalog.executions.last_batch(job.job_id, location)
    known = [batch for batch in (diagnosis.batch_id, reported) if batch is not None]
    choice = choose_image(images, newest_batch=max(known, default=None), problems=problems)
    return JobExamination(job.job_id, diagnosis, choice)


def _known_snapshot(job: StreamingJob, images: Sequence[ImageRecord]) -> KnownSnapshot | None:
    """The newest image of the timeline whose list of files can be read."""
    for image in images:
        try:
            manifest = job.store.manifest(image.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # What is wrong with it is said where an image is chosen.
            continue
        return KnownSnapshot(image.location or "", manifest.header.batch_id, list(manifest.files))
    return None


def _problems(job: StreamingJob, image: ImageRecord, *, deep: bool) -> Sequence[str]:
    if image.location is None:
        return ["the catalog does not say where it is"]
    try:
        return verify_image(job, image.location, deep=deep).problems
    except StorageAccessError:
        raise
    except CkptError as trouble:
        return [str(trouble)]
