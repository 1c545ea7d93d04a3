"""Locations of files in one spelling each, and the `FileIO` that opens them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.fsspec import FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.values.storage_path import StoragePath, local_path, with_authority

_DRIVERS = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}


def open_file_io(url: str, storage_options: Mapping[str, Any] | None = None, *, follow_links: bool = True) -> FileIO:
    """Open a location; a path without a scheme is local. Nothing is created."""
    if "\0" in url:
        raise StorageAccessError(
            f"{url!r} is not a valid location: a path cannot contain a NUL character. Correct the URL."
        )
    path = local_path(url)
    if path is not None:
        return LocalFileIO(path, follow_links=follow_links)
    return FsspecFileIO(with_authority(url), storage_options or {})


def normalised(location: str) -> str:
    """Return a location with `//` and no doubled or trailing slashes; a local path gets `file://`."""
    try:
        path = StoragePath.parse("location", f"file://{location}" if location.startswith("/") else location)
    except OptionError as error:
        raise StorageAccessError(str(error)) from error
    if path.user_info:
        # Locations are stored in the catalog and shown.
        raise StorageAccessError(
            f"The location {path.url} contains a user name. Remove it: user name and password are taken from the "
            "configured storage, if that is on the same host."
        )
    return path.url


def same_folder(one: str, other: str) -> bool:
    """Whether two locations are one folder, in any spelling: Spark writes `file:/a` for `/a`."""
    return _plain(one) == _plain(other)


def folders_overlap(one: str, other: str) -> bool:
    return lies_in(one, other) or lies_in(other, one)


def lies_in(inner: str, outer: str) -> bool:
    """Whether a folder is inside another one or the same. Neither needs to exist; links are followed."""
    path = local_path(inner)
    if path is None:
        return f"{_plain(inner).rstrip('/')}/".startswith(f"{_plain(outer).rstrip('/')}/")
    path = path.resolve()
    return _plain(outer) in {_known_by_its_inode(each) for each in (path, *path.parents)}


def _plain(url: str) -> str:
    path = local_path(url)
    if path is not None:
        return _known_by_its_inode(path)
    scheme, _, rest = with_authority(url).partition("://")
    authority, _, below = rest.partition("/")
    # As Hadoop's `Path` does.
    return f"{_DRIVERS.get(scheme.lower(), scheme.lower())}://{authority}{posixpath.normpath('/' + below.lstrip('/'))}"


def _known_by_its_inode(path: Path) -> str:
    """Return one text for all paths to a folder, through links, mounts or another letter case."""
    path = path.resolve()
    for there in (path, *path.parents):
        try:
            stat = there.stat()
        except (FileNotFoundError, NotADirectoryError):
            # Relative to its nearest existing parent.
            continue
        except OSError:
            break
        return f"{stat.st_dev}:{stat.st_ino}/{path.relative_to(there)}"
    return str(path)
