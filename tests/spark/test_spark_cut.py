import json
import re
from pathlib import Path

import pytest
from live_files import HDFS, ROCKSDB, LiveFiles, changelog, snapshot_zip

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, NothingCommittedError
from dagster_ckpt.io.file_io import FileVersion
from dagster_ckpt.io.local import LocalFileIO, LocalListing
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.file_source import log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    return LiveFiles(tmp_path / "live-0")


def paths(files: LiveFiles, *, carry_in_flight: bool = False) -> set[str]:
    return {file.path for file in cut(files.live, carry_in_flight=carry_in_flight).files}


def state_paths(files: LiveFiles) -> set[str]:
    return {path.removeprefix("state/") for path in paths(files) if path.startswith("state/") and "_meta" not in path}


def test_nothing_can_be_cut_before_the_first_commit(files: LiveFiles) -> None:
    files.query_id()
    files.offsets(0, "-")

    with pytest.raises(NothingCommittedError, match="no committed batch"):
        cut(files.live, carry_in_flight=True)


def test_a_stateless_cut_holds_two_offsets_one_commit_and_the_source_log(files: LiveFiles) -> None:
    files.batches(4)

    assert paths(files) == {"metadata", "commits/4", "offsets/3", "offsets/4", *(f"sources/0/{n}" for n in range(5))}


def test_the_first_batch_needs_no_batch_before_it(files: LiveFiles) -> None:
    files.batches(0)

    assert paths(files) == {"metadata", "commits/0", "offsets/0", "sources/0/0"}


def test_a_cut_says_which_query_batch_and_watermark_it_stands_at(files: LiveFiles) -> None:
    files.batches(2)

    taken = cut(files.live, carry_in_flight=False)

    assert (taken.batch_id, taken.query_id, taken.in_flight) == (2, "11111111-2222", None)
    assert taken.properties["watermark_ms"] == 25


def test_an_aligned_cut_drops_what_the_running_batch_has_planned(files: LiveFiles) -> None:
    files.batches(2)
    files.source_entry("3")
    files.offsets(3, '{"logOffset":3}')

    assert not paths(files) & {"offsets/3", "sources/0/3"}


def test_an_unaligned_cut_carries_what_the_running_batch_has_planned(files: LiveFiles) -> None:
    files.batches(2)
    files.source_entry("3")
    files.offsets(3, '{"logOffset":3}')

    assert paths(files, carry_in_flight=True) >= {"offsets/3", "sources/0/3"}
    assert cut(files.live, carry_in_flight=True).in_flight == 3


def test_an_offline_repartition_under_way_is_not_carried(files: LiveFiles) -> None:
    files.batches(2)
    files.offsets(3, '{"logOffset":2}', partitions=7)

    assert cut(files.live, carry_in_flight=True).in_flight is None


def test_a_source_log_is_taken_from_its_newest_compact_entry(files: LiveFiles) -> None:
    files.batches(12)
    files.source_entry("9.compact")
    files.remove("sources/0/9")
    files.remove("sources/0/3")

    assert {path for path in paths(files) if path.startswith("sources")} == {
        "sources/0/9.compact", "sources/0/10", "sources/0/11", "sources/0/12",
    }  # fmt: skip


def test_a_compact_entry_of_the_running_batch_does_not_replace_those_of_the_committed_one(files: LiveFiles) -> None:
    files.batches(8)
    files.source_entry("9.compact")
    files.offsets(9, '{"logOffset":9}')

    assert paths(files, carry_in_flight=True) >= {"sources/0/8", "sources/0/9.compact"}


def test_a_source_that_is_no_file_source_is_taken_whole(files: LiveFiles) -> None:
    files.query_id()
    files.offsets(0, '{"topic":{"0":4}}')
    files.commit(0)
    files.put("sources/0/0", 'v1\n{"topic":{"0":0}}')
    files.put("sources/0/shard-commit/1", "x")

    assert paths(files) >= {"sources/0/0", "sources/0/shard-commit/1"}


