"""Takes a savepoint set: savepoints of streams that read each other, while they run.

The streams downstream come first. A stream upstream goes on meanwhile, so its later savepoint contains what they have
read. This is then tested exactly, and where it is not so, the stream upstream is taken once more.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client.stored_sets import delete_set, write_set
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.recovery.recovery_line import RecoveryLine, recovery_line
from dagster_ckpt.recovery.stream_graph import StreamGraph, point_of, select
from dagster_ckpt.stream.edges import EdgeKind
from dagster_ckpt.stream.snapshots import holding

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle

TakeSavepoint = Callable[[str, str], SnapshotRecord]
OpenStream = Callable[[str], "StreamHandle"]


def take_savepoint_set(
    catalog: Catalog,
    graph: StreamGraph,
    take: TakeSavepoint,
    open_stream: OpenStream,
    *,
    selection: str,
    origin: str,
    label: str | None = None,
    keep: int | None = None,
    accept_unproven: bool = False,
    as_they_are: bool = False,
) -> SavepointSet:
    """`take` takes a savepoint of a stream with a label.

    `as_they_are`: of stopped streams, to put them back to; whether these savepoints belong together is only noted.
    """
    accept_unproven = accept_unproven or as_they_are
    doubts = [f"{edge}: {edge.why} not recorded by batch" for edge in graph.edges if edge.kind is EdgeKind.UNKNOWN]
    if not accept_unproven:
        _refuse(graph, doubts)
    set_id = str(uuid.uuid4())
    made: dict[str, SnapshotRecord] = {}
    with ExitStack() as held:

        def take_all(streams: Sequence[str]) -> RecoveryLine:
            for stream in reversed(streams):
                made[stream] = taken = take(stream, label or f"set-{set_id[:8]}")
                held.enter_context(holding(catalog, [taken], f"savepoint set {set_id}"))
                # Until the set is recorded, also if this process dies, the stream deletes it like a checkpoint.
                catalog.snapshots.give_to_stream(taken.snapshot_id)
            return line_through(catalog, graph, made)

        line = take_all(graph.order)
        behind = [member.stream_id for member in line.members if member.skipped]
        if behind and not as_they_are:
            # What they read has been committed since.
            edges = [edge for edge in graph.edges if edge.reader in behind]
            above = ",".join(f"+{edge.upstream}" for edge in edges)
            line = take_all(select(above, {each: each for each in graph.order}, graph.edges).order)
        wrong = [why for member in line.members for why in member.skipped]
        if not as_they_are and (wrong or not accept_unproven):
            _refuse(graph, [*wrong, *line.unproven])
        doubtful = (*wrong, *line.unproven)
        record = SavepointSet(
            set_id,
            selection,
            graph.order,
            origin,
            label,
            doubtful,
            is_counted=keep is not None,
            created_at_ms=catalog.now_ms(),
            savepoints=made,
        )
        write_set(record, open_stream)
        done = catalog.savepoint_sets.record(record, [each.snapshot_id for each in made.values()])
    if keep is not None:
        _forget_older(catalog, open_stream, selection, keep)
    return done


def line_through(catalog: Catalog, graph: StreamGraph, made: dict[str, SnapshotRecord]) -> RecoveryLine:
    """A member with `skipped` is not consistent."""
    readers = {edge.reader for edge in graph.edges}
    points = {stream: [point_of(catalog, made[stream], reads=stream in readers)] for stream in graph.order}
    return recovery_line(graph.order, points, graph.edges)


def release_savepoint_set(catalog: Catalog, found: SavepointSet, open_stream: OpenStream) -> None:
    """Repeatable."""
    delete_set(found, open_stream)
    catalog.savepoint_sets.release(found.set_id)


def _forget_older(catalog: Catalog, open_stream: OpenStream, selection: str, keep: int) -> None:
    alike = [each for each in catalog.savepoint_sets.all() if each.is_counted and each.selection == selection]
    for each in alike[max(keep, 1) :]:
        release_savepoint_set(catalog, each, open_stream)


def _refuse(graph: StreamGraph, reasons: Sequence[str]) -> None:
    if reasons:
        raise RequestFailedError(
            f"No savepoint set of {', '.join(graph.order)} was recorded: {'; '.join(reasons)}. Take it again, or, if "
            "only the proof is missing, with accept_unproven."
        )
