"""What still contains the state that an edit has forgotten or replaced: snapshots, live directories, temporary copies.

The ids of the edits that a state contains are in the file `metadata` of its directory and in the header of each of
its snapshots. Whatever lacks the id of an edit has, or may have, the state from before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.errors import CkptError, OptionError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.operations.description import find_snapshot
from dagster_ckpt.recovery.live_directories import scratch_copies
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.spark.checkpoint_dir.cut import STATE_EDITS
from dagster_ckpt.spark.checkpoint_dir.inspect import state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream

_MAY_HAVE_BYTES = (
    SnapshotStatus.COMPLETED,
    SnapshotStatus.DELETING,
    SnapshotStatus.IN_PROGRESS,
    SnapshotStatus.BROKEN,
)


@dataclass(frozen=True)
class RemainingState:
    """Where the state from before an edit remains.

    Attributes:
        edited: The savepoint with the edited state.
        snapshots: Snapshots of the stream without the edit, newest first, each with who deletes it.
        directories: Live directories and temporary copies without the edit, each described.
    """

    edited: SnapshotRecord
    snapshots: tuple[str, ...]
    directories: tuple[str, ...]

    @property
    def is_nowhere(self) -> bool:
        """Whether neither the catalog nor the folders of the stream show anything without the edit."""
        return not (self.snapshots or self.directories)

    def messages(self) -> list[str]:
        """The places, as messages."""
        name = describe_snapshot(self.edited)
        if self.is_nowhere:
            return [f"no snapshot and no directory of the stream contains the state from before {name}"]
        return [f"contains the state from before {name}: {each}" for each in (*self.snapshots, *self.directories)]


def remaining_state(stream: StreamHandle, reference: str) -> RemainingState:
    """Find what contains the state from before an edit. Changes nothing; the stream may be running.

    Args:
        stream: The stream.
        reference: Id, label or location of the savepoint with the edited state.

    Raises:
        SnapshotNotFoundError: The catalog lists no such snapshot.
        OptionError: Its state was not edited.
        StorageAccessError: The storage or the live folder cannot be reached.
    """
    edited = find_snapshot(stream.catalog, stream.stream_id, reference)
    edit = edited.edit.get("id")
    if not isinstance(edit, str):
        raise OptionError(
            f"The state of {describe_snapshot(edited)} was not edited. Name the savepoint that forgot the keys."
        )
    return RemainingState(edited, tuple(_snapshots(stream, edit)), tuple(_directories(stream, edit)))


def _snapshots(stream: StreamHandle, edit: str) -> Iterator[str]:
    known: set[str] = set()
    current = stream.catalog.streams.get(stream.stream_id)
    for each in stream.catalog.snapshots.of_stream(stream.stream_id):
        if each.status not in _MAY_HAVE_BYTES:
            continue
        known.add(each.location or "")
        # The edits of a snapshot are recorded once it is complete. The stream's own timeline begins with its edits.
        is_of_edited = each.location is None and each.timeline == current.timeline and edit in current.state_edits
        if is_of_edited or edit in each.state_edits:
            continue
        if each.location is None or _header(stream, each.location) is not None:
            yield f"{describe_snapshot(each)}, {_who_deletes(each)}: {each.location or 'being taken'}"
    for location in (*stream.store.checkpoints(), *stream.store.savepoints()):
        header = _header(stream, location) if location not in known else None
        is_ours = isinstance(header, str) or (header is not None and header.stream_id == stream.stream_id)
        if is_ours and edit not in _edits_of(header):
            yield f"a snapshot that the catalog does not list, which you delete: {location}"


def _who_deletes(snapshot: SnapshotRecord) -> str:
    return "which the stream deletes" if is_owned_by_stream(snapshot) else "which you delete"


def _header(stream: StreamHandle, location: str) -> SnapshotHeader | str | None:
    """Header of a snapshot; None if nothing is there, and why if it cannot be read."""
    try:
        return stream.store.manifest(location).header
    except SnapshotNotFoundError:
        return None
    except StorageAccessError:
        raise
    except CkptError as error:
        return str(error)


def _edits_of(header: SnapshotHeader | str | None) -> list[str]:
    edits = header.properties.get(STATE_EDITS) if isinstance(header, SnapshotHeader) else None
    return edits if isinstance(edits, list) else []


def _directories(stream: StreamHandle, edit: str) -> Iterator[str]:
    current = stream.catalog.streams.get(stream.stream_id).live_directory
    urls = {built.live.url for built in stream.live_directories()}
    for url in sorted(urls | ({current} if current is not None else set())):
        live = LiveDirectory(url)
        if live.exists() and not _has(live, edit):
            is_current = url == current
            yield f"the live directory {url}, " + (
                "in which the stream is: start it from the savepoint"
                if is_current
                else "which a later start deletes after its first checkpoint"
            )
    for copy in scratch_copies(stream):
        if not _has(copy, edit):
            yield f"the temporary copy {copy.url}, which its reader deletes, or six hours later the next one"


def _has(live: LiveDirectory, edit: str) -> bool:
    try:
        return edit in state_edits(live)
    except StorageAccessError:
        raise
    except CkptError:
        return False
