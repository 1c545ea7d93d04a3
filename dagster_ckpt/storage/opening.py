"""From a storage as it is configured to a store that can be used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dagster_ckpt.errors import OptionError
from dagster_ckpt.image import PACK_TARGET_BYTES, ObjectSpace
from dagster_ckpt.options import (
    CheckpointStorage,
    CustomCheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.options.checkpoint_storage import DEFAULT_WRITE_BUFFER_SIZE
from dagster_ckpt.options.state_backend import DEFAULT_TRANSFER_THREADS
from dagster_ckpt.storage.fsspec_space import PUT_AT_ONCE_BYTES, FsspecSpace
from dagster_ckpt.storage.local_space import LocalSpace
from dagster_ckpt.storage.memory_space import MemorySpace
from dagster_ckpt.storage.object_store import ObjectImageStore, StoreLayout
from dagster_ckpt.storage.store import ImageStore

MEMORY_URL = "jobmanager://memory"


def open_store(
    storage: CheckpointStorage, job_id: str, *, transfer_threads: int = DEFAULT_TRANSFER_THREADS
) -> ImageStore:
    """Open the place where a job's images live.

    Args:
        storage: Configuration of the storage.
        job_id: The job; its id is the name of its folder.
        transfer_threads: Data objects written or read at the same time, where there is enough to do. A custom storage
            has its own ways.

    Raises:
        OptionError: A custom storage cannot be loaded.
        StorageAccessError: The file system is unknown or its driver is not installed.
    """
    if isinstance(storage, FileSystemCheckpointStorage):
        root = storage.checkpoint_location.url
        return _store(
            StoreLayout(
                job_id=job_id,
                job_root=f"{root}/{job_id}",
                savepoint_root=_savepoint_root(storage) or root,
                inline_threshold=storage.get_min_file_size_threshold(),
                transfer_threads=transfer_threads,
                pack_least_bytes=PACK_TARGET_BYTES if root.startswith("file://") else PUT_AT_ONCE_BYTES,
            ),
            storage.storage_options,
            buffer_bytes=storage.get_write_buffer_size(),
        )
    if isinstance(storage, JobManagerCheckpointStorage):
        location = storage.checkpoint_location
        root = location.url if location is not None else MEMORY_URL
        return _store(
            StoreLayout(
                job_id=job_id,
                job_root=f"{root}/{job_id}",
                savepoint_root=_savepoint_root(storage) or (location.url if location is not None else None),
                # As in Flink, state goes into the metadata itself, which is why it must be small.
                inline_threshold=None,
                max_bytes=storage.get_max_state_size(),
            ),
            storage.storage_options,
            buffer_bytes=DEFAULT_WRITE_BUFFER_SIZE,
        )
    if isinstance(storage, CustomCheckpointStorage):
        return _custom(storage, job_id)
    raise OptionError(
        f"checkpoint storage is {storage!r}; give a FileSystemCheckpointStorage, a JobManagerCheckpointStorage "
        "or a CustomCheckpointStorage."
    )


def _store(layout: StoreLayout, options: Mapping[str, Any], *, buffer_bytes: int) -> ObjectImageStore:
    memory = MemorySpace(layout.job_root)
    schemes = {root.partition("://")[0] for root in (layout.job_root, layout.savepoint_root) if root is not None}

    def open_space(url: str) -> ObjectSpace:
        if url == layout.job_root and url.startswith(MEMORY_URL):
            return memory
        if url.startswith("file://"):
            return LocalSpace(Path(url.partition("://")[2]), buffer_bytes=buffer_bytes)
        # The options are those of the configured file system; a savepoint may go to another one.
        return FsspecSpace(url, options if url.partition("://")[0] in schemes else {})

    return ObjectImageStore(layout, open_space)


def _savepoint_root(storage: FileSystemCheckpointStorage | JobManagerCheckpointStorage) -> str | None:
    return storage.savepoint_location.url if storage.savepoint_location is not None else None


def _custom(storage: CustomCheckpointStorage, job_id: str) -> ImageStore:
    module, _, name = storage.factory.replace(":", ".").rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
        store = factory(job_id=job_id, **storage.settings)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(
            f"checkpoint storage factory {storage.factory!r} cannot be used: {error}. Give the import path of a class "
            "or function that takes job_id and the settings, and returns an ImageStore."
        ) from error
    verbs = [name for name in vars(ImageStore) if not name.startswith("_")]
    missing = [verb for verb in verbs if not hasattr(store, verb)]
    if missing:
        raise OptionError(
            f"{storage.factory!r} made a {type(store).__name__}, which has no {', '.join(missing)}: it is no "
            "ImageStore. Return one that has every method of dagster_ckpt.storage.ImageStore."
        )
    return cast("ImageStore", store)
