"""Client methods for streams that read each other's output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.lifecycle import LifecycleMethods
from dagster_ckpt.client.snapshots import SnapshotMethods
from dagster_ckpt.errors import CkptError
from dagster_ckpt.values.safe_parsing import LARGEST_LONG

if TYPE_CHECKING:
    from dagster_ckpt.catalog.catalog import Catalog
    from dagster_ckpt.catalog.records import SnapshotRecord
    from dagster_ckpt.catalog.savepoint_sets import SavepointSet
    from dagster_ckpt.client.description import StreamSummary
    from dagster_ckpt.recovery.rewind_preview import RewindPreview
    from dagster_ckpt.recovery.stream_graph import RecoveryLine
    from dagster_ckpt.stream.edges import Edge

_LOG = logging.getLogger(__name__)


class GraphMethods(SnapshotMethods, LifecycleMethods):
    def stream_edges(self) -> list[Edge]:
        """List which streams read the output of which others."""
        from dagster_ckpt.stream.edges import edges_in

        return edges_in(self._catalog)

    def stream_connections(self, stream: str | None = None) -> StreamConnections:
        """Return streams that read each other, how far each has read, and their savepoint sets.

        With `stream`, only those connected with it.
        """
        return stream_connections(self._catalog, self._id_of(stream) if stream is not None else None)

    def recovery_line(self, selection: str) -> RecoveryLine:
        """Find the newest snapshots of several streams of which none has read rows that another one lacks.

        Args:
            selection: Separated by commas: `orders+` is `orders` and all that reads its output, `+summary` is `summary`
                and all that it reads.

        Example:
            >>> client.recovery_line("orders+").messages()
            ['orders: chk-7 at batch 812', 'summary: chk-4 at batch 96']
        """
        from dagster_ckpt.recovery.stream_graph import graph_of, line_of

        return line_of(self._catalog, graph_of(self._catalog, selection))

    def trigger_savepoint_set(
        self,
        selection: str,
        *,
        label: str | None = None,
        keep: int | None = None,
        accept_unproven: bool = False,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> SavepointSet:
        """Take savepoints of several streams that belong together, while they run: a set, or nothing.

        Args:
            selection: Streams, such as `orders+`, as of `recovery_line`.
            keep: How many sets of this selection to keep; older ones that were taken with `keep` are released.
            accept_unproven: Also record a set whose streams are connected by something whose position is not known.
            timeout_s: For each stream.

        Raises:
            RequestFailedError: The savepoints do not belong together, or an attempt failed.
        """
        from dagster_ckpt.client.savepoint_set import take_savepoint_set
        from dagster_ckpt.recovery.stream_graph import graph_of
        from dagster_ckpt.stream.start_from import checked_label

        checked_label(label)
        return take_savepoint_set(
            self._catalog,
            graph_of(self._catalog, selection),
            # A second try may use the label again, which `trigger_savepoint` would refuse.
            lambda stream, name: self._take_savepoint(self._open(stream), name, timeout_s=timeout_s),
            self._open,
            selection=selection,
            origin=self._origin,
            label=label,
            keep=keep,
            accept_unproven=accept_unproven,
        )

    def savepoint_sets(self) -> list[SavepointSet]:
        """List all savepoint sets, newest first."""
        return self._catalog.savepoint_sets.all()

    def release_savepoint_set(self, savepoint_set: str) -> SavepointSet:
        """Dissolve a set, by its id or label. Its savepoints return to the retention of their streams."""
        from dagster_ckpt.client.savepoint_set import release_savepoint_set

        found = self._catalog.savepoint_sets.get(savepoint_set)
        release_savepoint_set(self._catalog, found, self._open)
        return found

    def preview_savepoint_set(self, savepoint_set: str) -> dict[str, RewindPreview]:
        """Preview, by stream, what a restart from a set would undo and process again. Changes nothing."""
        from dagster_ckpt.client.savepoint_set import preview_set

        found = self._catalog.savepoint_sets.get(savepoint_set)
        return preview_set(found, {stream: self._open(stream) for stream in found.streams})

    def restart_savepoint_set(
        self,
        savepoint_set: str,
        *,
        start: bool = True,
        timeout_s: float = REQUEST_TIMEOUT_S,
        report: Callable[[str], None] = _LOG.info,
    ) -> SavepointSet:
        """Take all streams of a set back to it. If interrupted, repeat it.

        First a set of the present state is taken, `before-<id>`, which leads back. The streams are suspended and
        restored, with their sinks, downstream first.

        Args:
            start: Start the streams, upstream first, which the supervisor sensor does. False leaves them suspended;
                their next starts continue there.
            timeout_s: For each step of each stream.

        Raises:
            RequestFailedError: Another stream has read rows that this would undo. Nothing was changed.
            RowsAtRiskError: A sink could lose rows. Nothing was changed.
        """
        from dagster_ckpt.client import savepoint_set as sets
        from dagster_ckpt.recovery.stream_graph import graph_of

        found = self._catalog.savepoint_sets.get(savepoint_set)
        opened = {stream: self._open(stream) for stream in found.streams}
        previews = sets.preview_set(found, opened)
        sets.refuse_set(found, opened, previews)
        suspended = sets.suspend_set(
            found, opened, lambda stream: self.stop(stream, savepoint=False, timeout_s=timeout_s)
        )
        report(f"suspended {', '.join(suspended) or 'no stream'}")
        try:
            # The streams have committed and read more until they were suspended.
            sets.refuse_set(found, opened, sets.preview_set(found, opened))
        except CkptError:
            for stream in found.streams:
                if stream in suspended:
                    self.restart(stream, timeout_s=timeout_s, report=report)
            raise
        sets.save_before(
            lambda: (
                sets.set_before(found, opened, self.savepoint_sets())
                or sets.take_savepoint_set(
                    self._catalog,
                    graph_of(self._catalog, ",".join(found.streams)),
                    lambda stream, name: self.trigger_savepoint(stream, label=name, timeout_s=timeout_s),
                    self._open,
                    selection=",".join(found.streams),
                    origin=self._origin,
                    label=sets.label_before(found, opened),
                    as_they_are=True,
                )
            ),
            report,
        )
        sets.restore_set(found, opened, origin=self._origin, report=report)
        for stream in found.streams if start else ():
            self.restart(stream, timeout_s=timeout_s, report=report)
        return found


@dataclass(frozen=True)
class StreamConnection:
    """How far a stream has read another one's output, by the newest snapshot of the reader.

    Attributes:
        written: The newest known batch of the upstream stream.
        read: The newest batch that was read; None: none, or unknown because of `why`.
        has_read_undone: Whether it has read rows that a rewind has undone since.
    """

    edge: Edge
    written: int | None
    read: int | None
    why: str
    as_of: SnapshotRecord | None
    has_read_undone: bool = False

    @property
    def batches_behind(self) -> int | None:
        if self.why or self.written is None:
            return None
        return max(self.written - (-1 if self.read is None else self.read), 0)


@dataclass(frozen=True)
class StreamConnections:
    streams: tuple[StreamSummary, ...]
    connections: tuple[StreamConnection, ...]
    sets: tuple[SavepointSet, ...]


def stream_connections(catalog: Catalog, stream: str | None) -> StreamConnections:
    from dagster_ckpt.client.description import summarize_streams
    from dagster_ckpt.recovery.stream_graph import reached
    from dagster_ckpt.stream.edges import edges_in

    edges = edges_in(catalog)
    joined = [(edge.reader, edge.upstream) for edge in edges]
    both_ways = [*joined, *((to, origin) for origin, to in joined)]
    wanted = reached([stream], both_ways) if stream is not None else {each for pair in joined for each in pair}
    known = {each.stream_id: each for each in summarize_streams(catalog) if each.stream_id in wanted}
    shown = [edge for edge in edges if edge.reader in known and edge.upstream in known]
    found = tuple(_connection(catalog, edge, known) for edge in shown)
    sets = tuple(each for each in catalog.savepoint_sets.all() if wanted & set(each.streams))
    return StreamConnections(tuple(known.values()), found, sets)


def _connection(catalog: Catalog, edge: Edge, known: Mapping[str, StreamSummary]) -> StreamConnection:
    from dagster_ckpt.recovery.stream_graph import Point
    from dagster_ckpt.stream.edges import reads_in

    upstream, as_of = known[edge.upstream], known[edge.reader].newest_snapshot
    written = upstream.batch_id
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
    now = Point("now", LARGEST_LONG, timeline, catalog.history.begins(edge.upstream))
    return StreamConnection(edge, written, read.batch, "", as_of, has_read_undone=not now.contains(read))
