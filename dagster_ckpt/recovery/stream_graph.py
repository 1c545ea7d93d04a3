"""The graph of the streams of a catalog: selections of it, its recovery line, and the readers of one stream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CkptError, OptionError, StreamNotFoundError
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.recovery_line import (
    EMPTY,
    Point,
    RecoveryLine,
    orphaned,
    recovery_line,
    topological,
    unproven,
)
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.edges import Edge, Read, edges_in, reads_in, reads_of_live
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.untrusted import LARGEST_LONG

_SELECTION = re.compile(r"(?P<upstream>\+?)(?P<stream>[^+,\s]+)(?P<downstream>\+?)")


@dataclass(frozen=True)
class StreamGraph:
    order: tuple[str, ...]
    edges: tuple[Edge, ...]


def select(selection: str, streams: Mapping[str, str], edges: Iterable[Edge]) -> StreamGraph:
    """The part of the graph that a selection names, as in Dagster: `orders+` is `orders` and all that reads it.

    Args:
        selection: Separated by commas; `+orders` is `orders` and all that it reads. Streams between are included.
        streams: Ids, by every name of a stream.
    """
    edges = list(edges)
    upward = [(edge.reader, edge.upstream) for edge in edges]
    downward = [(edge.upstream, edge.reader) for edge in edges]
    chosen: set[str] = set()
    for part in selection.split(","):
        match = _SELECTION.fullmatch(part.strip())
        if match is None:
            raise OptionError(f"{part.strip()!r} is not a selection of streams, such as orders+ or +summary.")
        stream = streams.get(match["stream"])
        if stream is None:
            raise StreamNotFoundError(
                f"The catalog has no stream {match['stream']!r}. It has: {', '.join(sorted(set(streams.values())))}."
            )
        chosen.add(stream)
        chosen |= reached([stream], upward) if match["upstream"] else set()
        chosen |= reached([stream], downward) if match["downstream"] else set()
    # Streams between two of them belong to the same history.
    chosen |= reached(chosen, upward) & reached(chosen, downward)
    within = tuple(edge for edge in edges if edge.reader in chosen and edge.upstream in chosen)
    return StreamGraph(tuple(topological(chosen, within)), within)


def reached(start: Iterable[str], steps: Sequence[tuple[str, str]]) -> set[str]:
    found, ahead = set(start), list(start)
    while ahead:
        here = ahead.pop()
        further = {to for origin, to in steps if origin == here} - found
        found |= further
        ahead += further
    return found


def graph_of(catalog: Catalog, selection: str) -> StreamGraph:
    streams = catalog.streams.all()
    names = {each.asset_key: each.stream_id for each in streams} | {each.stream_id: each.stream_id for each in streams}
    return select(selection, names, edges_in(catalog))


def line_of(catalog: Catalog, graph: StreamGraph, given: Mapping[str, Point] | None = None) -> RecoveryLine:
    readers = {edge.reader for edge in graph.edges}
    points = {stream: points_of(catalog, stream, reads=stream in readers) for stream in graph.order}
    return recovery_line(
        graph.order, points | {stream: [point] for stream, point in (given or {}).items()}, graph.edges
    )


def points_of(catalog: Catalog, stream_id: str, *, reads: bool) -> list[Point]:
    return [point_of(catalog, each, reads=reads) for each in catalog.snapshots.restorable(stream_id)]


def point_of(catalog: Catalog, snapshot: SnapshotRecord, *, reads: bool = True) -> Point:
    return Point(
        snapshot.reference,
        -1 if snapshot.batch_id is None else snapshot.batch_id,
        snapshot.timeline,
        begins_of(catalog, snapshot.stream_id),
        reads_in(snapshot.properties) if reads else (),
        snapshot.snapshot_id,
    )


def point_of_plan(catalog: Catalog, stream_id: str, plan: RecoveryPlan) -> Point:
    if plan.to_batch is None:
        return EMPTY
    if plan.snapshot is not None:
        name = describe_snapshot(plan.snapshot)
        return replace(point_of(catalog, plan.snapshot, reads=False), name=name, batch=plan.to_batch)
    timeline = catalog.streams.get(stream_id).timeline
    return Point(f"batch {plan.to_batch}", plan.to_batch, timeline, begins_of(catalog, stream_id))


def begins_of(catalog: Catalog, stream_id: str) -> dict[int, tuple[int, int]]:
    return {each.timeline: (each.parent, each.to_batch) for each in catalog.history.branches(stream_id)}


@dataclass(frozen=True)
class ReaderOfStream:
    """A stream that reads the output of one that goes back.

    Attributes:
        has_read_undone: Whether it has processed rows that the start undoes; None: unknown, `why` says so.
        line: The newest of its snapshots that has not, and that is consistent with those of the streams between.
    """

    stream_id: str
    has_read_undone: bool | None
    why: str
    line: str

    def message(self) -> str:
        verdict = {True: "has read undone rows", False: "has read no undone row", None: "may have read undone rows"}
        text = f"downstream stream {self.stream_id} {verdict[self.has_read_undone]}: {self.why}"
        return text if self.has_read_undone is False else f"{text}. Its newest consistent point: {self.line}"


def downstream_readers(catalog: Catalog, stream_id: str, plan: RecoveryPlan) -> tuple[ReaderOfStream, ...]:
    graph = graph_of(catalog, f"{stream_id}+")
    if len(graph.order) == 1:
        return ()
    start = point_of_plan(catalog, stream_id, plan)
    line = line_of(catalog, graph, {stream_id: start})
    # What each stream keeps: all of it, unless it has read what its upstream loses.
    kept = {stream_id: start}
    found = []
    for member in line.members[1:]:
        edges = [edge for edge in graph.edges if edge.reader == member.stream_id]
        now = _now(catalog, member.stream_id, edges)
        reads = now.reads or ()
        why = orphaned("now", reads, kept)
        doubts = unproven(member.stream_id, now, kept, edges)
        is_undone = True if why is not None else None if doubts else False
        shown = why.removeprefix("now: ") if why is not None else "; ".join(doubts) or _progress(reads, kept)
        found.append(ReaderOfStream(member.stream_id, is_undone, shown, member.messages()[0].partition(": ")[2]))
        kept[member.stream_id] = now if is_undone is False else member.point
    return tuple(found)


def _progress(reads: Iterable[Read], kept: Mapping[str, Point]) -> str:
    found = [
        f"it has read {each.upstream} up to batch {each.batch}"
        if each.batch is not None
        else f"it has read nothing of {each.upstream}"
        for each in reads
        if each.upstream in kept
    ]
    return ", ".join(found)


def _now(catalog: Catalog, stream_id: str, edges: Sequence[Edge]) -> Point:
    stream = catalog.streams.get(stream_id)
    begins = begins_of(catalog, stream_id)
    reads: tuple[Read, ...] | None = ()
    if stream.live_directory is not None:
        try:
            reads = tuple(reads_of_live(catalog, edges, LiveDirectory(stream.live_directory)))
        except (CkptError, OSError):
            reads = None
    return Point("its live directory", LARGEST_LONG, stream.timeline, begins, reads)
