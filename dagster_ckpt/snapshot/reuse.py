"""Inputs of a snapshot (`Source`), and reuse of unchanged content from an earlier one (`BaseSnapshot`, `Reuse`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Protocol

from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import Manifest, Metadata, object_name


class ContentCheck(Protocol):
    """Compares a file with the checksums that it carries, while it is read."""

    def update(self, chunk: bytes) -> None: ...

    def trouble(self) -> str | None:
        """What is wrong with the whole file; None if it is intact."""


class Source(Protocol):
    """One file to put into a snapshot.

    It is not read if an earlier snapshot has a file with its path and its identity or token; otherwise the content is
    compared.
    """

    @property
    def path(self) -> str:
        """A relative POSIX path."""

    @property
    def size(self) -> int:
        """The exact length: a stream of another length is rejected."""

    @property
    def identity(self) -> str | None:
        """Unique to this content, such as a name that contains a uuid."""

    @property
    def token(self) -> str | None:
        """See `FileVersion.token`."""

    @property
    def stable(self) -> bool:
        """Whether the next snapshots will probably contain it, so that it is worth storing for reuse."""

    def open(self) -> BinaryIO: ...

    def read(self) -> bytes:
        """All bytes, or more than `size` if the file has grown; for small files."""

    def check(self) -> ContentCheck | None:
        """A check that new bytes must pass; None if the file carries no checksums."""


@dataclass(frozen=True)
class SourceFile:
    path: str
    size: int
    identity: str | None
    open: Callable[[], BinaryIO]
    token: str | None = None
    stable: bool = False

    def read(self) -> bytes:
        with self.open() as stream:
            return stream.read(self.size + 1)

    def check(self) -> None:
        return


# An object with a smaller share in use is written again, which costs at most a third of what its deletion frees.
SPARSE = 0.25

ShareObject = Callable[[str], str | None]


@dataclass(frozen=True)
class BaseSnapshot:
    """An earlier snapshot, whose content a new one may share.

    Attributes:
        same_folder: Both refer to the same objects by the same names. Otherwise each object has to be linked or copied.
        sizes: Sizes of its objects when this process wrote it; None: list them. They are listed again before the next
            snapshot becomes visible.
    """

    metadata: Metadata
    file_io: FileIO
    directory: str
    same_folder: bool = True
    sizes: Mapping[str, int] | None = None

    @property
    def manifest(self) -> Manifest:
        return self.metadata.manifest

    @cached_property
    def usable_objects(self) -> frozenset[str]:
        """Objects that are neither missing or truncated, so that damage does not spread, nor hardly in use."""
        uses = self.manifest.uses
        sizes = self.sizes if self.sizes is not None else self.manifest.object_sizes(self.file_io, self.directory)
        usable = set()
        for name, use in uses.items():
            size = sizes.get(object_name(self.directory, name))
            if size is not None and size >= use.length and use.used >= size * SPARSE:
                usable.add(name)
        return frozenset(usable)

    @property
    def can_be_extended(self) -> bool:
        stable = self.manifest.stable_blocks
        return self.same_folder and bool(stable) and all(self.usable_objects.issuperset(part.uses) for part in stable)


class Reuse:
    """Finds files that a new snapshot can share with its base.

    If the snapshot `extends` the base, its stable files are new, and not searched there.
    """

    def __init__(self, base: BaseSnapshot | None, share_object: ShareObject, *, extends: bool) -> None:
        self._base = base
        self._extends = extends
        self._share_object = share_object
        self._references: dict[str, str | None] = {}
        self._usable = base.usable_objects if base is not None else frozenset()
        self._lock = threading.Lock()

    def unchanged(self, file: Source) -> FileEntry | None:
        entry = self._entry(file)
        if entry is None or entry.size != file.size:
            return None
        # A linked file may have the same token under another identity, a restored file the same identity with another
        # token.
        same_identity = file.identity is not None and entry.identity == file.identity
        same_token = file.token is not None and entry.token == file.token
        if not (same_identity or same_token):
            return None
        reference = self._reference(entry.object) if entry.object is not None else None
        if reference is None and entry.object is not None:
            return None
        return FileEntry(entry.digest, file.path, file.size, file.identity, file.token, reference, entry.offset)

    def is_likely_unchanged(self, file: Source) -> bool:
        entry = self._entry(file)
        return entry is not None and entry.size == file.size and entry.object is not None

    def stored_at(self, file: Source, digest: str) -> tuple[str, int] | None:
        entry = self._entry(file)
        if entry is None or entry.object is None or (entry.size, entry.digest) != (file.size, digest):
            return None
        reference = self._reference(entry.object)
        return (reference, entry.offset) if reference is not None else None

    def _entry(self, file: Source) -> FileEntry | None:
        if self._base is None or (self._extends and file.stable):
            return None
        return self._base.manifest.find(file.path, stable=not self._extends)

    def _reference(self, reference: str) -> str | None:
        with self._lock:
            if reference not in self._references:
                is_usable = reference in self._usable
                self._references[reference] = self._share_object(reference) if is_usable else None
            return self._references[reference]
