"""Crafted snapshots, each with a seal that fits: every reader refuses them, in our words and in little memory."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from blake3 import blake3

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.entries import BLOCK_BYTES, BLOCK_FILES, FileEntry
from dagster_ckpt.snapshot.manifest import decode_metadata
from dagster_ckpt.snapshot.reader import extract, read_references, verify_snapshot
from tests.fuzz.snapshots import container, sealed

EMPTY = blake3(b"").hexdigest()
HEADER = {
    "snapshot_id": "i",
    "stream_id": "golden",
    "kind": "SAVEPOINT",
    "number": 1,
    "created_at_ms": 0,
    "batch_id": 4,
    "query_id": "q",
    "properties": {},
}
MEBIBYTE = 1 << 20


def line(path: str, size: object = 0, reference: str | None = None, offset: object = 0) -> bytes:
    return json.dumps([EMPTY, path, size, None, None, reference, offset]).encode() + b"\n"


def crafted(
    lines: bytes = b"", *, files: bytes | None = None, text: str | None = None, compression: int = 0, **changed: Any
) -> bytes:
    packed = gzip.compress(lines) if files is None else files
    described = {"format_version": 2, "header": HEADER, "objects": {}, "blocks": [[len(packed), True]]} | changed
    return container((text or json.dumps(described)).encode(), packed, b"", compression=compression)


def bomb(piece: bytes) -> bytes:
    """512 MiB in half a megabyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(piece * MEBIBYTE) for _ in range(512))
    return packed + packer.flush()


def encrypted(data: bytes) -> bytes:
    """Says of each member of the archive that it needs a password."""
    for signature, at in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        for found in re.finditer(re.escape(signature), data):
            place = found.start() + at
            data = data[:place] + bytes([data[place] | 1]) + data[place + 1 :]
    return sealed(data)


DEEP = '{"format_version":2,"header":{"properties":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}}"
CASES: dict[str, Callable[[], bytes]] = {
    "properties nested a hundred thousand deep": lambda: crafted(text=DEEP),
    "a line nested as deep": lambda: crafted(b"[" * 200_000 + b"]" * 200_000 + b"\n"),
    "an archive that says it is encrypted": lambda: encrypted(crafted()),
    "members that the archive compresses": lambda: crafted(compression=8),
    "members compressed in a way of their own": lambda: crafted(compression=14),
    "half a gigabyte in one line": lambda: crafted(files=bomb(b"x")),
    "half a gigabyte of empty lines": lambda: crafted(files=bomb(b"\n")),
    "a size that no file has": lambda: crafted(line("a", 10**30)),
    "an offset that no file has": lambda: crafted(line("a", 0, None, 2**63)),
    "an offset that no object has": lambda: crafted(line("a", 1, "x.pack", 2**64), objects={"x.pack": {}}),
    "a size that is a truth": lambda: crafted(line("a", True)),
    "half a character in a path": lambda: crafted(line("a\ud800")),
    "half a character in plain bytes": lambda: crafted(line("a?").replace(b"?", b"\xed\xa0\x80")),
    "half a character in a property": lambda: crafted(header=HEADER | {"properties": {"a": "\ud800"}}),
    "a name longer than any": lambda: crafted(line("x" * 256)),
    "a path longer than any": lambda: crafted(line("x/" * 2500 + "x")),
    "a file in a file": lambda: crafted(line("a") + line("a/b")),
    "a file in a file, the other way round": lambda: crafted(line("a/b/c") + line("a/b")),
    "an identity that is no text": lambda: crafted(line("a").replace(b"null", b"{}", 1)),
    "an object that it does not list": lambda: crafted(line("a", 1, "x.pack")),
    "an object that no file lies in": lambda: crafted(line("a"), objects={"x.pack": {}}),
    "blocks of a negative length": lambda: crafted(line("a"), blocks=[[-5, True], [25, True]]),
    "blocks whose lengths are no integers": lambda: crafted(line("a"), blocks=[[20.0, True]]),
    "blocks without a length": lambda: crafted(line("a"), blocks={"a": 1}),
    "a block that ends early": lambda: crafted(files=gzip.compress(line("a"))[:-1]),
    "two blocks said to be one": lambda: crafted(files=gzip.compress(line("a")) + gzip.compress(line("b"))),
    "a block of no files": lambda: crafted(b""),
    "a block of too many files": lambda: crafted(b"".join(line(f"{n:05}") for n in range(BLOCK_FILES + 1))),
    "a block of too many bytes": lambda: crafted(line("a").replace(b"\n", b" " * BLOCK_BYTES + b"\n")),
    "a block in another order": lambda: crafted(line("b") + line("a")),
    "two files in one line": lambda: crafted(line("a")[:-1] + line("b")),
    "a line without an end": lambda: crafted(line("a")[:-1]),
    "a batch that no Spark has": lambda: crafted(header=HEADER | {"batch_id": 10**30}),
}


def opened(data: bytes) -> MemoryFileIO:
    space = MemoryFileIO("memory://stream")
    space.write("chk-1/_metadata", [data])
    space.write("chk-1/x.pack", [b""])
    return space


def drained(_entry: FileEntry, chunks: Iterable[bytes]) -> None:
    for _ in chunks:
        pass


@pytest.mark.parametrize("name", CASES)
def test_a_crafted_snapshot_is_refused_by_every_reader_alike(name: str) -> None:
    data = CASES[name]()
    space = opened(data)
    with pytest.raises(SnapshotCorruptError):
        decode_metadata(data, "memory://stream/chk-1/_metadata")
    with pytest.raises(SnapshotCorruptError) as refused:
        extract(space, "chk-1", drained)
    str(refused.value).encode()
    assert verify_snapshot(space, "chk-1") != []


def test_what_cleans_up_reads_what_a_restore_reads() -> None:
    data = crafted(line("a", 0, "x.pack"), objects={"x.pack": {"length": 0, "used": 0}})
    assert read_references(opened(data), "chk-1") == {"chk-1/x.pack": 0}
    assert verify_snapshot(opened(data), "chk-1") == []


@pytest.mark.thorough(but="half a gigabyte in one line")
@pytest.mark.parametrize("name", ["half a gigabyte in one line", "half a gigabyte of empty lines"])
def test_a_crafted_snapshot_of_half_a_megabyte_takes_little_memory(name: str) -> None:
    program = (
        "import resource, sys; from tests.snapshot import test_hostile_snapshots as t\n"
        f"data = t.CASES[{name!r}]()\n"
        "def used(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = used()\n"
        "for read in (lambda: t.decode_metadata(data, 'x'), lambda: t.extract(t.opened(data), 'chk-1', t.drained)):\n"
        "    try: read()\n"
        "    except t.SnapshotCorruptError: pass\n"
        "print(used() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300, "MiB"
