"""The greatest consistent line over the snapshots of a graph of streams.

A snapshot of a stream is consistent with one of its upstream if that contains all that it has read of it. What it has
not read is in a durable sink and arrives by itself. So a reader goes back because of its upstream, never vice versa,
and one pass in topological order finds the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dagster_ckpt.catalog.history import past_of
from dagster_ckpt.errors import OptionError
from dagster_ckpt.stream.edges import Edge, EdgeKind, Read


@dataclass(frozen=True)
class Point:
    """A position of a stream that it can go back to.

    Attributes:
        batch: -1 before the first.
        begins: Of each timeline of the stream its parent, and the batch after which it branched off.
        reads: What it has read of other streams; None if that was not recorded.
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
        written_on = read.timeline
        for _ in self.begins:
            parent, to_batch = self.begins.get(written_on, (written_on, -1))
            written_on = parent if read.batch <= to_batch else written_on
        history = {**past_of(self.timeline, self.begins), self.timeline: self.batch}
        return read.batch <= min(history.get(written_on, -1), self.batch)


EMPTY = Point("empty state", -1)


@dataclass(frozen=True)
class Member:
    """A stream of a line.

    Attributes:
        skipped: Why each newer snapshot is not part of the line.
        unproven: Why the point is not proven to be consistent.
    """

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
    """Each after those that it reads; OptionError if they read each other in a circle."""
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
    """The newest point of each stream that has read nothing of its upstream that would be undone.

    Args:
        order: Upstream first. Other streams that they read do not go back.
        edges: Those of unknown kind make the line not provable.
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
        elif read.timeline != upstream.timeline:
            what += f" on timeline {read.timeline}"
        return f"{name}: it has read {what}, and {upstream.name} ends at batch {upstream.batch}"
    return None


def unproven(stream: str, point: Point, chosen: Mapping[str, Point], edges: Sequence[Edge] = ()) -> tuple[str, ...]:
    if point.reads is None:
        return (f"{point.name} of {stream} does not record what it has read",)
    recorded = {(each.source, each.upstream) for each in point.reads}
    for edge in edges:
        # Earlier versions did not record it.
        if edge.reader == stream and edge.kind is EdgeKind.TOPIC and (edge.source, edge.upstream) not in recorded:
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
