"""Snapshots under test: golden ones with their metadata or data changed, and sealed again or not."""

from __future__ import annotations

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.recovery.examination import layout_problems
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import Manifest, decode_metadata
from dagster_ckpt.snapshot.reader import extract, read_references, verify_snapshot
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import materialize
from tests.fuzz.case import Case, Target
from tests.fuzz.mutations import dumped, mutated_bytes, mutated_value

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden() -> dict[str, dict[str, bytes]]:
    """Objects of each golden snapshot's space, by the snapshot's directory."""
    spaces: dict[str, dict[str, bytes]] = {}
    for metadata in sorted(GOLDEN.rglob("_metadata")):
        root = metadata.parent.parent
        objects = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        spaces[str(metadata.parent.relative_to(GOLDEN))] = objects
    return spaces


def sealed(data: bytes) -> bytes:
    """A `_metadata` whose seal fits again."""
    return data[:-71] + b"blake3:" + blake3(data[:-71]).hexdigest().encode()


def draw(rng: random.Random) -> Case:
    """Change one object of a golden snapshot."""
    snapshot = rng.choice(sorted(golden()))
    objects, directory = golden()[snapshot], snapshot.rpartition("/")[2]
    metadata = objects[f"{directory}/_metadata"]
    kind = rng.random()
    if kind < 0.1:
        name = rng.choice(sorted(objects))
        return Case(f"{snapshot}:{name}", mutated_bytes(rng, objects[name]))
    if kind < 0.25:
        return Case(f"{snapshot}:{directory}/_metadata", sealed(mutated_bytes(rng, metadata[:-71]) + metadata[-71:]))
    return Case(f"{snapshot}:{directory}/_metadata", _other(rng, metadata))


def check(case: Case, scratch: Path) -> None:
    """Read it by every way there is, and compare what they say."""
    snapshot, _, name = case.where.partition(":")
    directory = snapshot.rpartition("/")[2]
    space = MemoryFileIO("memory://fuzz")
    for other, data in (golden()[snapshot] | {name: case.data}).items():
        space.write(other, [data])
    references = _or_refusal(lambda: read_references(space, directory))
    metadata = _or_refusal(lambda: decode_metadata(space.read(f"{directory}/_metadata"), directory))
    delivered: dict[str, bytes] = {}

    def write(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        delivered[entry.path] = b"".join(chunks)
        assert blake3(delivered[entry.path]).hexdigest() == entry.digest
        assert not entry.path.startswith("/")
        assert ".." not in entry.path.split("/")

    refusal = _or_refusal(lambda: extract(space, directory, write))
    problems = verify_snapshot(space, directory)
    assert bool(problems) == isinstance(refusal, CkptError), (problems, refusal)
    "\n".join(problems).encode()
    if isinstance(refusal, CkptError) or isinstance(metadata, CkptError):
        return
    assert not isinstance(references, CkptError)
    assert {f"{directory}/{each}" for each in metadata.manifest.objects} <= {*references} or "../" in str(
        metadata.manifest.objects
    )
    assert {entry.path for entry in metadata.manifest.files} == {*delivered}
    _check_restore(space, directory, metadata.manifest, scratch)


def _check_restore(space: MemoryFileIO, directory: str, manifest: Manifest, scratch: Path) -> None:
    """What the verification calls good becomes a live directory that Spark can resume in."""

    class Store:
        def manifest(self, _location: str) -> Manifest:
            return manifest

        def extract(self, _location: str, write: Any, only: Callable[[str], bool]) -> None:
            extract(space, directory, write, only=only)

    problems = layout_problems(Store(), "memory://fuzz")  # type: ignore[arg-type]
    live = LiveDirectory(str(scratch / "live-1"))
    restored = _or_refusal(
        lambda: materialize(
            live,
            lambda fill: extract(space, directory, lambda entry, chunks: fill(entry.path, chunks)),
            is_whole=True,
        )
    )
    assert {path.name for path in scratch.iterdir()} <= {"live-1"}
    if not problems:
        assert not isinstance(restored, CkptError), restored
        assert inspect_live_directory(live).status is LiveStatus.GOOD


def _or_refusal(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except CkptError as error:
        if isinstance(error, StorageAccessError):
            pytest.fail(f"the storage was there, so the bytes are what is wrong: {error}")
        str(error).encode()
        return error


def _other(rng: random.Random, data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        parts = _parts(archive.read("files.jsonl.gz"), [length for length, _ in manifest["blocks"]])
        lines = [[json.loads(line) for line in gzip.decompress(part).splitlines()] for part in parts]
        inline = archive.read("inline.bin")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        filled = [block for block in lines if block]
        if kind < 0.3:
            manifest = mutated_value(rng, manifest)
        elif kind < 0.9 and filled:
            block = rng.choice(filled)
            at = rng.randrange(len(block))
            block[at] = mutated_value(rng, block[at])
        else:
            inline = mutated_bytes(rng, inline)
    packed = [gzip.compress(b"".join(dumped(rng, line) + b"\n" for line in block), 1) for block in lines]
    if isinstance(manifest, dict) and rng.random() < 0.9:
        manifest["blocks"] = [[len(part), rng.random() < 0.5] for part in packed]
    return container(dumped(rng, manifest), b"".join(packed), inline, compression=rng.choice((0, 0, 0, 0, 8, 14)))


def _parts(packed: bytes, lengths: Iterable[int]) -> Iterator[bytes]:
    begin = 0
    for length in lengths:
        yield packed[begin : begin + length]
        begin += length


def container(manifest: bytes, files: bytes, inline: bytes, *, compression: int = 0) -> bytes:
    """A sealed `_metadata` with any members."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, data in (("files.jsonl.gz", files), ("manifest.json", manifest), ("inline.bin", inline)):
            archive.writestr(zipfile.ZipInfo(name), data, compression)
        archive.comment = bytes(71)
    return sealed(target.getvalue())


TARGET = Target(draw, check)
