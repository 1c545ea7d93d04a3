"""How far streams have read each other, from the catalog alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client.description import StreamSummary
from dagster_ckpt.recovery.stream_graph import Point, begins_of, reached
from dagster_ckpt.stream.edges import Edge, edges_in, reads_in
from dagster_ckpt.values.untrusted import LARGEST_LONG


@dataclass(frozen=True)
class StreamConnection:
    """As the newest snapshot of the reader records it.

    Attributes:
        written: The newest known batch of the upstream stream.
        read: The newest one that was read; None: none, or `why` says why it is not known.
        has_read_undone: It has read rows that a rewind has undone since.
    """

    edge: Edge
    written: int | None
    read: int | None
    why: str
    as_of: SnapshotRecord | None
    has_read_undone: bool = False

    @property
    def batches_behind(self) -> int | None:
        """Batches that were written and not read then; None if that is not known."""
        if self.why or self.written is None:
            return None
        return max(self.written - (-1 if self.read is None else self.read), 0)


@dataclass(frozen=True)
class StreamConnections:
    """Streams that are connected, and their savepoint sets, newest first."""

    streams: tuple[StreamSummary, ...]
    connections: tuple[StreamConnection, ...]
    sets: tuple[SavepointSet, ...]


def stream_connections(catalog: Catalog, summaries: Iterable[StreamSummary], stream: str | None) -> StreamConnections:
    """Carry out `Client.stream_connections`."""
    edges = edges_in(catalog)
    joined = [(edge.reader, edge.upstream) for edge in edges]
    both_ways = [*joined, *((to, origin) for origin, to in joined)]
    wanted = reached([stream], both_ways) if stream is not None else {each for pair in joined for each in pair}
    known = {each.stream_id: each for each in summaries if each.stream_id in wanted}
    shown = [edge for edge in edges if edge.reader in known and edge.upstream in known]
    found = tuple(_connection(catalog, edge, known) for edge in shown)
    sets = tuple(each for each in catalog.savepoint_sets.all() if wanted & set(each.streams))
    return StreamConnections(tuple(known.values()), found, sets)


def _connection(catalog: Catalog, edge: Edge, known: Mapping[str, StreamSummary]) -> StreamConnection:
    upstream, as_of = known[edge.upstream], known[edge.reader].newest_snapshot
    taken = upstream.newest_snapshot
    written = upstream.batch_id if upstream.batch_id is not None or taken is None else taken.batch_id
    read = next(
        (
            each
            for each in (reads_in(as_of.properties) if as_of is not None else None) or ()
            if (each.source, each.upstream, each.sink) == (edge.source, edge.upstream, edge.sink)
        ),
        None,
    )
    why = edge.why or (read.why if read is not None else "")
    if why:
        return StreamConnection(edge, written, None, f"{why} not recorded by batch", as_of)
    if read is None:
        return StreamConnection(edge, written, None, "no snapshot records it", as_of)
    timeline = catalog.streams.get(edge.upstream).timeline
    now = Point("now", LARGEST_LONG, timeline, begins_of(catalog, edge.upstream))
    return StreamConnection(edge, written, read.batch, "", as_of, has_read_undone=not now.contains(read))
