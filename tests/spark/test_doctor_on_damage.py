"""The doctor on damaged content: it always has an answer, and never calls damaged state healthy. No JVM."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from dagster_ckpt.client.examination import examine_live_directory
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.contents import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.spark.doctor.finding import Code, Severity
from tests.fuzz.live_directories import files
from tests.support.golden_stream import GoldenStream, alter
from tests.support.lost_power import played_rewrite
from tests.support.thorough import either


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """What Spark left after batch 4 of an aggregation in RocksDB, without Hadoop's checksums."""
    for name, data in files().items():
        if name.startswith("live-1/"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return tmp_path / "live-1"


def examined(live: Path, snapshot: KnownSnapshot | None = None) -> Diagnosis:
    return diagnose(LiveDirectory(str(live)), snapshot=snapshot)


def worst_of(diagnosis: Diagnosis, path: str) -> set[tuple[Code, Severity]]:
    return {(item.code, item.severity) for item in diagnosis.findings if item.path == path}


def flipped(data: bytes, step: int = 1, bits: tuple[int, ...] = (0, 3, 6)) -> Iterator[bytes]:
    for at in range(0, len(data), step):
        for bit in bits:
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def with_hadoops_checksum(path: Path) -> None:
    data = path.read_bytes()
    sums = b"".join(struct.pack(">I", zlib.crc32(data[at : at + 512])) for at in range(0, len(data), 512))
    path.with_name(f".{path.name}.crc").write_bytes(b"crc\0" + struct.pack(">i", 512) + sums)


def test_an_undamaged_directory_has_no_finding(live: Path) -> None:
    diagnosis = examined(live)
    assert diagnosis.findings == ()
    assert (diagnosis.batch_id, diagnosis.good_back_to) == (4, 4)


def test_no_flipped_bit_of_a_snapshots_zip_makes_the_doctor_fail(live: Path) -> None:
    zip_file = live / "state/0/0/3.zip"
    for data in flipped(zip_file.read_bytes(), step=either(quick=149, thorough=29)):
        zip_file.write_bytes(data)
        examined(live)


def test_every_flipped_bit_of_a_changelogs_blocks_is_found_without_any_checksum_beside_it(live: Path) -> None:
    changelog = live / "state/0/0/5.changelog"
    whole = changelog.read_bytes()
    healthy = []
    for data in flipped(whole, step=3, bits=(7,)):
        changelog.write_bytes(data)
        if examined(live).can_resume:
            healthy.append(next(at for at in range(len(data)) if data[at] != whole[at]))
    # The block that ends the stream is of no bytes, and its begin says so.
    assert [at for at in healthy if at < len(whole) - 21] == []


@pytest.mark.parametrize("path", ["offsets/4", "offsets/3", "commits/4", "metadata", "state/0/_metadata/metadata"])
def test_a_log_that_does_not_fit_its_checksum_is_damaged(live: Path, path: str) -> None:
    with_hadoops_checksum(live / path)
    assert examined(live).findings == ()
    data = bytearray((live / path).read_bytes())
    digit = next(at for at in reversed(range(len(data))) if chr(data[at]).isalnum())
    data[digit] ^= 1
    (live / path).write_bytes(data)
    diagnosis = examined(live)
    assert not diagnosis.can_resume
    assert (Code.CHECKSUM_DIFFERS, Severity.ERROR) in worst_of(diagnosis, path)
    assert diagnosis.good_back_to != 4


def test_a_file_that_spark_is_writing_is_not_compared_with_its_checksum(live: Path) -> None:
    unfinished = live / "offsets/.5.6e2f8112.tmp"
    unfinished.write_text("v1\n{")
    with_hadoops_checksum(unfinished)
    unfinished.write_text("v1\n{}\n{")

    assert {item.severity for item in examined(live).findings} <= {Severity.NOTE}


def test_a_changelog_that_is_sound_beside_a_stale_checksum_is_harmless(live: Path) -> None:
    changelog = live / "state/0/0/5.changelog"
    with_hadoops_checksum(changelog)
    changelog.write_bytes((live / "state/0/0/4.changelog").read_bytes())
    if changelog.read_bytes() == files()["live-1/state/0/0/5.changelog"]:
        pytest.skip("both batches changed the same rows")
    diagnosis = examined(live)
    assert worst_of(diagnosis, "state/0/0/5.changelog") == {(Code.HADOOP_CHECKSUM_STALE, Severity.NOTE)}


def test_a_table_that_does_not_fit_its_checksum_is_damaged(live: Path) -> None:
    table = next(live.rglob("*.sst"))
    with_hadoops_checksum(table)
    data = bytearray(table.read_bytes())
    data[9] ^= 1
    table.write_bytes(data)
    diagnosis = examined(live)
    assert (Code.STATE_FILE_DAMAGED, Severity.ERROR) in worst_of(diagnosis, str(table.relative_to(live)))


@pytest.mark.parametrize("kind", ["offsets/4", "commits/4", "sst"])
def test_a_file_that_is_not_what_a_snapshot_has_is_damaged(live: Path, kind: str) -> None:
    path = next(live.rglob("*.sst")) if kind == "sst" else live / kind
    entries = [
        FileEntry(blake3(data).hexdigest(), name[7:], len(data), name if name.endswith(".sst") else None, None, None, 0)
        for name, data in files().items()
        if name.startswith("live-1/")
    ]
    snapshot = KnownSnapshot("file:///snapshots/chk-2", 4, entries)
    assert examined(live, snapshot).findings == ()
    data = bytearray(path.read_bytes())
    digit = next(at for at in reversed(range(len(data))) if chr(data[at]).isdecimal())
    data[digit] ^= 1
    path.write_bytes(data)
    diagnosis = examined(live, snapshot)
    assert (Code.CONTENT_DIFFERS, Severity.ERROR) in worst_of(diagnosis, str(path.relative_to(live)))
    assert diagnosis.good_back_to != 4


def test_a_rewritten_directory_is_only_compared_with_snapshots_from_after_the_rewrite(tmp_path: Path) -> None:
    """Its files have names of before, some of them the length of before, and another content."""
    golden = GoldenStream(tmp_path).make()
    for _ in range(2):
        golden.snapshot()
        played_rewrite("latest")(golden)
        found = examine_live_directory(golden.stream).diagnosis
        assert found.can_resume, found.findings
    golden.snapshot()
    alter([golden.live / "offsets/4"], lambda data: data.replace(b'batchTimestampMs":1', b'batchTimestampMs":2'))
    altered = examine_live_directory(golden.stream).diagnosis
    golden.close()
    assert (Code.CONTENT_DIFFERS, Severity.ERROR) in worst_of(altered, "offsets/4")