def test_a_file_source_without_data_yet_keeps_nothing_of_a_running_batch(files: LiveFiles) -> None:
    files.query_id()
    files.offsets(0, '{"logOffset":0}', "-")
    files.commit(0)
    files.source_entry("0")
    files.source_entry("0", source="1")

    assert {path for path in paths(files) if path.startswith("sources")} == {"sources/0/0"}


@pytest.mark.parametrize("offset", [None, "5", '{"topic":{"0":1}}', '{"logOffset":"x"}', "not json"])
def test_only_a_file_sources_offset_is_a_log_position(offset: str | None) -> None:
    assert log_offset(offset) is None


def test_hidden_files_are_never_taken(files: LiveFiles) -> None:
    files.batches(1)
    for path in ("sources/0/.0.crc", "sources/0/.1.4711.tmp", "commits/.1.crc", "offsets/.2.4711.tmp"):
        files.put(path)

    assert not [path for path in paths(files) if "/." in path]


def test_heap_state_is_the_newest_snapshot_and_the_deltas_after_it(files: LiveFiles) -> None:
    files.batches(12)
    files.operator()
    for version in range(1, 15):
        files.put(f"state/0/0/{version}.delta")
    files.put("state/0/0/11.snapshot")
    files.put("state/0/0/14.snapshot")

    assert state_paths(files) == {"0/0/11.snapshot", "0/0/12.delta", "0/0/13.delta"}


def test_a_snapshot_of_the_very_version_is_enough(files: LiveFiles) -> None:
    files.batches(1)
    files.operator()
    files.put("state/0/0/2.snapshot")

    assert state_paths(files) == {"0/0/2.snapshot"}


