"""Jobs for streams that read each other's output."""

from collections.abc import Mapping, Sequence

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client import Client
from dagster_ckpt.orchestration.downstream import Dependent, dependents_of
from dagster_ckpt.orchestration.jobs.ops import StreamOps, errors_as_failure, log_messages, with_parameters_of
from dagster_ckpt.orchestration.jobs.rewind_jobs import downstream_metadata
from dagster_ckpt.orchestration.metadata import markdown_table
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.recovery.rewind_preview import RewindPreview


@with_parameters_of(Client.trigger_savepoint_set)
class SavepointSetConfig(dg.Config):
    """Take savepoints of streams that belong together, while they run."""


@with_parameters_of(Client.restart_savepoint_set, without={"savepoint_set"})
class RestartSetConfig(dg.Config):
    """Take all streams of a set back to it."""

    savepoint_set: str = Field(description="Id or label of the set.")
    preview: bool = Field(default=False, description="Only show what the restart would undo.")


def build_set_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build the jobs for savepoint sets."""
    ops = StreamOps(streams)

    @ops.op
    def savepoint_set(context: dg.OpExecutionContext, config: SavepointSetConfig) -> str:
        """Take savepoints of several streams that belong together, while they run: a set, or nothing."""
        with errors_as_failure():
            made = ops.call_for_all(context, Client.trigger_savepoint_set, config)
        log_messages(context, made.messages())
        context.add_output_metadata(set_metadata(made))
        return made.set_id

    @ops.op
    def restart_savepoint_set(context: dg.OpExecutionContext, config: RestartSetConfig) -> str:
        """Suspend all streams of a savepoint set, take them and their sinks back to it, and start them."""
        with errors_as_failure():
            ahead = ops.call_for_all(context, Client.preview_savepoint_set, config)
        context.add_output_metadata(_undone(context, ops, ahead))
        for stream_id, preview in ahead.items():
            log_messages(context, [f"{stream_id}: {message}" for message in preview.messages()])
        if not config.preview:
            with errors_as_failure():
                ops.call_for_all(context, Client.restart_savepoint_set, config)
        return config.savepoint_set

    return [ops.job(savepoint_set), ops.job(restart_savepoint_set)]


def set_metadata(made: SavepointSet) -> dict[str, dg.MetadataValue]:
    """Metadata of a savepoint set."""
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
    """With the materializations downstream of any stream."""
    found: dict[tuple[dg.AssetKey, str], Dependent] = {}
    is_known = True
    keys = {key for stream_id in ahead for key in ops.stream(stream_id).keys}
    rows = []
    for stream_id, preview in ahead.items():
        rows.append((stream_id, preview.plan.reason, preview.batches))
        dependents = dependents_of(context, ops.stream(stream_id), preview)
        is_known &= dependents is not None
        # The streams themselves go back.
        found |= {(each.asset_key, each.run_id): each for each in dependents or () if each.asset_key not in keys}
    newest_first = sorted(found.values(), key=lambda each: each.at_ms, reverse=True)
    return {
        "dagster_ckpt/rewind": dg.MetadataValue.md(markdown_table(("stream", "plan", "batches undone"), rows)),
        **downstream_metadata(newest_first if is_known else None),
    }
