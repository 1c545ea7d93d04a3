"""Copies a snapshot to another storage, byte for byte: data objects first, then `_metadata` atomically.

A copy shares its objects with the copies that are there, as the original does with its neighbors. An interrupted copy
leaves objects that a repetition uses, and that a sweep deletes.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from threading import Lock

from dagster_ckpt.errors import SnapshotCorruptError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.parallel import CancelCheck, in_threads
from dagster_ckpt.snapshot.reader import read_references
from dagster_ckpt.snapshot.writer import METADATA_NAME, Progress

_CHUNK_BYTES = 1 << 20


def copy_snapshot(
    source: FileIO, target: FileIO, directory: str, *, width: int, progress: Progress, again: bool = False
) -> int:
    """Copy a snapshot under its own name; returns the bytes that were written. Repeatable.

    Args:
        source: The parent folder of the snapshot, with all objects that it may share.
        again: Also write the objects that are there: a byte of them differs.

    Raises:
        StorageAccessError: Another snapshot of that name is there.
    """
    name = posixpath.join(directory, METADATA_NAME)
    metadata, objects = source.read(name), list(read_references(source, directory))
    there = target.read(name) if target.size(name) is not None else None
    if there not in (None, metadata):
        raise StorageAccessError(
            f"{target.url}/{directory} is another snapshot than {source.url}/{directory}: another deployment, or an "
            "earlier life of the stream, copies to this folder. Copy to a folder of its own."
        )
    sizes, present = source.sizes(objects), target.sizes(objects)
    missing = [each for each in objects if each not in sizes]
    if missing:
        raise SnapshotCorruptError(f"{source.url}/{missing[0]} is missing, so {source.url}/{directory} is not copied.")
    # Names are unique, and an object is visible as a whole only.
    wanted = [each for each in objects if again or present.get(each) != sizes[each]]
    lock, done = Lock(), 0

    def copy(each: str, check_canceled: CancelCheck) -> None:
        nonlocal done
        target.write(each, _chunks(source, each, check_canceled))
        with lock:
            done += 1
            progress(done, len(wanted))

    in_threads(width, wanted, copy)
    if there is None:
        target.write(name, [metadata], before_visible=lambda: _refuse_missing(target, directory, sizes))
    return sum(sizes[each] for each in wanted) + (len(metadata) if there is None else 0)


def _chunks(source: FileIO, name: str, check_canceled: CancelCheck) -> Iterator[bytes]:
    with source.open(name) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            check_canceled()
            yield chunk


def _refuse_missing(target: FileIO, directory: str, sizes: dict[str, int]) -> None:
    """Another process may have deleted an older copy with its objects."""
    there = target.sizes(list(sizes))
    missing = [name for name, size in sizes.items() if there.get(name) != size]
    if missing:
        raise StorageAccessError(
            f"{target.url}/{directory} was not completed: {missing[0]} was deleted while it was copied. Copy it again."
        )
