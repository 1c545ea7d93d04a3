"""Ops and jobs that decide which snapshots stay: retention, tags, promotion, and rebuilding a lost catalog."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.config.modes import TerminalState
from dagster_ckpt.errors import NothingCommittedError, OptionError
from dagster_ckpt.operations import operations
from dagster_ckpt.orchestration.assets.stream import Stream, find_stream
from dagster_ckpt.orchestration.jobs.ops import (
    RESOURCES,
    STREAM_ID,
    errors_as_failure,
    job_of_op,
    markdown_table,
    operator_of,
    report_snapshot,
)
from dagster_ckpt.orchestration.resources.stream_resource import stream_handle
from dagster_ckpt.recovery.retention import RetentionReport, housekeeping
from dagster_ckpt.runtime.settlement import settle_execution
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.stream.handle import StreamHandle

_SHOWN_OBJECTS = 100
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


class RetentionConfigSchema(dg.Config):
    """Apply externalized retention."""

    stream_id: str = Field(description=STREAM_ID)
    state: TerminalState | None = Field(
        default=None,
        description="The state in which the stream ended: applies RETAIN/DELETE_ON_CANCELLATION for it. Leave it out "
        "to only finish interrupted deletions and remove orphaned bytes.",
    )
    execution_id: str | None = Field(default=None, description="The execution that ended. Default: the newest one.")
    dry_run: bool = Field(
        default=False,
        description="Only show which orphaned bytes would be removed and which deletions finished, and why. "
        "Not together with state.",
    )


def build_retention_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs that keep and delete snapshots of these streams.

    Returns:
        `apply_retention_job`, `tag_checkpoint_job`, `release_checkpoint_job`,
        `promote_checkpoint_job` and `rebuild_catalog_job`.
    """

    def handle_of(context: dg.OpExecutionContext, stream_id: str) -> StreamHandle:
        return stream_handle(find_stream(streams, stream_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def apply_retention(context: dg.OpExecutionContext, config: RetentionConfigSchema) -> None:
        """Keep or delete checkpoints according to the clean-up option; finish interrupted deletions."""
        with errors_as_failure():
            handle = handle_of(context, config.stream_id)
            report = _retention(handle, config)
        for message in report.messages(unlogged=True):
            context.log.info(message)
        context.add_output_metadata(
            {
                "dagster_ckpt/deleted": list(report.deleted),
                "dagster_ckpt/kept": list(report.kept),
                "dagster_ckpt/dry_run": report.dry_run,
                "dagster_ckpt/removed_objects": _garbage_table(report.swept),
            }
        )
        if report.failed:
            raise dg.Failure(
                "Some deletions failed; they stay in the catalog as DELETING and are tried again by the next run: "
                + "; ".join(report.failed)
            )

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
        job_of_op("apply_retention_job", apply_retention),
        job_of_op("tag_checkpoint_job", tag_checkpoint),
        job_of_op("release_checkpoint_job", release_checkpoint),
        job_of_op("promote_checkpoint_job", promote_checkpoint),
        job_of_op("rebuild_catalog_job", rebuild_catalog),
    ]


def _garbage_table(swept: Sequence[Garbage]) -> dg.MarkdownMetadataValue:
    rows = [(item.location, item.reason, f"{item.age_ms / 3_600_000:.1f}") for item in swept]
    header = ("object", "why nothing needs it", "age, hours")
    return dg.MetadataValue.md(markdown_table(header, rows, at_most=_SHOWN_OBJECTS))


def _retention(handle: StreamHandle, config: RetentionConfigSchema) -> RetentionReport:
    if config.state is not None and config.dry_run:
        raise OptionError(
            f"state is {config.state.name}, but a dry run shows only orphaned bytes and interrupted deletions, not "
            "what a state would delete. Nothing was changed. Leave out state, or dry_run."
        )
    finished = housekeeping(handle, dry_run=config.dry_run)
    if config.state is None:
        return finished
    execution_id = config.execution_id
    if execution_id is None:
        latest = handle.catalog.executions.latest(handle.stream_id)
        if latest is None:
            raise NothingCommittedError(
                f"Stream {handle.stream_id!r} was never started: there is nothing to keep or delete."
            )
        execution_id = latest.execution_id
    return finished.and_then(settle_execution(handle, execution_id, config.state))
