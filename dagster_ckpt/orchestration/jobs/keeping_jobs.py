"""Ops and jobs that keep images, and bring back what a lost catalog knew of them."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.operations import operations
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.operator_jobs import (
    JOB_ID,
    RESOURCES,
    job_of_op,
    operator_of,
    tell_image,
    told_as_failure,
)
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, streaming_job
from dagster_ckpt.stream.handle import StreamingJob

KEPT_IMAGE = "Id, number (chk-7), label or location of an image that the catalog lists."


class TagConfigSchema(dg.Config):
    """Keep a checkpoint."""

    job_id: str = Field(description=JOB_ID)
    image: str = Field(description=KEPT_IMAGE)
    label: str | None = Field(default=None, description="A name to start from later, such as before-release-42.")


class ReleaseConfigSchema(dg.Config):
    """Give a kept image back to the stream."""

    job_id: str = Field(description=JOB_ID)
    image: str = Field(description=KEPT_IMAGE)


class PromoteConfigSchema(TagConfigSchema):
    """Make a savepoint of a checkpoint."""

    target_directory: str | None = Field(
        default=None, description="Folder for the savepoint, as a URL. Default: the configured savepoint folder."
    )


class RebuildConfigSchema(dg.Config):
    """Register again what a lost catalog knew."""

    job_id: str = Field(description=JOB_ID)
    take_over_deployment: str | None = Field(
        default=None,
        description="Id of the deployment whose catalog was lost, as the refusal of a start names it. Nothing of that "
        "deployment may run.",
    )


def build_keeping_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """The jobs that keep images of these streams.

    Returns:
        `tag_checkpoint_job`, `release_checkpoint_job`, `promote_checkpoint_job` and `rebuild_catalog_job`.
    """

    def job_of(context: dg.OpExecutionContext, job_id: str) -> StreamingJob:
        return streaming_job(find_stream(streams, job_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def tag_checkpoint(context: dg.OpExecutionContext, config: TagConfigSchema) -> str:
        """Keep a checkpoint: it is neither subsumed nor deleted at the end, until it is released."""
        with told_as_failure():
            job, origin = job_of(context, config.job_id), operator_of(context).origin
            image = operations.tag_checkpoint(job, config.image, label=config.label, origin=origin)
        return tell_image(context, image)

    @dg.op(required_resource_keys=RESOURCES)
    def release_checkpoint(context: dg.OpExecutionContext, config: ReleaseConfigSchema) -> str:
        """Give an image that was tagged, or taken before a rewind, back to the stream, which deletes it in its turn."""
        with told_as_failure():
            image = operations.release_checkpoint(job_of(context, config.job_id), config.image)
        return tell_image(context, image)

    @dg.op(required_resource_keys=RESOURCES)
    def promote_checkpoint(context: dg.OpExecutionContext, config: PromoteConfigSchema) -> str:
        """Make a savepoint of a checkpoint: it needs no other image, and the stream never deletes it."""
        with told_as_failure():
            image = operations.promote_checkpoint(
                job_of(context, config.job_id),
                config.image,
                label=config.label,
                target_directory=config.target_directory,
            )
        return tell_image(context, image)

    @dg.op(required_resource_keys=RESOURCES)
    def rebuild_catalog(context: dg.OpExecutionContext, config: RebuildConfigSchema) -> list[str]:
        """Where the catalog was lost: register the images and live directories that are there, and change nothing."""
        with told_as_failure():
            report = operations.rebuild(
                job_of(context, config.job_id),
                origin=operator_of(context).origin,
                take_over_deployment=config.take_over_deployment,
            )
        for sentence in report.sentences():
            context.log.info(sentence)
        context.add_output_metadata(
            {
                "dagster_ckpt/registered": list(report.registered),
                "dagster_ckpt/passed_over": list(report.passed_over),
                "dagster_ckpt/live_directory": report.live_directory or "none",
            }
        )
        return list(report.registered)

    return [
        job_of_op("tag_checkpoint_job", tag_checkpoint),
        job_of_op("release_checkpoint_job", release_checkpoint),
        job_of_op("promote_checkpoint_job", promote_checkpoint),
        job_of_op("rebuild_catalog_job", rebuild_catalog),
    ]
