"""Operator jobs for rewinds, forks and savepoint sets."""

from collections.abc import Mapping, Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client import Client
from dagster_ckpt.client.export import Export
from dagster_ckpt.client.outputs import Orphan, SinkCleaning
from dagster_ckpt.orchestration.downstream import Dependent, dependents_of
from dagster_ckpt.orchestration.jobs.ops import (
    StreamConfig,
    StreamOps,
    errors_as_failure,
    log_messages,
    with_parameters_of,
)
from dagster_ckpt.orchestration.metadata import markdown_table
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.recovery.adopt import Adoption
from dagster_ckpt.recovery.fork import Fork
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.durations import rounded_duration, utc_time


@with_parameters_of(Client.preview_rewind)
class PreviewConfig(StreamConfig):
    """Preview what a start would undo and process again."""


@with_parameters_of(Client.clean_sinks, without={"grace_ms"})
class CleanSinkConfig(StreamConfig):
    """Find part files that the log of a rolled-back file sink no longer references."""

    grace_hours: float = Field(default=24, ge=0, description="Files younger than this are kept.")


def build_rewind_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    ops = StreamOps(streams)

    @ops.op
    def preview_rewind(context: dg.OpExecutionContext, config: PreviewConfig) -> None:
        """Show what a start would undo and process again, and the effect on each sink. Changes nothing."""
        with errors_as_failure():
            preview = ops.call(context, Client.preview_rewind, config)
        log_messages(context, preview.messages())
        context.add_output_metadata(rewind_metadata(context, ops.stream(config.stream_id), preview))

    def forked(context: dg.OpExecutionContext, made: Fork) -> None:
        context.log.info(
            f"{made.stream_id} continues after batch {made.batch_id} of {made.of_stream_id}: {made.source}"
        )
        context.add_output_metadata(fork_metadata(made))

    def adopted(context: dg.OpExecutionContext, made: Adoption) -> None:
        report(context, "dagster_ckpt/adoption", made.messages())

    def exported(context: dg.OpExecutionContext, made: Export) -> None:
        report(context, "dagster_ckpt/export", made.messages())

    @ops.op
    def clean_sink(context: dg.OpExecutionContext, config: CleanSinkConfig) -> None:
        """List, or delete, part files that the log of a rolled-back file sink no longer references."""
        with errors_as_failure():
            cleaning = ops.call(context, Client.clean_sinks, config, grace_ms=round(config.grace_hours * 3_600_000))
        what = "deleted" if cleaning.deleted else "dry run, would delete"
        context.log.info(f"{what} {len(cleaning.removable)} of {len(cleaning.orphans)} files, {cleaning.bytes:,} bytes")
        context.add_output_metadata(cleaning_metadata(cleaning))

    return [
        ops.job(preview_rewind),
        ops.verb("fork_stream", Client.fork, forked),
        ops.verb("import_stream", Client.import_snapshot, forked),
        ops.verb("adopt_stream", Client.adopt, adopted),
        ops.verb("export_snapshot", Client.export, exported),
        ops.job(clean_sink),
    ]


def rewind_metadata(
    context: dg.OpExecutionContext, stream: Stream, preview: RewindPreview
) -> dict[str, dg.MetadataValue]:
    return {**preview_metadata(preview), **downstream_metadata(dependents_of(context, stream, preview))}


def report(context: dg.OpExecutionContext, key: str, messages: Sequence[str]) -> None:
    log_messages(context, messages)
    context.add_output_metadata({key: dg.MetadataValue.md("\n".join(f"- {message}" for message in messages))})


ROWS_SHOWN = 200


def preview_metadata(preview: RewindPreview) -> dict[str, dg.MetadataValue]:
    plan = preview.plan
    facts = [
        ("plan", plan.reason),
        ("from batch", plan.from_batch if plan.from_batch is not None else "unknown"),
        ("to batch", plan.to_batch if plan.to_batch is not None else "none"),
        ("committed batches processed again", preview.batches),
        ("input rows processed again", preview.rows),
        ("processing time of these batches", _duration(preview.span_ms)),
        *((f"source {source.source}", _source(source.kind, source.count)) for source in preview.sources),
        ("downstream", preview.downstream),
    ]
    sinks = [(sink.sink, sink.effect.value, sink.reason, sink.advice) for sink in preview.sinks]
    left = [
        (describe_snapshot(snapshot), _time(snapshot.completed_at_ms), snapshot.location or "")
        for snapshot in preview.left
    ]
    return {
        "dagster_ckpt/rewind": dg.MetadataValue.md(markdown_table(("", "value"), facts)),
        "dagster_ckpt/sinks": dg.MetadataValue.md(markdown_table(("sink", "effect", "why", "advice"), sinks)),
        "dagster_ckpt/left_snapshots": dg.MetadataValue.md(markdown_table(("snapshot", "taken", "location"), left)),
        "dagster_ckpt/may_lose_rows": dg.MetadataValue.bool(bool(preview.losing)),
    }


def downstream_metadata(dependents: Sequence[Dependent] | None) -> dict[str, dg.MetadataValue]:
    if dependents is None:
        return {"dagster_ckpt/downstream": dg.MetadataValue.md("unknown: this run belongs to no code location")}
    rows = [
        (
            each.asset_key.to_user_string(),
            each.partition or "",
            _time(each.at_ms),
            "unknown" if each.read_batch is None else each.read_batch,
            each.basis.value,
            each.run_id,
        )
        for each in dependents
    ]
    columns = ("asset", "partition", "materialized", "read up to batch", "basis", "run")
    return {
        "dagster_ckpt/downstream": dg.MetadataValue.md(markdown_table(columns, rows, at_most=ROWS_SHOWN)),
        "dagster_ckpt/downstream_materializations": dg.MetadataValue.int(len(rows)),
    }


