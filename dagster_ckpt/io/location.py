"""Locations of files in one spelling each, patterns of them, and the `FileIO` that opens them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Folder:
    """A folder, whether it exists or not, to compare with others: look at the file system once, compare often.

    Attributes:
        name: Equal for every spelling of its location. A local folder is named by the inode of its nearest existing
            parent: the same through links, mounts or another letter case.
        within: The names of the folder itself and of every folder that it lies in.
    """

    name: str
    within: frozenset[str]

    def overlaps(self, other: Folder) -> bool:
        return self.name in other.within or other.name in self.within


def folder_of(url: str) -> Folder:
    path = local_path(url)
    names = _names_in_store(url) if path is None else _names_by_inode(path.resolve())
    return Folder(names[-1], frozenset(names))


def same_folder(one: str, other: str) -> bool:
    """Whether two locations are one folder, in any spelling: Spark writes `file:/a` for `/a`."""
    return folder_of(one).name == folder_of(other).name


def folders_overlap(one: str, other: str) -> bool:
    return folder_of(one).overlaps(folder_of(other))


def lies_in(inner: str, outer: str) -> bool:
    """Whether a folder is inside another one or the same."""
    return folder_of(outer).name in folder_of(inner).within


def _names_in_store(url: str) -> list[str]:
    """The names of a location and of all above it, the store's root first."""
    scheme, _, rest = with_authority(url).partition("://")
    authority, _, below = rest.partition("/")
    # As Hadoop's `Path` does.
    parts = posixpath.normpath("/" + below.lstrip("/")).split("/")[1:]
    root = f"{_DRIVERS.get(scheme.lower(), scheme.lower())}://{authority}"
    return [root, *("/".join((root, *parts[:number])) for number in range(1, len(parts) + 1) if parts != [""])]


def _names_by_inode(path: Path) -> list[str]:
    names: list[str] = []
    existing, inode = path, ""
    for folder in (*reversed(path.parents), path):
        try:
            stat = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            names.append(f"{inode}/{folder.relative_to(existing)}")
        except OSError:
            names.append(str(folder))
        else:
            existing, inode = folder, f"{stat.st_dev}:{stat.st_ino}"
            names.append(inode)
    return names


def spelled(url: str) -> str:
    """Return a location in one spelling, for patterns: local links are followed as far as there are no patterns."""
    path = local_path(url)
    return _names_in_store(url)[-1] if path is None else str(path.resolve())


# From Hadoop's `GlobPattern`.
_WILD = {"*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")", ",": "|"}


def as_expression(path: str) -> str:
    """Return a path with Hadoop's patterns as a regular expression."""
    found, depth, index = "", 0, 0
    while index < len(path):
        char = path[index]
        if char == "\\" and index + 1 < len(path):
            index += 1
            found += re.escape(path[index])
        elif char == "[" and "]" in path[index:]:
            end = path.index("]", index)
            inside = path[index + 1 : end]
            found += f"[{'^' if inside[:1] in ('!', '^') else ''}{inside.lstrip('!^')}]"
            index = end
        elif char in _WILD and (char != "," or depth) and (char != "}" or depth):
            depth += {"{": 1, "}": -1}.get(char, 0)
            found += _WILD[char]
        else:
            found += re.escape(char)
        index += 1
    return found if not depth else re.escape(path)
