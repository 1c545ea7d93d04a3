"""State in checkpoint format v2, whose snapshots Spark 4.0 gives a version that no other Spark reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.errors import LiveDirectoryError, UnsupportedSparkError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory, refuse_unknown_state
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.checkpoint_dir.rocksdb_zip_version import give_snapshots_version, is_of_spark_4_0
from dagster_ckpt.spark.versions import RELEASES, Feature
from tests.golden.live_directories import ROWS, WRITTEN, lay_input, unpacked
from tests.support.needs import needs, needs_rewriter

NAME = "counts-format-2"
PROGRAM = Path(__file__).with_name("format_2_program.py")


@pytest.fixture
def live(tmp_path: Path) -> LiveDirectory:
    copy = LiveDirectory(str(tmp_path / "live"))
    with unpacked("4.0") as folder:
        clone(LiveDirectory(str(folder / NAME)), copy, is_scratch=True)
    assert snapshots(copy)
    return copy


def snapshots(live: LiveDirectory) -> dict[str, dict[str, bytes]]:
    found = {}
    for path, _ in live.folder.find():
        if path.endswith(".zip"):
            with zipfile.ZipFile(Path(live.url.removeprefix("file://")) / path) as archive:
                found[path] = {name: archive.read(name) for name in archive.namelist()}
    return found


def test_only_the_version_changes_and_changes_back(live: LiveDirectory) -> None:
    before = snapshots(live)
    assert not is_of_spark_4_0(live)
    path = min(before)
    place, _, name = path.rpartition("/")
    checksums = (f"{place}/.{name}.crc", f"{path}.crc", f"{place}/.{name}.crc.crc")
    for checksum in checksums:
        live.folder.write(checksum, [b'{"mainFileSize": 1}'])
    assert inspect_live_directory(live).status is LiveStatus.BROKEN

    give_snapshots_version(live, 2, no_op)

    assert is_of_spark_4_0(live)
    assert [live.folder.size(checksum) for checksum in checksums] == [None] * 3
    assert inspect_live_directory(live).status is LiveStatus.GOOD
    for snapshot, members in snapshots(live).items():
        assert members["metadata"] == b"v2\n" + before[snapshot]["metadata"].partition(b"\n")[2]
        assert {**members, "metadata": b""} == {**before[snapshot], "metadata": b""}
    give_snapshots_version(live, 1, no_op)
    assert snapshots(live) == before


def test_a_snapshot_that_cannot_be_read_is_named_and_its_directory_is_not_taken_for_either(live: LiveDirectory) -> None:
    path = min(snapshots(live))
    live.folder.write(path, [b"no zip"])

    with pytest.raises(LiveDirectoryError, match="is not a readable RocksDB snapshot"):
        give_snapshots_version(live, 2, no_op)
    assert not is_of_spark_4_0(live)


def test_a_later_spark_refuses_what_only_4_0_reads(live: LiveDirectory) -> None:
    later = [release for release in RELEASES if release.has(Feature.ONE_SNAPSHOT_VERSION)]
    [own] = (release for release in RELEASES if release.minor == "4.0")
    for release in (own, *later):
        refuse_unknown_state(live, release)
    give_snapshots_version(live, 2, no_op)

    refuse_unknown_state(live, own)
    for release in later:
        with pytest.raises(UnsupportedSparkError, match="whose snapshots no other Spark reads"):
            refuse_unknown_state(live, release)


def in_a_new_jvm(*words: object) -> Any:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.spark
@pytest.mark.state
@needs(Feature.CHECKPOINT_FORMAT_2)
@needs_rewriter()
@pytest.mark.parametrize("changelog", ["changelog", "none"])
def test_state_is_read_and_rescaled_between_processes(tmp_path: Path, changelog: str) -> None:
    """In one process, Spark 4.0 reads what it has written with another first query than the next process has."""
    expected = json.loads(ROWS.read_text())[NAME]
    live, rescaled, files = tmp_path / "live", tmp_path / "rescaled", lay_input(tmp_path / "input")
    (later := tmp_path / "later").mkdir()
    for path in sorted(files.iterdir())[WRITTEN:]:
        path.rename(later / path.name)

    rows = in_a_new_jvm("run", changelog, live, files)
    keys = {row[0] for batch in rows.values() for row in batch}
    assert in_a_new_jvm("count", changelog, live, "") == len(keys)
    assert in_a_new_jvm("rescale", changelog, live, rescaled) == len(keys)
    for path in later.iterdir():
        path.rename(files / path.name)
    rows |= in_a_new_jvm("run", changelog, rescaled, files)

    assert rows == expected
