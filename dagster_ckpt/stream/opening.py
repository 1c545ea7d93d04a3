"""Opens streams without the code of their queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import OptionError, StreamNotFoundError
from dagster_ckpt.snapshot.opening import open_store, stream_folders
from dagster_ckpt.stream.handle import StreamHandle, live_folders
from dagster_ckpt.stream.recorded_settings import KEEP_EVERYTHING, RecordedRestartStrategy, RecordedSettings
from dagster_ckpt.values.storage_path import location_url


class StreamSource(Protocol):
    @property
    def catalog(self) -> Catalog: ...

    def id_of(self, stream: str) -> str:
        """StreamNotFoundError if there is none. Opens no storage."""

    def on_storage(self) -> list[str]:
        """Ids of streams that may have state, known to the catalog or not."""

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        """By its id or the key of an asset that it writes; StreamNotFoundError if there is none.

        With `new_like`, one that never started gets the settings of that stream.
        """


def storage_at(storage: str | CheckpointStorage) -> CheckpointStorage:
    """At a path or URL, savepoints go to its folder `savepoints`."""
    if not isinstance(storage, str):
        return storage
    root = location_url("storage", storage).rstrip("/")
    return FileSystemCheckpointStorage(root, savepoint_path=f"{root}/savepoints")


@dataclass(frozen=True)
class RecordedStreams:
    """Streams with the settings that the catalog recorded when they last ran."""

    catalog: Catalog
    storage: CheckpointStorage | None = None
    live_root: str | None = None
    options: Mapping[str, CheckpointOptions] = field(default_factory=dict)

    def id_of(self, stream: str) -> str:
        return self.catalog.streams.named(stream).stream_id

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        record = self._find(stream) if new_like is not None else self.catalog.streams.named(stream)
        known = record or (self._find(new_like) if new_like is not None else None)
        settings = RecordedSettings.of_record(known.options if known is not None else {})
        stream_id = record.stream_id if record is not None else stream
        options = self.options.get(stream_id, settings.options or KEEP_EVERYTHING)
        storage = self._storage(stream_id, settings)
        return StreamHandle(
            stream_id=stream_id,
            name=record.name if record is not None else stream_id,
            asset_key=record.asset_key if record is not None else stream_id,
            catalog=self.catalog,
            store=open_store(storage, stream_id),
            options=replace(options, storage=storage if settings.is_own_storage else None),
            restart=RecordedRestartStrategy(settings.restart),
            live_root=self._live_root(stream_id, settings),
            storage=storage,
        )

    def on_storage(self) -> list[str]:
        if self.storage is None:
            raise OptionError(
                "No storage was given. Name the folder of the checkpoints: --storage s3://bucket/checkpoints on the "
                "command line, storage='s3://bucket/checkpoints' in Python."
            )
        return sorted({*stream_folders(self.storage), *(live_folders(self.live_root) if self.live_root else ())})

    def _find(self, stream: str) -> StreamRecord | None:
        try:
            return self.catalog.streams.named(stream)
        except StreamNotFoundError:
            return None

    def _storage(self, stream_id: str, settings: RecordedSettings) -> CheckpointStorage:
        recorded, given = settings.storage, self.storage
        if recorded is None:
            if given is None:
                raise OptionError(
                    f"The catalog does not record how to open the storage of stream {stream_id!r}: it was never "
                    "started, or its storage is a class of your own. Name it: --storage s3://bucket/checkpoints on the "
                    "command line, storage='s3://bucket/checkpoints' in Python."
                )
            return given
        if given is None:
            return recorded
        places = storage_place(recorded), storage_place(given)
        if not settings.is_own_storage and None not in places and places[0] != places[1]:
            raise OptionError(
                f"Stream {stream_id!r} keeps its snapshots in {places[0]}, but storage is {places[1]}. Leave storage "
                "out, or give that one with the credentials that it needs."
            )
        return _with_access(recorded, given)

    def _live_root(self, stream_id: str, settings: RecordedSettings) -> str:
        recorded, given = settings.live_root, self.live_root
        if recorded is None and given is None:
            raise OptionError(
                f"The catalog does not know where the live directories of stream {stream_id!r} are, because it was "
                "never started. Name the folder that its program or its state_backend resource names: --live-root on "
                "the command line, live_root in Python."
            )
        if recorded is not None and given is not None and _spelled(recorded) != _spelled(given):
            raise OptionError(
                f"The live directories of stream {stream_id!r} are in {recorded}, but live_root is {given}. Leave "
                "live_root out."
            )
        return recorded or given or ""


def storage_place(storage: CheckpointStorage | None) -> str | None:
    if not isinstance(storage, FileSystemCheckpointStorage | JobManagerCheckpointStorage):
        return None
    return storage.checkpoint_location.url if storage.checkpoint_location is not None else None


def _with_access(recorded: CheckpointStorage, given: CheckpointStorage) -> CheckpointStorage:
    if not isinstance(given, FileSystemCheckpointStorage | JobManagerCheckpointStorage):
        return given if storage_place(recorded) is None else recorded
    if (
        isinstance(recorded, FileSystemCheckpointStorage)
        and given.checkpoint_location is not None
        and given.checkpoint_location.user_info
        and given.checkpoint_location.authority == recorded.checkpoint_location.authority
    ):
        savepoints = recorded.savepoint_location
        return FileSystemCheckpointStorage(
            replace(recorded.checkpoint_location, user_info=given.checkpoint_location.user_info).url_to_open,
            recorded.file_state_size_threshold,
            recorded.write_buffer_size,
            savepoint_path=savepoints.url if savepoints is not None else None,
            storage_options=given.storage_options,
        )
    return recorded.configure(DeploymentStorage(storage_options=given.storage_options))


def _spelled(folder: str) -> str:
    return folder.removeprefix("file://").removeprefix("file:").rstrip("/")
