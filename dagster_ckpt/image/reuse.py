"""What an image may take from the one before it, instead of writing the same bytes again."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence

from dagster_ckpt.image.manifest import FileEntry, Manifest
from dagster_ckpt.image.source import SourceFile
from dagster_ckpt.image.space import ObjectSpace

# Below this share of bytes in use an object is not shared any further: its last users are written anew, so that
# it can be deleted. Rewriting costs at most a third of what it frees.
SPARSE = 0.25


def object_name(directory: str, reference: str) -> str:
    """Name in the space of a data object that an image in `directory` refers to."""
    return posixpath.normpath(posixpath.join(directory, reference))


class Reusable:
    """Files of a base image, found by identity or by content.

    Args:
        entries: What may be shared; each lies in a data object.
    """

    def __init__(self, entries: Sequence[FileEntry] = ()) -> None:
        self._by_identity = {entry.identity: entry for entry in entries if entry.identity is not None}
        self._by_digest = {(entry.digest, entry.size): entry for entry in entries}
        self._sizes = {entry.size for entry in entries}

    def by_identity(self, file: SourceFile) -> FileEntry | None:
        """The entry of the same identity, which makes reading the file unnecessary."""
        known = self._by_identity.get(file.identity) if file.identity is not None else None
        return known if known is not None and known.size == file.size else None

    def by_content(self, digest: str, size: int) -> FileEntry | None:
        """The entry of the same content."""
        return self._by_digest.get((digest, size))

    def is_likely(self, size: int) -> bool:
        """Whether any entry could have the same content."""
        return size in self._sizes

    def add(self, entry: FileEntry) -> None:
        """Let later files of the same image share what was just written."""
        self._by_digest[entry.digest, entry.size] = entry
        self._sizes.add(entry.size)


def reusable(space: ObjectSpace, directory: str, base: Manifest | None, files: Sequence[SourceFile]) -> Reusable:
    """Choose what may be shared with a base image.

    Left out are the objects that are missing or too short, so that damage done to one image does not spread to the
    next, and those that hardly anything in use keeps alive.

    Args:
        space: Where both images are.
        directory: Directory of the new image, a sibling of the base's.
        base: The image to share with.
        files: Files of the new image.
    """
    if base is None:
        return Reusable()
    entries = [entry for entry in base.files if entry.object is not None]
    identities = {file.identity for file in files if file.identity is not None}
    places = {(file.path, file.size) for file in files}
    needed: dict[str, int] = {}
    in_use: Counter[str] = Counter()
    for entry in entries:
        name = entry.object or ""
        needed[name] = max(needed.get(name, 0), entry.offset + entry.size)
        if entry.identity in identities or (entry.path, entry.size) in places:
            in_use[name] += entry.size
    good = set()
    for name, length in needed.items():
        size = space.size(object_name(directory, name)) if in_use[name] else None
        if size is not None and size >= length and in_use[name] >= size * SPARSE:
            good.add(name)
    return Reusable([entry for entry in entries if entry.object in good])
