"""Ops and jobs that look into the state of a stream, compare it at two points, and forget keys."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.client import Client
from dagster_ckpt.client.state_browsing import (
    DEFAULT_LIMIT,
    ShownDifference,
    ShownState,
    show_differences,
    show_state,
    write_rows,
)
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.jobs.ops import StreamConfig, StreamOps, errors_as_failure, with_parameters_of
from dagster_ckpt.orchestration.sensors.reports import snapshot_metadata
from dagster_ckpt.orchestration.tables import table
from dagster_ckpt.state.editing import StateEdit
from dagster_ckpt.stream.snapshots import describe_snapshot

_POINT = "live (the newest committed batch), latest (the newest snapshot), or the id, number (chk-7), label or "
_POINT += "location of a snapshot."
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


@with_parameters_of(Client.edit_state, without={"edits"})
class ForgetKeyConfig(StreamConfig):
    """Make a savepoint without the state of some keys."""

    where: str = Field(description="Which keys: an SQL condition on fields of the key, such as user_id = 7.")
    operator: str | None = Field(
        default=None,
        description="Number or name of an operator. Default: all whose key has the columns of the condition.",
    )


def build_state_jobs(streams: Sequence[Stream]) -> list[dg.JobDefinition]:
    """Build `browse_state_job`, `diff_state_job` and `forget_key_job`; each of their runs starts Spark."""
    ops = StreamOps(streams)

    @ops.op_with_spark
    def browse_state(context: dg.OpExecutionContext, config: BrowseStateConfig) -> list[str]:
        """Show the state of a stream: first rows, counts and largest keys of every operator."""
        with errors_as_failure():
            spark = ops.resources(context).spark_session
            with ops.call(context, Client.state, config, spark=spark) as found:
                context.log.info(f"read {found}")
                frames = (found.frame(name) for name in found.states)
                rows = ((each.name, each.rows if config.where is None else each.where(config.where)) for each in frames)
                written = write_rows(rows, config.write_to) if config.write_to is not None else []
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
                rows = ((each.name, each.rows) for each in found.states)
                written = write_rows(rows, config.write_to) if config.write_to is not None else []
                shown = show_differences(found, limit=config.limit)
        context.add_output_metadata({**difference_metadata(shown), **_places(written)})
        return _totals(shown)

    @ops.op_with_spark
    def forget_key(context: dg.OpExecutionContext, config: ForgetKeyConfig) -> str:
        """Make a savepoint of a snapshot without the state of some keys. Start the stream from it afterwards."""
        with errors_as_failure():
            edits = StateEdit(config.operator, forget=config.where)
            done = ops.call(context, Client.edit_state, config, edits=edits, spark=ops.resources(context).spark_session)
        for message in done.messages():
            context.log.info(message)
        older = [describe_snapshot(each) for each in done.still_there]
        figures = {"dagster_ckpt/rows": done.rows, "dagster_ckpt/older_snapshots": dg.MetadataValue.json(older)}
        context.add_output_metadata({**snapshot_metadata(done.savepoint), **figures})
        return done.savepoint.location or ""

    return [ops.job(browse_state), ops.job(diff_state), ops.job(forget_key)]


def state_metadata(shown: Sequence[ShownState]) -> dict[str, Any]:
    """Metadata of state."""
    states: list[_Row] = [{**_name(each), "rows": each.rows} for each in shown]
    largest: list[_Row] = [{**_name(each), **vars(key)} for each in shown for key in each.largest]
    metadata: dict[str, Any] = {"dagster_ckpt/states": table({**_NAME, "rows": "int"}, states)}
    if largest:
        columns = {**_NAME, "key": "string", "rows": "int", "bytes": "int"}
        metadata["dagster_ckpt/largest_keys"] = table(columns, largest)
    return metadata | _first_rows(shown)


def difference_metadata(shown: Sequence[ShownDifference]) -> dict[str, Any]:
    """Metadata of differences of state."""
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
