"""Locations of the catalog, snapshots and live directories of a program without Dagster."""

from __future__ import annotations

from collections.abc import Sequence
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
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.storage_path import location_url


@dataclass(frozen=True)
class Deployment:
    """The locations of one program.

    Attributes:
        executor_copy_bytes: Executors copy larger snapshots; None: the driver copies.
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
        state_migrations: Sequence[StateMigration] = (),
    ) -> StreamHandle:
        """Backend None uses the session's settings; savepoint URL None stores savepoints next to checkpoints."""
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
            state_migrations=tuple(state_migrations),
        )

    def open_catalog(self) -> Catalog:
        """The folder of a SQLite file is created."""
        return Catalog(self.catalog_url)


def deployment_below(
    folder: Path, *, live_root: str | None, catalog_url: str | None, storage_path: str | None
) -> Deployment:
    """By default `live`, `catalog.db` and `snapshots` in a folder."""
    home = folder.absolute()
    return Deployment(
        live_root=live_root or f"file://{home / 'live'}",
        catalog_url=catalog_url or f"sqlite:///{home / 'catalog.db'}",
        storage=FileSystemCheckpointStorage(location_url("storage_path", storage_path or str(home / "snapshots"))),
    )
