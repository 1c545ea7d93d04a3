"""Ops and jobs that decide which snapshots stay: retention, tags, promotion, and rebuilding a lost catalog."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.client.maintenance import HISTORY_DAYS
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.ops import STREAM_ID, StreamOps, errors_as_failure, report_snapshot
from dagster_ckpt.orchestration.tables import markdown_table
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.values.modes import TerminalState

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
    continue_from: str | None = Field(
        default=None,
        description="'live' or 'newest': where the stream continues if its live directory is an old copy, behind a "
        "snapshot that was taken of it. The refusal of a rebuild names both.",
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
        description="Only show what would be deleted and removed, and why.",
    )
    history_days: int = Field(
        default=HISTORY_DAYS,
        description="Delete rows of the catalog about deleted snapshots, failed attempts, ended executions, events and "
        "answered requests that are older than this many days. Only where state is left out.",
    )


def build_retention_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs that keep and delete snapshots of these streams.

    Returns:
        `apply_retention_job`, `tag_checkpoint_job`, `release_checkpoint_job`,
        `promote_checkpoint_job` and `rebuild_catalog_job`.
    """
    ops = StreamOps(streams)

    @ops.op
    def apply_retention(context: dg.OpExecutionContext, config: RetentionConfigSchema) -> None:
        """Keep or delete checkpoints by the clean-up option; finish interrupted deletions; prune the catalog."""
        with errors_as_failure():
            report = ops.client(context, config.stream_id).apply_retention(
                config.stream_id, state=config.state, execution_id=config.execution_id, dry_run=config.dry_run
            )
            pruned = None
            if config.state is None:
                pruned = ops.client(context, config.stream_id).prune_history(
                    config.stream_id, older_than_days=config.history_days, dry_run=config.dry_run
                )
        for message in report.messages(unlogged=True):
            context.log.info(message)
        context.add_output_metadata(
            {
                "dagster_ckpt/pruned_rows": pruned.total if pruned is not None else 0,
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

    @ops.op
    def tag_checkpoint(context: dg.OpExecutionContext, config: TagConfigSchema) -> str:
        """Keep a checkpoint: it is neither subsumed nor deleted when the stream ends, until it is released."""
        with errors_as_failure():
            snapshot = ops.client(context, config.stream_id).tag(config.stream_id, config.snapshot, label=config.label)
        return report_snapshot(context, snapshot)

    @ops.op
    def release_checkpoint(context: dg.OpExecutionContext, config: ReleaseConfigSchema) -> str:
        """Release a tagged snapshot, or a savepoint taken before a rewind, so that retention may delete it."""
        with errors_as_failure():
            snapshot = ops.client(context, config.stream_id).release(config.stream_id, config.snapshot)
        return report_snapshot(context, snapshot)

    @ops.op
    def promote_checkpoint(context: dg.OpExecutionContext, config: PromoteConfigSchema) -> str:
        """Copy a checkpoint into a savepoint, which depends on no other snapshot and is never deleted by the stream."""
        with errors_as_failure():
            snapshot = ops.client(context, config.stream_id).promote(
                config.stream_id,
                config.snapshot,
                label=config.label,
                target_directory=config.target_directory,
            )
        return report_snapshot(context, snapshot)

    @ops.op
    def rebuild_catalog(context: dg.OpExecutionContext, config: RebuildConfigSchema) -> list[str]:
        """Rebuild a lost catalog: register the existing snapshots and live directories. Nothing else changes."""
        with errors_as_failure():
            report = ops.client(context, config.stream_id).rebuild(
                config.stream_id,
                take_over_deployment=config.take_over_deployment,
                continue_from=config.continue_from,
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
        ops.job(apply_retention),
        ops.job(tag_checkpoint),
        ops.job(release_checkpoint),
        ops.job(promote_checkpoint),
        ops.job(rebuild_catalog),
    ]


def _garbage_table(swept: Sequence[Garbage]) -> dg.MarkdownMetadataValue:
    rows = [(item.location, item.reason, f"{item.age_ms / 3_600_000:.1f}") for item in swept]
    header = ("object", "why nothing needs it", "age, hours")
    return dg.MetadataValue.md(markdown_table(header, rows, at_most=_SHOWN_OBJECTS))
