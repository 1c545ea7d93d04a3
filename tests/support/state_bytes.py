"""Bytes of state files that carry the checksums which Spark's and RocksDB's own files carry."""

from __future__ import annotations

import struct

import xxhash

_BLOCK = 1 << 16


def table(content: bytes) -> bytes:
    """A RocksDB table (format version 5, XXH3) whose only data block has this content."""
    out = bytearray()

    def block(plain: bytes) -> bytes:
        handle = _varint(len(out)) + _varint(len(plain))
        # Not compressed; the byte that says so is mixed into the checksum and is 0.
        out.extend(plain + b"\0" + struct.pack("<I", xxhash.xxh3_64_intdigest(plain) & 0xFFFFFFFF))
        return handle

    data = block(content)
    index = block(b"\0\x01k" + data + struct.pack("<II", 0, 1))
    meta = block(struct.pack("<II", 0, 1))
    footer = (b"\x04" + meta + index).ljust(41, b"\0")
    return bytes(out + footer + struct.pack("<IQ", 5, 0x88E241B785F4CFF7))


def lz4_blocks(content: bytes) -> bytes:
    """A stream of lz4-java with this content, not compressed."""
    pieces = [content[at : at + _BLOCK] for at in range(0, len(content), _BLOCK)]
    header = struct.Struct("<8sBiiI")
    sums = [xxhash.xxh32_intdigest(each, 0x9747B28C) & 0x0FFFFFFF for each in pieces]
    packed = [
        header.pack(b"LZ4Block", 0x16, len(each), len(each), summed) + each
        for each, summed in zip(pieces, sums, strict=True)
    ]
    return b"".join([*packed, header.pack(b"LZ4Block", 0x16, 0, 0, 0)])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))
