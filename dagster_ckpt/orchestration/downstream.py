"""Which checkpoint a downstream asset read, what a rewind invalidates, and batch assets between two streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import dagster as dg
from dagster import AssetExecutionContext, OpExecutionContext

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import BatchInput
from dagster_ckpt.orchestration._compat import BaseAssetGraph, asset_graph_of
from dagster_ckpt.orchestration.metadata import BATCH_ID_KEY, SNAPSHOT_ID_KEY, STREAM_ID_KEY, TIMELINE_KEY, number_in
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset
from dagster_ckpt.recovery.rewind_preview import RewindPreview

READ_STREAM_KEY = "dagster_ckpt/read_stream"
READ_SNAPSHOT_KEY = "dagster_ckpt/read_snapshot"
READ_BATCH_KEY = "dagster_ckpt/read_batch"
READ_TIMELINE_KEY = "dagster_ckpt/read_timeline"
READ_EXACTLY_KEY = "dagster_ckpt/read_exactly"
# Dagster's tag with the data version of an upstream asset at the start of the step.
_INPUT_DATA_VERSION = "dagster/input_data_version/"
# Materializations examined per asset, newest first.
_MAX_EVENTS = 1000
_PAGE = 100
_NO_BATCH = -1


@dataclass(frozen=True)
class ReadCheckpoint:
    """The newest reported checkpoint of a stream when an asset began to read its output."""

    stream_id: str
    snapshot_id: str
    batch_id: int
    timeline: int
    exactly: bool

    def metadata(self) -> dict[str, Any]:
        return {
            READ_STREAM_KEY: self.stream_id,
            READ_SNAPSHOT_KEY: self.snapshot_id,
            READ_BATCH_KEY: self.batch_id,
            READ_TIMELINE_KEY: self.timeline,
            READ_EXACTLY_KEY: self.exactly,
        }


def reading_checkpoint(
    context: AssetExecutionContext | OpExecutionContext,
    upstream: StreamingAsset | dg.AssetKey,
    *,
    exactly: bool = False,
) -> ReadCheckpoint | None:
    """Record with this materialization which checkpoint of a stream it reads. Call it before you read.

    Args:
        exactly: The asset reads nothing after the checkpoint's batch, such as a Delta table as of that version.
            Otherwise it may read slightly more.

    Returns:
        None if no checkpoint has been reported yet.

    Example:
        >>> @dg.asset(deps=[orders.asset], automation_condition=dg.AutomationCondition.eager())
        ... def revenue(context: dg.AssetExecutionContext) -> None:
        ...     read = reading_checkpoint(context, orders)
    """
    key = upstream.key if isinstance(upstream, StreamingAsset) else upstream
    event = context.instance.get_latest_materialization_event(key)
    metadata = event.asset_materialization.metadata if event and event.asset_materialization else {}
    values = {name: entry.value for name, entry in metadata.items()}
    batch_id = number_in(metadata, BATCH_ID_KEY)
    if batch_id is None:
        return None
    read = ReadCheckpoint(
        stream_id=str(values.get(STREAM_ID_KEY)),
        snapshot_id=str(values.get(SNAPSHOT_ID_KEY)),
        batch_id=batch_id,
        timeline=number_in(metadata, TIMELINE_KEY) or 0,
        exactly=exactly,
    )
    context.add_output_metadata(read.metadata())
    return read


class Basis(Enum):
    """How the read batch is known: recorded by the asset, by Dagster as its input's data version, or only by time."""

    RECORDED = "recorded"
    DATA_VERSION = "data version"
    TIME = "by time"


@dataclass(frozen=True)
class Dependent:
    """A downstream materialization that may contain data that a rewind undoes.

    `at_ms`: when it was stored; `read_batch`: the last batch that it read, if known.
    """

    asset_key: dg.AssetKey
    partition: str | None
    run_id: str
    at_ms: int
    read_batch: int | None
    basis: Basis


def built_on_undone_data(
    instance: dg.DagsterInstance,
    graph: BaseAssetGraph[Any],
    stream: Stream,
    *,
    to_batch: int | None,
    undone_since_ms: int | None,
) -> list[Dependent]:
    """List materializations that may have read what a rewind undoes, newest first.

    Args:
        to_batch: The last batch that stays; None if none does.
        undone_since_ms: When the first undone batch may have been written. None: every materialization without a
            recorded batch is listed.
    """
    kept = _NO_BATCH if to_batch is None else to_batch
    found = [
        dependent
        for key in sorted(_descendants(graph, stream.keys))
        for dependent in _of_asset(instance, key, stream, kept, undone_since_ms)
    ]
    return sorted(found, key=lambda each: each.at_ms, reverse=True)


