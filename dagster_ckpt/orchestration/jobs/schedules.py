"""Cron schedules for the operator jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pendulum

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.client.description import LATEST
from dagster_ckpt.client.examination import ALL
from dagster_ckpt.orchestration.resources import catalog_of
from dagster_ckpt.orchestration.stream import Stream, translator_of
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG
from dagster_ckpt.policies.retention import RetentionPolicy, SavepointHistory
from dagster_ckpt.policies.serialization import write_retention
from dagster_ckpt.policies.trigger import Blackout, blackout_ends_at_ms
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import conform_fields, conforming

DEFAULT_HISTORY = SavepointHistory()


@dataclass(frozen=True)
class PeriodicSavepoints:
    """Scheduled savepoints of one stream.

    Attributes:
        execution_timezone: Time zone of the cron expression and of the labels.
        history: Any retention policy; None keeps all.
        blackouts: Savepoints in these windows are skipped, not postponed.
        name: Name of the schedule, which owns the history; default: `<asset>_savepoint_schedule`.

    Example:
        >>> PeriodicSavepoints("0 3 * * *", execution_timezone="Europe/Berlin", history=Latest(14))
    """

    cron_schedule: str
    execution_timezone: str = "UTC"
    history: RetentionPolicy | None = DEFAULT_HISTORY
    blackouts: tuple[Blackout, ...] = ()
    name: str | None = None
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED

    def __post_init__(self) -> None:
        conform_fields(self)
        for each in self.blackouts:
            conforming("PeriodicSavepoints: blackouts", each, Blackout)


def build_savepoint_schedule(
    stream: Stream,
    savepoint_job: dg.JobDefinition,
    periodic: PeriodicSavepoints,
) -> dg.ScheduleDefinition:
    """Take savepoints of a stream on a schedule, labeled with the time, and keep the newest ones.

    It never deletes savepoints that a user or another schedule took.

    Raises:
        OptionError: The class of your own history policy has no import path, or arguments that are no plain values.
    """
    schedule_name = periodic.name or stream.translator.get_schedule_name(
        f"{stream.untranslated_name}_savepoint_schedule"
    )
    cron, timezone = periodic.cron_schedule, periodic.execution_timezone
    kept = _in_config(periodic.history)

    @dg.schedule(
        name=schedule_name,
        job=savepoint_job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=periodic.default_status,
        description=f"Takes a savepoint of {stream.stream_id} ({cron} {timezone}).",
    )
    def savepoint_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        due = pendulum.instance(context.scheduled_execution_time)
        over_at_ms = blackout_ends_at_ms(periodic.blackouts, round(due.timestamp() * 1000))
        if over_at_ms is not None:
            until = pendulum.from_timestamp(over_at_ms / 1000, tz=timezone)
            return dg.SkipReason(f"no savepoint in a blackout; it lasts until {until.to_datetime_string()}")
        local = due.in_timezone(timezone)
        # When summer time ends, one hour occurs twice.
        label = f"scheduled-{local.format('YYYY-MM-DDTHH-mm')}{'-second' if local.fold else ''}"
        config = {"stream_id": stream.stream_id, "label": label, "history": {"schedule": schedule_name, **kept}}
        return dg.RunRequest(
            run_key=f"{stream.stream_id}-{label}", run_config={"ops": {"trigger_savepoint": {"config": config}}}
        )

    return savepoint_schedule


def _in_config(history: RetentionPolicy | None) -> dict[str, Any]:
    if history is None:
        return {}
    if isinstance(history, SavepointHistory):
        limits = {"max_count": history.max_count, "max_age_ms": history.max_age_ms}
        return {limit: value for limit, value in limits.items() if value is not None}
    return {"keep": write_retention(history)}


def build_housekeeping_schedule(
    streams: Sequence[Stream], retention_job: dg.JobDefinition, *, cron_schedule: str = "0 * * * *"
) -> dg.ScheduleDefinition:
    """Finish interrupted deletions and remove orphaned bytes, for every stream; `cron_schedule` is in UTC."""

    @dg.schedule(
        name=translator_of(streams).get_schedule_name("checkpoint_housekeeping_schedule"),
        job=retention_job,
        cron_schedule=cron_schedule,
        description="Finishes deletions that were interrupted and removes bytes that no snapshot refers to.",
    )
    def housekeeping_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest]:
        return [_run_for(stream, context, "apply_retention") for stream in streams]

    return housekeeping_schedule


@dataclass(frozen=True)
class PeriodicReplication:
    """Scheduled copies of the snapshots of every stream to a second bucket or folder; options as of `Client.replicate`.

    Attributes:
        cron_schedule: In UTC.
        snapshot: `all`, or `latest`.

    Example:
        >>> PeriodicReplication("s3://second/checkpoints", keep=KeepRules(last=3, daily=7))
    """

    to: str
    cron_schedule: str = "15 * * * *"
    snapshot: str = ALL
    keep: RetentionPolicy | None = None
    verify: bool = False
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED

    def __post_init__(self) -> None:
        conform_fields(self)
        location_url("to", self.to)


def build_replication_schedule(
    streams: Sequence[Stream], replication_job: dg.JobDefinition, periodic: PeriodicReplication
) -> dg.ScheduleDefinition:
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)
    config = {"to": periodic.to, "snapshot": periodic.snapshot, "verify": periodic.verify}
    keep = {} if periodic.keep is None else {"keep": write_retention(periodic.keep)}

    @dg.schedule(
        name=translator.get_schedule_name("checkpoint_replication_schedule"),
        required_resource_keys={catalog_key},
        job=replication_job,
        cron_schedule=periodic.cron_schedule,
        default_status=periodic.default_status,
        description="Copies the snapshots of every stream to a second bucket, and verifies them there.",
    )
    def replication_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest]:
        with_snapshots = _with_snapshots(streams, catalog_of(context, catalog_key))
        return [_run_for(stream, context, "replicate_snapshots", **config, **keep) for stream in with_snapshots]

    return replication_schedule


def build_verification_schedule(
    streams: Sequence[Stream], verification_job: dg.JobDefinition, *, cron_schedule: str = "30 4 * * *"
) -> dg.ScheduleDefinition:
    """Prove that the newest snapshot of every stream can be restored; `cron_schedule` is in UTC."""
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)

    @dg.schedule(
        name=translator.get_schedule_name("checkpoint_verification_schedule"),
        required_resource_keys={catalog_key},
        job=verification_job,
        cron_schedule=cron_schedule,
        description="Verifies the newest snapshot of every stream.",
    )
    def verification_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest]:
        with_snapshots = _with_snapshots(streams, catalog_of(context, catalog_key))
        return [_run_for(stream, context, "verify_snapshots", snapshot=LATEST, deep=True) for stream in with_snapshots]

    return verification_schedule


def _with_snapshots(streams: Sequence[Stream], catalog: Catalog) -> list[Stream]:
    found = catalog.history.newest_of([stream.stream_id for stream in streams])
    return [stream for stream in streams if stream.stream_id in found]


def _run_for(stream: Stream, context: dg.ScheduleEvaluationContext, op: str, **config: Any) -> dg.RunRequest:
    """Request one run per stream and tick, even if the tick is evaluated again."""
    return dg.RunRequest(
        run_key=f"{stream.stream_id}-{context.scheduled_execution_time.isoformat()}",
        run_config={"ops": {op: {"config": {"stream_id": stream.stream_id, **config}}}},
    )
