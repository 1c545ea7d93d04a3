"""Ops and jobs for operating streams, from the launchpad or a schedule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.config.modes import RecoveryClaimMode, TerminalState
from dagster_ckpt.config.redaction import cause_to_show, without_secrets
from dagster_ckpt.errors import CkptError, NothingCommittedError, OptionError
from dagster_ckpt.operations import operations
from dagster_ckpt.operations.scheduled_savepoints import apply_savepoint_history
from dagster_ckpt.orchestration.assets.downstream import dependents_of
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.markdown import markdown_table
from dagster_ckpt.orchestration.jobs.rewind_report import downstream_metadata, preview_metadata
from dagster_ckpt.orchestration.runs.run_config import ACCEPT_PLAN_CHANGE, DISCARD_STATE, NO_SAFETY_SAVEPOINT
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, stream_handle
from dagster_ckpt.orchestration.sensors.snapshot_report import snapshot_metadata
from dagster_ckpt.policies.savepoint_history import SavepointHistory
from dagster_ckpt.recovery.retention import RetentionReport, apply_terminal_retention, housekeeping
from dagster_ckpt.snapshot.garbage_collection import Garbage
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom

RESOURCES = {"checkpoint_storage", "state_backend", "checkpoint_catalog"}
_SHOWN_OBJECTS = 100
STREAM_ID = "Stream id (or asset key) of the streaming asset, such as departure_delays."
TIMEOUT = "Seconds to wait for an answer of the running stream; after that the request is withdrawn."
START_FROM = (
    "latest (live directory, else the newest snapshot), latest-checkpoint, latest-savepoint, "
    "preferred-savepoint, empty (discard all state), batch-<n> (rewind to a batch that Spark still "
    "retains), or the id, number (chk-7), label or location of a snapshot."
)
NEW_QUERY_ID = (
    "With a rewind: continue as a new query, so that sinks which remember query ids (Delta, Iceberg) "
    "write the rewound batches again instead of skipping them."
)
ACCEPT_LOSS = (
    "Start even if the rewind could lose rows in a sink. Without it such a start is refused, and the "
    "message names the sink and the reason. preview_rewind_job shows it beforehand."
)


CLAIM_MODE = (
    "Ownership of the savepoint that the stream starts from. NO_CLAIM: the stream never deletes it. "
    "CLAIM: the stream takes ownership and deletes it like any of its checkpoints. Flink's LEGACY is "
    "not supported."
)


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


class TriggerSavepointConfigSchema(SavepointConfigSchema):
    """Take a savepoint without stopping."""

    history: HistoryConfigSchema | None = Field(
        default=None,
        description="Set by a schedule: the savepoint belongs to the schedule, and its older ones are deleted beyond "
        "the limits. Without it you own the savepoint, and nothing deletes it.",
    )


class RestartConfigSchema(dg.Config):
    """Start a stream, or restart it from another snapshot."""

    stream_id: str = Field(description=STREAM_ID)
    start_from: str = Field(default="latest", description=START_FROM)
    new_query_id: bool = Field(default=False, description=NEW_QUERY_ID)
    accept_loss: bool = Field(default=False, description=ACCEPT_LOSS)
    claim_mode: RecoveryClaimMode = Field(default=RecoveryClaimMode.NO_CLAIM, description=CLAIM_MODE)
    accept_plan_change: bool = Field(default=False, description=ACCEPT_PLAN_CHANGE)
    discard_state: bool = Field(default=False, description=DISCARD_STATE)
    no_safety_savepoint: bool = Field(default=False, description=NO_SAFETY_SAVEPOINT)
    timeout_seconds: float = Field(default=600, gt=0, description=TIMEOUT)


class PreferConfigSchema(dg.Config):
    """Select the savepoint that preferred-savepoint refers to."""

    stream_id: str = Field(description=STREAM_ID)
    savepoint: str = Field(description="Snapshot id, label or location of a completed savepoint.")


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


@contextmanager
def errors_as_failure() -> Iterator[None]:
    """Turn our own errors into step failures with their message, without retries."""
    try:
        yield
    except CkptError as error:
        raise dg.Failure(
            without_secrets(str(error)), metadata={"dagster_ckpt/error": type(error).__name__}, allow_retries=False
        ) from cause_to_show(error)


def build_operator_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs that operate these streams.

    Returns:
        `trigger_checkpoint_job`, `trigger_savepoint_job`, `stop_with_savepoint_job`,
        `cancel_stream_job`, `restart_stream_job`, `prefer_savepoint_job` and `apply_retention_job`.
    """

    def handle_of(context: dg.OpExecutionContext, stream_id: str) -> StreamHandle:
        return stream_handle(find_stream(streams, stream_id), context.resources)

    @dg.op(required_resource_keys=RESOURCES)
    def trigger_checkpoint(context: dg.OpExecutionContext, config: CheckpointConfigSchema) -> str:
        """Take a checkpoint of a running stream now, regardless of the minimum pause."""
        with errors_as_failure():
            snapshot = operations.trigger_checkpoint(
                handle_of(context, config.stream_id), operator_of(context), timeout_s=config.timeout_seconds
            )
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def trigger_savepoint(context: dg.OpExecutionContext, config: TriggerSavepointConfigSchema) -> str:
        """Take a savepoint of a running, stopped or failed stream. A running stream continues."""
        with errors_as_failure():
            handle = handle_of(context, config.stream_id)
            snapshot = operations.trigger_savepoint(
                handle,
                operator_of(context),
                label=config.label,
                target_directory=config.target_directory,
                schedule=config.history.schedule if config.history is not None else None,
                timeout_s=config.timeout_seconds,
            )
            if config.history is not None:
                limits = SavepointHistory(config.history.max_count, config.history.max_age_ms)
                history_report = apply_savepoint_history(handle, config.history.schedule, limits)
                # Housekeeping retries failed deletions: the savepoint itself succeeded.
                for message in history_report.messages():
                    context.log.info(message)
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def stop_with_savepoint(context: dg.OpExecutionContext, config: SavepointConfigSchema) -> str:
        """Stop a stream at a batch boundary with a savepoint of the final state."""
        with errors_as_failure():
            snapshot = operations.stop_with_savepoint(
                handle_of(context, config.stream_id),
                operator_of(context),
                label=config.label,
                target_directory=config.target_directory,
                timeout_s=config.timeout_seconds,
            )
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def cancel_stream(context: dg.OpExecutionContext, config: CheckpointConfigSchema) -> None:
        """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted."""
        with errors_as_failure():
            done = operations.cancel(
                handle_of(context, config.stream_id), operator_of(context), timeout_s=config.timeout_seconds
            )
        context.log.info(f"{config.stream_id}: canceled: {done}")

    @dg.op(required_resource_keys=RESOURCES)
    def restart_stream(context: dg.OpExecutionContext, config: RestartConfigSchema) -> None:
        """Start a stream, or stop it and start it from another snapshot. The supervisor sensor launches the run."""
        with errors_as_failure():
            stream = find_stream(streams, config.stream_id)
            ahead = operations.restart(
                stream_handle(stream, context.resources),
                StartFrom.parse(
                    config.start_from,
                    new_query_id=config.new_query_id,
                    accept_loss=config.accept_loss,
                    claim_mode=config.claim_mode,
                    accept_plan_change=config.accept_plan_change,
                    discard_state=config.discard_state,
                    no_safety_savepoint=config.no_safety_savepoint,
                ),
                operator_of(context),
                timeout_s=config.timeout_seconds,
                report=context.log.info,
            )
        context.add_output_metadata(
            {
                "dagster_ckpt/recovery": ahead.plan.reason,
                "dagster_ckpt/rewound_batches": ahead.batches,
                **preview_metadata(ahead),
                **downstream_metadata(dependents_of(context, stream, ahead)),
            }
        )

    @dg.op(required_resource_keys=RESOURCES)
    def prefer_savepoint(context: dg.OpExecutionContext, config: PreferConfigSchema) -> str:
        """Select the savepoint that start_from=preferred-savepoint refers to."""
        with errors_as_failure():
            snapshot = operations.prefer_savepoint(handle_of(context, config.stream_id), config.savepoint)
        return report_snapshot(context, snapshot)

    @dg.op(required_resource_keys=RESOURCES)
    def apply_retention(context: dg.OpExecutionContext, config: RetentionConfigSchema) -> None:
        """Keep or delete checkpoints according to the clean-up option; finish interrupted deletions."""
        with errors_as_failure():
            handle = handle_of(context, config.stream_id)
            report = _retention(handle, config)
        for message in report.messages():
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

    return [
        job_of_op("trigger_checkpoint_job", trigger_checkpoint),
        job_of_op("trigger_savepoint_job", trigger_savepoint),
        job_of_op("stop_with_savepoint_job", stop_with_savepoint),
        job_of_op("cancel_stream_job", cancel_stream),
        job_of_op("restart_stream_job", restart_stream),
        job_of_op("prefer_savepoint_job", prefer_savepoint),
        job_of_op("apply_retention_job", apply_retention),
    ]


def job_of_op(name: str, op: dg.OpDefinition) -> dg.JobDefinition:
    """A job with one op, which runs in the run's own process and has the op's description."""

    @dg.job(name=name, description=op.description, executor_def=dg.in_process_executor)
    def operator_job() -> None:
        op()

    return operator_job


def operator_of(context: dg.OpExecutionContext) -> operations.Operator:
    """The origin of the request, as recorded in the catalog."""
    return operations.Operator(origin=f"{context.job_name} run {context.run_id}")


def report_snapshot(context: dg.OpExecutionContext, snapshot: SnapshotRecord) -> str:
    """Show a snapshot in the log and on the page, and return its location."""
    location = snapshot.location or ""
    context.log.info(f"{snapshot.kind.lower()} at batch {snapshot.batch_id}: {location}")
    context.add_output_metadata(snapshot_metadata(snapshot))
    return location


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
    return finished.and_then(apply_terminal_retention(handle, execution_id, config.state))
