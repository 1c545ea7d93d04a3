"""Open the snapshot store for a configured checkpoint storage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dagster_ckpt.config.checkpoint_storage import (
    DEFAULT_FILE_STATE_THRESHOLD,
    DEFAULT_WRITE_BUFFER_SIZE,
    CheckpointStorage,
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.state_backend import DEFAULT_TRANSFER_THREADS
from dagster_ckpt.errors import OptionError, SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.io.custom import FolderFileIO
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.fsspec import SINGLE_PUT_BYTES, FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.location import normalised
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.garbage_collection import savepoint_directories
from dagster_ckpt.snapshot.manifest import CHECKPOINT_PREFIX
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore, StoreLayout
from dagster_ckpt.snapshot.reader import read_metadata
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.snapshot.writer import PACK_TARGET_BYTES
from dagster_ckpt.values.redaction import cause_to_show, without_secrets
from dagster_ckpt.values.storage_path import StoragePath
from dagster_ckpt.values.validation import checked_stream_id, imported

MEMORY_URL = "jobmanager://memory"


def open_store(
    storage: CheckpointStorage, stream_id: str, *, transfer_threads: int = DEFAULT_TRANSFER_THREADS
) -> SnapshotStore:
    """Open the store of a stream; a custom storage may ignore `transfer_threads`."""
    checked_stream_id(stream_id)
    if isinstance(storage, FileSystemCheckpointStorage):
        root, buffer_bytes = storage.checkpoint_location.url, storage.get_write_buffer_size()
        layout = StoreLayout(
            stream_id=stream_id,
            stream_root=f"{root}/{stream_id}",
            savepoint_root=_savepoint_root(storage) or root,
            inline_threshold=storage.get_min_file_size_threshold(),
            transfer_threads=transfer_threads,
            pack_least_bytes=PACK_TARGET_BYTES if root.startswith("file://") else SINGLE_PUT_BYTES,
        )
    elif isinstance(storage, JobManagerCheckpointStorage):
        location, buffer_bytes = storage.checkpoint_location, DEFAULT_WRITE_BUFFER_SIZE
        layout = StoreLayout(
            stream_id=stream_id,
            stream_root=f"{location.url if location is not None else MEMORY_URL}/{stream_id}",
            savepoint_root=_savepoint_root(storage) or (location.url if location is not None else None),
            # As in Flink, metadata has the state, which must be small.
            inline_threshold=None,
            max_bytes=storage.get_max_state_size(),
        )
    elif isinstance(storage, CustomCheckpointStorage):
        return _custom(storage, stream_id)
    else:
        raise OptionError(
            f"checkpoint storage is {storage!r}; give a FileSystemCheckpointStorage, a JobManagerCheckpointStorage "
            "or a CustomCheckpointStorage."
        )
    configured = (storage.checkpoint_location, storage.savepoint_location)
    return _store(layout, storage.storage_options, configured, buffer_bytes=buffer_bytes)


def stored_streams(storage: CheckpointStorage) -> dict[str, Mapping[str, object] | None]:
    """Streams in a storage by id: None if it has checkpoints, otherwise the properties of one of its savepoints."""
    location = getattr(storage, "checkpoint_location", None)
    if not isinstance(location, StoragePath):
        raise OptionError(
            f"The streams of {storage!r} cannot be listed: it is not a folder of checkpoints. Name each stream instead."
        )
    options: Mapping[str, Any] = getattr(storage, "storage_options", {})
    users = {(location.scheme, location.authority): location.user_info} if location.user_info else {}
    root = _file_io(location.url, options, buffer_bytes=DEFAULT_WRITE_BUFFER_SIZE, users=users)
    found: dict[str, Mapping[str, object] | None] = {
        name: None
        for name, entry in root.list().items()
        if entry.is_directory and any(each.startswith(CHECKPOINT_PREFIX) for each in root.list(name))
    }
    place = getattr(storage, "savepoint_location", None)
    if isinstance(place, StoragePath):
        savepoints = _file_io(place.url, options, buffer_bytes=DEFAULT_WRITE_BUFFER_SIZE, users=users)
        for directory in savepoint_directories(savepoints):
            with suppress(SnapshotCorruptError, SnapshotNotFoundError):
                header = read_metadata(savepoints, directory).manifest.header
                found.setdefault(header.stream_id, header.properties)
    return found


def _store(
    layout: StoreLayout, options: Mapping[str, Any], configured: Iterable[StoragePath | None], *, buffer_bytes: int
) -> ObjectSnapshotStore:
    memory = MemoryFileIO(layout.stream_root)
    users = {(each.scheme, each.authority): each.user_info for each in configured if each and each.user_info}
    schemes = {root.partition("://")[0] for root in (layout.stream_root, layout.savepoint_root) if root is not None}

    def open_file_io(url: str) -> FileIO:
        if url == layout.stream_root and url.startswith(MEMORY_URL):
            return memory
        # A savepoint may go to another file system, which these options are not for.
        given = options if url.partition("://")[0] in schemes else {}
        return _file_io(url, given, buffer_bytes=buffer_bytes, users=users)

    return ObjectSnapshotStore(layout, open_file_io)


def _savepoint_root(storage: FileSystemCheckpointStorage | JobManagerCheckpointStorage) -> str | None:
    return storage.savepoint_location.url if storage.savepoint_location is not None else None


def _custom(storage: CustomCheckpointStorage, stream_id: str) -> SnapshotStore:
    factory = imported("checkpoint storage factory", storage.factory)
    try:
        created = factory(stream_id=stream_id, **_fallback(factory, storage), **storage.settings)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(
            f"checkpoint storage factory {storage.factory!r} cannot be used: {without_secrets(str(error))}. "
            "Give the import path of a class or function that takes stream_id and the settings, and returns a "
            "CustomFileIO or a SnapshotStore."
        ) from cause_to_show(error)
    missing = [name for name in vars(SnapshotStore) if not name.startswith("_") and not hasattr(created, name)]
    if not missing:
        return cast("SnapshotStore", created)
    if not isinstance(created, FileIO):
        raise OptionError(
            f"{storage.factory!r} created a {type(created).__name__}, which is neither a FileIO nor a SnapshotStore "
            f"(it has no {', '.join(missing)}). Return a subclass of dagster_ckpt.io.custom.CustomFileIO, or an object "
            "with every method of dagster_ckpt.snapshot.store.SnapshotStore."
        )
    return _store_over(created, stream_id, storage.deployment)


def _fallback(factory: Callable[..., Any], storage: CustomCheckpointStorage) -> dict[str, Any]:
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return {}
    configured = {name: value for name, value in vars(storage.deployment).items() if value not in (None, -1, {})}
    return {name: value for name, value in configured.items() if name in parameters and name not in storage.settings}


def _store_over(file_io: FileIO, stream_id: str, deployment: DeploymentStorage) -> SnapshotStore:
    root = normalised(file_io.url)
    if root != file_io.url:
        raise OptionError(f"The url of {type(file_io).__name__} is {file_io.url!r}; write it as {root!r}.")
    savepoints = deployment.savepoint_path

    def open_file_io(url: str) -> FileIO:
        if url == root:
            return file_io
        if url.startswith(f"{root}/"):
            return FolderFileIO(file_io, url.removeprefix(f"{root}/"))
        return _file_io(url, deployment.storage_options, buffer_bytes=DEFAULT_WRITE_BUFFER_SIZE)

    layout = StoreLayout(
        stream_id=stream_id,
        stream_root=f"{root}/{stream_id}",
        savepoint_root=normalised(savepoints) if savepoints is not None else root,
        inline_threshold=_set_or_default(deployment.file_state_size_threshold),
    )
    return ObjectSnapshotStore(layout, open_file_io)


def _set_or_default(threshold: int | None) -> int:
    return DEFAULT_FILE_STATE_THRESHOLD if threshold is None or threshold < 0 else threshold


def _file_io(
    url: str, options: Mapping[str, Any], *, buffer_bytes: int, users: Mapping[tuple[str, str], str] | None = None
) -> FileIO:
    if url.startswith("file://"):
        # No links are followed, because housekeeping deletes what it lists.
        return LocalFileIO(Path(url.partition("://")[2]), buffer_bytes=buffer_bytes, follow_links=False)
    path = StoragePath.parse("location", url)
    # A location has no user info: use that of the configured storage on the same host.
    user = (users or {}).get((path.scheme, path.authority), "")
    return FsspecFileIO(url, options, url_to_open=replace(path, user_info=user).url_to_open)