def test_rocksdb_state_is_the_newest_snapshot_its_ssts_and_the_changelogs_after_it(files: LiveFiles) -> None:
    files.batches(2, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.changelog")
    files.put("state/0/0/2.zip", snapshot_zip(("000013-aa.sst", 3)))
    files.put("state/0/0/3.changelog")
    files.put("state/0/0/4.changelog")
    files.put("state/0/0/SSTs/000013-aa.sst", b"abc")
    files.put("state/0/0/SSTs/000014-bb.sst", b"abc")

    assert state_paths(files) == {"0/0/2.zip", "0/0/3.changelog", "0/0/SSTs/000013-aa.sst"}
    identities = {file.path: file.identity for file in cut(files.live, carry_in_flight=False).files}
    assert identities["state/0/0/SSTs/000013-aa.sst"] == "000013-aa.sst"
    assert identities["state/0/0/3.changelog"] is None


def test_an_sst_of_another_size_is_refused(files: LiveFiles) -> None:
    files.batches(0, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip(("000013-aa.sst", 9)))
    files.put("state/0/0/SSTs/000013-aa.sst", b"abc")

    with pytest.raises(IncompleteCutError, match=r"000013-aa\.sst.*9 bytes.*it has 3"):
        cut(files.live, carry_in_flight=False)


def test_an_sst_that_is_not_there_is_named_with_the_snapshot_that_needs_it(files: LiveFiles) -> None:
    files.batches(0, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip(("000013-aa.sst", 9)))

    with pytest.raises(IncompleteCutError, match=r"SSTs/000013-aa\.sst is missing: 1\.zip is built on it"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize("name", ["../1.zip", "/etc/hostname", ".hidden.sst", "below/000013-aa.sst", ""])
def test_a_snapshot_names_files_of_its_own_directory_only(files: LiveFiles, name: str) -> None:
    files.batches(0, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip((name, 9)))
    files.put("state/0/0/SSTs/below/000013-aa.sst", b"123456789")
    files.put("state/0/0/SSTs/.hidden.sst", b"123456789")

    with pytest.raises(IncompleteCutError, match=rf"SSTs/{re.escape(name)} is missing: 1\.zip is built on it"):
        cut(files.live, carry_in_flight=False)


def test_a_changelog_purged_after_it_was_listed_is_a_reason_to_look_again(
    files: LiveFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.batches(1, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.changelog")
    files.put("state/0/0/2.changelog")
    look, looks = LocalListing.version, list[str]()

    def purge_once(listing: LocalListing, name: str) -> FileVersion:
        looks.append(name)
        if len(looks) == 1:
            files.put("state/0/0/1.zip", snapshot_zip())
            files.remove("state/0/0/1.changelog")
        return look(listing, name)

    monkeypatch.setattr(LocalListing, "version", purge_once)

    assert state_paths(files) == {"0/0/1.zip", "0/0/2.changelog"}


def test_a_zip_that_is_none_is_named(files: LiveFiles) -> None:
    files.batches(0, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", b"no zip")

    with pytest.raises(LiveDirectoryError, match=r"state/0/0/1\.zip is not a readable RocksDB snapshot"):
        cut(files.live, carry_in_flight=False)


def test_format_2_follows_the_lineage_and_no_other_attempts_files(files: LiveFiles) -> None:
    files.batches(2, provider=ROCKSDB)
    files.commit(2, {"0": [["cc"]]})
    files.operator()
    files.put("state/0/0/1_aa.zip", snapshot_zip())
    files.put("state/0/0/2_bb.changelog", changelog({1: "aa", 2: "bb"}))
    files.put("state/0/0/2_failed.changelog", changelog({1: "aa", 2: "failed"}))
    files.put("state/0/0/2_failed.zip", snapshot_zip())
    files.put("state/0/0/3_cc.changelog", changelog({1: "aa", 2: "bb", 3: "cc"}))

    assert state_paths(files) == {"0/0/1_aa.zip", "0/0/2_bb.changelog", "0/0/3_cc.changelog"}


def test_format_2_takes_spark_checksums_and_checks_the_size_they_note(files: LiveFiles) -> None:
    files.batches(0, provider=ROCKSDB)
    files.commit(0, {"0": [["aa"]]})
    files.operator()
    files.put("state/0/0/1_aa.zip", snapshot_zip())
    size = len(snapshot_zip())
    files.put("state/0/0/1_aa.zip.crc", json.dumps({"algorithm": "CRC32C", "mainFileSize": size}))
    assert state_paths(files) == {"0/0/1_aa.zip", "0/0/1_aa.zip.crc"}

    files.put("state/0/0/1_aa.zip.crc", json.dumps({"algorithm": "CRC32C", "mainFileSize": size + 1}))
    with pytest.raises(IncompleteCutError, match=r"1_aa\.zip.*checksum"):
        cut(files.live, carry_in_flight=False)


def test_partitions_are_counted_by_the_log_and_not_by_directories(files: LiveFiles) -> None:
    files.batches(0, partitions=2)
    files.operator()
    for partition in range(3):
        files.put(f"state/0/{partition}/1.delta")

    assert state_paths(files) == {"0/0/1.delta", "0/1/1.delta"}


@pytest.mark.parametrize(("name", "key"), [("stateStoreSave", False), ("globalLimit", True)])
def test_an_operator_over_all_rows_has_one_partition_whatever_the_session_says(
    files: LiveFiles, name: str, key: bool
) -> None:
    files.batches(0, partitions=200)
    files.operator(name=name, key=key)
    files.put("state/0/0/1.delta")

    assert state_paths(files) == {"0/0/1.delta"}


def test_every_store_of_a_join_is_needed(files: LiveFiles) -> None:
    files.batches(0)
    files.operator(name="symmetricHashJoin", stores=("left-keyToNumValues", "right-keyToNumValues"))
    files.put("state/0/0/left-keyToNumValues/1.delta")

    with pytest.raises(IncompleteCutError, match=r"right-keyToNumValues/1\.delta is missing"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize(("suffix", "expected"), [("delta", "1.delta"), ("changelog", "1.changelog")])
def test_a_provider_that_extends_one_of_sparks_is_known_by_its_files(
    files: LiveFiles, suffix: str, expected: str
) -> None:
    files.batches(0, provider="com.example.MyProvider")
    files.operator()
    files.put(f"state/0/0/1.{suffix}")

    assert state_paths(files) == {f"0/0/{expected}"}


def test_a_provider_with_a_format_of_its_own_is_refused(files: LiveFiles) -> None:
    files.batches(0, provider="com.example.MyProvider")
    files.operator()
    files.put("state/0/0/1.mine")

    with pytest.raises(LiveDirectoryError, match=r"com\.example\.MyProvider"):
        cut(files.live, carry_in_flight=False)


def test_asynchronous_progress_tracking_may_leave_out_batches(files: LiveFiles) -> None:
    files.query_id()
    for batch in (0, 1, 4):
        files.offsets(batch, "7", provider=HDFS)
        files.commit(batch)

    assert paths(files) == {"metadata", "offsets/1", "offsets/4", "commits/4"}


def test_a_lost_batch_is_not_mistaken_for_asynchronous_progress(files: LiveFiles) -> None:
    files.batches(4)
    files.remove("offsets/3")

    with pytest.raises(IncompleteCutError, match="offsets/3 is missing"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize("path", ["metadata", "offsets/1", "offsets/2", "sources/0/0", "sources/0/2"])
def test_a_missing_log_file_is_named(files: LiveFiles, path: str) -> None:
    files.batches(2)
    files.remove(path)

    with pytest.raises(IncompleteCutError, match=f"{path} is missing"):
        cut(files.live, carry_in_flight=False)


def test_operators_without_a_gap_are_expected(files: LiveFiles) -> None:
    files.batches(0)
    files.operator(1)
    files.put("state/1/0/1.delta")

    with pytest.raises(IncompleteCutError, match="state/0 is missing"):
        cut(files.live, carry_in_flight=False)


def test_a_cut_begins_again_when_spark_commits_and_purges_meanwhile(
    files: LiveFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.batches(2)
    read = LocalFileIO.read

    def purge_first(folder: LocalFileIO, path: str) -> bytes:
        if path == "offsets/1" and (files.root / path).exists():
            files.source_entry("3")
            files.offsets(3, '{"logOffset":3}')
            files.commit(3)
            files.remove(path)
        return read(folder, path)

    monkeypatch.setattr(LocalFileIO, "read", purge_first)

    assert cut(files.live, carry_in_flight=False).batch_id == 3


def test_a_file_that_keeps_vanishing_is_named(files: LiveFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.batches(0)
    read = LocalFileIO.read

    def vanish(folder: LocalFileIO, path: str) -> bytes:
        if path == "sources/0/0":
            raise FileNotFoundError(f"{folder.url}/{path}")
        return read(folder, path)

    monkeypatch.setattr(LocalFileIO, "read", vanish)

    with pytest.raises(IncompleteCutError, match="sources/0/0 vanished"):
        cut(files.live, carry_in_flight=False)


def test_a_directory_rolled_back_while_it_is_read_is_refused(files: LiveFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.batches(2)
    read = LocalFileIO.read

    def take_over(folder: LocalFileIO, path: str) -> bytes:
        data = read(folder, path)
        if path == "sources/0/2":
            files.query_id("another-query")
        return data

    monkeypatch.setattr(LocalFileIO, "read", take_over)

    with pytest.raises(IncompleteCutError, match="taken over by another query"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("/data/live-0", "file:///data/live-0"),
        ("file:/data/live-0", "file:///data/live-0"),
        ("file:///data/live-0", "file:///data/live-0"),
        ("s3a://bucket/live-0/", "s3a://bucket/live-0"),
    ],
)
def test_spark_is_given_a_url_with_its_scheme(url: str, location: str) -> None:
    assert LiveDirectory(url).spark_location == location
