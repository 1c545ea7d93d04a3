"""An op that shows a stream's snapshots, executions, host and starting point from the catalog."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pendulum
from pydantic import Field

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotRecord
from dagster_ckpt.config.durations import iso_duration
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.operator_jobs import RESOURCES, STREAM_ID, errors_as_failure, job_of_op
from dagster_ckpt.orchestration.runs.streams_of_assets import find_stream, stream_handle
from dagster_ckpt.stream.lease import has_living_holder

_SNAPSHOT_COLUMNS = {
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

    stream_id: str = Field(description=STREAM_ID)
    limit: int = Field(default=100, ge=1, le=1000, description="Rows of each table, newest first.")


def build_overview_job(streams: Sequence[Stream]) -> dg.JobDefinition:
    """Build the job that shows these streams: `show_stream_job`."""

    @dg.op(required_resource_keys=RESOURCES)
    def show_stream(context: dg.OpExecutionContext, config: OverviewConfigSchema) -> None:
        """Show a stream: tables of its snapshots and executions, where it runs, and what it was started from."""
        with errors_as_failure():
            handle = stream_handle(find_stream(streams, config.stream_id), context.resources)
            handle.catalog.streams.get(handle.stream_id)
            metadata = overview_metadata(handle.catalog, handle.stream_id, limit=config.limit)
        context.add_output_metadata(metadata)

    return job_of_op("show_stream_job", show_stream)


def overview_metadata(catalog: Catalog, stream_id: str, *, limit: int) -> dict[str, Any]:
    """A stream as Dagster metadata.

    Args:
        catalog: The catalog.
        stream_id: A stream that the catalog contains.
        limit: Rows of each table.
    """
    handle = catalog.streams.get(stream_id)
    snapshots = catalog.snapshots.completed(stream_id)
    executions = catalog.executions.of_stream(stream_id, limit=limit)
    launch = catalog.launches.latest(stream_id)
    runs = has_living_holder(catalog, stream_id)
    latest = executions[0] if executions else None
    page = (latest.application or {}).get("page") if latest is not None else None
    metadata = {
        "dagster_ckpt/snapshots": _table(
            _SNAPSHOT_COLUMNS, [_snapshot_row(snapshot) for snapshot in snapshots[:limit]]
        ),
        "dagster_ckpt/snapshot_count": len(snapshots),
        "dagster_ckpt/snapshot_bytes_written": sum(snapshot.incremental_bytes or 0 for snapshot in snapshots),
        "dagster_ckpt/executions": _table(_EXECUTION_COLUMNS, [_execution_row(each) for each in executions]),
        "dagster_ckpt/runs": runs,
        "dagster_ckpt/started_from": started_from(latest) if latest is not None else None,
        "dagster_ckpt/live_directory": dg.MetadataValue.path(handle.live_directory) if handle.live_directory else None,
        "dagster_ckpt/spark_page": dg.MetadataValue.url(str(page)) if runs and page else None,
        "dagster_ckpt/driver_log": dg.MetadataValue.path(launch.log) if launch is not None else None,
        "dagster_ckpt/driver_command": launch.command if launch is not None else None,
    }
    return {name: value for name, value in metadata.items() if value is not None}


def started_from(execution: ExecutionRecord) -> str:
    """The starting point of an execution, and what had to be processed again, in one sentence."""
    recovery = execution.recovery or {}
    reason = str(recovery.get("reason") or "its query was not started")
    batches, span_ms = recovery.get("rewound_batches"), recovery.get("rewound_ms")
    costs = [f"{batches} batches"] if isinstance(batches, int) and batches else []
    costs += [f"at most {iso_duration(span_ms)}"] if isinstance(span_ms, int) else []
    return f"{reason} (processed again: {', '.join(costs)})" if costs else reason


def _snapshot_row(snapshot: SnapshotRecord) -> dict[str, str | int | None]:
    values = (
        *(
            snapshot.batch_id,
            snapshot.kind,
            snapshot.number,
            snapshot.label,
            _time(snapshot.completed_at_ms),
            snapshot.full_bytes,
        ),
        *(snapshot.incremental_bytes, snapshot.rows, snapshot.duration_ms, snapshot.timeline, snapshot.location),
    )
    return dict(zip(_SNAPSHOT_COLUMNS, values, strict=True))


def _execution_row(execution: ExecutionRecord) -> dict[str, str | int | None]:
    application = (execution.application or {}).get("id")
    values = (
        *(_time(execution.started_at_ms), execution.cause.value, execution.status.value, started_from(execution)),
        *(_time(execution.ended_at_ms), execution.reason, execution.host, execution.pid, application),
        execution.run_id,
    )
    return dict(zip(_EXECUTION_COLUMNS, values, strict=True))


def _table(columns: dict[str, str], rows: Sequence[dict[str, str | int | None]]) -> dg.TableMetadataValue:
    # A cell in Dagster's tables must not be empty.
    records = [dg.TableRecord({name: "-" if value is None else value for name, value in row.items()}) for row in rows]
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table(records=records, schema=schema)


def _time(ms: int | None) -> str | None:
    return None if ms is None else pendulum.from_timestamp(ms / 1000).to_datetime_string()
