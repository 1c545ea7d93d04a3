"""Ops and jobs that operate streams: savepoints, stop, cancel, restart, desired state, and rolling an upgrade back."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.assets.downstream import dependents_of
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.ops import STREAM_ID, StreamOps, errors_as_failure, report_snapshot
from dagster_ckpt.orchestration.jobs.rewind_jobs import downstream_metadata, preview_metadata
from dagster_ckpt.orchestration.resources.settings import StartConfig
from dagster_ckpt.orchestration.tables import markdown_table
from dagster_ckpt.policies.retention import RetentionPolicy, SavepointHistory
from dagster_ckpt.policies.serialization import read_retention
from dagster_ckpt.values.modes import DesiredState

ROLL_BACK_JOB = "roll_back_upgrade_job"
TIMEOUT = "Seconds to wait for an answer of the running stream; after that the request is withdrawn."


class CheckpointConfigSchema(dg.Config):
    """Take a checkpoint now."""

    stream_id: str = Field(description=STREAM_ID)
    timeout_seconds: float = Field(default=600, gt=0, description=TIMEOUT)


class SavepointConfigSchema(dg.Config):
    """Take a savepoint, with or without stopping."""

    stream_id: str = Field(description=STREAM_ID)
    label: str | None = Field(default=None, description="A name to start from later, such as before-release-42.")
    target_directory: str | None = Field(
        default=None,
        description="Folder for this savepoint, as a URL. Default: the configured savepoint folder.",
    )
    timeout_seconds: float = Field(default=600, gt=0, description=TIMEOUT)


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
        """The policy that decides which savepoints of the schedule are kept.

        Raises:
            OptionError: A value is not valid, or both a policy and a limit are given.
        """
        if self.keep is None:
            return SavepointHistory(self.max_count, self.max_age_ms)
        if self.max_count is not None or self.max_age_ms is not None:
            raise OptionError(
                f"keep is {self.keep!r}, and max_count or max_age_ms is set too: give one policy, such as "
                "{all_of: [{latest: 10}, {younger_than: 86400000}]}."
            )
        return read_retention(self.keep)


class TriggerSavepointConfigSchema(SavepointConfigSchema):
    """Take a savepoint without stopping."""

    history: HistoryConfigSchema | None = Field(
        default=None,
        description="Set by a schedule: the savepoint belongs to the schedule, and its older ones are deleted beyond "
        "the limits. Without it you own the savepoint, and nothing deletes it.",
    )


class RestartConfigSchema(StartConfig):
    """Start a stream, or restart it from another snapshot."""

    stream_id: str = Field(description=STREAM_ID)
    timeout_seconds: float = Field(default=600, gt=0, description=TIMEOUT)
    suspend_first: bool = Field(
        default=False,
        description="Suspend a running query before the new run is launched. By default the new run checks its code "
        "first, beside the running query, and a start that it refuses leaves that alone.",
    )


class PreferConfigSchema(dg.Config):
    """Select the savepoint that preferred-savepoint refers to."""

    stream_id: str = Field(description=STREAM_ID)
    savepoint: str = Field(description="Snapshot id, label or location of a completed savepoint.")


def build_operator_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs that operate these streams.

    Returns:
        `trigger_checkpoint_job`, `trigger_savepoint_job`, `stop_with_savepoint_job`,
        `cancel_stream_job`, `restart_stream_job` and `prefer_savepoint_job`.
    """
    ops = StreamOps(streams)

    @ops.op
    def trigger_checkpoint(context: dg.OpExecutionContext, config: CheckpointConfigSchema) -> str:
        """Take a checkpoint of a running stream now, regardless of the minimum pause."""
        with errors_as_failure():
            client = ops.client(context, config.stream_id)
            snapshot = client.trigger_checkpoint(config.stream_id, timeout_s=config.timeout_seconds)
        return report_snapshot(context, snapshot)

    @ops.op
    def trigger_savepoint(context: dg.OpExecutionContext, config: TriggerSavepointConfigSchema) -> str:
        """Take a savepoint of a running, stopped or failed stream. A running stream continues."""
        with errors_as_failure():
            client = ops.client(context, config.stream_id)
            snapshot = client.trigger_savepoint(
                config.stream_id,
                label=config.label,
                target_directory=config.target_directory,
                schedule=config.history.schedule if config.history is not None else None,
                timeout_s=config.timeout_seconds,
            )
            if config.history is not None:
                history_report = client.apply_savepoint_history(
                    config.stream_id, schedule=config.history.schedule, history=config.history.policy()
                )
                # Housekeeping retries failed deletions: the savepoint itself succeeded.
                for message in history_report.messages(unlogged=True):
                    context.log.info(message)
        return report_snapshot(context, snapshot)

    @ops.op
    def stop_with_savepoint(context: dg.OpExecutionContext, config: SavepointConfigSchema) -> str:
        """Stop a stream at a batch boundary with a savepoint of the final state."""
        with errors_as_failure():
            stopped = ops.client(context, config.stream_id).stop(
                config.stream_id,
                label=config.label,
                target_directory=config.target_directory,
                timeout_s=config.timeout_seconds,
            )
        assert stopped.savepoint is not None
        return report_snapshot(context, stopped.savepoint)

    @ops.op
    def cancel_stream(context: dg.OpExecutionContext, config: CheckpointConfigSchema) -> None:
        """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted."""
        with errors_as_failure():
            stopped = ops.client(context, config.stream_id).cancel(config.stream_id, timeout_s=config.timeout_seconds)
        context.log.info(f"{stopped.stream_id}: canceled: {'; '.join(stopped.messages())}")

    @ops.op
    def restart_stream(context: dg.OpExecutionContext, config: RestartConfigSchema) -> None:
        """Start a stream, or stop it and start it from another snapshot. The supervisor sensor launches the run."""
        with errors_as_failure():
            stream = ops.stream(config.stream_id)
            ahead = ops.client(context, config.stream_id).restart(
                stream.stream_id,
                start_from=config.parsed(),
                timeout_s=config.timeout_seconds,
                report=context.log.info,
                suspend_first=config.suspend_first,
            )
        context.add_output_metadata(
            {
                "dagster_ckpt/recovery": ahead.plan.reason,
                "dagster_ckpt/rewound_batches": ahead.batches,
                **preview_metadata(ahead),
                **downstream_metadata(dependents_of(context, stream, ahead)),
            }
        )

    @ops.op
    def prefer_savepoint(context: dg.OpExecutionContext, config: PreferConfigSchema) -> str:
        """Select the savepoint that start_from=preferred-savepoint refers to."""
        with errors_as_failure():
            snapshot = ops.client(context, config.stream_id).prefer_savepoint(config.stream_id, config.savepoint)
        return report_snapshot(context, snapshot)

    return [
        ops.job(trigger_checkpoint),
        ops.job(trigger_savepoint),
        ops.job(stop_with_savepoint),
        ops.job(cancel_stream),
        ops.job(restart_stream),
        ops.job(prefer_savepoint),
    ]