def dependents_of(context: OpExecutionContext, stream: Stream, preview: RewindPreview) -> list[Dependent] | None:
    """Return None outside a code location."""
    graph = asset_graph_of(context)
    if graph is None:
        return None
    if not preview.undoes:
        return []
    return built_on_undone_data(
        context.instance,
        graph,
        stream,
        to_batch=preview.plan.to_batch,
        undone_since_ms=preview.undone_since_ms,
    )


def batch_inputs_of(context: OpExecutionContext, catalog: Catalog, keys: Sequence[dg.AssetKey]) -> list[BatchInput]:
    graph = asset_graph_of(context)
    if graph is None:
        return []
    streams = {key: each.stream_id for each in catalog.streams.all() for key in each.asset_key.split(", ")}
    return batch_inputs(graph, keys, streams)


def batch_inputs(
    graph: BaseAssetGraph[Any], keys: Sequence[dg.AssetKey], streams: Mapping[str, str]
) -> list[BatchInput]:
    """Find batch assets that a stream reads and other streams feed (`streams`: ids by asset key)."""
    found: dict[BatchInput, None] = {}
    for parent in sorted({parent for key in keys if graph.has(key) for parent in graph.get(key).parent_keys}):
        seen, ahead = set(keys), [parent]
        while ahead:
            here = ahead.pop()
            if here in seen or not graph.has(here):
                continue
            seen.add(here)
            stream = streams.get(here.to_user_string())
            if stream is None:
                ahead += graph.get(here).parent_keys
            elif here != parent:
                found[BatchInput(stream, parent.to_user_string())] = None
    return sorted(found, key=lambda each: (each.upstream, each.asset))


def _descendants(graph: BaseAssetGraph[Any], keys: Sequence[dg.AssetKey]) -> set[dg.AssetKey]:
    found: set[dg.AssetKey] = set()
    ahead = list(keys)
    while ahead:
        here = ahead.pop()
        children = set(graph.get(here).child_keys) - found if graph.has(here) else set()
        found |= children
        ahead += children
    return found.difference(keys)


def _of_asset(
    instance: dg.DagsterInstance, key: dg.AssetKey, stream: Stream, kept: int, since_ms: int | None
) -> Iterator[Dependent]:
    for record in _newest(instance, key):
        materialization = record.asset_materialization
        if materialization is None:
            continue
        at_ms = round(record.timestamp * 1000)
        read, basis, exactly = _read(materialization, stream)
        is_later = since_ms is None or at_ms >= since_ms
        if read is not None and read > kept:
            yield Dependent(key, materialization.partition, record.run_id, at_ms, read, basis)
        elif is_later and not exactly:
            # An asset may read slightly more than the newest report.
            yield Dependent(key, materialization.partition, record.run_id, at_ms, read, Basis.TIME)


def _newest(instance: dg.DagsterInstance, key: dg.AssetKey) -> Iterator[dg.EventLogRecord]:
    cursor: str | None = None
    for _ in range(_MAX_EVENTS // _PAGE):
        page = instance.fetch_materializations(key, limit=_PAGE, cursor=cursor)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def _read(materialization: dg.AssetMaterialization, stream: Stream) -> tuple[int | None, Basis, bool]:
    recorded = {name: entry.value for name, entry in materialization.metadata.items()}
    batch_id = recorded.get(READ_BATCH_KEY)
    if isinstance(batch_id, int) and recorded.get(READ_STREAM_KEY) == stream.stream_id:
        return batch_id, Basis.RECORDED, recorded.get(READ_EXACTLY_KEY) is True
    # The catalog sensor sets the batch as data version.
    tags = materialization.tags or {}
    noted = [tags.get(f"{_INPUT_DATA_VERSION}{key.to_user_string()}", "") for key in stream.keys]
    batches = [int(batch_id) for batch_id in noted if batch_id.isdecimal()]
    if batches:
        return max(batches), Basis.DATA_VERSION, False
    return None, Basis.TIME, False
