"""Files of heap state as bytes: written here and by Spark, with every codec that can be read. Needs no JVM."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.checksums import content_trouble, write_blocks
from dagster_ckpt.state.heap import HeapStore, heap_snapshot

Rows = dict[bytes, bytes]
words = st.integers(1, 6).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n))


def plain(rows: Iterable[tuple[bytes, bytes | None]]) -> bytes:
    parts = [
        struct.pack(">i", len(key))
        + key
        + (struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value)
        for key, value in rows
    ]
    return b"".join(parts) + struct.pack(">i", -1)


def checksum(content: bytes) -> int:
    return int(xxhash.xxh32_intdigest(content, 0x9747B28C)) & 0x0FFFFFFF


def lz4(data: bytes) -> bytes:
    """As lz4-java writes it: one block packed, one stored, an empty one at the end."""
    half = len(data) // 2
    packed = bytes(pa.Codec("lz4_raw").compress(data[:half], asbytes=True))
    blocks = [(0x25, packed, data[:half]), (0x15, data[half:], data[half:]), (0x15, b"", b"")]
    return b"".join(
        struct.pack("<8sBiii", b"LZ4Block", token, len(body), len(content), checksum(content) if content else 0) + body
        for token, body, content in blocks
    )


def snappy(data: bytes) -> bytes:
    """As snappy-java writes it."""
    half = len(data) // 2
    blocks = [bytes(pa.Codec("snappy").compress(part, asbytes=True)) for part in (data[:half], data[half:])]
    head = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    return head + b"".join(struct.pack(">i", len(block)) + block for block in blocks)


def zstd(data: bytes) -> bytes:
    """As zstd-jni writes it for Spark: a frame without a checksum."""
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


CODECS = {"zstd": zstd, "lz4": lz4, "snappy": snappy}


def store(folder: Path, files: dict[str, bytes], codec: str, version: int) -> HeapStore:
    for name, data in files.items():
        (folder / "state/0/2").mkdir(parents=True, exist_ok=True)
        (folder / "state/0/2" / name).write_bytes(data)
    return HeapStore(open_file_io(str(folder), {}), 0, "default", version, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_snapshot_and_the_changes_after_it_are_read(tmp_path: Path, codec: str) -> None:
    a, b, c = (bytes([n]) * 8 for n in (1, 2, 3))
    pack = CODECS[codec]
    files = {
        "2.snapshot": pack(plain([(a, a), (b, b)])),
        "2.delta": b"not read",
        "3.delta": pack(plain([(b, None), (c, c)])),
        "4.delta": pack(plain([(a, c)])),
        "5.delta": b"later",
    }
    assert store(tmp_path, files, codec, 4).read(2) == {a: c, c: c}


@given(st.dictionaries(words, words, max_size=50))
def test_what_is_written_is_read_again(rows: Rows) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        data = b"".join(write_blocks(heap_snapshot(rows.items())))
        assert store(Path(folder), {"7.snapshot": data}, "lz4", 7).read(2) == rows
        assert content_trouble("state/0/0/1.delta", data) is None


def test_many_rows_are_written_in_blocks(tmp_path: Path) -> None:
    rows = {n.to_bytes(8, "big"): random.Random(n).randbytes(512) for n in range(400)}
    data = b"".join(write_blocks(heap_snapshot(rows.items())))
    assert data.count(b"LZ4Block") == 5
    assert content_trouble("state/0/0/1.delta", data) is None
    assert store(tmp_path, {"7.snapshot": data}, "lz4", 7).read(2) == rows


@pytest.mark.parametrize("place", [30, 200, -60])
def test_a_flipped_bit_does_not_become_state(tmp_path: Path, place: int) -> None:
    data = bytearray(lz4(plain([(bytes([n]) * 8, bytes([n]) * 8) for n in range(40)])))
    data[place] ^= 1
    with pytest.raises(LiveDirectoryError, match="not a readable file of heap state"):
        store(tmp_path, {"1.delta": bytes(data)}, "lz4", 1).read(2)


def test_other_codecs_are_compared_with_the_checksum_file_of_hadoop(tmp_path: Path) -> None:
    data = snappy(plain([(b"12345678", b"abcdefgh")]))
    sums = b"crc\0" + struct.pack(">iI", 512, zlib.crc32(data))
    files = {"1.delta": data, ".1.delta.crc": sums}
    assert store(tmp_path, files, "snappy", 1).read(2) == {b"12345678": b"abcdefgh"}
    files["1.delta"] = data.replace(b"abcdefgh", b"abcdefgi")
    with pytest.raises(LiveDirectoryError, match="checksum that Hadoop wrote"):
        store(tmp_path, files, "snappy", 1).read(2)


def test_a_length_without_an_end_is_damage_and_is_not_read_on(tmp_path: Path) -> None:
    block = b"\x80" * 5_000_000
    data = b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, len(block)) + block
    with pytest.raises(LiveDirectoryError, match="a length that does not end"):
        store(tmp_path, {"1.delta": data}, "snappy", 1).read(2)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"1.delta": lz4(plain([(b"12345678", b"12345678")]))[:-40]}, "1.delta is not a readable file of heap state"),
        ({"1.delta": b"XY" * 40}, "not with a header of LZ4"),
        ({"1.delta": lz4(plain([(b"12345678", b"12345678abcd")]))}, "rows have checksums"),
        ({"2.delta": lz4(plain([]))}, r"1\.delta is missing"),
    ],
)
def test_damage_is_reported(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    with pytest.raises(LiveDirectoryError, match=why):
        store(tmp_path, files, "lz4", max(1, *(int(name[0]) for name in files))).read(2)
