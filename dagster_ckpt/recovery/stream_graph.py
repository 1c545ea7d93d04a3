"""The graph of the streams of a catalog: selections of it, and its recovery line.

The recovery line is the newest consistent line of snapshots. A snapshot is consistent with one of an upstream stream if
that contains all that was read of it. What was not read yet is in a durable sink and arrives by itself. So a reader
goes back because of its upstream, never vice versa, and one pass in topological order finds the line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.history import past_of
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import OptionError, StreamNotFoundError
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.stream.edges import Edge, EdgeKind, Read, edges_in, reads_in
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.safe_parsing import LARGEST_LONG


@dataclass(frozen=True)
class Point:
    """A position of a stream that it can go back to.

    Attributes:
        batch: -1 is before the first.
        begins: Each timeline's parent, and the batch after which it branched off.
        reads: What it has read of other streams; None if not recorded.
    """

    name: str
    batch: int
    timeline: int = 0
    begins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    reads: tuple[Read, ...] | None = ()
    snapshot_id: str | None = None

    def contains(self, read: Read) -> bool:
        if read.undone or read.batch is None:
            return not read.undone
        return read.batch <= self.batch and remaining(read, self.timeline, self.begins).batch == read.batch


EMPTY = Point("empty state", -1)


def remaining(read: Read, timeline: int, begins: Mapping[int, tuple[int, int]]) -> Read:
    """Return what is left of a read on another timeline of its upstream: the batches of their common past."""
    if read.batch is None:
        return replace(read, timeline=timeline)
    mine = {**past_of(read.timeline, begins), read.timeline: LARGEST_LONG}
    other = {**past_of(timeline, begins), timeline: LARGEST_LONG}
    common = [min(read.batch, mine[each], other[each]) for each in mine.keys() & other.keys()]
    return replace(read, timeline=timeline, batch=max(common, default=-1))


@dataclass(frozen=True)
class Member:
    """A stream of a line; `skipped` says why newer snapshots are not part of it."""

    stream_id: str
    point: Point
    skipped: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    def messages(self) -> list[str]:
        at = f" at batch {self.point.batch}" if self.point.batch >= 0 else ""
        notes = [f"  not {why}" for why in self.skipped] + [f"  not provable: {why}" for why in self.unproven]
        return [f"{self.stream_id}: {self.point.name}{at}", *notes]


@dataclass(frozen=True)
class RecoveryLine:
    members: tuple[Member, ...]

    @property
    def is_proven(self) -> bool:
        return not any(member.unproven for member in self.members)

    @property
    def unproven(self) -> tuple[str, ...]:
        return tuple(why for member in self.members for why in member.unproven)

    def messages(self) -> list[str]:
        return [line for member in self.members for line in member.messages()]


def topological(streams: Iterable[str], edges: Iterable[Edge]) -> list[str]:
    """Order streams after those that they read; OptionError if they read each other in a circle."""
    left = {stream: set[str]() for stream in sorted(set(streams))}
    for edge in edges:
        if edge.reader in left and edge.upstream in left:
            left[edge.reader].add(edge.upstream)
    order: list[str] = []
    while left:
        free = [stream for stream, upstream in left.items() if not upstream & left.keys()]
        if not free:
            raise OptionError(
                f"The streams {', '.join(left)} read each other's output in a circle, so no line through their "
                "snapshots can be computed. Treat them one by one."
            )
        order += free
        left = {stream: upstream for stream, upstream in left.items() if stream not in free}
    return order


def recovery_line(
    order: Sequence[str], points: Mapping[str, Sequence[Point]], edges: Iterable[Edge] = ()
) -> RecoveryLine:
    """Find the newest point of each stream that has read nothing of its upstream that would be undone.

    Args:
        order: Upstream first. Other streams do not go back.
        edges: Those of unknown kind make the line unprovable.
    """
    edges = list(edges)
    chosen: dict[str, Point] = {}
    members = []
    for stream in order:
        member = _newest(stream, points[stream], chosen, edges)
        chosen[stream] = member.point
        members.append(member)
    return RecoveryLine(tuple(members))


def orphaned(name: str, reads: Iterable[Read], chosen: Mapping[str, Point]) -> str | None:
    for read in reads:
        upstream = chosen.get(read.upstream)
        if upstream is None or read.kind is EdgeKind.UNKNOWN or upstream.contains(read):
            continue
        what = f"batch {read.batch} of {read.upstream}"
        if read.undone:
            noun = "files" if read.kind is EdgeKind.FILES else "batches"
            what = f"{read.undone} {noun} of {read.upstream} that an earlier rewind undid"
        elif read.timeline != upstream.timeline and upstream.batch >= 0:
            what += f" on timeline {read.timeline}"
        return f"{name}: it has read {what}, and {upstream.name} ends at batch {upstream.batch}"
    return None


def unproven(stream: str, point: Point, chosen: Mapping[str, Point], edges: Sequence[Edge] = ()) -> tuple[str, ...]:
    if point.reads is None:
        return (f"{point.name} of {stream} does not record what it has read",)
    recorded = {(each.source, each.upstream) for each in point.reads}
    for edge in edges:
        # Earlier versions did not record topics, and an empty sink log was not recognized.
        is_read = edge.reader == stream and edge.kind is not EdgeKind.UNKNOWN
        if is_read and (edge.source, edge.upstream) not in recorded:
            return (f"{point.name} of {stream} does not record how far it has read {edge.sink}",)
    doubtful: list[Read | Edge] = [*point.reads, *(edge for edge in edges if edge.reader == stream)]
    return tuple(
        f"how far {stream} has read {each.sink} of {each.upstream}: {each.why} not recorded by batch"
        for each in doubtful
        if each.kind is EdgeKind.UNKNOWN and each.upstream in chosen
    )


def _newest(stream: str, points: Sequence[Point], chosen: Mapping[str, Point], edges: Sequence[Edge]) -> Member:
    skipped: list[str] = []
    for point in points:
        why = orphaned(point.name, point.reads or (), chosen)
        if why is None:
            return Member(stream, point, tuple(skipped), unproven(stream, point, chosen, edges))
        skipped.append(why)
    return Member(stream, EMPTY, tuple(skipped))


_SELECTION = re.compile(r"(?P<upstream>\+?)(?P<stream>[^+,\s]+)(?P<downstream>\+?)")


@dataclass(frozen=True)
class StreamGraph:
    order: tuple[str, ...]
    edges: tuple[Edge, ...]


def select(selection: str, streams: Mapping[str, str], edges: Iterable[Edge]) -> StreamGraph:
    """Select a part of the graph as in Dagster, see `Client.recovery_line`, with the streams between.

    Args:
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
    written = Counter(key for each in streams for key in each.asset_key.split(", "))
    # An asset that two streams wrote names neither.
    names = {key: each.stream_id for each in streams for key in each.asset_key.split(", ") if written[key] == 1}
    names |= {each.stream_id: each.stream_id for each in streams}
    return select(selection, names, edges_in(catalog))


def line_of(catalog: Catalog, graph: StreamGraph, given: Mapping[str, Point] | None = None) -> RecoveryLine:
    readers = {edge.reader for edge in graph.edges}
    points = {
        stream: [point_of(catalog, each, reads=stream in readers) for each in catalog.snapshots.restorable(stream)]
        for stream in graph.order
    }
    points |= {stream: [point] for stream, point in (given or {}).items()}
    return recovery_line(graph.order, points, graph.edges)


def point_of(catalog: Catalog, snapshot: SnapshotRecord, *, reads: bool = True) -> Point:
    return Point(
        snapshot.reference,
        -1 if snapshot.batch_id is None else snapshot.batch_id,
        snapshot.timeline,
        catalog.history.begins(snapshot.stream_id),
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
    return Point(f"batch {plan.to_batch}", plan.to_batch, timeline, catalog.history.begins(stream_id))
