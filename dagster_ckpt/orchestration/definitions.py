"""`stream_definitions`: everything that the streams of a code location need, in one call."""

from collections.abc import Collection, Mapping, Sequence

import dagster as dg

from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration._compat import UnresolvedAssetJobDefinition
from dagster_ckpt.orchestration.catalog_sensor import REPORT_INTERVAL_S, build_catalog_sensor
from dagster_ckpt.orchestration.checks import build_health_checks, build_health_sensor
from dagster_ckpt.orchestration.jobs.inspection_jobs import build_inspection_jobs
from dagster_ckpt.orchestration.jobs.operator_jobs import ROLL_BACK_JOB, build_operator_jobs
from dagster_ckpt.orchestration.jobs.rewind_jobs import build_rewind_jobs, build_set_jobs
from dagster_ckpt.orchestration.jobs.schedules import (
    PeriodicReplication,
    PeriodicSavepoints,
    build_housekeeping_schedule,
    build_replication_schedule,
    build_savepoint_schedule,
    build_verification_schedule,
)
from dagster_ckpt.orchestration.metadata import GRAPH_KEY, PAGE_KEY, CheckpointPage
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor
from dagster_ckpt.values.validation import conforming, did_you_mean

RETENTION_JOB = "apply_retention_job"
SAVEPOINT_JOB = "trigger_savepoint_job"
VERIFICATION_JOB = "verify_snapshots_job"
REPLICATION_JOB = "replicate_snapshots_job"


