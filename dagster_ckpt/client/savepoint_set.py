"""Savepoint sets, of streams that read each other: taken while these run, kept in storage, and restarted from.

Streams downstream are taken first, so that the later savepoints of those upstream contain what was read. If an exact
test finds that one does not, it is taken once more.

In storage, a file next to each savepoint names the set, for a rebuilt catalog. It is written before the catalog records
the set, and deleted before the catalog releases it.

For a restart, streams are restored downstream first and started upstream first: at no step has a stream read rows that
its upstream lacks. If the process dies, the same command finishes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.savepoint_sets import SAVEPOINT_SET, SavepointSet, set_from, values_of
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.client.reconciliation import fenced_lease, restore_snapshot
from dagster_ckpt.client.requests import is_running
from dagster_ckpt.errors import (
    CkptError,
    RequestFailedError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
)
from dagster_ckpt.recovery.rewind_preview import RewindPreview, refuse_loss
from dagster_ckpt.recovery.stream_graph import RecoveryLine, StreamGraph, point_of, recovery_line, select
from dagster_ckpt.recovery.undone_topics import other_writers
from dagster_ckpt.sinks.kafka.sink import TransactionalKafkaSink
from dagster_ckpt.sinks.registry import sink_of, sinks_in, sinks_of
from dagster_ckpt.sinks.sink import distinct
from dagster_ckpt.sinks.table import NoSessionError
from dagster_ckpt.snapshot.garbage_collection import SET_NAME
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.stream.edges import EdgeKind, edges_in
from dagster_ckpt.stream.known_sinks import sinks_written, topic_end_in
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import from_json, reading

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle


TakeSavepoint = Callable[[str, str], SnapshotRecord]
OpenStream = Callable[[str], "StreamHandle"]
Report = Callable[[str], None]
_MEMBERS = "savepoints"


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
    """Take a savepoint of each stream by `take(stream, label)`, and record the set if they belong together.

    With `as_they_are`, for stopped streams that may be put back, doubts are only noted.
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
                # Until the set is recorded, let the stream delete the savepoint like a checkpoint.
                catalog.snapshots.give_to_stream(taken.snapshot_id)
            return _line_through(catalog, graph, made)

        line = take_all(graph.order)
        behind = [member.stream_id for member in line.members if member.skipped]
        if behind and not as_they_are:
            # What they read has been committed since, so take their upstream streams again.
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
            created_at_ms=max([catalog.now_ms(), *(each.created_at_ms + 1 for each in catalog.savepoint_sets.all())]),
            executions=_executions(catalog, graph.order),
            savepoints=made,
        )
        write_set(record, open_stream)
        done = catalog.savepoint_sets.record(record, [each.snapshot_id for each in made.values()])
    if keep is not None:
        _forget_older(catalog, open_stream, done, keep)
    return done


def _line_through(catalog: Catalog, graph: StreamGraph, made: dict[str, SnapshotRecord]) -> RecoveryLine:
    readers = {edge.reader for edge in graph.edges}
    points = {stream: [point_of(catalog, made[stream], reads=stream in readers)] for stream in graph.order}
    return recovery_line(graph.order, points, graph.edges)


def release_savepoint_set(catalog: Catalog, found: SavepointSet, open_stream: OpenStream) -> None:
    _put(found, open_stream, None)
    catalog.savepoint_sets.release(found.set_id)


def _forget_older(catalog: Catalog, open_stream: OpenStream, newest: SavepointSet, keep: int) -> None:
    """Release older sets of the same selection, only those before `newest`: another caller may be recording one."""
    alike = [
        each
        for each in catalog.savepoint_sets.all()
        if each.is_counted and each.selection == newest.selection and each.created_at_ms < newest.created_at_ms
    ]
    for each in alike[max(keep, 1) - 1 :]:
        release_savepoint_set(catalog, each, open_stream)


def _refuse(graph: StreamGraph, reasons: Sequence[str]) -> None:
    if reasons:
        raise RequestFailedError(
            f"No savepoint set of {', '.join(graph.order)} was recorded: {'; '.join(reasons)}. Take it again, or, if "
            "only the proof is missing, with accept_unproven."
        )


