"""Schedules for the operator jobs: savepoints by cron, housekeeping by cron."""

from collections.abc import Sequence

import dagster as dg
import pendulum

from dagster_ckpt.orchestration.streaming_asset import StreamingAsset


def build_savepoint_schedule(
    stream: StreamingAsset,
    savepoint_job: dg.JobDefinition,
    *,
    cron_schedule: str,
    execution_timezone: str = "UTC",
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
) -> dg.ScheduleDefinition:
    """Take a savepoint of a stream at set times, labelled with the time.

    Args:
        stream: The stream.
        savepoint_job: `trigger_savepoint_job` of `build_operator_jobs`.
        cron_schedule: Cron expression.
        execution_timezone: Time zone of the cron expression and of the label.
        default_status: Whether it runs from the start.
    """

    @dg.schedule(
        name=f"{stream.name}_savepoint_schedule",
        job=savepoint_job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        description=f"Takes a savepoint of {stream.job_id} ({cron_schedule} {execution_timezone}).",
    )
    def savepoint_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        due = pendulum.instance(context.scheduled_execution_time)
        label = f"scheduled-{due.in_timezone(execution_timezone).format('YYYY-MM-DDTHH-mm')}"
        return dg.RunRequest(
            run_key=f"{stream.job_id}-{label}",
            run_config={"ops": {"trigger_savepoint": {"config": {"job_id": stream.job_id, "label": label}}}},
        )

    return savepoint_schedule


def build_housekeeping_schedule(
    streams: Sequence[StreamingAsset],
    retention_job: dg.JobDefinition,
    *,
    cron_schedule: str = "0 * * * *",
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
) -> dg.ScheduleDefinition:
    """Finish deletions that were cut off and remove orphaned bytes, for every stream.

    Args:
        streams: The streams.
        retention_job: `apply_retention_job` of `build_operator_jobs`.
        cron_schedule: Cron expression, UTC.
        default_status: Whether it runs from the start.
    """

    @dg.schedule(
        name="checkpoint_housekeeping_schedule",
        job=retention_job,
        cron_schedule=cron_schedule,
        default_status=default_status,
        description="Finishes deletions that were cut off and removes bytes that no image refers to.",
    )
    def housekeeping_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest]:
        due = context.scheduled_execution_time.isoformat()
        return [
            dg.RunRequest(
                run_key=f"{stream.job_id}-{due}",
                run_config={"ops": {"apply_retention": {"config": {"job_id": stream.job_id}}}},
            )
            for stream in streams
        ]

    return housekeeping_schedule
