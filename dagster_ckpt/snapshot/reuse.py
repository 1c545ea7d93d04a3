"""Inputs of a snapshot (`Source`), and reuse of unchanged content from an earlier snapshot (`Base`, `Reusable`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Protocol

from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.container import Metadata
from dagster_ckpt.snapshot.entries import FileEntry, is_line_of, parse_line, place_of
from dagster_ckpt.snapshot.manifest import Manifest, object_name


class Source(Protocol):
    """One file to put into a snapshot.

    Attributes:
        path: Its name in the snapshot, a relative POSIX path.
        size: Its length in bytes; a stream of another length is rejected.
        identity: A name that is unique to this content, such as one that contains a uuid, or None.
        token: A value that changes when the file is replaced: inode and time of a local file, the
            entity tag of an object. None if the storage has nothing reliable.
        stable: Whether the next snapshots will probably contain it too. Stable files are stored
            together, so that a snapshot can reuse all of them at once.

    If an earlier snapshot has the same path with the same identity or token, the bytes are not
    read. Otherwise the content is compared.
    """

    @property
    def path(self) -> str:
        """Name in the snapshot."""
        ...

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    @property
    def identity(self) -> str | None:
        """A name that is unique to this content."""
        ...

    @property
    def token(self) -> str | None:
        """A value that changes when the file is replaced."""
        ...

    @property
    def stable(self) -> bool:
        """Whether the next snapshots will probably contain it too."""
        ...

    def open(self) -> BinaryIO:
        """Open the bytes."""
        ...

    def read(self) -> bytes:
        """All bytes, or more than `size` if the file has grown; for small files."""
        ...


@dataclass(frozen=True)
class SourceFile:
    """A source that is opened by a function. See `Source` for the attributes."""

    path: str
    size: int
    identity: str | None
    open: Callable[[], BinaryIO]
    token: str | None = None
    stable: bool = False

    def read(self) -> bytes:
        """All bytes."""
        with self.open() as stream:
            return stream.read(self.size + 1)


# If less than this share of an object's bytes is in use, it is not shared any more: the remaining
# files are written again, so that it can be deleted. Rewriting costs at most a third of what it
# frees.
SPARSE = 0.25

# Makes an object of the base snapshot available to the new one, given its reference there; returns
# the new reference, or None if the object cannot be shared.
Share = Callable[[str], str | None]


@dataclass(frozen=True)
class Base:
    """An earlier snapshot, to share with.

    Attributes:
        metadata: Its metadata.
        space: The space of its data objects.
        directory: Its directory there.
        is_beside: Whether both snapshots refer to the same objects by the same names. Otherwise
            each object has to be adopted first, and is not shared if that is impossible.
    """

    metadata: Metadata
    space: FileIO
    directory: str
    is_beside: bool = True

    @cached_property
    def good_objects(self) -> frozenset[str]:
        """References of the data objects worth sharing.

        Missing and truncated objects are left out, so that damage to one snapshot does not spread
        to the next. So are objects of which hardly anything is still in use.
        """
        uses = self.metadata.manifest.uses
        sizes = self.space.sizes([object_name(self.directory, name) for name in uses])
        good = set()
        for name, use in uses.items():
            size = sizes.get(object_name(self.directory, name))
            if size is not None and size >= use.length and use.used >= size * SPARSE:
                good.add(name)
        return frozenset(good)

    @property
    def can_be_extended(self) -> bool:
        """Whether another snapshot can reuse all stable files of this one at once."""
        stable = self.metadata.manifest.stable
        return self.is_beside and bool(stable) and all(self.good_objects.issuperset(part.uses) for part in stable)


class Reusable:
    """Files of a base snapshot that a new one may share.

    Args:
        base: The snapshot, or None to share nothing.
        take: Makes an object of the base available to the new snapshot.
        is_extended: Whether the new snapshot reuses all stable files of the base. Searching them
            for equal content would then cost more than writing the new files.
    """

    def __init__(self, base: Base | None, take: Share, *, is_extended: bool) -> None:
        self._base = base
        self._is_extended = is_extended
        self._share_object = take
        self._references: dict[str, str | None] = {}
        self._by_digest: dict[bytes, bytes] | None = None
        self._good = base.good_objects if base is not None else frozenset()
        self._lock = threading.RLock()

    @property
    def inline(self) -> bytes:
        """The inlined bytes of the base."""
        return self._base.metadata.inline if self._base is not None else b""

    def unchanged(self, file: Source) -> bytes | None:
        """The line of a file that is certainly unchanged and need not be read, or None."""
        if self._base is None or (file.identity is None and file.token is None):
            return None
        line = self._base.metadata.manifest.find_line(file.path, stable=file.stable)
        if line is None:
            return None
        if is_line_of(line, file.path, file.size, file.identity, file.token):
            return self._shared(line)
        # One match is enough: a linked file may have the same token under another identity, a
        # restored file the same identity with another token.
        entry = parse_line(line)
        same = (file.identity is not None and entry.identity == file.identity) or (
            file.token is not None and entry.token == file.token
        )
        if not same or entry.size != file.size:
            return None
        return self._shared(entry._replace(identity=file.identity, token=file.token).line())

    def is_likely(self, file: Source) -> bool:
        """Whether a file probably has the same content as in the base."""
        manifest = self._base.metadata.manifest if self._base is not None else None
        entry = manifest.find(file.path, stable=file.stable) if manifest is not None else None
        return entry is not None and entry.size == file.size

    def same_content(self, digest: str, file: Source) -> FileEntry | None:
        """An entry for a file whose content is in an object of the base, under any path."""
        if self._base is None or self._is_extended:
            return None
        with self._lock:
            line = self._with_digest(self._base.metadata.manifest, digest)
        if line is None:
            return None
        entry = parse_line(line)
        if entry.digest != digest or entry.size != file.size or entry.object is None:
            return None
        taken = self._taken(entry.object)
        if taken is None:
            return None
        return entry._replace(path=file.path, identity=file.identity, token=file.token, object=taken)

    def _with_digest(self, manifest: Manifest, digest: str) -> bytes | None:
        if self._by_digest is None:
            kept = [segment for segment in manifest.segments if not segment.is_packed]
            # Keyed by a part of the digest, to save memory.
            self._by_digest = {line[2:18]: line for segment in kept for line in segment.lines}
        line = self._by_digest.get(digest[:16].encode())
        packed = (segment for segment in manifest.segments if line is None and segment.is_packed)
        return next(filter(None, (segment.with_digest(digest) for segment in packed)), line)

    def _shared(self, line: bytes) -> bytes | None:
        """The line for the new snapshot, or None if its object cannot be shared."""
        reference, _ = place_of(line)
        if reference is None:
            return line
        taken = self._taken(reference)
        if taken is None or taken == reference:
            return line if taken is not None else None
        return parse_line(line)._replace(object=taken).line()

    def _taken(self, reference: str) -> str | None:
        """Reference in the new snapshot to an object of the base, or None if it is not shared."""
        with self._lock:
            if reference not in self._references:
                self._references[reference] = self._take(reference)
            return self._references[reference]

    def _take(self, reference: str) -> str | None:
        base = self._base
        if base is None:
            return None
        return self._share_object(reference) if reference in self._good else None
