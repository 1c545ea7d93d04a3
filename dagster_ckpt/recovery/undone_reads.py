"""Whether a stream has read rows that a stream upstream has undone since, and which of its points have not.

If it has, its next start goes back, by the rule of `stream_graph`: a point is consistent with an upstream stream if
that still has all that the point has read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, Rewind, UndoneReads
from dagster_ckpt.recovery.recovery_points import live_point, snapshot_point
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.recovery.stream_graph import Point
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.edges import Edge, EdgeKind, Read, edges_to, reads_in, reads_of_live, recorded_sources
from dagster_ckpt.values.untrusted import LARGEST_LONG

# A start with a sink that does not answer is refused, and tried again.
_KEEPS_EACH_ROW = (
    SinkEffect.EXACT,
    SinkEffect.SKIP,
    SinkEffect.UNTOUCHED,
    SinkEffect.STARTS,
    SinkEffect.UNREACHABLE,
)


def with_undone_reads(catalog: Catalog, facts: RecoveryFacts) -> RecoveryFacts:
    """Let the plan go back behind what streams upstream have undone since the last start, if it may choose its point.

    What a person has accepted (`accept_undone`) does not count, nor does a restore that is not finished.
    """
    stream = facts.stream
    judge = _judge(catalog, stream, catalog.executions.last_upstream(stream.stream_id), facts.snapshots)
    found = UndoneReads(timelines=judge.considered)
    if judge.went_back and facts.start_from.chooses_its_point and stream.pending_restore is None:
        found = _judged(catalog, facts, judge, found)
    return replace(facts, undone=found)


def newest_without_undone(catalog: Catalog, stream_id: str, snapshots: Sequence[SnapshotRecord]) -> str | None:
    """The newest snapshot that the next start can go back to, if a stream upstream went back since the last one.

    Args:
        snapshots: Newest first.
    """
    reads = reads_in(snapshots[0].properties) if snapshots else None
    seen = catalog.executions.last_upstream(stream_id) if reads else None
    if seen is None or all(each.timeline <= seen.get(each.upstream, 0) for each in reads or ()):
        return None
    judge = _judge(catalog, catalog.streams.get(stream_id), seen, snapshots)
    free = (each.snapshot_id for each in snapshots if judge.why_not(each) is None)
    return next(free, None) if judge.went_back else None


def going_on(facts: RecoveryFacts, plan: RecoveryPlan, ahead: RewindPreview) -> RecoveryFacts | None:
    """The facts to keep undone rows, as going back would repeat or lose others; None if it would not."""
    if not facts.undone.points or not isinstance(plan, Restore | Rewind):
        return None
    against = [f"sink {each.sink}: {each.reason}" for each in ahead.sinks if each.effect not in _KEEPS_EACH_ROW]
    why = ahead.gone or ahead.repeated or next(iter(against), None)
    return replace(facts, undone=facts.undone.kept(why)) if why is not None else None


def _judge(
    catalog: Catalog, stream: StreamRecord, seen: Mapping[str, int] | None, snapshots: Sequence[SnapshotRecord]
) -> _Judge:
    """`seen`: of each upstream stream the timeline at the last start; None: an older version did not record it."""
    sources = recorded_sources(catalog, stream)
    edges = [each for each in edges_to(catalog, stream.stream_id, sources) if each.kind is not EdgeKind.UNKNOWN]
    upstream = [catalog.streams.get(name) for name in sorted({each.upstream for each in edges})]
    done = {each.stream_id: each.timeline for each in upstream if each.pending_restore is None}
    before = done if seen is None else {each.stream_id: seen.get(each.stream_id, 0) for each in upstream}
    went_back = {
        name: point
        for name, timeline in done.items()
        if (point := _went_back(catalog, name, timeline, before[name])) is not None
    }
    edges = [each for each in edges if each.upstream in went_back]
    return _Judge(edges, went_back, _undone_before(snapshots, edges, before), before, {**before, **done})


def _went_back(catalog: Catalog, upstream: str, timeline: int, before: int) -> Point | None:
    """The stream as it is, if it has gone back since and that was not accepted."""
    branches = {each.timeline: each for each in catalog.history.branches(upstream)}
    if all(each in branches and branches[each].accepted for each in range(before + 1, timeline + 1)):
        return None
    begins = {
        each.timeline: (each.parent, LARGEST_LONG if each.accepted else each.to_batch) for each in branches.values()
    }
    return Point("now", LARGEST_LONG, timeline, begins)


_Key = tuple[str, str, str]


def _key(of: Edge | Read) -> _Key:
    return of.source, of.upstream, of.sink


@dataclass(frozen=True)
class _Judge:
    """Compares reads with the upstream streams that went back.

    Attributes:
        undone_before: What was undone and read, with which the stream has gone on.
        before: Of each upstream stream the timeline at the last start.
        considered: And that up to which it is judged now.
    """

    edges: Sequence[Edge]
    went_back: Mapping[str, Point]
    undone_before: Mapping[_Key, int]
    before: Mapping[str, int]
    considered: Mapping[str, int]

    def why_not(self, snapshot: SnapshotRecord) -> str | None:
        """Why the stream cannot go back to a snapshot."""
        reads = reads_in(snapshot.properties) or ()
        unknown = self.unknown(reads)
        return self.why(reads) or (f"how far it has read {min(unknown)} is not recorded" if unknown else None)

    def why(self, reads: Iterable[Read]) -> str | None:
        return next((why for each in reads if (why := self._why(each)) is not None), None)

    def _why(self, read: Read) -> str | None:
        now = self.went_back.get(read.upstream)
        if now is None or read.kind is EdgeKind.UNKNOWN:
            return None
        undone = read.undone - self.undone_before.get(_key(read), 0)
        if undone > 0:
            noun = "files" if read.kind is EdgeKind.FILES else "batches"
            return f"it has read {undone} {noun} of {read.upstream} that were undone"
        if now.contains(replace(read, undone=0)):
            return None
        return f"it has read batch {read.batch} of {read.upstream}, which was undone"

    def unknown(self, reads: Iterable[Read]) -> set[str]:
        known = {_key(each) for each in reads if each.kind is not EdgeKind.UNKNOWN}
        return {each.upstream for each in self.edges if _key(each) not in known}


def _judged(catalog: Catalog, facts: RecoveryFacts, judge: _Judge, found: UndoneReads) -> UndoneReads:
    points: dict[str, str] = {}
    live = facts.live
    if live is not None and live.status is LiveStatus.GOOD and facts.stream.live_directory is not None:
        try:
            reads = reads_of_live(catalog, judge.edges, LiveDirectory(facts.stream.live_directory))
        except (CkptError, OSError):
            reads = []
        why, unknown = judge.why(reads), judge.unknown(reads)
        if why is None:
            # What could not be read now is judged by the next start.
            return replace(found, timelines={**found.timelines, **{name: judge.before[name] for name in unknown}})
        points[live_point(facts.stream.live_directory)] = why
    free = set()
    for snapshot in facts.snapshots:
        point, why = snapshot_point(snapshot.snapshot_id), judge.why_not(snapshot)
        if why is None:
            free.add(point)
        else:
            points[point] = why
    return replace(found, points=points, free=frozenset(free))


def _undone_before(
    snapshots: Sequence[SnapshotRecord], edges: Sequence[Edge], before: Mapping[str, int]
) -> dict[_Key, int]:
    """As the newest snapshot from before the upstream went back records it."""
    found: dict[_Key, int] = {}
    for edge in edges:
        reads = (
            read
            for snapshot in snapshots
            for read in reads_in(snapshot.properties) or ()
            if _key(read) == _key(edge) and read.kind is not EdgeKind.UNKNOWN
        )
        found[_key(edge)] = next((each.undone for each in reads if each.timeline <= before[edge.upstream]), 0)
    return found
