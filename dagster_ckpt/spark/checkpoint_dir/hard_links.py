"""Create hard links from other directory trees on this machine in a new tree.

Resolving two long paths takes a third of the time of a link, so the roots are opened once and paths
are resolved from there. A single thread does everything: with calls this short, two threads would
wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from dagster_ckpt.io.access import accessing
from dagster_ckpt.io.file_io import FileVersion
from dagster_ckpt.io.local import token_of, version_of
from dagster_ckpt.snapshot.entries import FileEntry


class Linker:
    """Links files into a new tree. Not thread-safe.

    Args:
        root: The new tree; created if it does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # The root exists; the path of a file without a directory begins with it.
        self._directories = {""}
        self._descriptors: dict[str, int] = {}

    def link(self, tree: str, source: str, path: str) -> bool:
        """Link a file of another tree into the new one.

        Args:
            tree: Path of the other tree.
            source: Path of the file in it.
            path: Its path in the new tree.

        Returns:
            False if these file systems do not support it.

        Raises:
            FileNotFoundError: The file does not exist.
            StorageAccessError: Its directory cannot be created.
        """
        self._make([_directory(path)])
        try:
            os.link(source, path, src_dir_fd=self._descriptor(tree), dst_dir_fd=self._target)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        return True

    def link_unchanged(self, tree: str, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Link those files into the new tree that have not changed since a snapshot was taken.

        Args:
            tree: Path of the tree that may contain them, under the same paths.
            entries: The files; each has a token.

        Returns:
            The files that were not linked.

        Raises:
            StorageAccessError: Their directories cannot be created.
        """
        self._make({_directory(entry.path) for entry in entries})
        try:
            source = self._descriptor(tree)
        except OSError:
            return list(entries)
        return [entry for entry in entries if not _is_linked(entry, source, self._target)]

    def unlink(self, path: str) -> None:
        """Delete a file of the new tree.

        Raises:
            StorageAccessError: It cannot be deleted.
        """
        with accessing("delete", f"file://{self.root}/{path}"):
            os.unlink(path, dir_fd=self._target)

    def linked_version(self, path: str) -> FileVersion:
        """Version of a file of the new tree."""
        return version_of(os.stat(path, dir_fd=self._target))

    def close(self) -> None:
        """Close the trees."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _make(self, directories: Iterable[str]) -> None:
        new = sorted(directory for directory in directories if directory not in self._directories)
        if not new:
            return
        with accessing("write", f"file://{self.root}"):
            for directory in new:
                _make_with_parents(directory, self._target)
        self._directories.update(new)

    @cached_property
    def _target(self) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        return self._descriptor(str(self.root))

    def _descriptor(self, tree: str) -> int:
        descriptor = self._descriptors.get(tree)
        if descriptor is None:
            descriptor = self._descriptors[tree] = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        return descriptor


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _make_with_parents(directory: str, root: int) -> None:
    try:
        os.mkdir(directory, dir_fd=root)
    except FileExistsError:
        return  # the file was already written as bytes
    except FileNotFoundError:
        _make_with_parents(_directory(directory), root)
        _make_with_parents(directory, root)


def _is_linked(entry: FileEntry, source: int, target: int) -> bool:
    """Link a file and check that it is the one in the snapshot; otherwise remove the link and return False."""
    _, path, size, _, token, _, _ = entry
    try:
        os.link(path, path, src_dir_fd=source, dst_dir_fd=target)
        # Checked under its new name, where no other process can replace it.
        found = os.stat(path, dir_fd=target)
        if found.st_size == size and token_of(found) == token:
            return True
        os.unlink(path, dir_fd=target)
    except OSError:
        return False
    return False
