"""Ops and jobs that set a stream's desired state and roll an upgrade back."""

from collections.abc import Sequence
from enum import Enum

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.config.modes import DesiredState
from dagster_ckpt.operations import operations
from dagster_ckpt.operations.rollback import roll_back
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.markdown import markdown_table
from dagster_ckpt.orchestration.jobs.operator_jobs import RESOURCES, STREAM_ID, errors_as_failure, job_of_op
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, stream_handle
from dagster_ckpt.stream.handle import StreamHandle

ROLL_BACK_JOB = "roll_back_upgrade_job"


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

    def handle_of(context: dg.OpExecutionContext, stream_id: str) -> StreamHandle:
        return stream_handle(find_stream(streams, stream_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def set_desired_state(context: dg.OpExecutionContext, config: DesiredStateConfigSchema) -> None:
        """Set the desired state of a stream. The supervisor sensor, which must be running, reconciles it."""
        with errors_as_failure():
            row = operations.set_desired_state(
                handle_of(context, config.stream_id),
                config.state.desired,
                operations.Operator(origin=f"{context.job_name} run {context.run_id}"),
                retry_refused=config.retry_refused,
                accept_plan_change=config.accept_plan_change,
            )
        context.add_output_metadata(desired_state_metadata(row))

    @dg.op(required_resource_keys=RESOURCES)
    def roll_back_upgrade(context: dg.OpExecutionContext, config: RollBackConfigSchema) -> None:
        """Roll a stream back to the snapshot taken before a failed upgrade. The supervisor sensor launches this job."""
        with errors_as_failure():
            handle = handle_of(context, config.stream_id)
            upgrade = roll_back(handle, run_id=context.run_id, report=context.log.info)
        if upgrade.phase is UpgradePhase.ROLLBACK_FAILED:
            raise dg.Failure(upgrade.reason, allow_retries=False)
        context.log.warning(upgrade.reason)
        row = handle.catalog.desired_states.find(handle.stream_id)
        assert row is not None
        context.add_output_metadata(desired_state_metadata(row))

    return [
        job_of_op("set_desired_state_job", set_desired_state),
        job_of_op(ROLL_BACK_JOB, roll_back_upgrade),
    ]


def desired_state_metadata(row: DesiredRecord) -> dict[str, dg.MetadataValue]:
    """A stream's desired state and the progress towards it, as metadata of a run."""
    upgrade = row.upgrade
    facts: list[tuple[str, object]] = [
        ("wanted", row.desired.value if row.desired is not None else "as defined"),
        ("said by", row.origin),
        ("reached", "yes" if row.reached == row.generation else "not yet"),
    ]
    if upgrade is not None:
        versions = f"{upgrade.from_version} → {upgrade.to_version}"
        facts += [("upgrade", versions), ("phase", upgrade.phase.value), ("because", upgrade.reason)]
    if row.alert is not None:
        facts.append(("alert", row.alert))
    return {"dagster_ckpt/desired_state": dg.MetadataValue.md(markdown_table(("", "value"), facts))}
