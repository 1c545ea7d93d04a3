"""The client's connection to its streams, which are opened without the code of their queries."""

from __future__ import annotations

import copy
import getpass
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import CkptError, OptionError, StreamNotFoundError
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.storage_path import StoragePath, location_url

if TYPE_CHECKING:
    from dagster_ckpt.catalog.records import StreamRecord
    from dagster_ckpt.config.checkpoint_config import CheckpointConfig
    from dagster_ckpt.config.checkpoint_options import CheckpointOptions
    from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
    from dagster_ckpt.stream.handle import StreamHandle
    from dagster_ckpt.stream.recorded_settings import RecordedSettings


class _CatalogResource(Protocol):
    def catalog(self) -> Catalog: ...


class _StorageResource(Protocol):
    def storage(self) -> CheckpointStorage: ...


class _BackendResource(Protocol):
    @property
    def live_directory(self) -> str: ...


Resource = TypeVar("Resource")


class StreamSource(Protocol):
    @property
    def catalog(self) -> Catalog: ...

    def id_of(self, stream: str) -> str:
        """Return a stream's id, without opening storage; raise StreamNotFoundError if unknown."""

    def on_storage(self) -> Mapping[str, str | None]:
        """Return the streams that may have state, known to the catalog or not.

        The value is the stream's deployment if only savepoints are left, in a folder that deployments may share;
        otherwise None.
        """

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        """Open a stream by its id or the key of an asset that it writes; raise StreamNotFoundError if there is none.

        With `new_like`, a stream that never started gets the settings of that stream.
        """


class Connection:
    def __init__(
        self,
        catalog: str | Catalog,
        *,
        storage: str | CheckpointStorage | None = None,
        live_root: str | None = None,
        checkpointing: Mapping[str, CheckpointConfig] | None = None,
        origin: str | None = None,
    ) -> None:
        # Refuse wrong locations before opening the catalog, which may create it.
        opened_storage = storage_at(storage) if storage is not None else None
        folder = location_url("live_root", live_root) if live_root is not None else None
        self._is_own = isinstance(catalog, str)
        self._catalog = Catalog(catalog) if isinstance(catalog, str) else catalog
        self._defined: StreamSource | None = None
        self._storage = opened_storage
        self._live_root = folder
        self._options = {stream: config.options for stream, config in (checkpointing or {}).items()}
        self._origin = origin or _this_user()

    @classmethod
    def of_streams(cls, streams: StreamSource, *, origin: str) -> Self:
        """Return a client for streams whose settings come from elsewhere, such as a code location."""
        client = cls(streams.catalog, origin=origin)
        client._defined = streams
        client._is_own = True
        return client

    @classmethod
    def of_stream(cls, stream: StreamHandle, *, origin: str) -> Self:
        """Return a client for an open stream; it does not close the catalog."""

        def opened(name: str) -> StreamHandle:
            if name not in (stream.stream_id, stream.asset_key):
                raise StreamNotFoundError(f"This client was made for stream {stream.stream_id!r}, not {name!r}.")
            return stream

        client = cls(stream.catalog, origin=origin)
        client._defined = GivenStreams(
            stream.catalog, lambda name: opened(name).stream_id, opened, lambda: [stream.stream_id]
        )
        return client

    @classmethod
    def from_resources(
        cls,
        checkpoint_catalog: _CatalogResource,
        checkpoint_storage: _StorageResource | None = None,
        state_backend: _BackendResource | None = None,
        *,
        storage: str | None = None,
        live_root: str | None = None,
        origin: str | None = None,
    ) -> Self:
        """Return a client for the deployment that Dagster resources describe, with or without a run.

        `storage` and `live_root`, as of `Client`, are for a deployment without these resources.

        Example:
            >>> client = Client.from_resources(CheckpointCatalogResource(url="sqlite:////var/lib/catalog.db"))
        """
        client = cls(
            _ready(checkpoint_catalog).catalog(),
            storage=_ready(checkpoint_storage).storage() if checkpoint_storage is not None else storage,
            live_root=_ready(state_backend).live_directory if state_backend is not None else live_root,
            origin=origin,
        )
        client._is_own = True
        return client

    @property
    def catalog(self) -> Catalog:
        """The open catalog."""
        return self._catalog

    @property
    def origin(self) -> str:
        """Who operates."""
        return self._origin

    def operating_as(self, origin: str) -> Self:
        """Return this client for another operator; this one keeps the connections, and closes them."""
        other = copy.copy(self)
        other._origin, other._is_own = origin, False
        return other

    def close(self) -> None:
        """Close the catalog, unless the caller opened it."""
        if self._is_own:
            self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._catalog.database.shown_url!r}, origin={self._origin!r})"

    @cached_property
    def _streams(self) -> StreamSource:
        return self._defined or RecordedStreams(self._catalog, self._storage, self._live_root, self._options)

    def snapshot_folders(self, stream: str) -> list[str]:
        """Return the configured folders of a stream's snapshots, without opening them."""
        opened = self._open(stream)
        places = (getattr(opened.storage, name, None) for name in ("checkpoint_location", "savepoint_location"))
        checkpoints, savepoints = (place.url if isinstance(place, StoragePath) else None for place in places)
        own = f"{checkpoints}/{opened.stream_id}" if checkpoints is not None else None
        return [folder for folder in (own, savepoints or checkpoints) if folder is not None]

    def other_deployment(self, stream: str) -> str | None:
        """Return the id of another deployment whose state is in the stream's folder, as after the loss of its catalog.

        None also if the folder cannot be read.
        """
        from dagster_ckpt.stream.ownership import other_owner_of_live_folder

        try:
            return other_owner_of_live_folder(self._open(stream))
        except (CkptError, OSError):
            return None

    def _refuse_taken(self, stream_id: str, label: str | None) -> None:
        from dagster_ckpt.stream.snapshots import describe_snapshot

        listed = self._catalog.snapshots.completed(stream_id) if label is not None else []
        for each in listed:
            if each.label == label:
                raise OptionError(
                    f"Stream {stream_id!r} already has a snapshot with the label {label!r}: {describe_snapshot(each)} "
                    f"({each.snapshot_id}). Choose another label. Nothing was changed."
                )

    def _id_of(self, stream: str) -> str:
        return self._streams.id_of(stream)

    def _open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        return self._streams.open(stream, new_like=new_like)


