"""Importing: a stream continues from a snapshot of another deployment as an independent query.

This catalog cannot hold that snapshot, so the import reads all of it at once and keeps no reference.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import LiveDirectoryError, SharedSinkError, SnapshotCorruptError
from dagster_ckpt.io.location import folders_overlap, same_folder
from dagster_ckpt.recovery.fork import Fork, ForkedState, assign_state, give_outputs
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.sinks.file_sink import unexpected_file
from dagster_ckpt.sinks.registry import captured_sinks, logs_in_snapshot, other_sinks, sink_of
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Progress
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.snapshots import DEPLOYMENT, describe_snapshot, foreign_snapshot
from dagster_ckpt.stream.start_from import is_location

# Derived from deployment, stream and directory, these ids identify the remains of an interrupted import.
_QUERY_IDS = uuid.UUID("6f0c3f0e-6a0b-4e0b-9d43-8f1f6a3f9c21")


@dataclass(frozen=True)
class _MovedSink:
    """A sink as the snapshot names it, the place in that name if any, and what replaces it."""

    name: str
    old: str | None
    new: str


def import_snapshot(
    stream: StreamHandle,
    location: str,
    *,
    outputs: Mapping[str, str],
    origin: str,
    with_rows: bool = False,
    replace_state: bool = False,
    progress: Progress | None = None,
) -> Fork:
    """Import a snapshot of another deployment into a stream; its next start, from `latest`, continues there.

    An interrupted import leaves the stream unchanged and can be repeated.

    Args:
        outputs: Each sink of the snapshot (a file sink by its folder), mapped to the folder, table or topic that the
            stream writes to instead. The first start is refused if its query writes anywhere else.
        with_rows: Copy the rows that the original's file sinks had at the snapshot to the new folders.
    """
    snapshot = foreign_snapshot(stream, location)
    logs = logs_in_snapshot(stream.store, snapshot_location(snapshot))
    sinks = _moved_sinks(snapshot, outputs)
    _refuse_taken(stream, snapshot, sinks, logs if with_rows else {})
    folders = {path: sink.new for path in logs for sink in sinks if sink.name == path} if with_rows else {}

    def build(target: LiveDirectory, still_mine: StillMine) -> ForkedState:
        query_id = _query_id_in(stream, target)
        place = snapshot_location(snapshot)
        restore_into(stream, place, target, new_query_id=query_id, marked=True, progress=progress)
        batch_id = snapshot.batch_id or 0
        give_outputs(logs, folders, batch_id, still_mine, may_link=False)
        pending = Forked(
            of_stream_id=snapshot.stream_id,
            batch_id=batch_id,
            parent_outputs=tuple(logs),
            outputs=tuple(folders.values()),
            imported_from=snapshot.location,
            mapped=tuple(sink.new for sink in sinks),
        )
        return ForkedState(target.url, query_id, pending)

    holder = this_holder(f"import-{uuid.uuid4()}", origin, None)
    made = assign_state(
        stream,
        build,
        holder=holder,
        replace_state=replace_state,
        plan=snapshot.plan,
        # Before the folder is claimed: it may be the original's, which has not marked it.
        check=lambda: _refuse_anothers_place(stream),
    )
    return Fork(
        stream.stream_id,
        snapshot.stream_id,
        f"{describe_snapshot(snapshot)} ({snapshot.location})",
        made.pending.batch_id,
        made.query_id,
        made.live_directory,
        {sink.name: sink.new for sink in sinks},
        made.pending.parent_outputs,
        of_deployment=str(snapshot.properties.get(DEPLOYMENT, "unknown")),
    )


def _moved_sinks(snapshot: SnapshotRecord, outputs: Mapping[str, str]) -> list[_MovedSink]:
    named = _sinks_of(snapshot)
    mapped = {old.strip(): new.strip() for old, new in outputs.items()}
    known = named or {old: sink_of(old).place or old for old in mapped}
    listed = ", ".join(known) or "none; name the place that its query writes to"
    moved = []
    for name, old in known.items():
        matches = [key for key in mapped if key == name or (old is not None and same_folder(key, old))]
        if not matches or not mapped[matches[0]]:
            raise SharedSinkError(
                f"{snapshot.location} is not imported, nothing was changed: its sink {name} is not mapped. Map it in "
                f"outputs to the place where the imported stream writes instead. Sinks of the snapshot: {listed}."
            )
        moved.append(_MovedSink(name, old, mapped.pop(matches[0])))
    if mapped or not moved:
        what = f"{', '.join(mapped)} is not one of its sinks" if mapped else "it names no sink, and outputs names none"
        raise SharedSinkError(
            f"{snapshot.location} is not imported, nothing was changed: {what}. Sinks of the snapshot: {listed}."
        )
    return moved


def _sinks_of(snapshot: SnapshotRecord) -> dict[str, str | None]:
    captured, others = captured_sinks(snapshot.properties), other_sinks(snapshot.properties)
    if captured is None or ("other_sinks" in snapshot.properties and others is None):
        raise SnapshotCorruptError(
            f"{snapshot.location} does not record which sinks its query wrote to, so the imported stream might write "
            "to the same ones. Import another snapshot."
        )
    folders: dict[str, str | None] = {sink.place or sink.name: sink.place for sink in captured}
    # A table that is known by its name only has no other place.
    return folders | {sink.name: sink.place if sink.place != sink.name else None for sink in others or ()}


def _refuse_taken(
    stream: StreamHandle, snapshot: SnapshotRecord, sinks: Sequence[_MovedSink], logs: Mapping[str, Sequence[SinkEntry]]
) -> None:
    originals = [sink.old or sink.name for sink in sinks]
    others = list(_places_of_others(stream))
    for before, sink in enumerate(sinks):
        why = _why_taken(sink, snapshot, originals, others, sinks[:before])
        unexpected = unexpected_file(sink.new, originals[before], logs.get(sink.name, ())) if _is_folder(sink) else None
        if why is None and unexpected is not None:
            why = f"{unexpected} already exists there"
        if why is not None:
            raise SharedSinkError(
                f"{snapshot.location} is not imported, nothing was changed: {sink.name} is mapped to {sink.new}, but "
                f"{why}. Name an empty folder, or a table or topic that nothing else writes to."
            )


def _why_taken(
    sink: _MovedSink,
    snapshot: SnapshotRecord,
    originals: Sequence[str],
    others: Sequence[str],
    before: Sequence[_MovedSink],
) -> str | None:
    for original in originals:
        if _meet(sink, original):
            return f"it is, or overlaps, {original}, where the original writes"
    if _is_folder(sink) and folders_overlap(sink.new, snapshot_location(snapshot)):
        return "it overlaps the snapshot"
    for other in before:
        if _meet(sink, other.new):
            return f"{other.name} is mapped to it as well"
    if any(_meet(sink, place) for place in others):
        return "another stream of this catalog writes there, or will"
    return None


def _is_folder(sink: _MovedSink) -> bool:
    return sink.name == sink.old or is_location(sink.new) or sink.new.startswith("file:")


def _meet(sink: _MovedSink, place: str) -> bool:
    return folders_overlap(sink.new, place) if _is_folder(sink) else same_folder(sink.new, place)


def _places_of_others(stream: StreamHandle) -> Iterator[str]:
    for sink in stream.catalog.executions.sinks_of_others(stream.stream_id):
        yield sink_of(sink).place or sink
    for other in stream.catalog.streams.all():
        pending = other.pending_restore
        if other.stream_id != stream.stream_id and isinstance(pending, Forked):
            yield from (*(pending.mapped or ()), *pending.outputs)


def _refuse_anothers_place(stream: StreamHandle) -> None:
    if stream.catalog.streams.get(stream.stream_id).live_generation > 0 or stream.catalog.snapshots.completed(
        stream.stream_id
    ):
        return
    # The next import ignores the directory of an interrupted one, recognized by its query id, and builds its own.
    directories = [
        built.live.url
        for built in stream.live_directories()
        if not built.is_unfinished
        and built.live.positions().commit is not None
        and live_query_id(built.live) != _query_id_in(stream, built.live)
    ]
    found = [*directories, *stream.store.checkpoints()]
    if found:
        raise LiveDirectoryError(
            f"Nothing was imported into stream {stream.stream_id!r}: this catalog has no execution of it, but its "
            f"folders contain {', '.join(found[:8])}. The deployment that the snapshot comes from may be using them. "
            "Give this deployment its own checkpoint storage and its own folder of live directories, or import into "
            "a stream with another id."
        )


def _query_id_in(stream: StreamHandle, live: LiveDirectory) -> str:
    name = live.url.rstrip("/").rsplit("/", 1)[-1]
    return str(uuid.uuid5(_QUERY_IDS, f"{stream.catalog.deployment_id}/{stream.stream_id}/{name}"))
