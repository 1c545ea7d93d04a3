"""Operator jobs that only read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotRecord
from dagster_ckpt.client import Client
from dagster_ckpt.client.description import LATEST
from dagster_ckpt.client.examination import SnapshotVerification, StreamExamination
from dagster_ckpt.client.state_browsing import (
    DEFAULT_LIMIT,
    ShownDifference,
    ShownState,
    show_differences,
    show_state,
    written_rows,
)
from dagster_ckpt.orchestration.jobs.ops import (
    SNAPSHOT,
    StreamConfig,
    StreamOps,
    errors_as_failure,
    log_messages,
    with_parameters_of,
)
from dagster_ckpt.orchestration.metadata import known, markdown_table, table
from dagster_ckpt.orchestration.query import check_stream
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.recovery.compatibility_report import Compatibility, CompatibilityReport
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import rounded_duration, utc_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@with_parameters_of(Client.check)
class CheckConfig(StreamConfig):
    """Check the loaded code of a stream against its state."""

    fail_on_error: bool = Field(
        default=True, description="Fail the run if a plain start would be refused, or would need further options."
    )


@with_parameters_of(Client.doctor)
class DoctorConfig(StreamConfig):
    """Examine the live directory of a stream."""

    fail_on_error: bool = Field(
        default=True, description="Fail the run if Spark could not continue from the directory."
    )


@with_parameters_of(Client.verify)
class VerifyConfig(StreamConfig):
    """Prove that snapshots can be restored."""

    snapshot: str = Field(default=LATEST, description=SNAPSHOT)
    fail_on_error: bool = Field(default=True, description="Fail the run if a snapshot cannot be restored.")


class OverviewConfig(StreamConfig):
    """Show a stream."""

    limit: int = Field(default=100, ge=1, le=1000, description="Rows of each table, newest first.")


_POINT = (
    "live (the newest committed batch), latest (the newest snapshot), or the id, number (chk-7), label or "
    "location of a snapshot."
)
_NAME = {"operator": "string", "state": "string"}
_Row = dict[str, str | int | None]


class _StateConfig(StreamConfig):
    operator: str | None = Field(default=None, description="Number or name of an operator. Default: all.")
    state: str | None = Field(
        default=None,
        description="Name of a state: a store, left or right for a join, or a variable of transformWithState. "
        "Default: all.",
    )
    limit: int = Field(default=DEFAULT_LIMIT, ge=0, le=1000, description="Rows of each state to show on the page.")
    write_to: str | None = Field(
        default=None,
        description="Write all rows as Parquet below this folder, given as an absolute path or URL. It must be empty.",
    )


class BrowseStateConfig(_StateConfig):
    """Look into the state of a stream."""

    snapshot: str = Field(default="latest", description=_POINT)
    where: str | None = Field(
        default=None, description="Only rows that match this SQL condition on fields of the key, such as user_id = 7."
    )


class DiffStateConfig(_StateConfig):
    """Compare the state of a stream at two points."""

    before: str = Field(description=_POINT)
    after: str = Field(default="live", description=_POINT)


def build_inspection_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    ops = StreamOps(streams)
    return [*_examination_jobs(ops), *_state_jobs(ops)]


def _examination_jobs(ops: StreamOps) -> list[dg.JobDefinition]:
    @ops.op
    def doctor(context: dg.OpExecutionContext, config: DoctorConfig) -> dict[str, Any]:
        """Diagnose a stream's live directory: what is wrong, how far back it is intact, which snapshot to use."""
        with errors_as_failure():
            examination = ops.call(context, Client.doctor, config)
        log_messages(context, examination.messages)
        metadata = doctor_metadata(examination)
        if config.fail_on_error and not examination.diagnosis.can_resume:
            raise dg.Failure(" ".join(examination.messages), metadata=metadata, allow_retries=False)
        context.add_output_metadata(metadata)
        return examination.as_record()

    def verify(
        context: dg.OpExecutionContext, config: VerifyConfig, spark: "SparkSession | None" = None
    ) -> list[dict[str, Any]]:
        with errors_as_failure():
            verified = ops.call(context, Client.verify, config, spark=spark)
        metadata = verification_metadata(verified)
        broken = [item for item in verified if not item.passed]
        for item in broken:
            context.log.error(f"{item.location} cannot be restored: {item.problems[0]}")
        if config.fail_on_error and broken:
            raise dg.Failure(
                f"{len(broken)} of {len(verified)} snapshots cannot be restored: {broken[0].problems[0]}",
                metadata=metadata,
                allow_retries=False,
            )
        context.add_output_metadata(metadata)
        return [item.as_record() for item in verified]

    @ops.op
    def verify_snapshots(context: dg.OpExecutionContext, config: VerifyConfig) -> list[dict[str, Any]]:
        """Prove that snapshots can be restored: check every byte and every file that a resume needs."""
        return verify(context, config)

    @ops.op_with_spark
    def verify_state(context: dg.OpExecutionContext, config: VerifyConfig) -> list[dict[str, Any]]:
        """Prove that snapshots can be restored, and read the state of every operator with Spark."""
        return verify(context, config, ops.resources(context).spark_session)

    @ops.op_with_code
    def check(context: dg.OpExecutionContext, config: CheckConfig) -> dict[str, Any]:
        """Check whether the loaded code can continue from the state of a stream. Starts no query."""
        stream, start = ops.stream(config.stream_id), StartFrom.from_record(config.model_dump())
        with errors_as_failure():
            client = ops.client(context, config.stream_id)
            report = check_stream(stream, context.resources, start_from=start, client=client)
        log_messages(context, report.messages())
        metadata = compatibility_metadata(report)
        if config.fail_on_error and report.verdict in (Compatibility.INCOMPATIBLE, Compatibility.MIGRATABLE):
            raise dg.Failure("\n".join(report.messages()), metadata=metadata, allow_retries=False)
        context.add_output_metadata(metadata)
        return report.as_record()

    @ops.op
    def show_stream(context: dg.OpExecutionContext, config: OverviewConfig) -> None:
        """Show a stream: tables of its snapshots and executions, where it runs, and what it was started from."""
        with errors_as_failure():
            client = ops.client(context, config.stream_id)
            stream = ops.stream(config.stream_id)
            metadata = overview_metadata(client.catalog, stream.stream_id, limit=config.limit)
        context.add_output_metadata(metadata)

    return [ops.job(show_stream), ops.job(check), ops.job(doctor), ops.job(verify_snapshots), ops.job(verify_state)]