def stream_definitions(
    *streams: Stream,
    downstream: UnresolvedAssetJobDefinition | dg.JobDefinition | None = None,
    downstream_interval_seconds: int = 0,
    report_interval_seconds: int = REPORT_INTERVAL_S,
    savepoint_schedules: Mapping[str, str | PeriodicSavepoints] | None = None,
    replication: PeriodicReplication | None = None,
    health: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
    health_checks: Sequence[HealthCheck] = tuple(HealthCheck),
    checkpoint_page: str | None = None,
    operator_jobs: Collection[str] | None = None,
) -> dg.Definitions:
    """Build the assets, jobs, sensors and schedules of streams, to merge into a code location.

    The code location must provide the resources `pyspark`, `checkpoint_storage`, `state_backend` and
    `checkpoint_catalog`, or those that the streams' translator names. Several calls in one code location need
    translators with different prefixes.

    Args:
        downstream: A job to start after new checkpoints.
        downstream_interval_seconds: Minimum time between two starts of it.
        report_interval_seconds: One periodic checkpoint is reported to Dagster per interval; 0: each.
        savepoint_schedules: By stream id: a cron expression, or `PeriodicSavepoints`.
        replication: Copies of the snapshots in a second bucket.
        health: Thresholds of the health checks, for all streams or by stream id.
        checkpoint_page: Address of `dagster-ckpt ui`, such as `http://localhost:3080`, for links from assets and
            reports.
        operator_jobs: Names of the operator jobs to define, such as `restart_stream_job`, without a translator's
            prefix; default: all. Those that sensors and savepoint schedules launch are always defined;
            the schedule that verifies snapshots is, if its job is.

    Example:
        >>> defs = dg.Definitions.merge(stream_definitions(orders), dg.Definitions(resources=...))
    """
    for each in health.values() if isinstance(health, Mapping) else [health]:
        conforming("health", each, HealthSettings)
    conforming("operator_jobs", operator_jobs, Collection | None)
    health_checks = [conforming("health_checks", each, HealthCheck) for each in health_checks]
    for stream in streams:
        conforming("each of streams", stream, Stream)
    by_stream_id = {stream.stream_id: stream for stream in streams}
    if len(by_stream_id) != len(streams):
        raise OptionError(
            f"Two streaming assets share a stream id: {sorted(s.stream_id for s in streams)}. A stream id names the "
            "state of one stream; give each its own."
        )
    _refuse_equal_start_jobs(streams)
    builders = (build_operator_jobs, build_rewind_jobs, build_inspection_jobs, build_set_jobs)
    # A translator renames jobs, but not their nodes.
    jobs = {f"{job.nodes[0].name}_job": job for build in builders for job in build(streams)}
    launched = {
        RETENTION_JOB,
        ROLL_BACK_JOB,
        *([SAVEPOINT_JOB] if savepoint_schedules else []),
        *([REPLICATION_JOB] if replication else []),
    }
    chosen = jobs.keys() if operator_jobs is None else _known(operator_jobs, jobs) | launched
    retention_job, roll_back_job, savepoint_job = (jobs[name] for name in (RETENTION_JOB, ROLL_BACK_JOB, SAVEPOINT_JOB))
    schedules = [build_housekeeping_schedule(streams, retention_job)]
    if VERIFICATION_JOB in chosen:
        schedules.append(build_verification_schedule(streams, jobs[VERIFICATION_JOB]))
    conforming("replication", replication, PeriodicReplication | None)
    if replication is not None:
        schedules.append(build_replication_schedule(streams, jobs[REPLICATION_JOB], replication))
    for stream_id, wanted in (savepoint_schedules or {}).items():
        if stream_id not in by_stream_id:
            raise OptionError(f"savepoint_schedules names {stream_id!r}; the streams are {sorted(by_stream_id)}.")
        conforming(f"savepoint_schedules of {stream_id}", wanted, str | PeriodicSavepoints)
        periodic = PeriodicSavepoints(wanted) if isinstance(wanted, str) else wanted
        schedules.append(build_savepoint_schedule(by_stream_id[stream_id], savepoint_job, periodic))
    writers = [stream for stream in streams if isinstance(stream, StreamingAsset)]
    return dg.Definitions(
        assets=[_linked(stream, checkpoint_page) for stream in writers],
        jobs=[
            *(stream.start_job for stream in streams if stream.start_job is not None),
            *(job for name, job in jobs.items() if name in chosen),
            *([downstream] if downstream is not None else []),
        ],
        sensors=[
            build_catalog_sensor(
                streams,
                downstream=downstream,
                downstream_interval_seconds=downstream_interval_seconds,
                report_interval_seconds=report_interval_seconds,
                checkpoint_page=checkpoint_page,
            ),
            build_supervisor_sensor(streams, retention_job, roll_back_job, health=health),
            build_health_sensor(writers, settings=health, checks=health_checks),
        ],
        asset_checks=build_health_checks(writers, settings=health, checks=health_checks),
        schedules=schedules,
    )


def _known(names: Collection[str], jobs: Mapping[str, dg.JobDefinition]) -> set[str]:
    for name in names:
        if name not in jobs:
            hint = did_you_mean(name, jobs)
            raise OptionError(f"operator_jobs names {name!r}.{hint} The operator jobs are: {', '.join(sorted(jobs))}.")
    return set(names)


def _linked(stream: StreamingAsset, checkpoint_page: str | None) -> dg.AssetsDefinition:
    if checkpoint_page is None:
        return stream.asset
    page = CheckpointPage(checkpoint_page)
    metadata = {PAGE_KEY: page.of_stream(stream.stream_id), GRAPH_KEY: page.of_graph(stream.stream_id)}
    return stream.asset.map_asset_specs(lambda spec: spec.merge_attributes(metadata=metadata))


def _refuse_equal_start_jobs(streams: Sequence[Stream]) -> None:
    by_job: dict[str, Stream] = {}
    for stream in streams:
        if stream.start_job is None:
            continue
        first = by_job.setdefault(stream.start_job.name, stream)
        if first is not stream:
            raise OptionError(
                f"Streams {first.stream_id!r} and {stream.stream_id!r} both have the start job "
                f"{stream.start_job.name!r}. Name one of the assets otherwise, or override "
                "StreamTranslator.get_start_job_name."
            )
