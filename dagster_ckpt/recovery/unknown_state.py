"""Looks for state of a stream that its catalog knows no start of: the catalog may be a different or a new one."""

from __future__ import annotations

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.recovery.plan import UnknownState
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.spark.query.output import NamedOutput, logged_batch, same_folder
from dagster_ckpt.stream.handle import StreamHandle

_AWAITS = "; a fork or an import made it, and no query was started in it: run the fork or the import again"


def unknown_state(stream: StreamHandle, output: NamedOutput | None = None) -> UnknownState:
    """Look for live directories, checkpoints, savepoints and sink logs of a stream. Changes nothing.

    Args:
        stream: The stream.
        output: Where the query to start will write; None if unknown.

    Raises:
        StorageAccessError: The storage or the live folder cannot be reached.
    """
    directories = [
        f"{built.live.url}, up to batch {commit}{_AWAITS if built.live.awaits_first_start() else ''}"
        for built in stream.live_directories()
        if (commit := built.live.positions().commit) is not None
    ]
    snapshots: list[str] = []
    folders = [output.folder] if output is not None and output.folder is not None else []
    for location in stream.store.checkpoints():
        header = _header(stream, location)
        snapshots.append(location if header is not None else f"{location}, which cannot be read")
        folders += _folders(header)
    for location in stream.store.savepoints():
        header = _header(stream, location)
        # The folder may contain savepoints of other streams.
        if header is not None and header.stream_id == stream.stream_id:
            snapshots.append(f"savepoint {location}")
            folders += _folders(header)
    distinct = [folder for i, folder in enumerate(folders) if not any(same_folder(folder, at) for at in folders[:i])]
    sinks = [told for folder in distinct if (told := _log(folder)) is not None]
    return UnknownState(directories, snapshots, sinks)


def _header(stream: StreamHandle, location: str) -> SnapshotHeader | None:
    try:
        return stream.store.manifest(location).header
    except StorageAccessError:
        raise
    except CkptError:
        return None


def _folders(header: SnapshotHeader | None) -> list[str]:
    noted = header.properties.get("sinks") if header is not None else None
    return [str(sink["path"]) for sink in noted] if isinstance(noted, list) else []


def _log(folder: str) -> str | None:
    try:
        last = logged_batch(folder)
    except StorageAccessError:
        return f"the sink log of {folder}, which cannot be reached"
    return None if last is None else f"the sink log of {folder}, up to batch {last}"