def fork_metadata(made: Fork) -> dict[str, dg.MetadataValue]:
    is_import = made.of_deployment is not None
    facts = [
        ("stream", made.stream_id),
        ("imported from" if is_import else "forked from", f"{made.of_stream_id}, {made.source}"),
        *([("of deployment", made.of_deployment)] if is_import else []),
        ("continues after batch", made.batch_id),
        ("query id", made.query_id),
        ("live directory", made.live_directory),
        *(
            (f"writes instead of {old} to" if is_import else f"output forked from {old}", new)
            for old, new in made.outputs.items()
        ),
        *(("must not write to", path) for path in made.parent_outputs),
    ]
    return {"dagster_ckpt/fork": dg.MetadataValue.md(markdown_table(("", "value"), facts))}


def cleaning_metadata(cleaning: SinkCleaning) -> dict[str, dg.MetadataValue]:
    done = "deleted" if cleaning.deleted else "would be deleted"
    orphans = [_orphan(orphan, done) for orphan in cleaning.orphans]
    table = markdown_table(("file", "bytes", "age", "undone by", "what is done"), orphans, at_most=ROWS_SHOWN)
    return {
        "dagster_ckpt/orphans": dg.MetadataValue.md(table),
        "dagster_ckpt/removable_files": dg.MetadataValue.int(len(cleaning.removable)),
        "dagster_ckpt/removable_bytes": dg.MetadataValue.int(cleaning.bytes),
        "dagster_ckpt/deleted": dg.MetadataValue.bool(cleaning.deleted),
    }


def _orphan(orphan: Orphan, done: str) -> tuple[object, ...]:
    what = done if orphan.is_removable else f"kept: {orphan.kept_because}"
    file = f"{orphan.sink.rstrip('/')}/{orphan.file.path}"
    return (file, orphan.file.size, _duration(orphan.age_ms), orphan.undone_by, what)


def _duration(ms: int | None) -> str:
    return "unknown" if ms is None else rounded_duration(ms)


def _time(ms: int | None) -> str:
    return "unknown" if ms is None else utc_time(ms)


def _source(kind: str, count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} {kind}"


@with_parameters_of(Client.trigger_savepoint_set)
class SavepointSetConfig(dg.Config):
    """Take savepoints of streams that belong together, while they run."""


@with_parameters_of(Client.restart_savepoint_set, without={"savepoint_set"})
class RestartSetConfig(dg.Config):
    """Take all streams of a set back to it."""

    savepoint_set: str = Field(description="Id or label of the set.")
    preview: bool = Field(default=False, description="Only show what the restart would undo.")


def build_set_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    ops = StreamOps(streams)

    @ops.op
    def savepoint_set(context: dg.OpExecutionContext, config: SavepointSetConfig) -> str:
        """Take savepoints of several streams that belong together, while they run: a set, or nothing."""
        with errors_as_failure():
            made = ops.call(context, Client.trigger_savepoint_set, config)
        log_messages(context, made.messages())
        context.add_output_metadata(set_metadata(made))
        return made.set_id

    @ops.op
    def restart_savepoint_set(context: dg.OpExecutionContext, config: RestartSetConfig) -> str:
        """Suspend all streams of a savepoint set, take them and their sinks back to it, and start them."""
        with errors_as_failure():
            ahead = ops.call(context, Client.preview_savepoint_set, config)
        context.add_output_metadata(_undone(context, ops, ahead))
        for stream_id, preview in ahead.items():
            log_messages(context, [f"{stream_id}: {message}" for message in preview.messages()])
        if not config.preview:
            with errors_as_failure():
                ops.call(context, Client.restart_savepoint_set, config)
        return config.savepoint_set

    return [ops.job(savepoint_set), ops.job(restart_savepoint_set)]


def set_metadata(made: SavepointSet) -> dict[str, dg.MetadataValue]:
    rows = [
        (stream_id, "none" if each.batch_id is None else each.batch_id, each.location or "")
        for stream_id in made.streams
        if (each := made.savepoints.get(stream_id)) is not None
    ]
    return {
        "dagster_ckpt/savepoint_set": dg.MetadataValue.text(made.label or made.set_id),
        "dagster_ckpt/savepoints": dg.MetadataValue.md(markdown_table(("stream", "batch", "location"), rows)),
        "dagster_ckpt/unproven": dg.MetadataValue.json(list(made.unproven)),
    }


def _undone(
    context: dg.OpExecutionContext, ops: StreamOps, ahead: Mapping[str, RewindPreview]
) -> dict[str, dg.MetadataValue]:
    found: dict[tuple[dg.AssetKey, str], Dependent] = {}
    is_known = True
    keys = {key for stream_id in ahead for key in ops.stream(stream_id).keys}
    rows = []
    for stream_id, preview in ahead.items():
        rows.append((stream_id, preview.plan.reason, preview.batches))
        dependents = dependents_of(context, ops.stream(stream_id), preview)
        is_known &= dependents is not None
        # The streams' own assets go back with the set.
        found |= {(each.asset_key, each.run_id): each for each in dependents or () if each.asset_key not in keys}
    newest_first = sorted(found.values(), key=lambda each: each.at_ms, reverse=True)
    return {
        "dagster_ckpt/rewind": dg.MetadataValue.md(markdown_table(("stream", "plan", "batches undone"), rows)),
        **downstream_metadata(newest_first if is_known else None),
    }