def _state_jobs(ops: StreamOps) -> list[dg.JobDefinition]:
    @ops.op_with_spark
    def browse_state(context: dg.OpExecutionContext, config: BrowseStateConfig) -> list[str]:
        """Show the state of a stream: first rows, counts and largest keys of every operator."""
        with errors_as_failure():
            spark = ops.resources(context).spark_session
            with ops.call(context, Client.state, config, spark=spark) as found:
                context.log.info(f"read {found}")
                written = written_rows(found, config.write_to, where=config.where)
                shown = show_state(found, where=config.where, limit=config.limit)
                batch_id = found.batch_id
        context.add_output_metadata({"dagster_ckpt/batch_id": batch_id, **state_metadata(shown), **_places(written)})
        return written

    @ops.op_with_spark
    def diff_state(context: dg.OpExecutionContext, config: DiffStateConfig) -> dict[str, int]:
        """Show which rows of state were added, removed and changed between two points of a stream."""
        with errors_as_failure():
            spark = ops.resources(context).spark_session
            with ops.call(context, Client.state_diff, config, spark=spark) as found:
                context.log.info(f"compare {found.before} with {found.after}")
                written = written_rows(found, config.write_to)
                shown = show_differences(found, limit=config.limit)
        context.add_output_metadata({**difference_metadata(shown), **_places(written)})
        return _totals(shown)

    return [ops.job(browse_state), ops.job(diff_state)]


