"""Whether a stream has read rows that a stream upstream has undone since, and which of its points have not.

If it has, its next start goes back, by the rule of `stream_graph`: a point is consistent with an upstream stream if
that still has all that the point has read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
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
    sources = recorded_sources(catalog, stream)
    edges = [each for each in edges_to(catalog, stream.stream_id, sources) if each.kind is not EdgeKind.UNKNOWN]
    upstream = [catalog.streams.get(name) for name in sorted({each.upstream for each in edges})]
    done = {each.stream_id: each.timeline for each in upstream if each.pending_restore is None}
    seen = catalog.executions.last_upstream(stream.stream_id)
    if seen is None:
        # It last started before this was recorded.
        return replace(facts, undone=UndoneReads(timelines=done))
    before = {each.stream_id: seen.get(each.stream_id, 0) for each in upstream}
    went_back = {
        name: point
        for name, timeline in done.items()
        if (point := _went_back(catalog, name, timeline, before[name])) is not None
    }
    found = UndoneReads(timelines=before | done)
    if went_back and facts.start_from.chooses_its_point and stream.pending_restore is None:
        of_these = [each for each in edges if each.upstream in went_back]
        judge = _Judge(of_these, went_back, _undone_before(facts.snapshots, of_these, before))
        found = _judged(catalog, facts, judge, found, before)
    return replace(facts, undone=found)


def going_on(facts: RecoveryFacts, plan: RecoveryPlan, ahead: RewindPreview) -> RecoveryFacts | None:
    """The facts to keep undone rows, as going back would repeat or lose others; None if it would not."""
    if not facts.undone.points or not isinstance(plan, Restore | Rewind):
        return None
    against = [f"sink {each.sink}: {each.reason}" for each in ahead.sinks if each.effect not in _KEEPS_EACH_ROW]
    why = ahead.gone or ahead.repeated or next(iter(against), None)
    return replace(facts, undone=facts.undone.kept(why)) if why is not None else None


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
    """`undone_before`: what was undone and read, with which the stream has gone on."""

    edges: Sequence[Edge]
    went_back: Mapping[str, Point]
    undone_before: Mapping[_Key, int]

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


def _judged(
    catalog: Catalog, facts: RecoveryFacts, judge: _Judge, found: UndoneReads, before: Mapping[str, int]
) -> UndoneReads:
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
            return replace(found, timelines={**found.timelines, **{name: before[name] for name in unknown}})
        points[live_point(facts.stream.live_directory)] = why
    free = set()
    for snapshot in facts.snapshots:
        point, of_snapshot = snapshot_point(snapshot.snapshot_id), reads_in(snapshot.properties) or ()
        unknown = judge.unknown(of_snapshot)
        why = judge.why(of_snapshot) or (f"how far it has read {min(unknown)} is not recorded" if unknown else None)
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
