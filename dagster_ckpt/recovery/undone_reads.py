"""Rows that a stream has read and that a stream upstream has undone: which points and which readers have them.

A point is consistent by the rule of `stream_graph`. Rows that a stream continued with, or a user accepted
(`accept_undone`), no longer count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.history import Branch, past_of
from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, StartEmpty, UndoneReads
from dagster_ckpt.recovery.recovery_points import live_point, snapshot_point
from dagster_ckpt.recovery.stream_graph import (
    EMPTY,
    Point,
    graph_of,
    line_of,
    orphaned,
    point_of_plan,
    remaining,
    unproven,
)
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.sources import SourceIdentity
from dagster_ckpt.stream.edges import Edge, EdgeKind, Read, edges_to, reads_in, reads_of_live, recorded_sources
from dagster_ckpt.values.safe_parsing import LARGEST_LONG

_Key = tuple[str, str, str]


def _key(of: Edge | Read) -> _Key:
    return of.source, of.upstream, of.sink


@dataclass(frozen=True)
class _Upstream:
    """A stream that another one reads.

    Attributes:
        before: Its timeline when the reader last started.
        is_done: It has no unfinished restore.
    """

    timeline: int
    before: int
    branches: Mapping[int, Branch]
    is_done: bool

    @property
    def begins(self) -> dict[int, tuple[int, int]]:
        return {each.timeline: (each.parent, each.to_batch) for each in self.branches.values()}

    @property
    def now(self) -> Point:
        return Point("now", LARGEST_LONG, self.timeline, self.begins)

    def undid(self, until: int) -> list[int]:
        """Return the timelines since the reader's start that undid rows; the first start undoes none."""
        return [each for each in range(self.before + 1, until + 1) if each in self.branches or each > 1]

    def undid_unaccepted(self, until: int) -> bool:
        return any(not self.is_accepted(each) for each in self.undid(until))

    def is_accepted(self, timeline: int) -> bool:
        return timeline in self.branches and bool(self.branches[timeline].accepted)


