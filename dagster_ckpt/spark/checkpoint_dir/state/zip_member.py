"""One small file out of a small ZIP that is in memory.

`zipfile` reads whatever a ZIP may be, with objects for all that is in it; a cut reads one member of each of hundreds of
Spark's snapshots. What Java's `ZipOutputStream` writes is read here by the three records that it consists of (PKWARE
APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.16), and anything else is left to `zipfile`.
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
# Raw deflate, without a header of zlib's own.
_RAW = -zlib.MAX_WBITS
# Says that a text is UTF-8, and that sizes follow the content: the sizes at the end of the archive are meant.
_HARMLESS_FLAGS = 0x0808


def read_member(archive: bytes, name: str) -> bytes:
    """Content of a member of a ZIP, checked against its checksum.

    Args:
        archive: The whole ZIP.
        name: Which member.

    Raises:
        KeyError: It has none of that name.
        zipfile.BadZipFile: It is no ZIP, or damaged.
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
        # What a damaged byte makes `zipfile` see: another way of packing, a password, names that are no text.
        raise zipfile.BadZipFile(str(error)) from error


def _read_plain(archive: bytes, name: bytes) -> bytes | None:
    """The same where all is as Java writes it; None where `zipfile` has to look."""
    begin = len(archive) - _END.size
    # Without a comment of the archive its end is at the very end.
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
