"""Take snapshots of a stream, and keep them: tag, release, promote, prefer.

A running stream receives a request through a row in the catalog, which its own process answers. A
savepoint of a stream that is not running is taken here.
"""

from __future__ import annotations

from dagster_ckpt.catalog.records import (
    RequestKind,
    RequestRecord,
    SnapshotRecord,
    SnapshotTrigger,
)
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.errors import RequestFailedError, SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.operations.derived_savepoint import SavepointIdentity, derive_savepoint
from dagster_ckpt.operations.description import find_snapshot
from dagster_ckpt.operations.lifecycle import listed_snapshot, preview_start
from dagster_ckpt.operations.requests import await_process, is_running, require_running, snapshot_of
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.store import StoredSnapshot, sources_in
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream
from dagster_ckpt.stream.start_from import StartFrom, checked_label
from dagster_ckpt.stream.stopped_savepoint import savepoint_of_stopped_stream
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.redaction import refuse_user_info


def trigger_checkpoint(stream: StreamHandle, *, origin: str, timeout_s: float = REQUEST_TIMEOUT_S) -> SnapshotRecord:
    """Take a checkpoint of a running stream now, regardless of the minimum pause.

    Raises:
        StreamNotFoundError: The stream was never started.
        RequestFailedError: The stream is not running, or the attempt failed.
        RequestTimeoutError: No answer in time; the request was withdrawn.
    """
    request = request_checkpoint(stream, origin=origin)
    return snapshot_of(stream, await_process(stream, request, timeout_s=timeout_s))


def request_checkpoint(stream: StreamHandle, *, origin: str) -> RequestRecord:
    """Request a checkpoint of a running stream without waiting for it.

    Raises:
        StreamNotFoundError: The stream was never started.
        RequestFailedError: The stream is not running.
    """
    stream.catalog.streams.get(stream.stream_id)
    if not is_running(stream):
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not running, and only a running stream takes checkpoints. Take a "
            "savepoint instead: that works for a stopped stream too."
        )
    return stream.catalog.requests.submit(stream.stream_id, RequestKind.CHECKPOINT, arguments={}, origin=origin)


def trigger_savepoint(
    stream: StreamHandle,
    *,
    origin: str,
    label: str | None = None,
    target_directory: str | None = None,
    schedule: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
    progress: Progress = lambda _done, _total: None,
) -> SnapshotRecord:
    """Take a savepoint of a running, stopped or failed stream.

    Args:
        stream: The stream.
        origin: Who requests it, as the catalog shows it.
        label: A name to start from later.
        target_directory: Folder for it, instead of the configured one.
        schedule: Name of the schedule that requests it; its history may delete the savepoint later.
            None: a user requests it.
        timeout_s: How long to wait for a running stream's answer.
        progress: Called now and then with the number of files that were written, and of those to write,
            where the savepoint is taken here.

    Raises:
        StreamNotFoundError: The stream was never started.
        NothingCommittedError: The stream has not committed a batch yet.
        OptionError: The label means another starting point or is not valid, or the folder contains user
            credentials.
        RequestFailedError: The attempt failed.
        RequestTimeoutError: No answer in time; the request was withdrawn.
    """
    checked_label(label)
    refuse_user_info("target_directory", target_directory)
    stream.catalog.streams.get(stream.stream_id)
    if is_running(stream):
        request = request_savepoint(
            stream, origin=origin, label=label, target_directory=target_directory, schedule=schedule
        )
        return snapshot_of(stream, await_process(stream, request, timeout_s=timeout_s))
    return savepoint_of_stopped_stream(
        stream, label=label, target_directory=target_directory, schedule=schedule, progress=progress
    )


def request_savepoint(
    stream: StreamHandle,
    *,
    origin: str,
    label: str | None = None,
    target_directory: str | None = None,
    schedule: str | None = None,
) -> RequestRecord:
    """Request a savepoint of a running stream without waiting for it; the arguments are those of `trigger_savepoint`.

    Raises:
        StreamNotFoundError: The stream was never started.
        OptionError: The label means another starting point or is not valid, or the folder contains user
            credentials.
        RequestFailedError: The stream is not running.
    """
    checked_label(label)
    refuse_user_info("target_directory", target_directory)
    require_running(stream, "asked for a savepoint without waiting; trigger_savepoint takes it here")
    arguments = {"label": label, "target_directory": target_directory, "schedule": schedule}
    return stream.catalog.requests.submit(stream.stream_id, RequestKind.SAVEPOINT, arguments=arguments, origin=origin)


def prefer_savepoint(stream: StreamHandle, reference: str) -> SnapshotRecord:
    """Select the savepoint that `preferred-savepoint` starts from.

    Args:
        stream: The stream.
        reference: Snapshot id, label or location of one of its savepoints.

    Raises:
        SnapshotNotFoundError: The stream has no savepoint of this name.
    """
    plan = preview_start(stream, StartFrom(reference))
    snapshot = plan.snapshot
    if snapshot is None or snapshot.kind is not SnapshotKind.SAVEPOINT:
        raise SnapshotNotFoundError(
            f"{reference!r} of stream {stream.stream_id!r} is not a savepoint: checkpoints belong to the system and "
            "may be subsumed at any time. Take a savepoint and prefer that."
        )
    if listed_snapshot(stream, snapshot) is None:
        raise SnapshotNotFoundError(
            f"The catalog of stream {stream.stream_id!r} does not list a savepoint at {reference!r}, so it would not "
            "be found there later. Start from its location, or prefer one that is listed."
        )
    stream.catalog.streams.prefer_savepoint(stream.stream_id, snapshot.snapshot_id)
    return snapshot


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
    snapshot = find_snapshot(stream.catalog, stream.stream_id, reference)
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
    snapshot = find_snapshot(stream.catalog, stream.stream_id, reference)
    released = stream.catalog.holds.release_tag(snapshot.snapshot_id)
    if snapshot.trigger is SnapshotTrigger.REWIND and not is_owned_by_stream(snapshot):
        stream.catalog.snapshots.give_to_stream(snapshot.snapshot_id)
        released = True
    if not released:
        raise RequestFailedError(
            f"{describe_snapshot(snapshot)} of stream {stream.stream_id!r} is not tagged, and was not taken before a "
            "rewind: there is nothing to release."
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
    snapshot = find_snapshot(stream.catalog, stream.stream_id, reference)
    return derive_savepoint(
        stream,
        snapshot,
        lambda identity: _copy(stream, snapshot, identity, target_directory),
        trigger=SnapshotTrigger.MANUAL,
        label=label,
        purpose="promotion to savepoint",
        state_rows=snapshot.state_rows,
        began_ms=wall_clock_ms(),
    )


def _copy(
    stream: StreamHandle, snapshot: SnapshotRecord, identity: SavepointIdentity, target: str | None
) -> tuple[StoredSnapshot, SnapshotHeader]:
    location = snapshot_location(snapshot)
    problems = stream.store.verify(location)
    if problems:
        raise SnapshotCorruptError(f"{location} cannot be promoted: {problems[0]}. Promote another checkpoint.")
    manifest = stream.store.manifest(location)
    header = identity.header(manifest.header)
    sources = sources_in(stream.store, location, manifest.files)
    return stream.store.write_savepoint(header, sources, target_directory=target, base=location), header
