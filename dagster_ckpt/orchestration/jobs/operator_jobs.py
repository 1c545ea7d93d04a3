"""Operator jobs that change streams or their snapshots."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.client import Client
from dagster_ckpt.client.description import LATEST
from dagster_ckpt.client.lifecycle import StopResult
from dagster_ckpt.client.maintenance import HISTORY_DAYS
from dagster_ckpt.client.rebuild import RebuildReport
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.jobs.ops import (
    SNAPSHOT,
    StreamConfig,
    StreamOps,
    errors_as_failure,
    log_messages,
    report_snapshot,
    with_parameters_of,
)
from dagster_ckpt.orchestration.jobs.rewind_jobs import rewind_metadata
from dagster_ckpt.orchestration.metadata import markdown_table, snapshot_metadata
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.policies.retention import RetentionPolicy, SavepointHistory
from dagster_ckpt.policies.serialization import read_retention
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.state.editing import StateEdit
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.modes import DesiredState, TerminalState

ROLL_BACK_JOB = "roll_back_upgrade_job"
_SHOWN_OBJECTS = 100


class HistoryConfigSchema(dg.Config):
    """Retention limits for the savepoints of one schedule; the newest is always kept."""

    schedule: str = Field(description="Name of the schedule: only savepoints that it took are ever deleted.")
    max_count: int | None = Field(default=None, ge=1, description="Number of savepoints to keep. Default: no limit.")
    max_age_ms: int | None = Field(
        default=None, ge=1, description="Maximum age of a kept savepoint in ms. Default: no limit."
    )
    keep: dict[str, Any] | None = Field(
        default=None,
        description="Another retention policy instead of the two limits, by its name and arguments, such as "
        "{newest_per: {period: day, count: 14}}.",
    )

    def policy(self) -> RetentionPolicy:
        if self.keep is None:
            return SavepointHistory(self.max_count, self.max_age_ms)
        if self.max_count is not None or self.max_age_ms is not None:
            raise OptionError(
                f"keep is {self.keep!r}, and max_count or max_age_ms is set too: give one policy, such as "
                "{all_of: [{latest: 10}, {younger_than: 86400000}]}."
            )
        return read_retention(self.keep)


@with_parameters_of(Client.trigger_savepoint, without={"schedule"})
class TriggerSavepointConfig(StreamConfig):
    """Take a savepoint without stopping."""

    history: HistoryConfigSchema | None = Field(
        default=None,
        description="Set by a schedule: the savepoint belongs to the schedule, and its older ones are deleted beyond "
        "the limits. Without it you own the savepoint, and nothing deletes it.",
    )


@with_parameters_of(Client.restart)
class RestartConfig(StreamConfig):
    """Start a stream, or restart it from another snapshot."""


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


@with_parameters_of(Client.replicate)
class ReplicateConfig(StreamConfig):
    """Copy snapshots to a second bucket."""

    snapshot: str = Field(default=LATEST, description=SNAPSHOT)
    keep: dict[str, Any] | None = Field(
        default=None,
        description="Delete the copies that this retention policy does not keep, such as {keep_rules: {daily: 7}}. "
        "Default: all stay.",
    )


class RequestedState(Enum):
    """The desired states in Dagster's config, which identifies enum members by name."""

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    CANCELED = "CANCELED"
    AS_DEFINED = "AS_DEFINED"

    @property
    def desired(self) -> DesiredState | None:
        return None if self is RequestedState.AS_DEFINED else DesiredState(self.value)


@with_parameters_of(Client.set_desired_state)
class DesiredStateConfig(StreamConfig):
    """Set the desired state of a stream."""

    state: RequestedState = Field(
        description="RUNNING: the stream runs and is upgraded to new code versions. SUSPENDED: it is stopped with a "
        "savepoint and everything is kept. CANCELED: it is canceled, and its clean-up option decides "
        "what is kept. AS_DEFINED: the state in streaming_asset(desired_state=...); without one, the "
        "stream is not managed."
    )