class RequestedState(Enum):
    """The desired states in Dagster's config, which identifies enum members by name."""

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    CANCELED = "CANCELED"
    AS_DEFINED = "AS_DEFINED"

    @property
    def desired(self) -> DesiredState | None:
        """The state; None to use the one in the definition."""
        return None if self is RequestedState.AS_DEFINED else DesiredState(self.value)


class DesiredStateConfigSchema(dg.Config):
    """Set the desired state of a stream."""

    stream_id: str = Field(description=STREAM_ID)
    state: RequestedState = Field(
        description="RUNNING: the stream runs and is upgraded to new code versions. SUSPENDED: it is stopped with a "
        "savepoint and everything is kept. CANCELED: it is canceled, and its clean-up option decides "
        "what is kept. AS_DEFINED: the state in streaming_asset(desired_state=...); without one, the "
        "stream is not managed."
    )
    retry_refused: bool = Field(
        default=False,
        description="Retry a code version that a preflight refused or that was rolled back.",
    )
    accept_plan_change: bool = Field(
        default=False,
        description="Let the code continue from the state although its plan differs, as reported by the last "
        "preflight, and retry it.",
    )


class RollBackConfigSchema(dg.Config):
    """Roll an upgrade back."""

    stream_id: str = Field(description=STREAM_ID)


def build_desired_state_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs for desired states.

    Returns:
        `set_desired_state_job` and `roll_back_upgrade_job`; the supervisor sensor launches the second.
    """
    ops = StreamOps(streams)

    @ops.op
    def set_desired_state(context: dg.OpExecutionContext, config: DesiredStateConfigSchema) -> None:
        """Set the desired state of a stream. The supervisor sensor, which must be running, reconciles it."""
        with errors_as_failure():
            row = ops.client(context, config.stream_id).set_desired_state(
                config.stream_id,
                config.state.desired,
                retry_refused=config.retry_refused,
                accept_plan_change=config.accept_plan_change,
            )
        context.add_output_metadata(desired_state_metadata(row))

    @ops.op
    def roll_back_upgrade(context: dg.OpExecutionContext, config: RollBackConfigSchema) -> None:
        """Roll a stream back to the snapshot taken before a failed upgrade. The supervisor sensor launches this job."""
        with errors_as_failure():
            client = ops.client(context, config.stream_id)
            upgrade = client.roll_back_upgrade(config.stream_id, run_id=context.run_id, report=context.log.info)
        if upgrade.phase is UpgradePhase.ROLLBACK_FAILED:
            raise dg.Failure(upgrade.reason, allow_retries=False)
        context.log.warning(upgrade.reason)
        row = client.desired_state(config.stream_id)
        assert row is not None
        context.add_output_metadata(desired_state_metadata(row))

    return [
        ops.job(set_desired_state),
        ops.job(roll_back_upgrade),
    ]


def desired_state_metadata(row: DesiredRecord) -> dict[str, dg.MetadataValue]:
    """A stream's desired state and the progress towards it, as metadata of a run."""
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
