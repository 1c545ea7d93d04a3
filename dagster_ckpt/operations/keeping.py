"""Keeps snapshots: tag a checkpoint, release a kept snapshot, promote a checkpoint to a savepoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from io import BytesIO
from typing import Any

from dagster_ckpt.catalog.records import CompletedSnapshot, SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.errors import RequestFailedError, SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.recovery.prepare import snapshot_location
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.snapshot.reuse import Source, SourceFile
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.stream.handle import StreamHandle, wall_clock_ms
from dagster_ckpt.stream.snapshots import describe_snapshot, holding, is_named, is_owned_by_stream
from dagster_ckpt.stream.start_from import checked_label


def tag_checkpoint(stream: StreamHandle, reference: str, *, label: str | None, origin: str) -> SnapshotRecord:
    """Keep a snapshot: the stream does not delete it when it is subsumed or at the end, until it is released.

    It does not count towards `num_retained`.

    Args:
        stream: The stream; it may be running.
        reference: Id, number (`chk-7`), label or location of a snapshot that the catalog lists.
        label: A name to start from later, or None.
        origin: Who keeps it.

    Raises:
        SnapshotNotFoundError: There is no such snapshot any more.
        OptionError: The label means another starting point.
    """
    checked_label(label)
    snapshot = _find(stream, reference)
    stream.catalog.holds.tag(snapshot.snapshot_id, label=label, holder=origin)
    return stream.catalog.snapshots.get(snapshot.snapshot_id)


def release_checkpoint(stream: StreamHandle, reference: str) -> SnapshotRecord:
    """Return a kept snapshot to the stream, which deletes it like any other checkpoint.

    A savepoint that was taken before a rewind becomes the stream's own. A user's savepoint cannot
    be released: to remove it, delete its folder.

    Raises:
        SnapshotNotFoundError: There is no such snapshot any more.
        RequestFailedError: It is not kept.
    """
    snapshot = _find(stream, reference)
    released = stream.catalog.holds.release_tag(snapshot.snapshot_id)
    if snapshot.trigger is SnapshotTrigger.REWIND and not is_owned_by_stream(snapshot):
        stream.catalog.snapshots.give_to_stream(snapshot.snapshot_id)
        released = True
    if not released:
        raise RequestFailedError(
            f"{describe_snapshot(snapshot)} of stream {stream.stream_id!r} is not tagged, and was not taken before a "
            "rewind: there "
            "is nothing to release."
        )
    return stream.catalog.snapshots.get(snapshot.snapshot_id)


def promote_checkpoint(
    stream: StreamHandle, reference: str, *, label: str | None = None, target_directory: str | None = None
) -> SnapshotRecord:
    """Copy a checkpoint into a savepoint, which is self-contained and never deleted by the stream.

    On the same disk its bytes are linked; within one object store the store itself copies them.

    Args:
        stream: The stream; it may be running.
        reference: Id, number (`chk-7`), label or location of a snapshot that the catalog lists.
        label: A name to start from later.
        target_directory: Folder for it, instead of the configured one.

    Raises:
        SnapshotNotFoundError: There is no such snapshot any more.
        SnapshotCorruptError: It lacks data or was altered; no savepoint is created.
        OptionError: The label means another starting point.
        StorageAccessError: The savepoint cannot be written.
    """
    checked_label(label)
    snapshot = _find(stream, reference)
    snapshot_id, number = str(uuid.uuid4()), stream.catalog.streams.allocate_number(stream.stream_id)
    began_ms = wall_clock_ms()
    begun = stream.catalog.snapshots.start_of_stopped(
        stream.stream_id,
        snapshot_id=snapshot_id,
        number=number,
        trigger=SnapshotTrigger.MANUAL,
        timeline=snapshot.timeline,
        label=label,
    )
    try:
        with holding(stream.catalog, [snapshot, begun], f"promotion to savepoint {snapshot_id}"):
            named = {"label": label} if label is not None else {}
            said = {"snapshot_id": snapshot_id, "number": number, "properties": named}
            stored, properties = _write(stream, snapshot, said, target_directory)
    except BaseException as error:
        stream.catalog.snapshots.fail_of_stopped(snapshot_id, str(error) or type(error).__name__)
        raise
    facts = CompletedSnapshot(
        stored.location,
        batch_id=snapshot.batch_id,
        query_id=snapshot.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        rows=None,
        state_rows=snapshot.state_rows,
        watermark=snapshot.watermark,
        duration_ms=wall_clock_ms() - began_ms,
        properties=properties,
    )
    return stream.catalog.snapshots.complete_of_stopped(snapshot_id, facts)


def _write(
    stream: StreamHandle, snapshot: SnapshotRecord, said: Mapping[str, Any], target: str | None
) -> tuple[StoredSnapshot, dict[str, object]]:
    location = snapshot_location(snapshot)
    problems = stream.store.verify(location)
    if problems:
        raise SnapshotCorruptError(f"{location} cannot be promoted: {problems[0]}. Promote another checkpoint.")
    manifest = stream.store.manifest(location)
    taken = {name: value for name, value in manifest.header.properties.items() if name not in ("label", "schedule")}
    properties = {**taken, "trigger": SnapshotTrigger.MANUAL.value, **said["properties"]}
    header = manifest.header.model_copy(update={**said, "kind": SnapshotKind.SAVEPOINT, "properties": properties})

    def read(entry: FileEntry) -> BytesIO:
        found: list[bytes] = []

        def keep(_entry: FileEntry, chunks: Iterable[bytes]) -> None:
            found.extend(chunks)

        stream.store.extract(location, keep, only=entry.path.__eq__)
        return BytesIO(b"".join(found))

    # Unique names, so that bytes that the store can link or copy itself are not even read.
    sources: list[Source] = [
        SourceFile(entry.path, entry.size, entry.identity, partial(read, entry), entry.token)
        for entry in manifest.files
    ]
    stored = stream.store.write_savepoint(header, sources, target_directory=target, base=location)
    return stored, properties


def _find(stream: StreamHandle, reference: str) -> SnapshotRecord:
    listed = stream.catalog.snapshots.of_stream(stream.stream_id, status=SnapshotStatus.COMPLETED)
    found = next((snapshot for snapshot in listed if is_named(snapshot, reference)), None)
    if found is None:
        known = ", ".join(describe_snapshot(snapshot) for snapshot in listed[:8]) or "none"
        raise SnapshotNotFoundError(
            f"Stream {stream.stream_id!r} has no snapshot {reference!r}. It has: {known}. Name one of these."
        )
    return found
