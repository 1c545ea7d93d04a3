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
from dagster_ckpt.snapshot import segment as segment_module
from dagster_ckpt.snapshot.container import pack_metadata, referred_objects, unpack_files, unpack_metadata
from dagster_ckpt.snapshot.entries import FileEntry, is_line_of
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader, SnapshotKind

WHERE = "file:///snapshots/chk-1/_metadata"
HEADER = SnapshotHeader(
    snapshot_id="i", stream_id="j", kind=SnapshotKind.SAVEPOINT, number=1, created_at_ms=2, batch_id=3, query_id="q"
)
INLINE = b"offsets of batch 3"
DIGEST = blake3(INLINE).hexdigest()
ENTRY = FileEntry(DIGEST, "offsets/3", len(INLINE), None, None, None, 0)
PACKED = FileEntry("0" * 64, "state/0/0/1.zip", 9, "u", "801.1f.2a", "../shared/a.pack", 4)
WHOLE = pack_metadata(Manifest.of(HEADER, [ENTRY, PACKED]), INLINE)


def read_files(data: bytes, location: str) -> list[FileEntry]:
    return list(unpack_files(data, location).files)


Reader = Callable[[bytes, str], object]
each_reader = pytest.mark.parametrize("read", [unpack_metadata, read_files], ids=["manifest", "files"])


def line(**changed: Any) -> str:
    return json.dumps([*ENTRY._replace(**changed)])


def sealed(
    lines: str, inline: bytes = INLINE, version: int = 2, header: Any = None, objects: Sequence[str] = ()
) -> bytes:
    """A container as section 2 describes it, written without the code under test."""
    target = io.BytesIO()
    files = gzip.compress(lines.encode())
    described = {
        "format_version": version,
        "header": header or HEADER.model_dump(mode="json"),
        "segments": [len(files)],
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
    metadata = unpack_metadata(WHOLE, WHERE)
    assert metadata.inline == INLINE
    assert metadata.manifest == Manifest.of(HEADER, [ENTRY, PACKED])
    assert list(metadata.manifest.files) == [ENTRY, PACKED]
    assert metadata.manifest.objects == {"../shared/a.pack"}
    assert metadata.manifest.full_bytes == len(INLINE) + 9


def test_section_2_the_files_alone_are_the_same() -> None:
    contents = unpack_files(WHOLE, WHERE)
    assert (list(contents.files), contents.inline) == ([ENTRY, PACKED], INLINE)


def test_section_2_a_container_written_by_another_program_is_read() -> None:
    # Spaces after the commas, which ours leaves out.
    data = sealed(line() + "\n")
    assert list(unpack_metadata(data, WHERE).manifest.files) == read_files(data, WHERE) == [ENTRY]


def test_section_2_any_reader_of_zip_archives_and_gzip_reads_it() -> None:
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
        assert archive.testzip() is None
        described = json.loads(archive.read("manifest.json"))
        assert described["header"]["batch_id"] == 3
        assert described["objects"] == {"../shared/a.pack": {"length": 13, "used": 9}}
        entries = [json.loads(text) for text in gzip.decompress(archive.read("files.jsonl.gz")).splitlines()]
    assert [entry[1] for entry in entries] == ["offsets/3", "state/0/0/1.zip"]


def test_section_3_the_objects_are_known_without_the_list_of_files() -> None:
    assert referred_objects(WHOLE, WHERE) == {"../shared/a.pack"}
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        referred_objects(WHOLE[:-1], WHERE)


@each_reader
@given(length=st.integers(min_value=0, max_value=len(WHOLE) - 1))
def test_section_2_any_truncation_is_detected(read: Reader, length: int) -> None:
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        read(WHOLE[:length], WHERE)


@each_reader
@given(position=st.integers(min_value=0, max_value=len(WHOLE) - 1), change=st.integers(min_value=1, max_value=255))
def test_section_2_any_changed_byte_is_detected(read: Reader, position: int, change: int) -> None:
    altered = bytearray(WHOLE)
    altered[position] ^= change
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        read(bytes(altered), WHERE)


@each_reader
@given(extra=st.binary(min_size=1, max_size=64))
def test_section_2_bytes_after_the_end_are_detected(read: Reader, extra: bytes) -> None:
    with pytest.raises(SnapshotCorruptError, match="truncated or altered"):
        read(WHOLE + extra, WHERE)


@each_reader
def test_section_2_a_newer_format_says_to_upgrade(read: Reader) -> None:
    with pytest.raises(SnapshotCorruptError, match=r"format version 3.*Upgrade dagster-ckpt"):
        read(sealed(line(), version=3), WHERE)


@each_reader
@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "..", ".", "a\0b", "a/", "a/.", "a/..", "a/./b"]
)
def test_section_3_a_path_that_leaves_the_directory_is_refused(read: Reader, path: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="is not a plain relative path"):
        read(sealed(line(path=path)), WHERE)