def write_set(made: SavepointSet, open_stream: OpenStream) -> None:
    """Write the set next to each savepoint, except in a user's own storage class. Repeatable."""
    members = {stream: each.snapshot_id for stream, each in made.savepoints.items()}
    _put(made, open_stream, json.dumps({**values_of(made), _MEMBERS: members}).encode())


def _put(made: SavepointSet, open_stream: OpenStream, content: bytes | None) -> None:
    for stream, each in made.savepoints.items():
        store = open_stream(stream).store
        if isinstance(store, ObjectSnapshotStore) and each.location is not None:
            store.put_companion(each.location, SET_NAME, content)


def register_sets(stream: StreamHandle, found: Iterable[SnapshotRecord]) -> tuple[list[str], list[str]]:
    """Register the sets of which the catalog has every savepoint.

    Returns their names, and why others are not registered.
    """
    registered: list[str] = []
    incomplete: list[str] = []
    for snapshot in found:
        try:
            stored = _set_beside(stream, snapshot)
            if stored is None:
                continue
            made, members = stored
            listed = stream.catalog.snapshots.by_id(list(members.values()))
            lacking = [each for each in made.streams if not _is_there(listed.get(members.get(each, "")), each)]
            name = f"savepoint set {made.label or made.set_id}"
            if lacking:
                incomplete.append(f"{name} is not registered: the catalog lacks its savepoint of {', '.join(lacking)}")
            elif not all(SAVEPOINT_SET in each.properties for each in listed.values()):
                stream.catalog.savepoint_sets.record(made, list(listed))
                registered.append(name)
        except CkptError as error:
            incomplete.append(f"the savepoint set beside {snapshot.location} is not registered: {error}")
    return registered, incomplete


