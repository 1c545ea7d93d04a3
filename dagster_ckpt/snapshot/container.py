"""Encode and decode `_metadata`: manifest and small files in one sealed ZIP (docs/snapshot-format.md, section 2).

You can read it with any ZIP tool, and its file list with `zcat`. The seal, a checksum over all
bytes, is stored in the archive comment.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.foreign import from_json, reading
from dagster_ckpt.snapshot.entries import FileEntry, Paths, is_reference
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader
from dagster_ckpt.snapshot.segment import Segment, read_files

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
FILES_NAME = "files.jsonl.gz"
INLINE_NAME = "inline.bin"
_ZIP_MAGIC = b"PK\x03\x04"
_SEAL = b"blake3:"
_SEAL_BYTES = len(_SEAL) + 64
# The earliest time that ZIP supports. With a fixed time, equal content produces equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Metadata:
    """A parsed `_metadata`.

    Attributes:
        manifest: The manifest.
        inline: The inlined bytes, concatenated.
    """

    manifest: Manifest
    inline: bytes


@dataclass(frozen=True)
class Contents:
    """The files of a `_metadata`, for a single pass over them.

    Attributes:
        files: Its files, each validated when it is reached.
        inline: The inlined bytes, concatenated.
    """

    files: Iterator[FileEntry]
    inline: bytes


def pack_metadata(manifest: Manifest, inline: bytes | bytearray) -> bytes:
    """Encode a `_metadata`, sealed with a checksum over all its bytes."""
    described = {
        "format_version": FORMAT_VERSION,
        "header": manifest.header.model_dump(mode="json"),
        "file_count": manifest.file_count,
        "full_bytes": manifest.full_bytes,
        "objects": {name: {"length": use.length, "used": use.used} for name, use in manifest.uses.items()},
    }
    ends: list[int] = []
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        with archive.open(zipfile.ZipInfo(FILES_NAME, _NO_TIME), "w") as files:
            begin = target.tell()
            for segment in manifest.segments:
                segment.pack_into(files.write)
                ends.append(target.tell())
        begins = [begin, *ends[:-1]]
        # Length of each segment of the file list; the last segment holds the files that are not
        # stable.
        described["segments"] = [end - begin for begin, end in zip(begins, ends, strict=True)]
        archive.writestr(zipfile.ZipInfo(MANIFEST_NAME, _NO_TIME), _json(described))
        archive.writestr(zipfile.ZipInfo(INLINE_NAME, _NO_TIME), bytes(inline))
        archive.comment = bytes(_SEAL_BYTES)
    with target.getbuffer() as whole:
        seal = blake3(whole[:-_SEAL_BYTES]).hexdigest().encode()
    target.seek(-_SEAL_BYTES, io.SEEK_END)
    target.write(_SEAL + seal)
    data = target.getvalue()
    for segment, begin, end in zip(manifest.segments, begins, ends, strict=True):
        # A view: the bytes exist once, even if many segments and snapshots refer to them.
        segment.remember_packed(memoryview(data)[begin:end])
    return data


def _json(described: dict[str, Any]) -> str:
    """Encode one key per line: readable, and encoded by C code, which does not support indentation."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in described.items()) + "\n}"


def unpack_metadata(data: bytes, location: str) -> Metadata:
    """Parse a `_metadata`.

    Args:
        data: Its bytes.
        location: Their location, for messages.

    Raises:
        SnapshotCorruptError: It is truncated, modified, not a `_metadata`, or in a newer format.
    """
    metadata = _unpack(data, location)
    with _errors_as_corrupt(location):
        _check_inline(metadata.manifest.inline_length, metadata.inline)
    return metadata


def unpack_files(data: bytes, location: str) -> Contents:
    """Parse only the file list of a `_metadata`, one line at a time, without keeping the lines.

    Args:
        data: Its bytes.
        location: Their location, for messages.

    Raises:
        SnapshotCorruptError: It is truncated, modified, not a `_metadata`, or in a newer format.
            Damage to a single line is raised when that line is reached.
    """
    with _opened(data, location) as (archive, described):
        SnapshotHeader.model_validate(described["header"])
        packed, inline = _member(archive, FILES_NAME), _member(archive, INLINE_NAME)
        lengths, listed = described["segments"], _listed_objects(described)

    def files() -> Iterator[FileEntry]:
        paths, used, inline_length = Paths(), set[str](), 0
        with _errors_as_corrupt(location):
            for part in _parts(packed, lengths):
                for entries in read_files(part, paths):
                    used.update(entry.object for entry in entries if entry.object is not None)
                    ends = (entry.offset + entry.size for entry in entries if entry.object is None)
                    inline_length = max(inline_length, max(ends, default=0))
                    _check_inline(inline_length, inline)
                    yield from entries
            _check_objects(used, listed)

    return Contents(files(), inline)


