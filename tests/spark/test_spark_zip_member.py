"""A member of a ZIP is read as `zipfile` reads it, or not at all."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import read_member

GOLDEN = Path(__file__).parents[1] / "golden" / "format-2"
CONTENT = b"v1\n" + b'{"sstFiles":[]}' * 20
OTHERS = {"CURRENT": b"MANIFEST-000012\n", "000011.log": b"", "metadata.old": b"v0\n"}


def _archive(write: Callable[[zipfile.ZipFile], None], *, comment: bytes = b"", before: bytes = b"") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in OTHERS.items():
            archive.writestr(name, content)
        write(archive)
        archive.comment = comment
    return before + target.getvalue()


def _plain(archive: zipfile.ZipFile) -> None:
    archive.writestr("metadata", CONTENT)


def _stored(archive: zipfile.ZipFile) -> None:
    archive.writestr("metadata", CONTENT, zipfile.ZIP_STORED)


def _packed_otherwise(archive: zipfile.ZipFile) -> None:
    archive.writestr("metadata", CONTENT, zipfile.ZIP_BZIP2)


def _with_64_bits(archive: zipfile.ZipFile) -> None:
    with archive.open("metadata", "w", force_zip64=True) as member:
        member.write(CONTENT)


def _in_a_stream(archive: zipfile.ZipFile) -> None:
    """As Java writes: what was not known when the member was begun follows it."""
    archive.fp.seekable = lambda: False  # type: ignore[union-attr, method-assign]
    archive._seekable = False  # type: ignore[attr-defined]
    archive.writestr("metadata", CONTENT)


KINDS = {
    "plain": _archive(_plain),
    "sizes after the content": _archive(_in_a_stream),
    "stored": _archive(_stored),
    "packed otherwise": _archive(_packed_otherwise),
    "sizes of 64 bits": _archive(_with_64_bits),
    "with a comment": _archive(_plain, comment=b"of an archive"),
    "after other bytes": _archive(_plain, before=b"#!/bin/sh\n"),
}


@pytest.mark.parametrize("archive", KINDS.values(), ids=KINDS)
def test_a_member_is_what_zipfile_reads(archive: bytes) -> None:
    assert read_member(archive, "metadata") == CONTENT
    for name, content in OTHERS.items():
        assert read_member(archive, name) == content


def test_what_spark_wrote_is_read_without_zipfile(monkeypatch: pytest.MonkeyPatch) -> None:
    spark_snapshot = _snapshot_of_spark()
    with zipfile.ZipFile(io.BytesIO(spark_snapshot)) as archive:
        expected = {name: archive.read(name) for name in archive.namelist()}
    assert expected["metadata"].startswith(b"v1\n")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert {name: read_member(spark_snapshot, name) for name in expected} == expected


@pytest.mark.parametrize("archive", KINDS.values(), ids=KINDS)
def test_a_member_that_is_not_there(archive: bytes) -> None:
    with pytest.raises(KeyError):
        read_member(archive, "MANIFEST-000012")


@pytest.mark.parametrize("archive", [b"", b"PK\5\6", b"v1\n" * 40, bytes(300)])
def test_what_is_no_archive(archive: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile):
        read_member(archive, "metadata")


@pytest.mark.parametrize("kind", ["plain", "sizes after the content"])
def test_damage_is_never_read_as_content(kind: str) -> None:
    archive = KINDS[kind]
    for at in range(len(archive)):
        for damaged in (archive[:at], archive[:at] + bytes([archive[at] ^ 0x11]) + archive[at + 1 :]):
            try:
                content = read_member(damaged, "metadata")
            except (zipfile.BadZipFile, KeyError):
                continue
            assert content == CONTENT, f"byte {at}"


def _snapshot_of_spark() -> bytes:
    store, snapshots = open_store(FileSystemCheckpointStorage(f"file://{GOLDEN}"), "golden"), []
    [*_, location] = store.checkpoints()
    store.extract(location, lambda _, data: snapshots.append(b"".join(data)), only=lambda path: path.endswith(".zip"))
    return snapshots[0]
