"""Ops and jobs for rewinds and forks: preview a rewind, fork, import, adopt or export a stream, clean up."""

from collections.abc import Sequence

import dagster as dg
import pendulum
from pydantic import Field

from dagster_ckpt.client.outputs import Orphan, SinkCleaning
from dagster_ckpt.orchestration.assets.downstream import Dependent, dependents_of
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.ops import STREAM_ID, StreamOps, errors_as_failure
from dagster_ckpt.orchestration.resources.settings import StartConfig
from dagster_ckpt.orchestration.tables import markdown_table
from dagster_ckpt.recovery.fork import Fork
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.stream.snapshots import describe_snapshot


class PreviewConfigSchema(StartConfig):
    """Preview what a start would undo and process again."""

    stream_id: str = Field(description=STREAM_ID)


class ForkConfigSchema(dg.Config):
    """Fork a stream into another one."""

    stream_id: str = Field(
        description="Stream id (or asset key) of the stream to fork; it may be running and is not changed."
    )
    into_stream_id: str = Field(
        description="Stream id (or asset key) of the stream that continues from the fork; it must not be running."
    )
    start_from: str = Field(
        default="latest",
        description="Where to fork: latest (the newest committed batch), batch-<n>, or the id, number (chk-7), label "
        "or location of a snapshot of the stream to fork.",
    )
    outputs: dict[str, str] = Field(
        default={},
        description="Maps a folder of a file sink of the original to a folder of the fork, which then also contains "
        "the original's rows up to the fork. Without it the fork's folder contains only later rows.",
    )
    replace_state: bool = Field(default=False, description="Discard what the fork itself has committed before.")
    accept_loss: bool = Field(
        default=False, description="Fork even if files that the original has read since no longer exist."
    )


class ImportConfigSchema(dg.Config):
    """Start a stream from a checkpoint or savepoint of another deployment."""

    into_stream_id: str = Field(
        description="Stream id (or asset key) of the stream that continues from the snapshot; it must not be running."
    )
    location: str = Field(
        description="URL of the other deployment's checkpoint or savepoint; this deployment's storage must be able "
        "to read it. It is read once and not changed.",
    )
    outputs: dict[str, str] = Field(
        description="Maps each sink of the original (a file sink by its folder, others by Spark's name) to the "
        "folder, table or topic that the stream writes to instead. A start that writes elsewhere is "
        "refused.",
    )
    with_rows: bool = Field(
        default=False,
        description="Copy the rows of the original's file sinks up to the snapshot to the new folders. Without it "
        "these contain only later rows.",
    )
    replace_state: bool = Field(default=False, description="Discard what the stream itself has committed before.")


class AdoptConfigSchema(dg.Config):
    """Take the checkpoint directory of a plain Spark query under management."""

    stream_id: str = Field(
        description="Stream id (or asset key) of the stream that continues the query; it must not have any state yet."
    )
    checkpoint_location: str = Field(
        description="The checkpointLocation of the query. It is only read; the query may keep running until the "
        "stream's next start."
    )
    sinks: list[str] = Field(
        default=[],
        description="Where the query writes: a folder of files, a Delta table by its path, or an Iceberg table "
        "as IcebergTable[lake.sales.orders]. With the log of its file sink, the first snapshot can be restored "
        "exactly.",
    )
    in_place: bool = Field(
        default=False, description="Continue in the directory itself, instead of in a copy among the live directories."
    )
    label: str | None = Field(default=None, description="A name for the first snapshot.")
    dry_run: bool = Field(default=False, description="Only examine the directory.")


class ExportConfigSchema(dg.Config):
    """Export a snapshot as a checkpoint directory for plain Spark."""

    stream_id: str = Field(description=STREAM_ID)
    snapshot: str = Field(default="latest", description="latest, or the id, number (chk-7), label or location.")
    to: str = Field(description="The checkpoint directory to create; it must not exist.")
    outputs: dict[str, str] = Field(
        default={},
        description="Maps a folder of a file sink to a new folder, which receives its rows up to the snapshot.",
    )


class CleanSinkConfigSchema(dg.Config):
    """Find part files that the log of a rolled-back file sink no longer references."""

    stream_id: str = Field(description=STREAM_ID)
    dry_run: bool = Field(
        default=True, description="Only list the files. Turn it off to delete those that are not needed."
    )
    grace_hours: float = Field(default=24, ge=0, description="Files younger than this are kept.")


