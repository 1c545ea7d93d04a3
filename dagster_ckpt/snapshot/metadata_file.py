"""Encode and decode `_metadata`: manifest and small files in one ZIP (docs/snapshot-format.md, section 2).

You can read it with any ZIP tool, and its list of files with `zcat`. A checksum over all its bytes
is stored in the archive comment.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.snapshot.entries import Block, Paths, is_reference
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader
from dagster_ckpt.values.untrusted import from_json, reading

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
FILES_NAME = "files.jsonl.gz"
INLINE_NAME = "inline.bin"
_ZIP_MAGIC = b"PK\x03\x04"
_CHECKSUM_NAME = b"blake3:"
_CHECKSUM_BYTES = len(_CHECKSUM_NAME) + 64
# The earliest time that ZIP supports. With a fixed time, equal content produces equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Metadata:
    """The content of a `_metadata`.

    Attributes:
        manifest: The manifest.
        inline: The inlined bytes, concatenated.
    """

    manifest: Manifest
    inline: bytes


def encode_metadata(metadata: Metadata) -> bytes:
    """Encode a `_metadata`."""
    manifest = metadata.manifest
    described = {
        "format_version": FORMAT_VERSION,
        "header": manifest.header.model_dump(mode="json"),
        "file_count": manifest.file_count,
        "full_bytes": manifest.full_bytes,
        "objects": {name: use._asdict() for name, use in manifest.uses.items()},
        "blocks": [[len(block.packed), block.stable] for block in manifest.blocks],
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST_NAME, _NO_TIME), _one_key_a_line(described))
        with archive.open(zipfile.ZipInfo(FILES_NAME, _NO_TIME), "w") as files:
            for block in manifest.blocks:
                files.write(block.packed)
        archive.writestr(zipfile.ZipInfo(INLINE_NAME, _NO_TIME), metadata.inline)
        archive.comment = bytes(_CHECKSUM_BYTES)
    with target.getbuffer() as whole:
        checksum = blake3(whole[:-_CHECKSUM_BYTES]).hexdigest().encode()
        whole[-_CHECKSUM_BYTES:] = _CHECKSUM_NAME + checksum
    return target.getvalue()


def _one_key_a_line(described: dict[str, Any]) -> str:
    # `json.dumps` with an indentation is implemented in Python, and fifteen times as slow.
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in described.items()) + "\n}"


def decode_metadata(data: bytes, location: str) -> Metadata:
    """Decode and validate a `_metadata`.

    Args:
        data: Its bytes.
        location: Their location, for messages.

    Raises:
        SnapshotCorruptError: It is truncated, modified, not a `_metadata`, or in a newer format.
    """
    with _opened(data, location) as (archive, described):
        header = SnapshotHeader.model_validate(described["header"])
        manifest = Manifest(header, tuple(_blocks(_member(archive, FILES_NAME), described["blocks"])))
        listed, inline = _listed_objects(described), _member(archive, INLINE_NAME)
        # Garbage collection relies on this list: an object missing from it would be deleted while
        # the snapshot needs it.
        if manifest.objects != listed:
            odd = sorted(manifest.objects ^ listed)[:3]
            raise ValueError(f"its files are in data objects that it does not list: {odd}")
        if manifest.inline_length > len(inline):
            raise ValueError(f"a file ends at {manifest.inline_length} of its {len(inline)} inlined bytes")
        return Metadata(manifest, inline)


def decode_references(data: bytes, location: str) -> frozenset[str]:
    """The data objects that a `_metadata` refers to, without decoding its list of files.

    Raises:
        SnapshotCorruptError: It is truncated, modified, not a `_metadata`, or in a newer format.
    """
    with _opened(data, location) as (_, described):
        return _listed_objects(described)


def _blocks(packed: bytes, described: list[tuple[int, bool]]) -> Iterator[Block]:
    lengths = [length for length, stable in described if type(length) is int and length >= 0 and type(stable) is bool]
    if len(lengths) < len(described) or sum(lengths) != len(packed):
        raise ValueError(f"its blocks are {described!r:.200}, and {FILES_NAME} has {len(packed)} bytes")
    paths, begin = Paths(), 0
    for length, stable in described:
        block = Block.read(packed[begin : begin + length], stable=stable)
        paths.add(block.entries)
        yield block
        begin += length


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


@contextmanager
def _opened(data: bytes, location: str) -> Iterator[tuple[zipfile.ZipFile, dict[str, Any]]]:
    """The archive, after checking its checksum and version, and the content of `manifest.json`."""
    if len(data) < len(_ZIP_MAGIC) + _CHECKSUM_BYTES:
        raise _corrupt(location, f"it ends after {len(data)} bytes, so it is truncated")
    if not data.startswith(_ZIP_MAGIC):
        raise _corrupt(location, f"it begins with {data[:6]!r}: that is not a snapshot's metadata")
    checked, checksum = memoryview(data)[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum != _CHECKSUM_NAME + blake3(checked).hexdigest().encode():
        raise _corrupt(location, "its checksum does not match, so it is truncated or altered")
    with (
        reading(lambda why: _corrupt(location, f"its manifest cannot be read ({why})")),
        zipfile.ZipFile(io.BytesIO(data)) as archive,
    ):
        described = from_json(_member(archive, MANIFEST_NAME))
        version = described["format_version"]
        if version != FORMAT_VERSION:
            raise SnapshotCorruptError(
                f"{location} has format version {version}; this dagster-ckpt reads versions up to {FORMAT_VERSION}. "
                "Upgrade dagster-ckpt, or start from another snapshot."
            )
        yield archive, described


def _corrupt(location: str, what: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(f"{location} cannot be trusted: {what}. Start from another snapshot.")
