"""docs/image-format.md, section 6: containers of version 1 are read for ever, with the same refusals."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import ImageCorruptError
from dagster_ckpt.snapshot.container import unpack_files, unpack_metadata
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import ImageHeader, ImageKind

WHERE = "file:///images/chk-1/_metadata"
HEADER = ImageHeader(
    image_id="i", job_id="j", kind=ImageKind.SAVEPOINT, number=1, created_at_ms=2, batch_id=3, query_id="q"
)
INLINE = b"offsets of batch 3"
ENTRY = FileEntry(blake3(INLINE).hexdigest(), "offsets/3", len(INLINE), None, None, None, 0)


def sealed(document: Any, inline: bytes = INLINE) -> bytes:
    """A container as section 6 describes it, written without the code under test."""
    body = zlib.compress(json.dumps(document).encode())
    data = struct.pack(">6sHQQ", b"DGCKPT", 1, len(body), len(inline)) + body + inline
    return data + blake3(data).digest()


def document(**entry: Any) -> dict[str, Any]:
    file = {"path": "offsets/3", "size": len(INLINE), "digest": blake3(INLINE).hexdigest(), "offset": 0, **entry}
    return {"format_version": 1, "header": HEADER.model_dump(mode="json"), "files": [file]}


WHOLE = sealed(document())


def test_section_6_a_container_written_by_another_program_is_read() -> None:
    metadata = unpack_metadata(WHOLE, WHERE)
    assert metadata.inline == INLINE
    assert (metadata.manifest.header, list(metadata.manifest.files)) == (HEADER, [ENTRY])
    contents = unpack_files(WHOLE, WHERE)
    assert (list(contents.files), contents.inline) == ([ENTRY], INLINE)


@given(length=st.integers(min_value=0, max_value=len(WHOLE) - 1))
def test_section_6_any_truncation_is_detected(length: int) -> None:
    with pytest.raises(ImageCorruptError, match=WHERE):
        unpack_metadata(WHOLE[:length], WHERE)


@given(position=st.integers(min_value=0, max_value=len(WHOLE) - 1), change=st.integers(min_value=1, max_value=255))
def test_section_6_any_changed_byte_is_detected(position: int, change: int) -> None:
    altered = bytearray(WHOLE)
    altered[position] ^= change
    with pytest.raises(ImageCorruptError, match=WHERE):
        unpack_metadata(bytes(altered), WHERE)


@given(extra=st.binary(min_size=1, max_size=64))
def test_section_6_bytes_after_the_end_are_detected(extra: bytes) -> None:
    with pytest.raises(ImageCorruptError, match="truncated or altered"):
        unpack_metadata(WHOLE + extra, WHERE)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "..", "a\0b", "a/"])
def test_section_6_a_path_that_leaves_the_directory_is_refused(path: str) -> None:
    with pytest.raises(ImageCorruptError, match="is not a plain relative path"):
        unpack_metadata(sealed(document(path=path)), WHERE)


@pytest.mark.parametrize(
    "reference", ["/shared/a", "../../shared/a", "../other/a", "../shared/../a", "shared/a", "", ".hidden", "s3://b/a"]
)
def test_section_6_an_object_elsewhere_is_refused(reference: str) -> None:
    with pytest.raises(ImageCorruptError, match="manifest cannot be read"):
        unpack_metadata(sealed(document(object=reference)), WHERE)


@pytest.mark.parametrize(
    "wrong",
    [{"size": -1}, {"offset": -1}, {"digest": "xyz"}, {"size": len(INLINE) + 1}, {"offset": 1}, {"surprise": 1}],
    ids=str,
)
def test_section_6_an_entry_that_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ImageCorruptError, match=WHERE):
        unpack_metadata(sealed(document(**wrong)), WHERE)


def test_section_6_two_files_of_one_path_are_refused() -> None:
    twice = document()
    twice["files"] *= 2
    with pytest.raises(ImageCorruptError, match="same path"):
        unpack_metadata(sealed(twice), WHERE)


@pytest.mark.parametrize("make", [lambda: b"not zlib", lambda: zlib.compress(b"{")], ids=["no zlib", "no JSON"])
def test_section_6_a_body_that_is_no_manifest_is_refused(make: Callable[[], bytes]) -> None:
    body = make()
    data = struct.pack(">6sHQQ", b"DGCKPT", 1, len(body), 0) + body
    with pytest.raises(ImageCorruptError, match="manifest cannot be read"):
        unpack_metadata(data + blake3(data).digest(), WHERE)
