"""The container that version 1 of the format had: read for ever, written no more (docs/image-format.md, section 6)."""

from __future__ import annotations

import struct
from typing import Annotated

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dagster_ckpt.errors import ImageCorruptError
from dagster_ckpt.foreign import LARGEST_LONG, from_json, inflated, reading
from dagster_ckpt.snapshot.entries import FileEntry, Paths, check_entry
from dagster_ckpt.snapshot.manifest import ImageHeader

MAGIC = b"DGCKPT"
VERSION = 1
# Magic, format version, length of the compressed manifest, length of the inlined bytes; big-endian.
_HEAD = struct.Struct(">6sHQQ")
_SEAL_BYTES = 32
_Bytes = Annotated[int, Field(ge=0, le=LARGEST_LONG)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: _Bytes
    digest: str
    identity: str | None = None
    object: str | None = None
    offset: _Bytes

    def entry(self) -> FileEntry:
        return FileEntry(self.digest, self.path, self.size, self.identity, None, self.object, self.offset)


class _Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    header: ImageHeader
    files: tuple[_Entry, ...]

    @model_validator(mode="after")
    def _entries_are_sound(self) -> _Manifest:
        entries = [file.entry() for file in self.files]
        for entry in entries:
            check_entry(entry)
        Paths().add(entry.path for entry in entries)
        return self


def unpack(data: bytes, location: str) -> tuple[ImageHeader, list[FileEntry], bytes]:
    """Header, files and inlined bytes of a container of version 1.

    Raises:
        ImageCorruptError: It is truncated or altered.
    """
    if len(data) < _HEAD.size + _SEAL_BYTES:
        raise _corrupt(location, f"it ends after {len(data)} bytes, so it is truncated")
    _, version, body_bytes, inline_bytes = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _corrupt(location, f"it has version {version} of a container that only version 1 had")
    expected = _HEAD.size + body_bytes + inline_bytes + _SEAL_BYTES
    if len(data) != expected:
        raise _corrupt(location, f"it has {len(data)} bytes instead of {expected}: truncated or altered")
    sealed, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if blake3(sealed).digest() != seal:
        raise _corrupt(location, "its checksum does not fit: it was altered")
    with reading(lambda why: _corrupt(location, f"its manifest cannot be read ({why})")):
        body = inflated(sealed[_HEAD.size : _HEAD.size + body_bytes])
        manifest = _Manifest.model_validate(from_json(body))
    return manifest.header, [file.entry() for file in manifest.files], sealed[_HEAD.size + body_bytes :]


def _corrupt(location: str, what: str) -> ImageCorruptError:
    return ImageCorruptError(f"{location} cannot be trusted: {what}. Start from another image.")