def compatibility_metadata(report: CompatibilityReport) -> dict[str, Any]:
    rows = [[step.part.value, step.name, step.action.value, step.reason] for step in report.steps]
    return {
        "dagster_ckpt/verdict": report.verdict.value,
        "dagster_ckpt/compared_with": report.compared_with,
        "dagster_ckpt/steps": dg.MetadataValue.md(
            markdown_table(["part", "name", "what the start does", "why"], rows) if rows else "Nothing."
        ),
        "dagster_ckpt/options": dg.MetadataValue.json(report.options),
    }


def doctor_metadata(examination: StreamExamination) -> dict[str, Any]:
    diagnosis = examination.diagnosis
    rows = [
        [item.severity.value, item.code.value, item.path, item.explanation, item.advice] for item in diagnosis.findings
    ]
    figures = {
        "dagster_ckpt/summary": " ".join(examination.messages),
        "dagster_ckpt/findings": dg.MetadataValue.md(
            markdown_table(["severity", "code", "where", "what was found", "what to do"], rows) if rows else "Nothing."
        ),
        "dagster_ckpt/can_resume": diagnosis.can_resume,
        "dagster_ckpt/live_directory": dg.MetadataValue.path(diagnosis.url),
        "dagster_ckpt/batch_id": diagnosis.batch_id,
        "dagster_ckpt/good_back_to": diagnosis.good_back_to,
        "dagster_ckpt/snapshot": examination.choice.snapshot.location if examination.choice.snapshot else None,
        "dagster_ckpt/replayed_batches": examination.choice.replayed_batches,
    }
    return known(figures)


def verification_metadata(verified: Sequence[SnapshotVerification]) -> dict[str, Any]:
    rows = [
        [
            "good" if item.passed else "BROKEN",
            str(item.header.batch_id) if item.header else "?",
            item.location,
            "; ".join(item.problems) or ("every byte" if item.deep else "lengths") + ", complete for its batch",
        ]
        for item in verified
    ]
    states = [
        [item.location, f"{state.operator_id} {state.operator}", state.state, str(state.partitions), str(state.rows)]
        for item in verified
        for state in item.state or ()
    ]
    metadata: dict[str, Any] = {
        "dagster_ckpt/snapshots": dg.MetadataValue.md(
            markdown_table(["snapshot", "batch", "location", "result"], rows)
        ),
        "dagster_ckpt/good": sum(item.passed for item in verified),
        "dagster_ckpt/broken": sum(not item.passed for item in verified),
    }
    if states:
        columns = ["location", "operator", "state", "partitions", "rows"]
        metadata["dagster_ckpt/state"] = dg.MetadataValue.md(markdown_table(columns, states))
    return metadata


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


def overview_metadata(catalog: Catalog, stream_id: str, *, limit: int) -> dict[str, Any]:
    handle = catalog.streams.get(stream_id)
    snapshots = catalog.snapshots.completed(stream_id)
    executions = catalog.executions.of_stream(stream_id, limit=limit)
    launch = catalog.launches.latest(stream_id)
    runs = has_living_holder(catalog, stream_id)
    latest = executions[0] if executions else None
    page = (latest.application or {}).get("page") if latest is not None else None
    metadata = {
        "dagster_ckpt/snapshots": table(_SNAPSHOT_COLUMNS, [_snapshot_row(snapshot) for snapshot in snapshots[:limit]]),
        "dagster_ckpt/snapshot_count": len(snapshots),
        "dagster_ckpt/snapshot_bytes_written": sum(snapshot.incremental_bytes or 0 for snapshot in snapshots),
        "dagster_ckpt/executions": table(_EXECUTION_COLUMNS, [_execution_row(each) for each in executions]),
        "dagster_ckpt/runs": runs,
        "dagster_ckpt/started_from": started_from(latest) if latest is not None else None,
        "dagster_ckpt/live_directory": dg.MetadataValue.path(handle.live_directory) if handle.live_directory else None,
        "dagster_ckpt/spark_page": dg.MetadataValue.url(str(page)) if runs and page else None,
        "dagster_ckpt/driver_log": dg.MetadataValue.path(launch.log) if launch is not None else None,
        "dagster_ckpt/driver_command": launch.command if launch is not None else None,
    }
    return known(metadata)


