"""A snapshot's `_metadata`: header, list of files and small files in one ZIP (docs/snapshot-format.md, 2 and 3).

Any ZIP tool reads it, and `zcat` its list of files. The archive comment is a checksum over all its bytes.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import Block, FileEntry, ObjectUse, Paths, is_reference, merge_uses
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import LARGEST_LONG, from_json, reading

_last_of = attrgetter("last")


CHECKPOINT_PREFIX = "chk-"
_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}(0|[1-9][0-9]*)")


def checkpoint_directory(number: int) -> str:
    return f"{CHECKPOINT_PREFIX}{number}"


def checkpoint_number(directory: str) -> int | None:
    match = _CHECKPOINT.fullmatch(directory)
    return int(match[1]) if match is not None else None


def object_name(directory: str, reference: str) -> str:
    return posixpath.normpath(posixpath.join(directory, reference))


_Long = Annotated[int, Field(ge=-LARGEST_LONG, le=LARGEST_LONG)]


class SnapshotHeader(BaseModel):
    """The header; its `properties` are the caller's, and nothing in this package reads them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_id: str
    stream_id: str
    kind: SnapshotKind
    number: _Long | None
    created_at_ms: _Long
    batch_id: _Long
    query_id: str
    properties: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The header and the blocks of a snapshot, the oldest first."""

    header: SnapshotHeader
    blocks: tuple[Block, ...] = ()

    @property
    def stable_blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.stable)

    @property
    def other_blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if not block.stable)

    @cached_property
    def uses(self) -> Mapping[str, ObjectUse]:
        return merge_uses(self.blocks)

    @property
    def objects(self) -> frozenset[str]:
        return frozenset(self.uses)

    def object_sizes(self, file_io: FileIO, directory: str) -> dict[str, int]:
        return file_io.sizes([object_name(directory, name) for name in self.uses])

    def unusable_objects(self, file_io: FileIO, directory: str, sizes: Mapping[str, int] | None = None) -> list[str]:
        uses = {object_name(directory, name): use for name, use in self.uses.items()}
        sizes = self.object_sizes(file_io, directory) if sizes is None else sizes
        problems = []
        for name, use in sorted(uses.items()):
            found = sizes.get(name)
            if found is None:
                problems.append(f"{file_io.url}/{name} is missing")
            elif found < use.length:
                problems.append(f"{file_io.url}/{name} has {found} bytes, {use.length} are needed")
        return problems

    @property
    def file_count(self) -> int:
        return sum(block.file_count for block in self.blocks)

    @property
    def full_bytes(self) -> int:
        return sum(block.full_bytes for block in self.blocks)

    @property
    def inline_length(self) -> int:
        return max((block.inline_length for block in self.blocks), default=0)

    @property
    def files(self) -> Iterator[FileEntry]:
        for block in self.blocks:
            yield from block.entries.values()

    def find(self, path: str, *, stable: bool = True) -> FileEntry | None:
        """The entry of a path; without `stable`, it is searched only among the few other files."""
        for run in self._other_runs + (self._stable_runs if stable else []):
            at = bisect_left(run, path, key=_last_of)
            entry = run[at].entries.get(path) if at < len(run) and run[at].first <= path else None
            if entry is not None:
                return entry
        return None

    @cached_property
    def _stable_runs(self) -> list[list[Block]]:
        return _runs(self.stable_blocks)

    @cached_property
    def _other_runs(self) -> list[list[Block]]:
        return _runs(self.other_blocks)


def _runs(blocks: Iterable[Block]) -> list[list[Block]]:
    """Runs of blocks in ascending order, newest first: a path is in at most one block of each run."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and runs[-1][-1].last < block.first:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs[::-1]


FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
FILES_NAME = "files.jsonl.gz"
INLINE_NAME = "inline.bin"
_ZIP_MAGIC = b"PK\x03\x04"
_CHECKSUM_NAME = b"blake3:"
_CHECKSUM_BYTES = len(_CHECKSUM_NAME) + 64
# The earliest time in ZIP: equal content gives equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Metadata:
    manifest: Manifest
    inline: bytes


def encode_metadata(metadata: Metadata) -> bytes:
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
    # `json.dumps` with indentation is fifteen times as slow.
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in described.items()) + "\n}"


def decode_metadata(data: bytes, location: str) -> Metadata:
    with _opened(data, location) as (archive, described):
        header = SnapshotHeader.model_validate(described["header"])
        manifest = Manifest(header, tuple(_blocks(_member(archive, FILES_NAME), described["blocks"])))
        listed, inline = _listed_objects(described), _member(archive, INLINE_NAME)
        # Garbage collection relies on this list.
        if manifest.objects != listed:
            odd = sorted(manifest.objects ^ listed)[:3]
            raise ValueError(f"its files are in data objects that it does not list: {odd}")
        if manifest.inline_length > len(inline):
            raise ValueError(f"a file ends at {manifest.inline_length} of its {len(inline)} inlined bytes")
        return Metadata(manifest, inline)


def decode_references(data: bytes, location: str) -> dict[str, int]:
    """Bytes that a snapshot needs of each data object, without decoding the list of files."""
    with _opened(data, location) as (_, described):
        uses = described["objects"]
        return {name: _length(uses[name]) for name in _listed_objects(described)}


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
    """Read a member, which must not be compressed: it could expand to any length."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its {name} is compressed by the archive, which no writer of this format does")
    return archive.read(name)


def _listed_objects(described: dict[str, Any]) -> frozenset[str]:
    names = described["objects"]
    if not isinstance(names, dict) or not all(map(is_reference, names)):
        raise ValueError(f"it refers to {names!r:.200}")
    return frozenset(names)


def _length(use: object) -> int:
    length = use.get("length") if isinstance(use, dict) else None
    return length if type(length) is int and length > 0 else 0


@contextmanager
def _opened(data: bytes, location: str) -> Iterator[tuple[zipfile.ZipFile, dict[str, Any]]]:
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