@with_parameters_of(Client.edit_state, without={"edits"})
class ForgetKeyConfig(StreamConfig):
    """Make a savepoint without the state of some keys."""

    where: str = Field(description="Which keys: an SQL condition on fields of the key, such as user_id = 7.")
    operator: str | None = Field(
        default=None,
        description="Number or name of an operator. Default: all whose key has the columns of the condition.",
    )


def build_operator_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs. The supervisor sensor launches `apply_retention_job` and `roll_back_upgrade_job`."""
    ops = StreamOps(streams)
    return [*_lifecycle_jobs(ops), *_snapshot_jobs(ops)]


def _lifecycle_jobs(ops: StreamOps) -> list[dg.JobDefinition]:
    def stopped(context: dg.OpExecutionContext, result: StopResult) -> str:
        assert result.savepoint is not None
        return report_snapshot(context, result.savepoint)

    def canceled(context: dg.OpExecutionContext, result: StopResult) -> None:
        context.log.info(f"{result.stream_id}: canceled: {'; '.join(result.messages())}")

    def rewound(context: dg.OpExecutionContext, stream_id: str, ahead: RewindPreview) -> None:
        context.add_output_metadata(
            {
                "dagster_ckpt/recovery": ahead.plan.reason,
                "dagster_ckpt/rewound_batches": ahead.batches,
                **rewind_metadata(context, ops.stream(stream_id), ahead),
            }
        )

    @ops.op
    def restart_stream(context: dg.OpExecutionContext, config: RestartConfig) -> None:
        """Start a stream, or stop it and start it from another snapshot. The supervisor sensor launches the run."""
        with errors_as_failure():
            ahead = ops.call(context, Client.restart, config)
        rewound(context, config.stream_id, ahead)

    @ops.op
    def set_desired_state(context: dg.OpExecutionContext, config: DesiredStateConfig) -> None:
        """Set the desired state of a stream. The supervisor sensor, which must be running, reconciles it."""
        with errors_as_failure():
            row = ops.call(context, Client.set_desired_state, config, state=config.state.desired)
        context.add_output_metadata(desired_state_metadata(row))

    @ops.op
    def roll_back_upgrade(context: dg.OpExecutionContext, config: StreamConfig) -> None:
        """Roll a stream back to the snapshot from before an upgrade. The supervisor sensor launches it if one fails.

        A stream whose drivers Dagster launches, and of which no upgrade is recorded, goes back to the previous launch.
        """
        if ops.client(context, config.stream_id).rolls_back_launch(config.stream_id):
            with errors_as_failure():
                ahead = ops.call(context, Client.roll_back_launch, config)
            rewound(context, config.stream_id, ahead)
            return
        with errors_as_failure():
            upgrade = ops.call(context, Client.roll_back_upgrade, config)
        if upgrade.phase is UpgradePhase.ROLLBACK_FAILED:
            raise dg.Failure(upgrade.reason, allow_retries=False)
        context.log.warning(upgrade.reason)
        row = ops.client(context, config.stream_id).desired_state(config.stream_id)
        assert row is not None
        context.add_output_metadata(desired_state_metadata(row))

    return [
        ops.verb(
            "stop_with_savepoint",
            Client.stop,
            stopped,
            without={"savepoint"},
            description="Stop a stream at a batch boundary with a savepoint of the final state.",
        ),
        ops.verb("cancel_stream", Client.cancel, canceled),
        ops.job(restart_stream),
        ops.job(set_desired_state),
        ops.job(roll_back_upgrade),
    ]


def _snapshot_jobs(ops: StreamOps) -> list[dg.JobDefinition]:
    @ops.op
    def trigger_savepoint(context: dg.OpExecutionContext, config: TriggerSavepointConfig) -> str:
        """Take a savepoint of a running, stopped or failed stream. A running stream continues."""
        history = config.history
        with errors_as_failure():
            schedule = history.schedule if history is not None else None
            snapshot = ops.call(context, Client.trigger_savepoint, config, schedule=schedule)
            if history is not None:
                deleted = ops.client(context, config.stream_id).apply_savepoint_history(
                    config.stream_id, schedule=history.schedule, history=history.policy()
                )
                # Housekeeping retries failed deletions.
                log_messages(context, deleted.messages(unlogged=True))
        return report_snapshot(context, snapshot)

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
        log_messages(context, report.messages(unlogged=True))
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
        if report.held and config.state is not None and not report.dry_run:
            raise dg.Failure("Not everything was deleted; run this again later: " + "; ".join(report.held))

    @ops.op
    def replicate_snapshots(context: dg.OpExecutionContext, config: ReplicateConfig) -> list[str]:
        """Copy snapshots to a second bucket or folder, and verify every byte there."""
        with errors_as_failure():
            done = ops.call(context, Client.replicate, config)
        log_messages(context, done.messages())
        broken = [*done.failed, *(f"{each.name}: {each.problems[0]}" for each in done.replicas if each.problems)]
        if broken:
            raise dg.Failure("Some snapshots were not copied: " + "; ".join(broken))
        context.add_output_metadata(
            {
                "dagster_ckpt/to": done.to,
                "dagster_ckpt/copied_bytes": sum(each.copied_bytes for each in done.replicas),
                "dagster_ckpt/deleted": list(done.deleted),
            }
        )
        return [each.location for each in done.replicas]

    def rebuilt(context: dg.OpExecutionContext, report: RebuildReport) -> list[str]:
        log_messages(context, report.messages())
        context.add_output_metadata(
            {
                "dagster_ckpt/registered": list(report.registered),
                "dagster_ckpt/skipped": list(report.skipped),
                "dagster_ckpt/live_directory": report.live_directory or "none",
            }
        )
        return list(report.registered)

    @ops.op_with_spark
    def forget_key(context: dg.OpExecutionContext, config: ForgetKeyConfig) -> str:
        """Make a savepoint of a snapshot without the state of some keys. Start the stream from it afterwards."""
        with errors_as_failure():
            edits = StateEdit(config.operator, forget=config.where)
            done = ops.call(context, Client.edit_state, config, edits=edits, spark=ops.resources(context).spark_session)
        log_messages(context, done.messages())
        older = [describe_snapshot(each) for each in done.still_there]
        figures = {"dagster_ckpt/rows": done.rows, "dagster_ckpt/older_snapshots": dg.MetadataValue.json(older)}
        context.add_output_metadata({**snapshot_metadata(done.savepoint), **figures})
        return done.savepoint.location or ""

    return [
        ops.verb("trigger_checkpoint", Client.trigger_checkpoint, report_snapshot),
        ops.job(trigger_savepoint),
        ops.job(forget_key),
        ops.job(replicate_snapshots),
        ops.verb("prefer_savepoint", Client.prefer_savepoint, report_snapshot),
        ops.job(apply_retention),
        ops.verb("tag_checkpoint", Client.tag, report_snapshot),
        ops.verb("release_checkpoint", Client.release, report_snapshot),
        ops.verb("promote_checkpoint", Client.promote, report_snapshot),
        ops.verb("rebuild_catalog", Client.rebuild, rebuilt),
    ]


def desired_state_metadata(row: DesiredRecord) -> dict[str, dg.MetadataValue]:
    upgrade = row.upgrade
    facts: list[tuple[str, object]] = [
        ("desired state", row.desired.value if row.desired is not None else "as defined"),
        ("set by", row.origin),
        ("reached", "yes" if row.reached == row.generation else "not yet"),
    ]
    if upgrade is not None:
        versions = f"{upgrade.from_version} → {upgrade.to_version}"
        facts += [("upgrade", versions), ("phase", upgrade.phase.value), ("reason", upgrade.reason)]
    if row.alert is not None:
        facts.append(("alert", row.alert))
    return {"dagster_ckpt/desired_state": dg.MetadataValue.md(markdown_table(("", "value"), facts))}


def _garbage_table(swept: Sequence[Garbage]) -> dg.MarkdownMetadataValue:
    rows = [(item.location, item.reason, f"{item.age_ms / 3_600_000:.1f}") for item in swept]
    header = ("object", "why nothing needs it", "age, hours")
    return dg.MetadataValue.md(markdown_table(header, rows, at_most=_SHOWN_OBJECTS))
