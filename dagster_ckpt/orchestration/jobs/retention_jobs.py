"""Ops and jobs that decide which snapshots stay: retention, tags, promotion, and rebuilding a lost catalog."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.client import Client
from dagster_ckpt.client.maintenance import HISTORY_DAYS
from dagster_ckpt.client.rebuild import RebuildReport
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.ops import (
    StreamConfig,
    StreamOps,
    errors_as_failure,
    report_snapshot,
    with_parameters_of,
)
from dagster_ckpt.orchestration.tables import markdown_table
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.values.modes import TerminalState

_SHOWN_OBJECTS = 100


@with_parameters_of(Client.apply_retention)
class RetentionConfig(StreamConfig):
    """Apply externalized retention."""

    state: TerminalState | None = Field(
        default=None,
        description="The state in which the stream ended: applies RETAIN/DELETE_ON_CANCELLATION for it. Leave it out "
        "to only finish interrupted deletions and remove orphaned bytes.",
    )
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
    """Build the jobs that keep, delete and register snapshots of these streams."""
    ops = StreamOps(streams)

    @ops.op
    def apply_retention(context: dg.OpExecutionContext, config: RetentionConfig) -> None:
        """Keep or delete checkpoints by the clean-up option; finish interrupted deletions; prune the catalog."""
        with errors_as_failure():
            report = ops.call(context, Client.apply_retention, config)
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

    def rebuilt(context: dg.OpExecutionContext, report: RebuildReport) -> list[str]:
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
        ops.verb("tag_checkpoint", Client.tag, report_snapshot),
        ops.verb("release_checkpoint", Client.release, report_snapshot),
        ops.verb("promote_checkpoint", Client.promote, report_snapshot),
        ops.verb("rebuild_catalog", Client.rebuild, rebuilt),
    ]


def _garbage_table(swept: Sequence[Garbage]) -> dg.MarkdownMetadataValue:
    rows = [(item.location, item.reason, f"{item.age_ms / 3_600_000:.1f}") for item in swept]
    header = ("object", "why nothing needs it", "age, hours")
    return dg.MetadataValue.md(markdown_table(header, rows, at_most=_SHOWN_OBJECTS))
