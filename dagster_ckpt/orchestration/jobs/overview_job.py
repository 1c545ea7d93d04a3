"""An op that shows a stream as the catalog has it: images, executions, where it runs and what it was started from."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pendulum
from pydantic import Field

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ImageRecord
from dagster_ckpt.config.durations import iso_duration
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.operator_jobs import JOB_ID, RESOURCES, job_of_op, told_as_failure
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, streaming_job
from dagster_ckpt.stream.lease import has_living_holder

_IMAGE_COLUMNS = {
    "batch": "int",
    "kind": "string",
    "number": "int",
    "label": "string",
    "taken": "string",
    "bytes": "int",
    "written bytes": "int",
    "rows": "int",
    "duration ms": "int",
    "timeline": "int",
    "location": "string",
}
_EXECUTION_COLUMNS = {
    "began": "string",
    "cause": "string",
    "status": "string",
    "started from": "string",
    "ended": "string",
    "reason": "string",
    "host": "string",
    "process": "int",
    "application": "string",
    "run": "string",
}


class OverviewConfigSchema(dg.Config):
    """Show a stream."""

    job_id: str = Field(description=JOB_ID)
    limit: int = Field(default=100, ge=1, le=1000, description="Rows of each table, newest first.")


def build_overview_job(streams: Sequence[Stream]) -> dg.JobDefinition:
    """The job that shows these streams: `show_stream_job`."""

    @dg.op(required_resource_keys=RESOURCES)
    def show_stream(context: dg.OpExecutionContext, config: OverviewConfigSchema) -> None:
        """Show a stream: its images and executions as tables, where it runs, and what it was started from."""
        with told_as_failure():
            job = streaming_job(find_stream(streams, config.job_id), context.resources)
            job.catalog.jobs.get(job.job_id)
            metadata = overview_metadata(job.catalog, job.job_id, limit=config.limit)
        context.add_output_metadata(metadata)

    return job_of_op("show_stream_job", show_stream)


def overview_metadata(catalog: Catalog, job_id: str, *, limit: int) -> dict[str, Any]:
    """A stream as Dagster metadata.

    Args:
        catalog: The catalog.
        job_id: The job, which it knows.
        limit: Rows of each table.
    """
    job = catalog.jobs.get(job_id)
    images = catalog.images.completed(job_id)
    executions = catalog.executions.of_job(job_id, limit=limit)
    launch = catalog.launches.latest(job_id)
    runs = has_living_holder(catalog, job_id)
    latest = executions[0] if executions else None
    page = (latest.application or {}).get("page") if latest is not None else None
    metadata = {
        "dagster_ckpt/images": _table(_IMAGE_COLUMNS, [_image_row(image) for image in images[:limit]]),
        "dagster_ckpt/image_count": len(images),
        "dagster_ckpt/image_bytes_written": sum(image.incremental_bytes or 0 for image in images),
        "dagster_ckpt/executions": _table(_EXECUTION_COLUMNS, [_execution_row(each) for each in executions]),
        "dagster_ckpt/runs": runs,
        "dagster_ckpt/started_from": started_from(latest) if latest is not None else None,
        "dagster_ckpt/live_directory": dg.MetadataValue.path(job.live_directory) if job.live_directory else None,
        "dagster_ckpt/spark_page": dg.MetadataValue.url(str(page)) if runs and page else None,
        "dagster_ckpt/driver_log": dg.MetadataValue.path(launch.log) if launch is not None else None,
        "dagster_ckpt/driver_command": launch.command if launch is not None else None,
    }
    return {name: value for name, value in metadata.items() if value is not None}


def started_from(execution: ExecutionRecord) -> str:
    """What an execution was started from, and what going back there cost, in one sentence."""
    recovery = execution.recovery or {}
    reason = str(recovery.get("reason") or "its query was not started")
    batches, span_ms = recovery.get("rewound_batches"), recovery.get("rewound_ms")
    costs = [f"{batches} batches"] if isinstance(batches, int) and batches else []
    costs += [f"at most {iso_duration(span_ms)}"] if isinstance(span_ms, int) else []
    return f"{reason} (processed again: {', '.join(costs)})" if costs else reason


def _image_row(image: ImageRecord) -> dict[str, str | int | None]:
    values = (
        *(image.batch_id, image.kind, image.number, image.label, _time(image.completed_at_ms), image.full_bytes),
        *(image.incremental_bytes, image.rows, image.duration_ms, image.timeline, image.location),
    )
    return dict(zip(_IMAGE_COLUMNS, values, strict=True))


def _execution_row(execution: ExecutionRecord) -> dict[str, str | int | None]:
    application = (execution.application or {}).get("id")
    values = (
        *(_time(execution.started_at_ms), execution.cause.value, execution.status.value, started_from(execution)),
        *(_time(execution.ended_at_ms), execution.reason, execution.host, execution.pid, application),
        execution.run_id,
    )
    return dict(zip(_EXECUTION_COLUMNS, values, strict=True))


def _table(columns: dict[str, str], rows: Sequence[dict[str, str | int | None]]) -> dg.TableMetadataValue:
    # A cell of Dagster's tables is never empty.
    records = [dg.TableRecord({name: "-" if value is None else value for name, value in row.items()}) for row in rows]
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table(records=records, schema=schema)


def _time(ms: int | None) -> str | None:
    return None if ms is None else pendulum.from_timestamp(ms / 1000).to_datetime_string()