def started_from(execution: ExecutionRecord) -> str:
    recovery = execution.recovery or {}
    reason = str(recovery.get("reason") or "its query was not started")
    batches, span_ms = recovery.get("rewound_batches"), recovery.get("rewound_ms")
    costs = [f"{batches} batches"] if isinstance(batches, int) and batches else []
    costs += [f"at most {rounded_duration(span_ms)}"] if isinstance(span_ms, int) else []
    return f"{reason} (processed again: {', '.join(costs)})" if costs else reason


def _snapshot_row(snapshot: SnapshotRecord) -> dict[str, str | int | None]:
    values = (
        snapshot.batch_id,
        snapshot.kind.value,
        snapshot.number,
        snapshot.label,
        _time(snapshot.completed_at_ms),
        snapshot.full_bytes,
        snapshot.incremental_bytes,
        snapshot.rows,
        snapshot.duration_ms,
        snapshot.timeline,
        snapshot.location,
    )
    return dict(zip(_SNAPSHOT_COLUMNS, values, strict=True))


def _execution_row(execution: ExecutionRecord) -> dict[str, str | int | None]:
    application = (execution.application or {}).get("id")
    values = (
        _time(execution.started_at_ms),
        execution.cause.value,
        execution.status.value,
        started_from(execution),
        _time(execution.ended_at_ms),
        execution.reason,
        execution.host,
        execution.pid,
        application,
        execution.run_id,
    )
    return dict(zip(_EXECUTION_COLUMNS, values, strict=True))


def _time(ms: int | None) -> str | None:
    return None if ms is None else utc_time(ms)


def state_metadata(shown: Sequence[ShownState]) -> dict[str, Any]:
    states: list[_Row] = [{**_name(each), "rows": each.rows} for each in shown]
    largest: list[_Row] = [{**_name(each), **vars(key)} for each in shown for key in each.largest]
    metadata: dict[str, Any] = {"dagster_ckpt/states": table({**_NAME, "rows": "int"}, states)}
    if largest:
        columns = {**_NAME, "key": "string", "rows": "int", "bytes": "int"}
        metadata["dagster_ckpt/largest_keys"] = table(columns, largest)
    return metadata | _first_rows(shown)


def difference_metadata(shown: Sequence[ShownDifference]) -> dict[str, Any]:
    changes = {"added": "ADDED", "removed": "REMOVED", "changed": "CHANGED"}
    states: list[_Row] = [
        {**_name(each), **{name: each.counts[change] for name, change in changes.items()}, "note": each.note}
        for each in shown
    ]
    columns = {**_NAME, **dict.fromkeys(changes, "int"), "note": "string"}
    totals = {f"dagster_ckpt/{name}": _totals(shown)[change] for name, change in changes.items()}
    return {"dagster_ckpt/states": table(columns, states), **totals, **_first_rows(shown)}


def _totals(shown: Sequence[ShownDifference]) -> dict[str, int]:
    return {change: sum(each.counts[change] for each in shown) for change in ("ADDED", "REMOVED", "CHANGED")}


def _first_rows(shown: Sequence[ShownState | ShownDifference]) -> dict[str, Any]:
    return {
        f"dagster_ckpt/operator_{each.operator_id}_{each.state}": table(
            dict.fromkeys(each.columns, "string"), [dict(zip(each.columns, row, strict=True)) for row in each.first]
        )
        for each in shown
        if each.first
    }


def _name(each: ShownState | ShownDifference) -> dict[str, str]:
    return {"operator": f"{each.operator_id} {each.operator}", "state": each.state}


def _places(written: Sequence[str]) -> dict[str, Any]:
    return {"dagster_ckpt/written": dg.MetadataValue.json(list(written))} if written else {}
