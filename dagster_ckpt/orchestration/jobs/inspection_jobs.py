"""Ops and jobs that look and change nothing: is this live directory whole, is this image good?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.operations.doctor import JobExamination, examine_live_directory
from dagster_ckpt.operations.verification import (
    ALL,
    LATEST,
    ImageVerification,
    locations_of,
    record_verification,
    verify_image,
)
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.markdown import markdown_table
from dagster_ckpt.orchestration.jobs.operator_jobs import JOB_ID, RESOURCES, job_of_op, told_as_failure
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, streaming_job
from dagster_ckpt.stream.handle import StreamingJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_RESOURCE = "pyspark"
IMAGE = f"{LATEST} (the newest image), {ALL}, or the id, number (chk-7), label or location of an image."


class DoctorConfigSchema(dg.Config):
    """Examine the live directory of a stream."""

    job_id: str = Field(description=JOB_ID)
    directory: str | None = Field(
        default=None,
        description="Another directory than the stream's own, such as an old live-<k>-<token> or a copy of one.",
    )
    deep: bool = Field(default=True, description="Read the content of every state file that a resume needs.")
    deep_images: bool = Field(
        default=False,
        description="Read every byte of the image that is recommended; otherwise lengths and completeness.",
    )
    fail_on_error: bool = Field(default=True, description="End the run as failed where Spark could not go on.")


class VerifyConfigSchema(dg.Config):
    """Prove that images can be restored."""

    job_id: str = Field(description=JOB_ID)
    image: str = Field(default=LATEST, description=IMAGE)
    deep: bool = Field(default=True, description="Compare every byte with its digest; otherwise only lengths.")
    fail_on_error: bool = Field(default=True, description="End the run as failed where an image cannot be restored.")


def build_inspection_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """The jobs that look at these streams' live directories and images.

    Returns:
        `doctor_job`, `verify_images_job`, and `verify_state_job`, one of its own as it starts Spark.
    """

    def job_of(context: dg.OpExecutionContext, job_id: str) -> StreamingJob:
        return streaming_job(find_stream(streams, job_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def doctor(context: dg.OpExecutionContext, config: DoctorConfigSchema) -> dict[str, Any]:
        """Say what is wrong with a stream's live directory, how far back it is good, and which image to use."""
        with told_as_failure():
            examination = examine_live_directory(
                job_of(context, config.job_id),
                url=config.directory,
                deep=config.deep,
                deep_images=config.deep_images,
            )
        for sentence in examination.sentences:
            context.log.info(sentence)
        metadata = doctor_metadata(examination)
        if config.fail_on_error and not examination.diagnosis.can_resume:
            raise dg.Failure(" ".join(examination.sentences), metadata=metadata, allow_retries=False)
        context.add_output_metadata(metadata)
        return examination.as_record()

    def verify(
        context: dg.OpExecutionContext, config: VerifyConfigSchema, spark: "SparkSession | None" = None
    ) -> list[dict[str, Any]]:
        with told_as_failure():
            job = job_of(context, config.job_id)
            verified = [
                verify_image(job, location, deep=config.deep, spark=spark)
                for location in locations_of(job, config.image)
            ]
            for item in verified:
                record_verification(job, item)
        metadata = verification_metadata(verified)
        broken = [item for item in verified if not item.passed]
        for item in broken:
            context.log.error(f"{item.location} cannot be restored: {item.problems[0]}")
        if config.fail_on_error and broken:
            raise dg.Failure(
                f"{len(broken)} of {len(verified)} images cannot be restored: {broken[0].problems[0]}",
                metadata=metadata,
                allow_retries=False,
            )
        context.add_output_metadata(metadata)
        return [item.as_record() for item in verified]

    @dg.op(required_resource_keys=RESOURCES)
    def verify_images(context: dg.OpExecutionContext, config: VerifyConfigSchema) -> list[dict[str, Any]]:
        """Prove that images can be restored: every byte, and every file that a resume needs."""
        return verify(context, config)

    @dg.op(required_resource_keys=RESOURCES | {SPARK_RESOURCE})
    def verify_state(context: dg.OpExecutionContext, config: VerifyConfigSchema) -> list[dict[str, Any]]:
        """Prove that images can be restored, and read the state of every operator from a restored copy with Spark."""
        return verify(context, config, context.resources.pyspark.spark_session)

    return [
        job_of_op("doctor_job", doctor),
        job_of_op("verify_images_job", verify_images),
        job_of_op("verify_state_job", verify_state),
    ]


def doctor_metadata(examination: JobExamination) -> dict[str, Any]:
    """An examination as Dagster metadata."""
    diagnosis = examination.diagnosis
    rows = [
        [item.severity.value, item.code.value, item.path, item.explanation, item.advice] for item in diagnosis.findings
    ]
    figures = {
        "dagster_ckpt/summary": " ".join(examination.sentences),
        "dagster_ckpt/findings": dg.MetadataValue.md(
            markdown_table(["severity", "code", "where", "what was found", "what to do"], rows) if rows else "Nothing."
        ),
        "dagster_ckpt/can_resume": diagnosis.can_resume,
        "dagster_ckpt/live_directory": dg.MetadataValue.path(diagnosis.url),
        "dagster_ckpt/batch_id": diagnosis.batch_id,
        "dagster_ckpt/good_back_to": diagnosis.good_back_to,
        "dagster_ckpt/image": examination.choice.image.location if examination.choice.image else None,
        "dagster_ckpt/replayed_batches": examination.choice.replayed_batches,
    }
    return {name: value for name, value in figures.items() if value is not None}


def verification_metadata(verified: Sequence[ImageVerification]) -> dict[str, Any]:
    """Verifications as Dagster metadata."""
    rows = [
        [
            "good" if item.passed else "BROKEN",
            str(item.header.batch_id) if item.header else "?",
            item.location,
            "; ".join(item.problems) or ("every byte" if item.deep else "lengths") + ", complete for its batch",
        ]
        for item in verified
    ]
    states = [
        [item.location, f"{rows.operator_id} {rows.operator}", rows.state, str(rows.partitions), str(rows.rows)]
        for item in verified
        for rows in item.state or ()
    ]
    metadata: dict[str, Any] = {
        "dagster_ckpt/images": dg.MetadataValue.md(markdown_table(["image", "batch", "location", "result"], rows)),
        "dagster_ckpt/good": sum(item.passed for item in verified),
        "dagster_ckpt/broken": sum(not item.passed for item in verified),
    }
    if states:
        table = markdown_table(["location", "operator", "state", "partitions", "rows"], states)
        metadata["dagster_ckpt/state"] = dg.MetadataValue.md(table)
    return metadata
