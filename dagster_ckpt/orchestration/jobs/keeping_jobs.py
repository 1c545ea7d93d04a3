"""Ops and jobs that keep snapshots, and rebuild a lost catalog from them."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.operations import operations
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.operator_jobs import (
    RESOURCES,
    STREAM_ID,
    errors_as_failure,
    job_of_op,
    operator_of,
    report_snapshot,
)
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, stream_handle
from dagster_ckpt.stream.handle import StreamHandle

KEPT_SNAPSHOT = "Id, number (chk-7), label or location of a snapshot that the catalog lists."


class TagConfigSchema(dg.Config):
    """Keep a checkpoint."""

    stream_id: str = Field(description=STREAM_ID)
    snapshot: str = Field(description=KEPT_SNAPSHOT)
    label: str | None = Field(default=None, description="A name to start from later, such as before-release-42.")


class ReleaseConfigSchema(dg.Config):
    """Return a kept snapshot to the stream's retention."""

    stream_id: str = Field(description=STREAM_ID)
    snapshot: str = Field(description=KEPT_SNAPSHOT)


class PromoteConfigSchema(TagConfigSchema):
    """Copy a checkpoint into a savepoint."""

    target_directory: str | None = Field(
        default=None, description="Folder for the savepoint, as a URL. Default: the configured savepoint folder."
    )


class RebuildConfigSchema(dg.Config):
    """Register the snapshots and live directory of a lost catalog again."""

    stream_id: str = Field(description=STREAM_ID)
    take_over_deployment: str | None = Field(
        default=None,
        description="Id of the deployment whose catalog was lost; the refusal of a start names it. No stream of that "
        "deployment may be running.",
    )


def build_keeping_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs that keep snapshots of these streams.

    Returns:
        `tag_checkpoint_job`, `release_checkpoint_job`, `promote_checkpoint_job` and
        `rebuild_catalog_job`.
    """

    def handle_of(context: dg.OpExecutionContext, stream_id: str) -> StreamHandle:
        return stream_handle(find_stream(streams, stream_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def tag_checkpoint(context: dg.OpExecutionContext, config: TagConfigSchema) -> str:
        """Keep a checkpoint: it is neither subsumed nor deleted when the stream ends, until it is released."""
        with errors_as_failure():
            handle, origin = handle_of(context, config.stream_id), operator_of(context).origin
            snapshot = operations.tag_checkpoint(handle, config.snapshot, label=config.label, origin=origin)
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def release_checkpoint(context: dg.OpExecutionContext, config: ReleaseConfigSchema) -> str:
        """Release a tagged snapshot, or a savepoint taken before a rewind, so that retention may delete it."""
        with errors_as_failure():
            snapshot = operations.release_checkpoint(handle_of(context, config.stream_id), config.snapshot)
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def promote_checkpoint(context: dg.OpExecutionContext, config: PromoteConfigSchema) -> str:
        """Copy a checkpoint into a savepoint, which depends on no other snapshot and is never deleted by the stream."""
        with errors_as_failure():
            snapshot = operations.promote_checkpoint(
                handle_of(context, config.stream_id),
                config.snapshot,
                label=config.label,
                target_directory=config.target_directory,
            )
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def rebuild_catalog(context: dg.OpExecutionContext, config: RebuildConfigSchema) -> list[str]:
        """Rebuild a lost catalog: register the existing snapshots and live directories. Nothing else changes."""
        with errors_as_failure():
            report = operations.rebuild(
                handle_of(context, config.stream_id),
                origin=operator_of(context).origin,
                take_over_deployment=config.take_over_deployment,
            )
        for message in report.messages():
            context.log.info(message)
        context.add_output_metadata(
            {
                "dagster_ckpt/registered": list(report.registered),
                "dagster_ckpt/skipped": list(report.skipped),
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