def referred_objects(data: bytes, location: str) -> frozenset[str]:
    """The data objects that a `_metadata` refers to, without parsing its file list.

    Raises:
        SnapshotCorruptError: It is truncated, modified, not a `_metadata`, or in a newer format.
    """
    with _opened(data, location) as (_, described):
        return _listed_objects(described)


def cannot_be_trusted(location: str, what: str) -> str:
    """The message about damaged metadata."""
    return f"{location} cannot be trusted: {what}. Start from another snapshot."


def _unpack(data: bytes, location: str) -> Metadata:
    with _opened(data, location) as (archive, described):
        header = SnapshotHeader.model_validate(described["header"])
        paths = Paths()
        parts = _parts(_member(archive, FILES_NAME), described["segments"])
        *stable, rest = (Segment.read(part, paths) for part in parts)
        manifest = Manifest(header, tuple(stable), rest)
        _check_objects(manifest.objects, _listed_objects(described))
        return Metadata(manifest, _member(archive, INLINE_NAME))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a stored (not compressed) member, whose length the archive bounds.

    A compressed member could expand to any length.
    """
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its {name} is compressed by the archive, which no writer of this format does")
    return archive.read(name)


def _listed_objects(described: dict[str, Any]) -> frozenset[str]:
    names = described["objects"]
    if not isinstance(names, dict) or not all(map(is_reference, names)):
        raise ValueError(f"it refers to {names!r:.200}")
    return frozenset(names)


def _check_objects(used: Set[str], listed: Set[str]) -> None:
    # Garbage collection relies on this list: an object missing from it would be deleted while the
    # snapshot needs it.
    if used != listed:
        raise ValueError(f"its files lie in other data objects than it lists: {sorted(used ^ listed)[:3]}")


def _check_inline(inline_length: int, inline: bytes) -> None:
    if inline_length > len(inline):
        raise ValueError(f"a file ends at {inline_length} of its {len(inline)} inlined bytes")


@contextmanager
def _opened(data: bytes, location: str) -> Iterator[tuple[zipfile.ZipFile, dict[str, Any]]]:
    """The archive, after checking its seal and version, and the content of `manifest.json`."""
    if len(data) < len(_ZIP_MAGIC) + _SEAL_BYTES:
        raise SnapshotCorruptError(cannot_be_trusted(location, f"it ends after {len(data)} bytes, so it is truncated"))
    if not data.startswith(_ZIP_MAGIC):
        raise SnapshotCorruptError(
            cannot_be_trusted(location, f"it begins with {data[:6]!r}: that is not a snapshot's metadata")
        )
    sealed, seal = memoryview(data)[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL + blake3(sealed).hexdigest().encode():
        raise SnapshotCorruptError(
            cannot_be_trusted(location, "its checksum does not fit, so it is truncated or altered")
        )
    with _errors_as_corrupt(location), zipfile.ZipFile(io.BytesIO(data)) as archive:
        described = from_json(_member(archive, MANIFEST_NAME))
        _check_version(described, location)
        yield archive, described


def _errors_as_corrupt(location: str) -> AbstractContextManager[None]:
    return reading(
        lambda why: SnapshotCorruptError(cannot_be_trusted(location, f"its manifest cannot be read ({why})"))
    )


def _check_version(described: Any, location: str) -> None:
    version = described["format_version"]
    if version != FORMAT_VERSION:
        raise SnapshotCorruptError(
            f"{location} has format version {version}; this dagster-ckpt reads versions up to {FORMAT_VERSION}. "
            "Upgrade dagster-ckpt, or start from another snapshot."
        )


def _parts(packed: bytes, lengths: list[int]) -> Iterator[bytes]:
    """The compressed lines of each segment."""
    if not lengths or not all(type(each) is int and each >= 0 for each in lengths) or sum(lengths) != len(packed):
        raise ValueError(f"its segments have {lengths} bytes, and {FILES_NAME} has {len(packed)}")
    begin = 0
    for length in lengths:
        yield packed[begin : begin + length]
        begin += length
