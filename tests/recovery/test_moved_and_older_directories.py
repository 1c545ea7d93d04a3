"""Folders that were moved, deleted or put back from a backup: the stream goes on, or says why not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import RestartStrategies
from dagster_ckpt.errors import LeaseHeldError, LiveDirectoryError, SharedSinkError
from dagster_ckpt.spark.doctor.finding import Code
from tests.recovery.test_field_cases import SETTINGS
from tests.support.small_spark import lose, small_spark
from tests.support.small_stream import STREAM, SmallStream, Writer, copies, dedup, distinct, without_checksums

pytestmark = pytest.mark.spark

RESTARTED = RestartStrategies.fixed_delay_restart(5, 1)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(SETTINGS) as session:
        yield session


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> SmallStream:
    """It has a savepoint after batch 2, and has run on to batch 4."""
    made = SmallStream(spark, tmp_path / "stream")
    made.feed(3)
    made.run()
    made.savepoint()
    made.feed(2)
    made.run()
    return made


@pytest.fixture
def moved(stream: SmallStream) -> Writer:
    """Its output is moved and its log relocated; the query writes there."""
    (stream.root / "out").rename(stream.root / "moved")
    without_checksums(stream.root / "moved")
    with stream.client() as client:
        client.relocate_output(f"{stream.root}/moved")
    stream.feed(3)
    return stream.writer(output="moved")


def test_an_output_that_was_moved_and_relocated_goes_on(stream: SmallStream, moved: Writer) -> None:
    stream.run(moved)
    stream.feed(3)
    stream.run(moved)

    assert stream.rows("moved") == copies(stream.files)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["at once", "after a start"])
def test_snapshots_from_before_the_move_are_restored_into_the_new_folder(
    stream: SmallStream, moved: Writer, when: str
) -> None:
    if when == "after a start":
        stream.run(moved)
        stream.feed(1)
    stream.run(moved, start_from="sp")

    assert stream.rows("moved") == copies(stream.files)


@pytest.mark.thorough
def test_a_recovery_goes_on_in_the_new_folder(stream: SmallStream, moved: Writer) -> None:
    lose(stream.live)
    stream.run(moved, restart_strategy=RESTARTED)

    assert stream.rows("moved") == copies(stream.files)


def test_before_the_relocation_the_refusal_says_what_to_do(stream: SmallStream) -> None:
    (stream.root / "out").rename(stream.root / "moved")
    without_checksums(stream.root / "moved")
    (stream.root / "out").mkdir()
    stream.feed(1)
    refused = stream.refused(stream.writer(output="moved"))

    assert "relocate-output" in str(refused)
    with stream.client() as client:
        client.relocate_output(f"{stream.root}/moved")
    stream.run(stream.writer(output="moved"))
    assert stream.rows("moved") == copies(stream.files)


def test_another_output_is_not_taken_for_a_moved_one(stream: SmallStream, tmp_path: Path) -> None:
    other = SmallStream(stream.spark, tmp_path / "other")
    other.feed(stream.files)
    other.run_plainly("plain", other.writer(output="out"))
    other.root.joinpath("out").rename(stream.root / "moved")
    without_checksums(stream.root / "moved")
    with stream.client() as client:
        client.relocate_output(f"{stream.root}/moved")
    stream.feed(1)

    assert isinstance(stream.refused(stream.writer(output="moved")), SharedSinkError)


@pytest.mark.thorough
def test_a_former_output_is_called_so(stream: SmallStream) -> None:
    stream.feed(2)
    second = stream.writer(output="out2")
    stream.run(second)
    stream.feed(1)

    refused = stream.refused()

    assert "wrote there before" in str(refused)
    assert "not this stream's" not in str(refused)
    stream.run(second)
    assert stream.rows("out", "out2") == copies(stream.files)


@pytest.mark.thorough
def test_an_adopted_directory_without_its_state_is_not_taken_over(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing in the directory says that there was state, only the code does; the old query runs on."""
    stream = SmallStream(spark, tmp_path / "stream", dedup)
    stream.feed(3)
    stream.run_plainly("plain")
    plain = stream.root / "plain"
    (plain / "state").rename(stream.root / "state")
    with stream.client() as client:
        client.adopt(STREAM, checkpoint_location=str(plain), sinks=[f"{stream.root}/out"])
    stream.feed(1)
    before = stream.files_of("plain", "out")

    with pytest.raises(LiveDirectoryError, match="keeps state"):
        stream.run()

    assert stream.files_of("plain", "out") == before
    (stream.root / "state").rename(plain / "state")
    stream.run()
    assert stream.rows() == distinct(stream.files)


