"""Locations of the catalog, snapshots and live directories of a program without Dagster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import DeploymentStorage, FileSystemCheckpointStorage
from dagster_ckpt.config.state_backend import (
    DEFAULT_TRANSFER_THREADS,
    OnStateChange,
    StateBackend,
    StatePartitions,
    storage_of_stream,
)
from dagster_ckpt.policies.restart import RestartPolicy
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.storage_path import location_url


@dataclass(frozen=True)
class Deployment:
    """The locations of one program.

    Attributes:
        live_root: Folder of live directories.
        catalog_url: SQLAlchemy URL of the catalog.
        storage: Where snapshots are stored, unless the stream or its backend specifies it.
        executor_copy_bytes: Spark's executors copy snapshots that write more bytes than this; None: the driver
            copies.
    """

    live_root: str
    catalog_url: str
    storage: FileSystemCheckpointStorage
    executor_copy_bytes: int | None = None

    def stream(
        self,
        stream_id: str,
        *,
        catalog: Catalog,
        query_name: str,
        options: CheckpointOptions,
        restart: RestartPolicy,
        backend: StateBackend | None,
        savepoint_url: str | None,
        code_version: str | None = None,
        on_backend_change: OnStateChange = OnStateChange.REFUSE,
        state_partitions: StatePartitions | None = None,
    ) -> StreamHandle:
        """Create the handle of a stream.

        Args:
            stream_id: Its id.
            catalog: The catalog, opened.
            query_name: Name of its query in Spark.
            options: Its checkpointing options.
            restart: Its restart strategy.
            backend: Its state backend; None uses the session's settings.
            savepoint_url: Default folder of savepoints; None: next to the checkpoints.
            code_version: Version of the code, recorded in snapshots.
            on_backend_change: What a start does with state of another backend.
            state_partitions: Its number of state partitions; None keeps that of its state.

        Raises:
            OptionError: The storage cannot be used.
        """
        root = self.storage.checkpoint_location.url_to_open
        unset = DeploymentStorage(checkpoint_path=root, savepoint_path=savepoint_url or f"{root}/savepoints")
        storage = storage_of_stream(options.storage, backend, self.storage).configure(unset)
        threads = backend.transfer_threads if backend is not None else DEFAULT_TRANSFER_THREADS
        return StreamHandle(
            stream_id=stream_id,
            name=query_name,
            asset_key=stream_id,
            catalog=catalog,
            store=open_store(storage, stream_id, transfer_threads=threads),
            options=options,
            restart=restart,
            live_root=self.live_root,
            backend=backend,
            code_version=code_version,
            on_backend_change=on_backend_change,
            state_partitions=state_partitions,
            executor_copy_bytes=self.executor_copy_bytes,
            storage=storage,
        )

    def open_catalog(self) -> Catalog:
        """Open the catalog; the folder of a SQLite file is created if it does not exist.

        Raises:
            CatalogError: It cannot be opened.
        """
        return Catalog(self.catalog_url)


@dataclass(frozen=True)
class StreamsOfProgram:
    """The queries of a program as a client opens them: with the settings of the program.

    Attributes:
        catalog: The catalog.
        open_query: Opens the stream of a query, by the query's name.
    """

    catalog: Catalog
    open_query: Callable[[str], StreamHandle]

    def id_of(self, stream: str) -> str:
        """The id of a stream, which is the name of its query."""
        return stream

    def on_storage(self) -> list[str]:
        """Ids of the streams in the catalog: a program has the settings of those that it names."""
        return [stream.stream_id for stream in self.catalog.streams.all()]

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        """Open the stream of a query, whether or not it was ever started."""
        del new_like  # the program has every setting
        return self.open_query(stream)


def deployment_below(
    folder: Path, *, live_root: str | None, catalog_url: str | None, storage_path: str | None
) -> Deployment:
    """Return the locations of a program; nothing is created yet.

    Args:
        folder: Default folder of everything below.
        live_root: Folder of live directories, or None for `live` in the folder.
        catalog_url: URL of the catalog, or None for a SQLite file `catalog.db` in the folder.
        storage_path: URL of the folder of snapshots, or None for `snapshots` in the folder.

    Raises:
        OptionError: A path is relative, or the storage path is the root of a file system.
        OptionTypeError: It is not a string.
    """
    home = folder.absolute()
    return Deployment(
        live_root=live_root or f"file://{home / 'live'}",
        catalog_url=catalog_url or f"sqlite:///{home / 'catalog.db'}",
        storage=FileSystemCheckpointStorage(location_url("storage_path", storage_path or str(home / "snapshots"))),
    )
