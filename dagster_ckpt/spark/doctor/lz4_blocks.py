"""State files in lz4-java's block stream (`LZ4BlockOutputStream`): each block has a checksum of its plain bytes.

Spark's deltas, changelogs and snapshots of the heap are such streams, unless another codec is set.
"""

from __future__ import annotations

import struct

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import reading
from dagster_ckpt.spark.state.lineage import LARGEST_BLOCK, decompress_block

MAGIC = b"LZ4Block"
# Magic, token, packed length, plain length, checksum; the last block has no bytes.
_HEADER = struct.Struct("<8sBiiI")
_RAW = 0x10
# Constants of xxHash32 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), and lz4-java's seed and mask.
_P1, _P2, _P3, _P4, _P5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393
_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
_CHECKSUM_BITS = 0x0FFFFFFF


def lz4_trouble(data: bytes, *, checksums: bool = True) -> str | None:
    """What is wrong with the blocks of a state file; None where all are there, or it uses another codec.

    Args:
        data: The whole file.
        checksums: Also unpack each block, and compare it with its checksum.
    """
    if not data:
        return "It is empty"
    if not data.startswith(MAGIC):
        if _is_nearly_magic(data):
            return "It is damaged at its very begin"
        # Another codec than Spark's default; its framing is not known here.
        return None
    at = 0
    while True:
        if len(data) - at < _HEADER.size:
            return "It is cut off: the block that ends it is missing"
        magic, token, packed, plain, checksum = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if magic != MAGIC or not (0 <= packed <= LARGEST_BLOCK and 0 <= plain <= LARGEST_BLOCK):
            return "It is damaged: where a block should begin there is something else"
        if plain == 0:
            return None
        block = data[at : at + packed]
        at += packed
        if len(block) < packed:
            return "It is cut off in the middle of a block"
        if checksums and not _is_sound(block, plain, checksum, is_raw=token & 0xF0 == _RAW):
            return "It is damaged: a block does not have the checksum it was written with"


def _is_nearly_magic(data: bytes) -> bool:
    """Whether a file begins as no codec's does: with zeros, or with most of the bytes of this one."""
    begin = data[: len(MAGIC)]
    alike = sum(one == other for one, other in zip(begin, MAGIC, strict=False))
    return not any(begin) or alike > len(MAGIC) // 2


def is_lz4(data: bytes) -> bool:
    """Whether a file is such a stream, so that its own checksums tell whether it is sound."""
    return data.startswith(MAGIC)


def _is_sound(block: bytes, length: int, checksum: int, *, is_raw: bool) -> bool:
    try:
        with reading(LiveDirectoryError):
            plain = block if is_raw else decompress_block(block, length)
    except LiveDirectoryError:
        return False
    return len(plain) == length and xxh32(plain) & _CHECKSUM_BITS == checksum


def xxh32(data: bytes, seed: int = _SEED) -> int:
    """XxHash of 32 bits."""
    length = len(data)
    whole = length & ~15
    if length >= 16:
        one, two, three, four = seed + _P1 + _P2 & _MASK, seed + _P2 & _MASK, seed, seed - _P1 & _MASK
        for first, second, third, fourth in struct.iter_unpack("<4I", memoryview(data)[:whole]):
            one = one + first * _P2 & _MASK
            one = (one << 13 | one >> 19) * _P1 & _MASK
            two = two + second * _P2 & _MASK
            two = (two << 13 | two >> 19) * _P1 & _MASK
            three = three + third * _P2 & _MASK
            three = (three << 13 | three >> 19) * _P1 & _MASK
            four = four + fourth * _P2 & _MASK
            four = (four << 13 | four >> 19) * _P1 & _MASK
        mixed = _rotated(one, 1) + _rotated(two, 7) + _rotated(three, 12) + _rotated(four, 18) & _MASK
    else:
        mixed = seed + _P5 & _MASK
    mixed = mixed + length & _MASK
    words = whole + (length - whole & ~3)
    for (word,) in struct.iter_unpack("<I", memoryview(data)[whole:words]):
        mixed = _rotated(mixed + word * _P3 & _MASK, 17) * _P4 & _MASK
    for byte in data[words:]:
        mixed = _rotated(mixed + byte * _P5 & _MASK, 11) * _P1 & _MASK
    mixed = (mixed ^ mixed >> 15) * _P2 & _MASK
    mixed = (mixed ^ mixed >> 13) * _P3 & _MASK
    return mixed ^ mixed >> 16


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> 32 - by) & _MASK
