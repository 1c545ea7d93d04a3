"""Delete live directories that no start needs: at the end of a stream, after a start, and in housekeeping."""

from __future__ import annotations

import uuid

from dagster_ckpt.catalog.records import (
    EventType,
    StreamRecord,
)
from dagster_ckpt.errors import LeaseHeldError, LeaseLostError, StreamNotFoundError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.adopted import adopted_directory
from dagster_ckpt.stream.fencing import put_up_fence
from dagster_ckpt.stream.handle import BuiltDirectory, StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import disown_live_folder, lies_elsewhere, other_owner_of_live_folder

# Number of the stream's former live directories whose location is checked.
_MADE = 100


def delete_live_directories(stream: StreamHandle, acquired: AcquiredLease, lease: LeaseKeeper) -> str | None:
    """Delete every live directory of a stream and forget it. Returns the folder, or None if there was none.

    A directory outside the stream's folder is forgotten and stays: it was adopted or, if the catalog is
    a copy, it is the original's, whose query is not even fenced. So does a folder that another
    deployment uses now.

    If a previous holder may still be alive, its query is fenced first, and fenced directories stay:
    once a directory is forgotten nothing else can fence its query, which would keep writing without
    the fence.

    Raises:
        LeaseLostError: Another execution is the writer now; its directories are not touched.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    if not acquired.predecessor_ended and not may_be_anothers(stream, record):
        put_up_fence(stream, acquired, still_mine=lease.check, is_followed=False)
    stream.catalog.streams.forget_live_directory(lease.record)
    _delete_live_directories(stream, record, lease, spares_fenced=not acquired.predecessor_ended)
    is_kept = lies_elsewhere(stream, record) or may_be_anothers(stream, record)
    return None if record.live_directory is None or is_kept else stream.live_folder


def delete_older_live_directories(stream: StreamHandle, current: LiveDirectory, lease: LeaseKeeper) -> None:
    """Delete the live directories that earlier starts left behind, finished or not.

    The previous one is kept if it is fenced: without its fence, a query that still runs there would
    plan further batches.

    Args:
        stream: The stream.
        current: The directory in use.
        lease: The lease of the stream. Directories with a higher token belong to a successor and stay.

    Raises:
        LeaseLostError: Another execution is the writer now.
    """
    built = _own_live_directories(stream, stream.catalog.streams.get(stream.stream_id))
    names = {each.live.url.rpartition("/")[2]: each for each in built}
    mine = names.get(current.url.rstrip("/").rpartition("/")[2])
    token = lease.record.token
    for each in built:
        of_this_run = each.token == token and mine is not None and each.generation < mine.generation
        is_before = mine is not None and each.generation == mine.generation - 1
        if each != mine and (each.token < token or of_this_run):
            if is_before and each.live.fenced_at() is not None:
                continue
            lease.check()
            each.live.delete()


def delete_forgotten_live_directories(stream: StreamHandle) -> str | None:
    """Delete what a JVM's last uploads wrote into live directories after their deletion."""
    try:
        record = stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        # The housekeeping schedule also covers streams that were never started.
        return None
    if record.live_directory is not None or stream.catalog.leases.current(stream.stream_id) is not None:
        return None
    if not _own_live_directories(stream, record):
        return None
    try:
        # A start that comes in the meantime waits for this, or has a higher token and its own
        # directories.
        acquired = acquire(
            stream.catalog, stream.stream_id, this_holder(f"housekeeping-{uuid.uuid4()}", "housekeeping", None)
        )
    except LeaseHeldError:
        return None
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            return _delete_live_directories(stream, record, lease) if acquired.predecessor_ended else None
        except LeaseLostError:
            return None


def _delete_live_directories(
    stream: StreamHandle, record: StreamRecord, lease: LeaseKeeper, *, spares_fenced: bool = False
) -> str | None:
    built = [each.live for each in _own_live_directories(stream, record) if each.token <= lease.record.token]
    if spares_fenced:
        built = [live for live in built if live.fenced_at() is None]
    for live in built:
        lease.check()
        live.delete()
    if not stream.live_directories():
        disown_live_folder(stream)
    LiveDirectory(stream.live_folder).folder.delete_if_empty()
    return stream.live_folder if built else None


def _own_live_directories(stream: StreamHandle, record: StreamRecord) -> list[BuiltDirectory]:
    """The live directories in the stream's folder, if the catalog knows that the stream has run there.

    Otherwise they belong to another deployment, or to this one before its catalog was lost, and
    must not be deleted.
    """
    known = {record.live_directory} | {
        each.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    }
    events = stream.catalog.events
    made = events.last_of([stream.stream_id], [EventType.RESTORED], up_to=events.latest_sequence(), each=_MADE)
    known |= {event.payload.get("live_directory") for event in made.get(stream.stream_id, ())}
    is_own = any(isinstance(url, str) and _is_in(stream.live_folder, url) for url in known)
    # Another deployment may use the folder since this one has deleted its directories there.
    return stream.live_directories() if is_own and other_owner_of_live_folder(stream) is None else []


def _is_in(folder: str, url: str) -> bool:
    return same_folder(folder, url.rstrip("/").rpartition("/")[0])


def may_be_anothers(stream: StreamHandle, record: StreamRecord) -> bool:
    """Whether the live directory may be another deployment's.

    It is outside the stream's folder and was not adopted from there, or the folder has another owner now.
    """
    if adopted_directory(record) is not None:
        return False
    return lies_elsewhere(stream, record) or other_owner_of_live_folder(stream) is not None


def left_to_another(stream: StreamHandle) -> str:
    """Why a live directory that may be another deployment's is kept."""
    record = stream.catalog.streams.get(stream.stream_id)
    if not lies_elsewhere(stream, record):
        return (
            f"the live directories in {stream.live_folder}: the folder belongs to deployment "
            f"{other_owner_of_live_folder(stream)} now"
        )
    return (
        f"the live directory {record.live_directory}: it is not below {stream.live_folder}, and belongs to another "
        "environment if this catalog is a copy. Otherwise delete it yourself"
    )
