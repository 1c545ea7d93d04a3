import re
from pathlib import Path

import pytest
from live_files import LiveFiles

from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import Positions


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    return LiveFiles(tmp_path / "live-0")


def test_a_directory_that_is_not_there_is_missing(files: LiveFiles) -> None:
    assert inspect_live_directory(files.live).status is LiveStatus.MISSING


def test_a_directory_without_batches_is_empty(files: LiveFiles) -> None:
    files.query_id()

    assert inspect_live_directory(files.live).status is LiveStatus.EMPTY


def test_a_planned_first_batch_is_still_empty_and_will_be_replayed(files: LiveFiles) -> None:
    files.query_id()
    files.offsets(0, '{"logOffset":0}')

    state = inspect_live_directory(files.live)

    assert (state.status, state.batch_id, state.in_flight) == (LiveStatus.EMPTY, None, 0)


def test_a_whole_directory_is_good(files: LiveFiles) -> None:
    files.batches(3)

    state = inspect_live_directory(files.live)

    assert (state.status, state.batch_id, state.in_flight) == (LiveStatus.GOOD, 3, None)


def test_a_good_directory_tells_the_batch_that_will_be_replayed(files: LiveFiles) -> None:
    files.batches(3)
    files.offsets(4, '{"logOffset":4}')
    files.source_entry("4")

    state = inspect_live_directory(files.live)

    assert (state.status, state.batch_id, state.in_flight) == (LiveStatus.GOOD, 3, 4)
    assert files.live.positions() == Positions(commit=3, offset=4)


def stateful(files: LiveFiles) -> None:
    files.batches(1)
    files.operator()
    files.put("state/0/0/1.delta")
    files.put("state/0/0/2.delta")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda files: files.remove("metadata"), "metadata is missing"),
        (lambda files: files.remove("offsets/0"), "offsets/0 is missing"),
        (lambda files: files.remove("state/0/0/2.delta"), r"2\.delta is missing"),
        (lambda files: files.put("commits/1", ""), "commits/1 cannot be read: it is empty"),
        (lambda files: files.put("offsets/2", ""), "offsets/2 cannot be read: it is empty"),
        (lambda files: files.offsets(2, '{"logOffset":2}'), "sources/0/2 is missing"),
        (lambda files: files.offsets(3, '{"logOffset":1}'), r"offsets/2 is missing"),
        (lambda files: files.offsets(2, '{"logOffset":1}', partitions=9), "offline repartition"),
        (lambda files: files.commit(2), "offsets/2 is missing"),
        (lambda files: files.put("state/0/_metadata/metadata", "v1\n{}"), "not readable operator metadata"),
        (lambda files: files.put("state/0/0/_metadata/schema", b"\0"), "not a readable state schema"),
    ],
)
def test_a_directory_spark_could_not_resume_in_is_broken(files: LiveFiles, damage: object, reason: str) -> None:
    stateful(files)
    assert inspect_live_directory(files.live).status is LiveStatus.GOOD

    assert callable(damage)
    damage(files)

    state = inspect_live_directory(files.live)
    assert state.status is LiveStatus.BROKEN
    assert state.batch_id is None
    assert re.search(reason, state.reason)


def test_state_without_batches_is_broken(files: LiveFiles) -> None:
    files.query_id()
    files.put("state/0/0/1.delta")

    assert inspect_live_directory(files.live).status is LiveStatus.BROKEN


def test_planned_batches_without_any_commit_are_broken(files: LiveFiles) -> None:
    files.query_id()
    files.offsets(3, '{"logOffset":0}')

    assert "commit log is lost" in inspect_live_directory(files.live).reason


def test_a_first_batch_without_query_metadata_is_broken(files: LiveFiles) -> None:
    files.offsets(0, '{"logOffset":0}')

    assert inspect_live_directory(files.live).status is LiveStatus.BROKEN