@dataclass(frozen=True)
class Reader:
    """A stream that reads others; `started` is what it had read, and how much was undone, when it last started."""

    edges: Sequence[Edge]
    upstream: Mapping[str, _Upstream]
    started: Mapping[_Key, Read]

    @classmethod
    def of(cls, catalog: Catalog, stream: StreamRecord, sources: Mapping[str, SourceIdentity] | None = None) -> Reader:
        """Describe a reader; `sources` are those of its query, or None for those that earlier starts recorded."""
        found = edges_to(catalog, stream.stream_id, sources or recorded_sources(catalog, stream))
        edges = [each for each in found if each.kind is not EdgeKind.UNKNOWN]
        started = reads_in(catalog.executions.last_recovery(stream.stream_id) or {})
        known = {each.stream_id: each for each in catalog.streams.all() if each.broken is None} if edges else {}
        upstream = {}
        for name in {each.upstream for each in edges} & known.keys():
            record = known[name]
            before = [each.timeline for each in started or () if each.upstream == name]
            upstream[name] = _Upstream(
                record.timeline,
                # Older versions recorded none. A stream unknown then has started since.
                min(before, default=0) if started is not None else record.timeline,
                {each.timeline: each for each in catalog.history.branches(name)} if record.may_have_gone_back else {},
                is_done=record.pending_restore is None,
            )
        edges = [each for each in edges if each.upstream in upstream]
        return cls(edges, upstream, {_key(each): each for each in started or ()})

    def since(self, *, accepted: bool, with_unfinished: bool = False) -> set[str]:
        """Return the upstream streams that undid rows since its start, with `accepted` also if that was accepted."""
        return {
            name
            for name, each in self.upstream.items()
            if (each.is_done or with_unfinished)
            and (bool(each.undid(each.timeline)) if accepted else each.undid_unaccepted(each.timeline))
        }

    def counted(self, read: Read) -> Read:
        """Return a read without undone rows that it continued with or that were accepted."""
        of = self.upstream.get(read.upstream)
        if of is None or read.kind is EdgeKind.UNKNOWN:
            return read
        before = self.started.get(_key(read))
        # On a timeline that was left before, such rows may be there again.
        goes_on = before is not None and of.before in {read.timeline, *past_of(read.timeline, of.begins)}
        undone = max(0, read.undone - (before.undone if before is not None and goes_on else 0))
        if not of.undid_unaccepted(read.timeline):
            undone = 0
        accepted = [each for each in of.branches if of.is_accepted(each)]
        for timeline in sorted({of.before, *accepted}):
            if read.timeline < timeline <= of.timeline:
                read = remaining(read, timeline, of.begins)
        return replace(read, undone=undone)

    def why(self, reads: Sequence[Read], went_back: set[str]) -> str | None:
        for read in map(self.counted, reads):
            if read.upstream not in went_back or read.kind is EdgeKind.UNKNOWN:
                continue
            if read.undone:
                noun = "files" if read.kind is EdgeKind.FILES else "batches"
                return f"it has read {read.undone} {noun} of {read.upstream} that were undone"
            if not self.upstream[read.upstream].now.contains(read):
                return f"it has read batch {read.batch} of {read.upstream}, which was undone"
        return None

    def unknown(self, reads: Sequence[Read], went_back: set[str]) -> set[str]:
        known = {_key(each) for each in reads if each.kind is not EdgeKind.UNKNOWN}
        return {each.upstream for each in self.edges if each.upstream in went_back and _key(each) not in known}

    def why_not(self, snapshot: SnapshotRecord, went_back: set[str]) -> str | None:
        reads = reads_in(snapshot.properties) or ()
        unknown = self.unknown(reads, went_back)
        return self.why(reads, went_back) or (
            f"how far it has read {min(unknown)} is not recorded" if unknown else None
        )

    def as_started(self, judged: set[str], reads: Sequence[Read] = ()) -> tuple[Read, ...]:
        """Return what a start records: up to which timeline upstream streams were judged, and how much was undone."""
        now = {_key(each): each for each in reads if each.kind is not EdgeKind.UNKNOWN}
        found = []
        for edge in self.edges:
            of = self.upstream[edge.upstream]
            known = now.get(_key(edge)) or self.started.get(_key(edge))
            timeline = of.timeline if edge.upstream in judged and of.is_done else of.before
            undone = known.undone if known is not None else 0
            found.append(Read(edge.source, edge.upstream, edge.sink, edge.kind, timeline=timeline, undone=undone))
        return tuple(found)


def with_undone_reads(
    catalog: Catalog, facts: RecoveryFacts, sources: Mapping[str, SourceIdentity] | None = None
) -> RecoveryFacts:
    """Let a plan that may choose its point go back behind what upstream streams have undone since the last start.

    Unfinished restores are left to the next start.
    """
    stream = facts.stream
    reader = Reader.of(catalog, stream, sources)
    moved, went_back = reader.since(accepted=True), reader.since(accepted=False)
    everything = set(reader.upstream)
    if not facts.start_from.chooses_its_point:
        return replace(facts, undone=UndoneReads(reads=reader.as_started(everything)))
    if stream.pending_restore is not None or not moved:
        is_restored = stream.pending_restore is None
        # A restore since then may have removed undone rows from the state.
        has_kept = is_restored and any(each.undone for each in reader.started.values())
        now = _live_reads(catalog, facts, reader) if has_kept else None
        judged = everything if is_restored else set[str]()
        return replace(facts, undone=UndoneReads(reads=reader.as_started(judged, now or ())))
    reads, points, free = _live_reads(catalog, facts, reader), dict[str, str](), set[str]()
    judged = everything - (reader.unknown(reads, moved) if reads is not None else moved)
    if reads is not None:
        why = reader.why(reads, went_back)
        if why is None:
            return replace(facts, undone=UndoneReads(reads=reader.as_started(judged, reads)))
        points[live_point(stream.live_directory or "")] = why
    for snapshot in facts.snapshots if went_back else ():
        point, why = snapshot_point(snapshot.snapshot_id), reader.why_not(snapshot, went_back)
        if why is None:
            free.add(point)
        else:
            points[point] = why
    recorded = reader.as_started(judged, reads or ())
    return replace(facts, undone=UndoneReads(points, frozenset(free), recorded, bool(went_back)))


