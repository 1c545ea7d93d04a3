"""Read snapshots: parse the manifest, extract files, verify integrity."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import BinaryIO

from blake3 import blake3

from dagster_ckpt.errors import SnapshotCorruptError, SnapshotNotFoundError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.parallel import CancelCheck, in_threads
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import Metadata, decode_metadata, decode_references, object_name
from dagster_ckpt.snapshot.packs import CHUNK_BYTES
from dagster_ckpt.snapshot.writer import METADATA_NAME

WriteEntry = Callable[[FileEntry, Iterable[bytes]], None]
_SHARE_BYTES = 16 * 1024 * 1024


def read_metadata(file_io: FileIO, directory: str) -> Metadata:
    data = _read(file_io, directory, METADATA_NAME)
    return decode_metadata(data, f"{file_io.url}/{posixpath.join(directory, METADATA_NAME)}")


def read_references(file_io: FileIO, directory: str, name: str = METADATA_NAME) -> dict[str, int]:
    """By name in the parent folder, with the bytes that are needed of each; cheap with many files.

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
    """Problems of a snapshot; an empty list means that it is intact.

    Without `deep`, only checks that the data objects exist and are long enough. StorageAccessError says nothing about
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
    """A missing data object makes the snapshot corrupt."""
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
