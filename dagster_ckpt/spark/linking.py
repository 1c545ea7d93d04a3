"""Hard links from other directory trees of this machine into a new one.

A third of the time of a link is the walk along two long paths. So the roots are opened once, and walked from there.
"""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path

from dagster_ckpt.spark.folder import FileVersion
from dagster_ckpt.spark.local_folder import version_of


class Linker:
    """Links files into a new tree; for one thread.

    Args:
        root: The new tree; it is made where it is not there yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        # The root is there; the path of a file without a directory begins with it.
        self._directories = {""}
        self._descriptors: dict[str, int] = {}

    def link(self, tree: str, source: str, path: str) -> bool:
        """Give a file of another tree a second name in the new one.

        Args:
            tree: Path of the other tree.
            source: Path of the file in it.
            path: Its path in the new tree.

        Returns:
            False where these file systems cannot.

        Raises:
            FileNotFoundError: It is not there.
        """
        directory = path.rpartition("/")[0]
        if directory not in self._directories:
            self._make(directory)
        try:
            os.link(source, path, src_dir_fd=self._descriptor(tree), dst_dir_fd=self._target)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        return True

    def version(self, tree: str, path: str) -> FileVersion:
        """Version of a file of another tree as it is now.

        Raises:
            OSError: It is not there, or cannot be looked at.
        """
        return version_of(os.stat(path, dir_fd=self._descriptor(tree)))

    def linked_version(self, path: str) -> FileVersion:
        """Version of a file of the new tree."""
        return version_of(os.stat(path, dir_fd=self._target))

    def close(self) -> None:
        """Let go of the trees."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _make(self, directory: str) -> None:
        parent = directory.rpartition("/")[0]
        if parent not in self._directories:
            self._make(parent)
        # Its files may have been given as bytes before.
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, dir_fd=self._target)
        self._directories.add(directory)

    @cached_property
    def _target(self) -> int:
        Path(self._root).mkdir(parents=True, exist_ok=True)
        return self._descriptor(self._root)

    def _descriptor(self, tree: str) -> int:
        descriptor = self._descriptors.get(tree)
        if descriptor is None:
            descriptor = self._descriptors[tree] = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        return descriptor