def unfinished_upstream(catalog: Catalog, stream: StreamRecord) -> list[str]:
    """Return streams upstream with an unfinished restore, which may still undo output."""
    return sorted(name for name, each in Reader.of(catalog, stream).upstream.items() if not each.is_done)


def reads_at_start(facts: RecoveryFacts, plan: RecoveryPlan) -> tuple[Read, ...]:
    """Return what a start records of its upstream streams, with the undone counts of its point."""
    if not isinstance(plan, StartEmpty | Restore):
        return facts.undone.reads
    reads = (reads_in(plan.snapshot.properties) if isinstance(plan, Restore) else None) or ()
    undone = {_key(each): each.undone for each in reads}
    return tuple(replace(each, undone=undone.get(_key(each), 0)) for each in facts.undone.reads)


def newest_without_undone(catalog: Catalog, stream_id: str, snapshots: Sequence[SnapshotRecord]) -> str | None:
    """Return the first snapshot, newest first, that the next start can use if a stream upstream went back."""
    if not snapshots or not reads_in(snapshots[0].properties):
        return None
    reader = Reader.of(catalog, catalog.streams.get(stream_id))
    went_back = reader.since(accepted=False, with_unfinished=True)
    free = (each.snapshot_id for each in snapshots if reader.why_not(each, went_back) is None)
    return next(free, None) if went_back else None


def _live_reads(catalog: Catalog, facts: RecoveryFacts, reader: Reader) -> list[Read] | None:
    live, url = facts.live, facts.stream.live_directory
    if live is None or live.status is not LiveStatus.GOOD or url is None:
        return None
    try:
        return reads_of_live(catalog, reader.edges, LiveDirectory(url))
    except (CkptError, OSError):
        return []


@dataclass(frozen=True)
class ReaderOfStream:
    """A stream that reads the output of one that goes back.

    Attributes:
        has_read_undone: Whether it has processed rows that the start undoes; None: unknown, as `why` says.
        line: Its newest snapshot without them that is consistent with those of the streams between.
        accepted: Why it may keep them.
    """

    stream_id: str
    has_read_undone: bool | None
    why: str
    line: str
    accepted: str = ""

    def message(self) -> str:
        verdict = {True: "has read undone rows", False: "has read no undone row", None: "may have read undone rows"}
        text = f"downstream stream {self.stream_id} {verdict[self.has_read_undone]}: {self.why}"
        if self.has_read_undone is False:
            return text
        if self.accepted:
            return f"{text}. It keeps them: {self.accepted}"
        if self.has_read_undone is None:
            return f"{text}. Its newest consistent point: {self.line}"
        if self.line == EMPTY.name:
            return f"{text}. No snapshot of it is without them, so its next start keeps them, unless from empty state"
        return (
            f"{text}. Its next start goes back to {self.line} if its sinks can be rolled back; to let it continue, "
            "give a reason in accept_undone"
        )


def downstream_readers(
    catalog: Catalog, stream_id: str, plan: RecoveryPlan, accepted: str = ""
) -> tuple[ReaderOfStream, ...]:
    graph = graph_of(catalog, f"{stream_id}+")
    if len(graph.order) == 1:
        return ()
    start = point_of_plan(catalog, stream_id, plan)
    line = line_of(catalog, graph, {stream_id: start})
    # Each stream keeps all, unless it has read what its upstream loses.
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
        at = member.messages()[0].partition(": ")[2]
        found.append(ReaderOfStream(member.stream_id, is_undone, shown, at, accepted))
        kept[member.stream_id] = now if is_undone is False else member.point
    return tuple(found)


def _progress(reads: Sequence[Read], kept: Mapping[str, Point]) -> str:
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
    begins = catalog.history.begins(stream_id)
    reads: tuple[Read, ...] | None = ()
    if stream.live_directory is not None:
        try:
            counted = Reader.of(catalog, stream).counted
            reads = tuple(map(counted, reads_of_live(catalog, edges, LiveDirectory(stream.live_directory))))
        except (CkptError, OSError):
            reads = None
    return Point("its live directory", LARGEST_LONG, stream.timeline, begins, reads)
