"""Read, verify and copy snapshots."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import BinaryIO

from blake3 import blake3

from dagster_ckpt.errors import SnapshotCorruptError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.io.file_io import CancelCheck, FileIO, Hook, in_threads, no_op
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import Metadata, decode_metadata, decode_references, object_name
from dagster_ckpt.snapshot.packs import CHUNK_BYTES
from dagster_ckpt.snapshot.writer import METADATA_NAME, Progress

WriteEntry = Callable[[FileEntry, Iterable[bytes]], None]
DELETE_DAMAGED_COPY = "Delete the folder of this copy; the next call makes it again if its original exists."
_SHARE_BYTES = 16 * 1024 * 1024


def read_metadata(file_io: FileIO, directory: str) -> Metadata:
    data = _read(file_io, directory, METADATA_NAME)
    return decode_metadata(data, f"{file_io.url}/{posixpath.join(directory, METADATA_NAME)}")


def read_references(file_io: FileIO, directory: str, name: str = METADATA_NAME) -> dict[str, int]:
    """The bytes needed of each data object, by its name in the parent folder.

    The metadata has another `name` while the snapshot is being deleted.
    """
    references = decode_references(_read(file_io, directory, name), f"{file_io.url}/{posixpath.join(directory, name)}")
    return {object_name(directory, reference): length for reference, length in references.items()}


def _read(file_io: FileIO, directory: str, name: str) -> bytes:
    try:
        return file_io.read(posixpath.join(directory, name))
    except FileNotFoundError as error:
        raise SnapshotNotFoundError(
            f"There is no snapshot at {file_io.url}/{directory}: {name} is missing. A snapshot that was not finished "
            "has none. Name another snapshot."
        ) from error


def extract(
    file_io: FileIO,
    directory: str,
    write: WriteEntry,
    *,
    only: Callable[[str], bool] = lambda _path: True,
    missing: Callable[[Iterable[FileEntry]], Iterable[FileEntry]] = iter,
    threads: int = 1,
    metadata: Metadata | None = None,
) -> None:
    """See `SnapshotStore.extract`. `threads` is the number of objects, or parts of one, read concurrently."""
    metadata = metadata or read_metadata(file_io, directory)
    wanted = (entry for entry in metadata.manifest.files if only(entry.path))
    entries = sorted(missing(wanted), key=lambda entry: (entry.object or "", entry.offset))

    def hand_out(share: Sequence[FileEntry], check_canceled: CancelCheck) -> None:
        part = range(share[0].offset, max(entry.offset + entry.size for entry in share))
        with _opened(file_io, directory, share[0].object, metadata.inline, part) as stream:
            for entry in share:
                check_canceled()
                write(entry, _checked(stream, entry, f"{file_io.url}/{directory}"))

    in_threads(threads, list(_shares(entries)), hand_out)


def verify_snapshot(file_io: FileIO, directory: str, *, deep: bool = True) -> list[str]:
    """See `SnapshotStore.verify`.

    Without `deep`, only check that the data objects exist and are long enough. StorageAccessError says nothing about
    the snapshot.
    """
    try:
        metadata = read_metadata(file_io, directory)
    except (SnapshotNotFoundError, SnapshotCorruptError) as error:
        return [str(error)]
    problems = metadata.manifest.unusable_objects(file_io, directory)
    if not deep or problems:
        return problems

    def check(_entry: FileEntry, chunks: Iterable[bytes]) -> None:
        try:
            for _ in chunks:
                pass
        except SnapshotCorruptError as error:
            problems.append(str(error))

    try:
        extract(file_io, directory, check, metadata=metadata)
    except SnapshotCorruptError as error:
        problems.append(str(error))
    return problems


def _shares(entries: Sequence[FileEntry]) -> Iterator[list[FileEntry]]:
    for _, group in groupby(entries, key=lambda entry: entry.object):
        share: list[FileEntry] = []
        for entry in group:
            # Gaps are fetched as well.
            if share and entry.offset + entry.size - share[0].offset > _SHARE_BYTES:
                yield share
                share = []
            share.append(entry)
        yield share


def _opened(file_io: FileIO, directory: str, reference: str | None, inline: bytes, part: range) -> BinaryIO:
    if reference is None:
        return io.BytesIO(inline)
    name = object_name(directory, reference)
    try:
        return file_io.open(name, part)
    except FileNotFoundError as error:
        raise SnapshotCorruptError(
            f"{file_io.url}/{name} is missing, and a snapshot refers to it. Put it back, or start from another "
            "snapshot."
        ) from error


def _checked(stream: BinaryIO, entry: FileEntry, location: str) -> Iterator[bytes]:
    stream.seek(entry.offset)
    if entry.size <= CHUNK_BYTES:
        data = stream.read(entry.size)
        if len(data) < entry.size:
            raise _ends_early(entry, entry.size - len(data), location)
        if blake3(data).hexdigest() != entry.digest:
            raise _altered(entry, location)
        yield data
        return
    digest = blake3()
    left = entry.size
    while left:
        chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise _ends_early(entry, left, location)
        digest.update(chunk)
        left -= len(chunk)
        yield chunk
    if digest.hexdigest() != entry.digest:
        raise _altered(entry, location)


def _ends_early(entry: FileEntry, left: int, location: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(
        f"{location}: the data of {entry.path} ends {left} bytes early: truncated. Start from another snapshot."
    )


def _altered(entry: FileEntry, location: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(
        f"{location}: the content of {entry.path} does not have the digest it was written with: it was altered. "
        "Start from another snapshot."
    )


def copy_snapshot(
    source: FileIO,
    target: FileIO,
    directory: str,
    *,
    width: int,
    progress: Progress,
    again: bool = False,
    before_write: Hook = no_op,
) -> int:
    """Copy a snapshot under its own name, data objects first; returns the bytes written. Repeatable.

    A copy shares its objects with the copies that are there. A repetition uses the objects of an interrupted copy; a
    sweep deletes them.

    Args:
        source: The parent folder of the snapshot, with all objects that it may share.
        again: Also write the objects that are there: a byte of them differs.

    Raises:
        SnapshotNotFoundError: There is no original.
        SnapshotCorruptError: The original lacks bytes that the copy does not have either, or the copy is damaged.
        StorageAccessError: Another snapshot of that name is there.
    """
    name = posixpath.join(directory, METADATA_NAME)
    metadata, needed = _read(source, directory, METADATA_NAME), read_references(source, directory)
    there = target.read(name) if target.size(name) is not None else None
    if there not in (None, metadata):
        _refuse_damaged(target, directory, there or b"")
        raise StorageAccessError(
            f"{target.url}/{directory} is another snapshot than {source.url}/{directory}: another deployment, or an "
            "earlier life of the stream, copies to this folder. Copy to a folder of its own."
        )
    sizes, present = source.sizes(list(needed)), target.sizes(list(needed))
    lacking = {each for each, length in needed.items() if present.get(each, -1) < length}
    # An object that was cut short must not replace a longer one, whose end other copies may need.
    wanted = [each for each in needed if each in lacking or (again and sizes.get(each, -1) >= present[each])]
    for each in wanted:
        if sizes.get(each, -1) < needed[each]:
            found = "is missing" if each not in sizes else f"has {sizes[each]} bytes, {needed[each]} are needed"
            raise SnapshotCorruptError(f"{source.url}/{each} {found}, so {source.url}/{directory} is not copied.")
    lock, done = Lock(), 0

    def copy(each: str, check_canceled: CancelCheck) -> None:
        nonlocal done
        target.write(each, _chunks(source, each, check_canceled))
        with lock:
            done += 1
            progress(done, len(wanted))

    before_write()
    in_threads(width, wanted, copy)
    if there is None:
        target.write(name, [metadata], before_visible=lambda: _refuse_missing(target, directory, needed))
    return sum(sizes[each] for each in wanted) + (len(metadata) if there is None else 0)


def _refuse_damaged(target: FileIO, directory: str, metadata: bytes) -> None:
    try:
        decode_metadata(metadata, f"{target.url}/{posixpath.join(directory, METADATA_NAME)}")
    except SnapshotCorruptError as error:
        raise SnapshotCorruptError(
            f"the copy {target.url}/{directory} is damaged: {error} {DELETE_DAMAGED_COPY}"
        ) from error


def _chunks(source: FileIO, name: str, check_canceled: CancelCheck) -> Iterator[bytes]:
    with source.open(name) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            check_canceled()
            yield chunk


def _refuse_missing(target: FileIO, directory: str, needed: Mapping[str, int]) -> None:
    there = target.sizes(list(needed))
    missing = [name for name, length in needed.items() if there.get(name, -1) < length]
    if missing:
        raise StorageAccessError(
            f"{target.url}/{directory} was not completed: {missing[0]} was deleted while it was copied. Copy it again."
        )