def build_rewind_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs for rewinds and forks.

    Returns:
        `preview_rewind_job`, `fork_stream_job`, `import_stream_job`, `adopt_stream_job`,
        `export_snapshot_job` and `clean_sink_job`.
    """
    ops = StreamOps(streams)

    @ops.op
    def preview_rewind(context: dg.OpExecutionContext, config: PreviewConfigSchema) -> None:
        """Show what a start would undo and process again, and the effect on each sink. Changes nothing."""
        with errors_as_failure():
            stream = ops.stream(config.stream_id)
            preview = ops.client(context, config.stream_id).preview_rewind(stream.stream_id, start_from=config.parsed())
        for message in preview.messages():
            context.log.info(message)
        dependents = dependents_of(context, stream, preview)
        context.add_output_metadata({**preview_metadata(preview), **downstream_metadata(dependents)})

    @ops.op
    def fork_stream(context: dg.OpExecutionContext, config: ForkConfigSchema) -> None:
        """Fork a stream into another one, an independent query whose next start continues from there."""
        with errors_as_failure():
            made = ops.client(context, config.into_stream_id).fork(
                config.stream_id,
                into=config.into_stream_id,
                start_from=config.start_from,
                outputs=config.outputs,
                replace_state=config.replace_state,
                accept_loss=config.accept_loss,
            )
        context.log.info(
            f"{made.stream_id} continues after batch {made.batch_id} of {made.of_stream_id}: {made.source}"
        )
        context.add_output_metadata(fork_metadata(made))

    @ops.op
    def import_stream(context: dg.OpExecutionContext, config: ImportConfigSchema) -> None:
        """Import a snapshot of another deployment into a stream, whose next start continues from there."""
        with errors_as_failure():
            made = ops.client(context, config.into_stream_id).import_snapshot(
                config.location,
                into=config.into_stream_id,
                outputs=config.outputs,
                with_rows=config.with_rows,
                replace_state=config.replace_state,
            )
        context.log.info(
            f"{made.stream_id} continues after batch {made.batch_id} of {made.of_stream_id}: {made.source}"
        )
        context.add_output_metadata(fork_metadata(made))

    @ops.op
    def adopt_stream(context: dg.OpExecutionContext, config: AdoptConfigSchema) -> None:
        """Take the checkpoint directory of a plain Spark query under management; the next start continues it."""
        with errors_as_failure():
            made = ops.client(context, config.stream_id).adopt(
                config.stream_id,
                checkpoint_location=config.checkpoint_location,
                sinks=config.sinks,
                in_place=config.in_place,
                label=config.label,
                dry_run=config.dry_run,
            )
        report(context, "dagster_ckpt/adoption", made.messages())

    @ops.op
    def export_snapshot(context: dg.OpExecutionContext, config: ExportConfigSchema) -> None:
        """Export a snapshot as a checkpoint directory in which plain Spark continues."""
        with errors_as_failure():
            made = ops.client(context, config.stream_id).export(
                config.stream_id, config.snapshot, to=config.to, outputs=config.outputs
            )
        report(context, "dagster_ckpt/export", made.messages())

    @ops.op
    def clean_sink(context: dg.OpExecutionContext, config: CleanSinkConfigSchema) -> None:
        """List, or delete, part files that the log of a rolled-back file sink no longer references."""
        with errors_as_failure():
            cleaning = ops.client(context, config.stream_id).clean_sinks(
                config.stream_id,
                dry_run=config.dry_run,
                grace_ms=round(config.grace_hours * 3_600_000),
            )
        what = "deleted" if cleaning.deleted else "dry run, would delete"
        context.log.info(f"{what} {len(cleaning.removable)} of {len(cleaning.orphans)} files, {cleaning.bytes:,} bytes")
        context.add_output_metadata(cleaning_metadata(cleaning))

    return [
        ops.job(preview_rewind),
        ops.job(fork_stream),
        ops.job(import_stream),
        ops.job(adopt_stream),
        ops.job(export_snapshot),
        ops.job(clean_sink),
    ]


def report(context: dg.OpExecutionContext, key: str, messages: Sequence[str]) -> None:
    """Report the result of an operation in the log and as metadata of the run."""
    for message in messages:
        context.log.info(message)
    context.add_output_metadata({key: dg.MetadataValue.md("\n".join(f"- {message}" for message in messages))})


# The page of a run should not show more.
ROWS_SHOWN = 200


def preview_metadata(preview: RewindPreview) -> dict[str, dg.MetadataValue]:
    """The effects of a rewind, as metadata of a run."""
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
    """Downstream materializations that a rewind invalidates, as metadata of a run; None: unknown."""
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
    """The result of a fork or import, as metadata of a run."""
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
    """Orphaned part files, as metadata of a run."""
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
    return "unknown" if ms is None else pendulum.duration(milliseconds=ms).in_words(locale="en") or "0 seconds"


def _time(ms: int | None) -> str:
    return "unknown" if ms is None else pendulum.from_timestamp(ms / 1000).to_datetime_string()


def _source(kind: str, count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} {kind}"
