"""Tables for the result pages of the rewind preview, fork, import and sink clean-up jobs."""

from collections.abc import Sequence

import dagster as dg
import pendulum

from dagster_ckpt.operations.sink_cleaning import Orphan, SinkCleaning
from dagster_ckpt.orchestration.assets.downstream import Dependent
from dagster_ckpt.orchestration.jobs.markdown import markdown_table
from dagster_ckpt.recovery.fork import Fork
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.stream.snapshots import describe_snapshot

# The page of a run should not show more.
ROWS_SHOWN = 200


def preview_metadata(preview: RewindPreview) -> dict[str, dg.MetadataValue]:
    """The effects of a rewind, as metadata of a run."""
    plan = preview.plan
    facts = [
        ("what", plan.reason),
        ("from batch", plan.from_batch if plan.from_batch is not None else "unknown"),
        ("to batch", plan.to_batch if plan.to_batch is not None else "none"),
        ("committed batches processed again", preview.batches),
        ("input rows processed again", preview.rows),
        ("processing time gone through again", _duration(preview.span_ms)),
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
    columns = ("asset", "partition", "materialized", "had read batch", "known", "run")
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
        ("goes on after batch", made.batch_id),
        ("query id", made.query_id),
        ("live directory", made.live_directory),
        *(
            (f"writes in place of {old} to" if is_import else f"output forked from {old}", new)
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
