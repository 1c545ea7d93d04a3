"""From the URL of a directory tree to the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.folder import Folder, local_path
from dagster_ckpt.spark.local_folder import LocalFolder
from dagster_ckpt.spark.remote_folder import RemoteFolder


def open_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Open a directory tree by URL; nothing is created.

    Args:
        url: A URL of any file system fsspec knows; a path without a scheme is local.
        storage_options: Arguments of the fsspec file system.

    Raises:
        StorageAccessError: The file system is unknown or its driver is not installed.
    """
    if "\0" in url:
        raise StorageAccessError(f"{url!r} is no place of files: no path holds a NUL. Correct the URL.")
    path = local_path(url)
    return LocalFolder(path) if path is not None else RemoteFolder(url, storage_options or {})
