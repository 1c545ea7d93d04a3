"""Hard-link files of other trees on this machine into a new tree.

Roots are opened once, as resolving two long paths takes a third of the time of a link. One thread handles small files,
as short calls of several wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

from blake3 import blake3

from dagster_ckpt.io.file_io import CancelCheck, FileVersion, accessing, in_threads, no_op
from dagster_ckpt.io.local import token_of, version_of

# Larger files are read in pieces, in threads.
_READ_WHOLE_BYTES = 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024
_UNWATCHED_FILES = 64


class KnownFile(Protocol):
    """A file whose content is known: `token` as in `FileVersion`, `digest` by BLAKE3."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def token(self) -> str | None: ...

    @property
    def digest(self) -> str: ...


Known = TypeVar("Known", bound=KnownFile)


class Linker:
    """Creates the tree if needed. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories = {""}
        self._descriptors: dict[str, int] = {}

    def link(self, tree: str, source: str, path: str) -> bool:
        self._make([_directory(path)])
        try:
            os.link(source, path, src_dir_fd=self._descriptor(tree), dst_dir_fd=self._target)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        return True

    def link_known(
        self,
        tree: str,
        files: Sequence[Known],
        *,
        by_version: Callable[[Known], bool],
        watch: Callable[[], None] = no_op,
    ) -> list[Known]:
        """Link the files that still have their known content, and return the others.

        Each is compared under its new name, where no other process can replace it.

        Args:
            by_version: Whether length and token prove the content; otherwise its digest is compared.
        """
        self._make({_directory(file.path) for file in files})
        try:
            source = self._descriptor(tree)
        except OSError:
            return list(files)
        target = self._target
        left: list[Known] = []
        large: list[Known] = []
        for number, file in enumerate(files):
            if number % _UNWATCHED_FILES == 0:
                watch()
            path = file.path
            try:
                os.link(path, path, src_dir_fd=source, dst_dir_fd=target)
            except OSError:
                left.append(file)
                continue
            is_trusted = by_version(file)
            if is_trusted or file.size > _READ_WHOLE_BYTES:
                is_known = _has_version(target, file)
            else:
                is_known = _has_content(target, file)
            if not is_known:
                self._unlink(path)
                left.append(file)
            elif not is_trusted and file.size > _READ_WHOLE_BYTES:
                large.append(file)
        for file in self._altered(large, watch):
            self._unlink(file.path)
            left.append(file)
        return left

    def linked_version(self, path: str) -> FileVersion:
        return version_of(os.stat(path, dir_fd=self._target))

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _altered(self, files: Sequence[Known], watch: Callable[[], None]) -> list[Known]:
        target = self._target

        def compare(file: Known, check_canceled: CancelCheck) -> bool:
            check_canceled()
            watch()
            return _has_content(target, file)

        same = in_threads(os.cpu_count() or 1, files, compare)
        return [file for file, is_same in zip(files, same, strict=True) if not is_same]

    def _unlink(self, path: str) -> None:
        with accessing("delete", f"file://{self.root}/{path}"):
            os.unlink(path, dir_fd=self._target)

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


def _has_version(root: int, file: KnownFile) -> bool:
    try:
        found = os.stat(file.path, dir_fd=root)
    except OSError:
        return False
    return found.st_size == file.size and token_of(found) == file.token


def _has_content(root: int, file: KnownFile) -> bool:
    try:
        descriptor = os.open(file.path, os.O_RDONLY, dir_fd=root)
        try:
            # One more byte than expected detects a file that has grown.
            data = os.read(descriptor, min(file.size + 1, _READ_BYTES))
            if len(data) == file.size:
                return blake3(data).hexdigest() == file.digest
            digest = blake3(data)
            while data:
                data = os.read(descriptor, _READ_BYTES)
                digest.update(data)
            return digest.hexdigest() == file.digest
        finally:
            os.close(descriptor)
    except OSError:
        return False