@pytest.mark.parametrize(
    "path", ["a.b/..c", "a/...", 'quote"d', 'com",ma', 'd",x/y', "back\\slash", "ümlaut/ß", "sp ace", "tab\t"]
)
def test_section_3_any_other_path_is_taken(path: str) -> None:
    data = pack_metadata(Manifest.of(HEADER, [ENTRY._replace(path=path)]), INLINE)
    manifest = unpack_metadata(data, WHERE).manifest
    assert [entry.path for entry in manifest.files] == [path]
    assert manifest.find(path) == ENTRY._replace(path=path)


@each_reader
@pytest.mark.parametrize(
    "reference", ["/shared/a", "../../shared/a", "../other/a", "../shared/../a", "shared/a", "", ".hidden", "s3://b/a"]
)
def test_section_3_an_object_elsewhere_is_refused(read: Reader, reference: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        read(sealed(line(object=reference)), WHERE)


@pytest.mark.parametrize(
    "wrong",
    [{"size": -1}, {"offset": -1}, {"digest": "xyz"}, {"size": len(INLINE) + 1}, {"offset": 1}, {"size": "1"}],
    ids=str,
)
def test_section_3_an_entry_that_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SnapshotCorruptError, match=WHERE):
        unpack_metadata(sealed(line(**wrong)), WHERE)


@each_reader
@pytest.mark.parametrize("text", ["{", "{}", "[]", '["a"]', "1", line()[:-1] + ", 1]", "\n" + line()])
def test_section_3_a_line_that_is_no_entry_is_refused(read: Reader, text: str) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        read(sealed(text), WHERE)


@each_reader
def test_section_3_two_files_of_one_path_are_refused(read: Reader) -> None:
    with pytest.raises(SnapshotCorruptError, match="same path"):
        read(sealed(f"{line()}\n{line(digest='1' * 64)}\n"), WHERE)


@each_reader
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
def test_section_2_an_archive_that_is_no_manifest_is_refused(read: Reader, make: Callable[[], bytes]) -> None:
    with pytest.raises(SnapshotCorruptError, match="manifest cannot be read"):
        read(make(), WHERE)


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
    manifest = Manifest.of(HEADER, [ENTRY._replace(path="other"), entry])
    read = unpack_metadata(pack_metadata(manifest, INLINE), WHERE).manifest
    assert read == manifest
    assert read.find(path) == entry
    line = read.find_line(path)
    assert line == entry.line()
    assert is_line_of(line, path, size, identity, token)
    assert not is_line_of(line, path, size + 1, identity, token)
    assert not is_line_of(line, path, size, identity, f"{token}x")


def test_section_3_names_that_differ_behind_a_quote_differ() -> None:
    names = ['a",b', 'a",c']
    data = pack_metadata(Manifest.of(HEADER, [ENTRY._replace(path=name) for name in names]), INLINE)
    assert [entry.path for entry in unpack_metadata(data, WHERE).manifest.files] == names


@pytest.mark.parametrize("text", [line(path="a/b"), line(path='d",x/y')], ids=["as other programs write", "quoted"])
def test_what_another_program_wrote_is_found_again_when_only_its_packed_lines_are_kept(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "_LARGE", 0)
    read = unpack_metadata(sealed(text), WHERE).manifest
    (path,) = [entry.path for entry in read.files]
    # Written once more, as part of a snapshot that has the same files.
    pack_metadata(read, INLINE)
    assert read.find(path) == ENTRY._replace(path=path)
    assert [entry.path for entry in read.files] == [path]
