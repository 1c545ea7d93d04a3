"""docs/snapshot-format.md, sections 2 and 3: what a reader accepts and what it refuses."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.snapshot.entries import Block, FileEntry
from dagster_ckpt.snapshot.manifest import (
    Manifest,
    Metadata,
    SnapshotHeader,
    decode_metadata,
    decode_references,
    encode_metadata,
)
from dagster_ckpt.values.modes import SnapshotKind

WHERE = "file:///snapshots/chk-1/_metadata"
HEADER = SnapshotHeader(
    snapshot_id="i", stream_id="j", kind=SnapshotKind.SAVEPOINT, number=1, created_at_ms=2, batch_id=3, query_id="q"
)
INLINE = b"offsets of batch 3"
DIGEST = blake3(INLINE).hexdigest()
ENTRY = FileEntry(DIGEST, "offsets/3", len(INLINE), None, None, None, 0)
PACKED = FileEntry("0" * 64, "state/0/0/1.zip", 9, "u", "801.1f.2a", "../shared/a.pack", 4)


def manifest_of(*entries: FileEntry) -> Manifest:
    return Manifest(HEADER, tuple(Block.pack(entries, stable=False)))


def encoded(*entries: FileEntry) -> bytes:
    return encode_metadata(Metadata(manifest_of(*entries), INLINE))


WHOLE = encoded(ENTRY, PACKED)


def line(**changed: Any) -> str:
    return json.dumps([*ENTRY._replace(**changed)]) + "\n"


def sealed(
    lines: str, inline: bytes = INLINE, version: int = 2, header: Any = None, objects: Sequence[str] = ()
) -> bytes:
    """A container as section 2 describes it, written without the code under test."""
    target = io.BytesIO()
    files = gzip.compress(lines.encode())
    described = {
        "format_version": version,
        "header": header or HEADER.model_dump(mode="json"),
        "blocks": [[len(files), True]],
        "objects": {name: {"length": 1, "used": 1} for name in objects},
    }
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("manifest.json", json.dumps(described))
        archive.writestr("files.jsonl.gz", files)
        archive.writestr("inline.bin", inline)
        archive.comment = bytes(71)
    return seal(target.getvalue()[:-71])


def seal(data: bytes) -> bytes:
    return data + b"blake3:" + blake3(data).hexdigest().encode()


def test_section_2_a_container_is_read_as_it_was_written() -> None:
    metadata = decode_metadata(WHOLE, WHERE)
    assert metadata.inline == INLINE
    assert metadata.manifest == manifest_of(ENTRY, PACKED)
    assert list(metadata.manifest.files) == [ENTRY, PACKED]
    assert metadata.manifest.objects == {"../shared/a.pack"}
    assert metadata.manifest.full_bytes == len(INLINE) + 9


def test_section_2_a_container_written_by_another_program_is_decode_metadata() -> None:
    # Spaces after the commas, which ours leaves out.
    assert list(decode_metadata(sealed(line()), WHERE).manifest.files) == [ENTRY]


def test_section_2_any_reader_of_zip_archives_and_gzip_reads_it() -> None:
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
        assert archive.testzip() is None
        described = json.loads(archive.read("manifest.json"))
        assert described["header"]["batch_id"] == 3
        assert described["objects"] == {"../shared/a.pack": {"length": 13, "used": 9}}
        entries = [json.loads(text) for text in gzip.decompress(archive.read("files.jsonl.gz")).splitlines()]
    assert [entry[1] for entry in entries] == ["offsets/3", "state/0/0/1.zip"]


def test_section_3_the_objects_are_known_without_the_list_of_files() -> None:
    assert decode_references(WHOLE, WHERE) == {"../shared/a.pack": 13}
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        decode_references(WHOLE[:-1], WHERE)


@given(length=st.integers(min_value=0, max_value=len(WHOLE) - 1))
def test_section_2_any_truncation_is_detected(length: int) -> None:
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        decode_metadata(WHOLE[:length], WHERE)


@given(position=st.integers(min_value=0, max_value=len(WHOLE) - 1), change=st.integers(min_value=1, max_value=255))
def test_section_2_any_changed_byte_is_detected(position: int, change: int) -> None:
    altered = bytearray(WHOLE)
    altered[position] ^= change
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        decode_metadata(bytes(altered), WHERE)


@given(extra=st.binary(min_size=1, max_size=64))
def test_section_2_bytes_after_the_end_are_detected(extra: bytes) -> None:
    with pytest.raises(SnapshotCorruptError, match="truncated or altered"):
        decode_metadata(WHOLE + extra, WHERE)


def test_section_2_a_newer_format_says_to_upgrade() -> None:
    with pytest.raises(SnapshotCorruptError, match=r"format version 3.*Upgrade dagster-ckpt"):
        decode_metadata(sealed(line(), version=3), WHERE)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "..", ".", "a\0b", "a/", "a/.", "a/..", "a/./b"]
)
def test_section_3_a_path_that_leaves_the_directory_is_refused(path: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="is not a plain relative path"):
        decode_metadata(sealed(line(path=path)), WHERE)


@pytest.mark.parametrize(
    "path", ["a.b/..c", "a/...", 'quote"d', 'com",ma', 'd",x/y', "back\\slash", "ümlaut/ß", "sp ace", "tab\t"]
)
def test_section_3_any_other_path_is_taken(path: str) -> None:
    manifest = decode_metadata(encoded(ENTRY._replace(path=path)), WHERE).manifest
    assert [entry.path for entry in manifest.files] == [path]
    assert manifest.find(path) == ENTRY._replace(path=path)


@pytest.mark.parametrize(
    "reference", ["/shared/a", "../../shared/a", "../other/a", "../shared/../a", "shared/a", "", ".hidden", "s3://b/a"]
)
def test_section_3_an_object_elsewhere_is_refused(reference: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        decode_metadata(sealed(line(object=reference)), WHERE)


@pytest.mark.parametrize(
    "wrong",
    [{"size": -1}, {"offset": -1}, {"digest": "xyz"}, {"size": len(INLINE) + 1}, {"offset": 1}, {"size": "1"}],
    ids=str,
)
def test_section_3_an_entry_that_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        decode_metadata(sealed(line(**wrong)), WHERE)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '["a"]', "1", line()[:-2] + ", 1]\n", "\n" + line()])
def test_section_3_a_line_that_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        decode_metadata(sealed(text), WHERE)


def test_section_3_two_files_of_one_path_are_refused() -> None:
    with pytest.raises(SnapshotCorruptError, match="same path"):
        decode_metadata(sealed(line() + line(digest="1" * 64)), WHERE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: seal(b"PK\x03\x04 no archive at all"),
        lambda: sealed(line(), header={"snapshot_id": "i"}),
        lambda: seal(_archive({"manifest.json": "{"})),
        lambda: seal(_archive({"manifest.json": "{}"})),
        lambda: seal(_archive({"files.jsonl.gz": line()})),
    ],
    ids=["no archive", "half a header", "no JSON", "no version", "no manifest"],
)
def test_section_2_an_archive_that_is_no_manifest_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        decode_metadata(make(), WHERE)


def _archive(members: dict[str, str]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
        archive.comment = bytes(71)
    return target.getvalue()[:-71]


paths = st.lists(st.text(min_size=1, max_size=8).filter(lambda t: "/" not in t and t not in (".", "..")), min_size=1)


@given(
    path=paths.map("/".join),
    identity=st.none() | st.text(max_size=20),
    token=st.none() | st.text(max_size=20),
    size=st.integers(0, 2**50),
)
def test_section_3_whatever_names_a_file_has_it_is_found_again(path: str, identity: Any, token: Any, size: int) -> None:
    if "\0" in path:
        return
    entry = FileEntry("1" * 64, path, size, identity, token, "a.pack", 7)
    manifest = manifest_of(ENTRY._replace(path="other"), entry)
    read = decode_metadata(encode_metadata(Metadata(manifest, INLINE)), WHERE).manifest
    assert read == manifest
    assert read.find(path) == entry


def test_section_3_names_that_differ_behind_a_quote_differ() -> None:
    names = ['a",b', 'a",c']
    data = encoded(*(ENTRY._replace(path=name) for name in names))
    assert [entry.path for entry in decode_metadata(data, WHERE).manifest.files] == names