@dataclass(frozen=True)
class GivenStreams:
    catalog: Catalog
    id_of: Callable[[str], str]
    open_stream: Callable[[str], StreamHandle]
    ids: Callable[[], list[str]]

    def on_storage(self) -> Mapping[str, str | None]:
        return dict.fromkeys(self.ids())

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:  # noqa: ARG002 - it has settings
        return self.open_stream(stream)


def _ready(resource: Resource) -> Resource:
    """Read the environment variables of a resource, which Dagster reads only in a run."""
    initialize = getattr(resource, "process_config_and_initialize", None)
    ready: Resource = initialize() if initialize is not None else resource
    return ready


def given_folder(folder: str | None, option: str = "target_directory") -> str | None:
    return location_url(option, folder) if folder is not None else None


def checked_target(label: str | None, target_directory: str | None) -> str | None:
    from dagster_ckpt.stream.start_from import checked_label

    target = given_folder(target_directory)
    checked_label(label)
    refuse_user_info("target_directory", target)
    return target


def _this_user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        user = "unknown user"
    return f"{user} on {socket.gethostname()}"


def storage_at(storage: str | CheckpointStorage) -> CheckpointStorage:
    from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage

    if not isinstance(storage, str):
        return storage
    root = location_url("storage", storage).rstrip("/")
    return FileSystemCheckpointStorage(root, savepoint_path=f"{root}/savepoints")


@dataclass(frozen=True)
class RecordedStreams:
    """Streams with the settings that the catalog recorded last."""

    catalog: Catalog
    storage: CheckpointStorage | None = None
    live_root: str | None = None
    options: Mapping[str, CheckpointOptions] = field(default_factory=dict)

    def id_of(self, stream: str) -> str:
        return self.catalog.streams.named(stream).stream_id

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        from dagster_ckpt.snapshot.opening import open_store
        from dagster_ckpt.stream.handle import StreamHandle
        from dagster_ckpt.stream.recorded_settings import KEEP_EVERYTHING, RecordedRestartStrategy, RecordedSettings

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

    def on_storage(self) -> Mapping[str, str | None]:
        from dagster_ckpt.snapshot.opening import stored_streams
        from dagster_ckpt.stream.handle import live_folders
        from dagster_ckpt.stream.snapshots import DEPLOYMENT

        if self.storage is None:
            raise OptionError(
                "No storage was given. Name the folder of the checkpoints: --storage s3://bucket/checkpoints on the "
                "command line, storage='s3://bucket/checkpoints' in Python."
            )
        stored: dict[str, str | None] = {}
        for stream_id, properties in stored_streams(self.storage).items():
            deployment = properties.get(DEPLOYMENT) if properties is not None else None
            stored[stream_id] = str(deployment) if deployment is not None else None
        return stored | dict.fromkeys(live_folders(self.live_root) if self.live_root else ())

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
    from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage, JobManagerCheckpointStorage

    if not isinstance(storage, FileSystemCheckpointStorage | JobManagerCheckpointStorage):
        return None
    return storage.checkpoint_location.url if storage.checkpoint_location is not None else None


def _with_access(recorded: CheckpointStorage, given: CheckpointStorage) -> CheckpointStorage:
    from dagster_ckpt.config.checkpoint_storage import (
        DeploymentStorage,
        FileSystemCheckpointStorage,
        JobManagerCheckpointStorage,
    )

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
