"""The bytes of `_metadata`: manifest and small files in one sealed container (docs/image-format.md, section 2)."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from blake3 import blake3
from pydantic import ValidationError

from dagster_ckpt.errors import ImageCorruptError
from dagster_ckpt.image.manifest import FORMAT_VERSION, Manifest

MAGIC = b"DGCKPT"
# Magic, format version, length of the compressed manifest, length of the inlined bytes; big-endian.
_HEAD = struct.Struct(">6sHQQ")
_SEAL_BYTES = 32


@dataclass(frozen=True)
class Metadata:
    """A read `_metadata`.

    Attributes:
        manifest: The manifest.
        inline: The inlined bytes, one file after the other.
    """

    manifest: Manifest
    inline: bytes


def pack_metadata(manifest: Manifest, inline: bytes) -> bytes:
    """The bytes of a `_metadata`, sealed with a checksum over all of them."""
    # Most of it are digests, which no level shrinks; level 1 takes a third of the time.
    body = zlib.compress(manifest.model_dump_json(exclude_none=True).encode(), level=1)
    head = _HEAD.pack(MAGIC, manifest.format_version, len(body), len(inline))
    sealed = head + body + inline
    return sealed + blake3(sealed).digest()


def unpack_metadata(data: bytes, location: str) -> Metadata:
    """Read a `_metadata`.

    Args:
        data: Its bytes.
        location: Where they are from, for messages.

    Raises:
        ImageCorruptError: It is truncated, altered, no `_metadata` at all, or of a newer format.
    """
    if len(data) < _HEAD.size + _SEAL_BYTES:
        raise ImageCorruptError(_advice(location, f"it ends after {len(data)} bytes, so it is truncated"))
    magic, version, body_bytes, inline_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ImageCorruptError(_advice(location, f"it begins with {magic!r}, not {MAGIC!r}: not an image's metadata"))
    if version != FORMAT_VERSION:
        raise ImageCorruptError(
            f"{location} has format version {version}; this dagster-ckpt reads version {FORMAT_VERSION}. "
            "Upgrade dagster-ckpt, or start from another image."
        )
    expected = _HEAD.size + body_bytes + inline_bytes + _SEAL_BYTES
    if len(data) != expected:
        raise ImageCorruptError(
            _advice(location, f"it has {len(data)} bytes instead of {expected}: truncated or altered")
        )
    sealed, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if blake3(sealed).digest() != seal:
        raise ImageCorruptError(_advice(location, "its checksum does not fit: it was altered"))
    body = sealed[_HEAD.size : _HEAD.size + body_bytes]
    try:
        manifest = Manifest.model_validate_json(zlib.decompress(body))
    except (zlib.error, ValidationError) as error:
        raise ImageCorruptError(_advice(location, f"its manifest cannot be read ({error})")) from error
    inline = sealed[_HEAD.size + body_bytes :]
    for entry in manifest.files:
        if entry.object is None and entry.offset + entry.size > len(inline):
            raise ImageCorruptError(_advice(location, f"{entry.path} lies outside its {len(inline)} inlined bytes"))
    return Metadata(manifest, inline)


def _advice(location: str, what: str) -> str:
    return f"{location} cannot be trusted: {what}. Start from another image."