def _set_beside(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[SavepointSet, dict[str, str]] | None:
    store = stream.store
    if not isinstance(store, ObjectSnapshotStore) or snapshot.kind is not SnapshotKind.SAVEPOINT:
        return None
    content = store.companion(snapshot.location or "", SET_NAME)
    if content is None:
        return None
    with reading(lambda why: SnapshotCorruptError(f"The record of its set cannot be read: {why}")):
        values = from_json(content)
        return set_from(values), {str(each): str(its) for each, its in values[_MEMBERS].items()}


def _is_there(snapshot: SnapshotRecord | None, stream_id: str) -> bool:
    return snapshot is not None and snapshot.stream_id == stream_id and snapshot.status is SnapshotStatus.COMPLETED


def preview_set(found: SavepointSet, opened: dict[str, StreamHandle]) -> dict[str, RewindPreview]:
    gone = [stream for stream in found.streams if stream not in found.savepoints]
    if gone:
        raise SnapshotNotFoundError(
            f"Savepoint set {found.set_id} has lost the savepoint of {', '.join(gone)}. Nothing was changed. "
            "Restart the streams one by one, as far as dagster-ckpt line shows snapshots that belong together."
        )
    return {stream: start_preview(opened[stream], _start_from(found, opened[stream])) for stream in found.streams}


def _start_from(found: SavepointSet, stream: StreamHandle) -> StartFrom:
    """Start from the stream's savepoint, as a new query if another stream of the set reads its topic.

    A topic keeps what was written since: the new query writes behind it, where its readers continue. Whether a topic
    that none of them reads may get the same rows again, a person decides.
    """
    return StartFrom(found.savepoints[stream.stream_id].snapshot_id, new_query_id=bool(_topics_between(found, stream)))


def _topics_between(found: SavepointSet, stream: StreamHandle) -> list[TransactionalKafkaSink]:
    written = distinct([*sinks_in(found.savepoints[stream.stream_id].properties), *sinks_of(sinks_written(stream))])
    edges = [each for each in edges_in(stream.catalog) if each.upstream == stream.stream_id]
    read = [sink_of(each.sink) for each in edges if each.reader in found.streams and each.kind is EdgeKind.TOPIC]
    return [sink for sink in written if isinstance(sink, TransactionalKafkaSink) and sink.is_among(read)]


def refuse_set(found: SavepointSet, opened: dict[str, StreamHandle], previews: dict[str, RewindPreview]) -> None:
    others = [
        reader.message()
        for preview in previews.values()
        for reader in preview.readers
        if reader.stream_id not in found.streams and reader.has_read_undone is not False
    ]
    if others:
        raise RequestFailedError(
            f"Streams {', '.join(found.streams)} are not restarted, nothing was changed: the set lacks streams that "
            f"read them. {' '.join(dict.fromkeys(others))}. Cancel these streams first, or accept the loss."
        )
    for stream, preview in previews.items():
        refuse_loss(opened[stream], preview, accept_loss=False)
        if preview.undoes:
            _refuse_topics(found, opened[stream])


def _refuse_topics(found: SavepointSet, stream: StreamHandle) -> None:
    edges = [each for each in edges_in(stream.catalog) if each.reader in found.streams]
    savepoint = found.savepoints[stream.stream_id]
    for topic in _topics_between(found, stream):
        reading = [each for each in edges if each.upstream == stream.stream_id and sink_of(each.sink).is_same(topic)]
        why = ""
        if topic_end_in(savepoint.properties, topic) is None:
            why = f"the savepoint of {stream.stream_id} does not record where its batches end in {topic.place}"
        elif any(other_writers(edge, edges) for edge in reading):
            why = f"another stream than {stream.stream_id} writes to {topic.place} too"
        if why:
            raise RequestFailedError(
                f"Streams {', '.join(found.streams)} are not restarted, nothing was changed: {why}, so the streams "
                "that read this topic could not continue behind what is undone. Restart them one by one."
            )


_HAS_ENDED = (ExecutionStatus.FINISHED, ExecutionStatus.SUSPENDED, ExecutionStatus.CANCELED)


def suspend_set(found: SavepointSet, opened: dict[str, StreamHandle], suspend: Callable[[str], object]) -> list[str]:
    suspended = []
    for stream in reversed(found.streams):
        last = opened[stream].catalog.executions.latest(stream)
        waits = last is not None and not last.settled and last.status not in _HAS_ENDED
        if is_running(opened[stream]) or waits:
            suspend(stream)
            suspended.append(stream)
    return suspended


def restore_set(found: SavepointSet, opened: dict[str, StreamHandle], *, origin: str, report: Report) -> None:
    """Restore the streams with their sinks, downstream first. Repeatable.

    If a table needs a Spark session that this process lacks, its stream's next start rolls it back.
    """
    for stream in reversed(found.streams):
        _restore(opened[stream], _start_from(found, opened[stream]), origin, report)
        report(f"restored {stream} to batch {found.savepoints[stream].batch_id}")


def _restore(stream: StreamHandle, start_from: StartFrom, origin: str, report: Report) -> None:
    with fenced_lease(stream, "restore", origin) as lease:
        try:
            restore_snapshot(stream, start_from, lease, report)
        except StorageAccessError as error:
            if not isinstance(error.__cause__, NoSessionError):
                raise
            # Streams that read the table do not start before that.
            report(f"{stream.stream_id}: {error}")


def set_before(
    found: SavepointSet, opened: dict[str, StreamHandle], sets: Sequence[SavepointSet]
) -> SavepointSet | None:
    """Return the set that an interrupted restart from `found` took first, if no stream has run since.

    Another one would hide the way back: its streams are already restored in part.
    """
    for each in sets:
        if (each.label or "").startswith(_before(found)) and set(each.savepoints) == set(found.streams):
            catalog = opened[found.streams[0]].catalog
            return each if set(_executions(catalog, found.streams)) == set(each.executions) else None
    return None


def _executions(catalog: Catalog, streams: Sequence[str]) -> tuple[str, ...]:
    return tuple(each.execution_id for each in catalog.executions.latest_of(streams).values())


def label_before(found: SavepointSet, opened: Mapping[str, StreamHandle]) -> str:
    used = {each.label for stream, handle in opened.items() for each in handle.catalog.snapshots.completed(stream)}
    names = (_before(found) + (f"-{number}" if number > 1 else "") for number in count(1))
    return next(name for name in names if name not in used)


def _before(found: SavepointSet) -> str:
    return f"before-{found.set_id[:8]}"


def save_before(take: Callable[[], SavepointSet], report: Report) -> None:
    """Take the set that leads back. A stream may be too broken for a savepoint, which the restart mends."""
    try:
        before = take()
    except CkptError as error:
        report(f"no set of the streams as they are could be taken, so none leads back: {error}")
    else:
        report(f"to undo this, restart from savepoint set {before.label or before.set_id}")
