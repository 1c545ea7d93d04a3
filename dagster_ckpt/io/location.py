"""Locations of files: one spelling each, so that they can be compared, and the `FileIO` that opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster_ckpt.config.storage_path import StoragePath, local_path
from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.fsspec import FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO


def open_file_io(url: str, storage_options: Mapping[str, Any] | None = None, *, follow_links: bool = True) -> FileIO:
    """Open a tree of files by URL; nothing is created.

    Args:
        url: A URL of any fsspec file system; a path without a scheme is local.
        storage_options: Arguments for the fsspec file system.
        follow_links: See `LocalFileIO`.

    Raises:
        StorageAccessError: The file system is unknown or its driver is not installed.
    """
    if "\0" in url:
        raise StorageAccessError(f"{url!r} is no place of files: no path holds a NUL. Correct the URL.")
    path = local_path(url)
    if path is not None:
        return LocalFileIO(path, follow_links=follow_links)
    return FsspecFileIO(url, storage_options or {})


def normalised(location: str) -> str:
    """Normalise a location to a URL with `//` and without doubled or trailing slashes; a local path gets `file://`.

    Raises:
        StorageAccessError: It is not a URL, is a relative path, or contains user info.
    """
    try:
        path = StoragePath.parse("location", f"file://{location}" if location.startswith("/") else location)
    except OptionError as error:
        raise StorageAccessError(str(error)) from error
    if path.user_info:
        # Locations are stored in the catalog and shown.
        raise StorageAccessError(
            f"The location of {path.url} names a user. Leave that out: user name and password are taken from the "
            "configured storage, where that is on the same host."
        )
    return path.url
