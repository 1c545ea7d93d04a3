"""Read one small file from a small ZIP in memory.

A cut reads one member from each of hundreds of Spark's snapshots, for which `zipfile` with its
objects is too slow. The output of Java's `ZipOutputStream` is parsed here by its three record types
(PKWARE APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.16); `zipfile` handles everything else.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

from dagster_ckpt.foreign import inflated, inflation_limit

_END = struct.Struct("<4s4xxxHLL2x")
_END_SIGNATURE = b"PK\5\6"
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")
_ENTRY_SIGNATURE = b"PK\1\2"
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\3\4"
_DEFLATED = 8
# Raw deflate, without a zlib header.
_RAW = -zlib.MAX_WBITS
# The text is UTF-8, and sizes follow the content: the sizes in the central directory are used.
_HARMLESS_FLAGS = 0x0808


def read_member(archive: bytes, name: str) -> bytes:
    """Content of a member of a ZIP, verified with its checksum.

    Args:
        archive: The whole ZIP.
        name: Name of the member.

    Raises:
        KeyError: It has no member of that name.
        zipfile.BadZipFile: It is not a ZIP, or is damaged.
    """
    try:
        content = _read_plain(archive, name.encode())
    except (struct.error, zlib.error, EOFError, ValueError):
        content = None
    if content is not None:
        return content
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as slow, slow.open(name) as member:
            content = member.read(inflation_limit(len(archive)))
            if member.read(1):
                raise ValueError(f"its member {name} is longer than {len(archive)} packed bytes become")
            return content
    except (zlib.error, RuntimeError, OSError, EOFError, ValueError) as error:
        # A damaged byte can look to `zipfile` like another compression method, a password, or an
        # undecodable name.
        raise zipfile.BadZipFile(str(error)) from error


def _read_plain(archive: bytes, name: bytes) -> bytes | None:
    """Read an archive as Java writes it; None if `zipfile` has to read it."""
    begin = len(archive) - _END.size
    # If the archive has no comment, its end record is at the very end.
    signature, count, length, begin_of_entries = _END.unpack_from(archive, begin)
    if signature != _END_SIGNATURE or begin_of_entries + length != begin:
        return None
    at = begin_of_entries
    for _ in range(count):
        entry = _ENTRY.unpack_from(archive, at)
        signature, flags, method, crc, packed, size, name_length, extra, comment, local = entry
        at += _ENTRY.size
        if signature != _ENTRY_SIGNATURE:
            return None
        if archive[at : at + name_length] == name:
            if method != _DEFLATED or flags & ~_HARMLESS_FLAGS:
                return None
            signature, local_name, local_extra = _LOCAL.unpack_from(archive, local)
            data = local + _LOCAL.size + local_name + local_extra
            content = inflated(archive[data : data + packed], _RAW)
            is_sound = signature == _LOCAL_SIGNATURE and len(content) == size and zlib.crc32(content) == crc
            return content if is_sound else None
        at += name_length + extra + comment
    return None