def to_table(stream: SmallStream) -> Writer:
    """A sink that takes each batch again."""

    def save(rows: Any, batch_id: int) -> None:
        folder = stream.root / "batches"
        folder.mkdir(exist_ok=True)
        with (folder / "rows").open("a") as file:
            file.writelines(f"{batch_id} {row.a}\n" for row in rows.collect())

    return lambda spark: stream.read(spark).writeStream.foreachBatch(save)


@pytest.mark.thorough(but="function")
@pytest.mark.parametrize("sink", ["files", "function"])
def test_an_older_copy_of_the_live_directory_is_not_resumed(spark: SparkSession, tmp_path: Path, sink: str) -> None:
    """A sink that takes each batch again would get the batches since that copy twice."""
    stream = SmallStream(spark, tmp_path / "stream")
    writer = to_table(stream) if sink == "function" else stream.writer()
    stream.feed(2)
    stream.run(writer)
    live = stream.live
    shutil.copytree(live, stream.root / "backup")
    stream.feed(3)
    stream.run(writer)
    stream.savepoint()
    assert stream.live == live
    lose(live)
    (stream.root / "backup").rename(live)

    with stream.client() as client:
        assert Code.OLDER_COPY in [each.code for each in client.doctor(STREAM).diagnosis.findings]
    stream.feed(1)
    stream.run(writer, restart_strategy=RESTARTED)

    assert stream.live != live
    if sink == "files":
        assert stream.rows() == copies(stream.files)
    else:
        lines = (stream.root / "batches/rows").read_text().splitlines()
        assert len(lines) == len(set(lines)) == 10 * stream.files


@pytest.mark.thorough
def test_a_lost_log_is_rebuilt_under_the_lease_of_the_stream(stream: SmallStream) -> None:
    """Readers accept the log at once, and the next start goes on with it and runs the other batches again."""
    shutil.rmtree(stream.root / "out/_spark_metadata")
    with stream.client() as client:
        dry = client.rebuild_output_logs(STREAM, dry_run=True)
        assert not (stream.root / "out/_spark_metadata").exists()
        done = client.rebuild_output_logs(STREAM)
        assert [each.messages() for each in dry] == [each.messages() for each in done] != []
        log = stream.files_of("out")
        # Batches that no snapshot captured are named again.
        assert [each.messages() for each in client.rebuild_output_logs(STREAM)] == [each.messages() for each in dry]
        assert stream.files_of("out") == log
    assert stream.rows() == copies(3)
    stream.feed(1)
    stream.run()
    assert stream.rows() == copies(stream.files)


def test_a_log_is_not_rebuilt_while_the_stream_runs(stream: SmallStream) -> None:
    shutil.rmtree(stream.root / "out/_spark_metadata")
    refused: list[str] = []

    def rebuild(rows: Any, _: int) -> None:
        with stream.client() as client:
            try:
                client.rebuild_output_logs(STREAM)
            except LeaseHeldError as error:
                refused.append(str(error))

    stream.feed(1)
    stream.run(lambda spark: stream.read(spark).writeStream.foreachBatch(rebuild))

    assert refused
    assert not (stream.root / "out/_spark_metadata").exists()
