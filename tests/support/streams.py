"""The streams of the tests: where a stream in a folder has its catalog, its snapshots and its live directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import CheckpointStorage, FileSystemCheckpointStorage
from dagster_ckpt.policies.restart import RestartPolicy, RestartStrategies
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle
from tests.support.places import catalog_at, is_local, place


def storage_at(root: Path, inline_bytes: int = 64) -> FileSystemCheckpointStorage:
    """Where the streams of a folder have their snapshots; a file larger than so many bytes is an object of its own."""
    return FileSystemCheckpointStorage(
        place(root / "snapshots"), inline_bytes, savepoint_path=place(root / "savepoints")
    )


def stream_at(
    root: Path,
    stream_id: str = "orders",
    *,
    name: str | None = None,
    catalog: Catalog | str | None = None,
    storage: CheckpointStorage | None = None,
    restart: RestartPolicy | None = None,
    **checkpointing: Any,
) -> StreamHandle:
    """A stream as a process finds it that knows no more than its folder; nothing is registered, and nothing runs.

    Args:
        root: The folder.
        stream_id: Its id.
        name: Default: the id.
        catalog: Its catalog, or a URL of one; default: a SQLite file in the folder.
        storage: Default: `storage_at(root)`.
        restart: Default: no restart.
        checkpointing: Of `CheckpointConfig`.
    """
    storage = storage or storage_at(root)
    return StreamHandle(
        stream_id=stream_id,
        name=name or stream_id,
        asset_key=stream_id,
        catalog=catalog if isinstance(catalog, Catalog) else Catalog(catalog or catalog_at(root)),
        store=open_store(storage, stream_id),
        options=CheckpointConfig(**checkpointing).options,
        restart=restart or RestartStrategies.no_restart(),
        live_root=str(root / "live") if is_local() else place(root / "live"),
        storage=storage,
    )
