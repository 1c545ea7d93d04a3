"""Snapshots that Spark's executors copy are those that the driver would have copied."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from live_files import HDFS, LiveFiles
from pyspark.sql import SparkSession

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import CutOvertakenError, SnapshotAbortedError
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Filler, materialize
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.spark.jobs import ExecutorCopy, executors_above
from dagster_ckpt.values.modes import SnapshotKind

pytestmark = [pytest.mark.spark, pytest.mark.core]

PARTITIONS = 8


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    made = LiveFiles(tmp_path / "live-0")
    made.batches(1, provider=HDFS, partitions=PARTITIONS)
    made.operator()
    for partition in range(PARTITIONS):
        for version in (1, 2):
            made.put(f"state/0/{partition}/{version}.delta", os.urandom(30_000 + partition))
    return made


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), "stream")


@pytest.fixture
def executors(spark: SparkSession) -> ExecutorCopy:
    found = executors_above(0)
    assert found is not None
    assert found.context is spark.sparkContext
    return found


def header(live: LiveDirectory) -> SnapshotHeader:
    return SnapshotHeader(
        snapshot_id="1",
        stream_id="stream",
        kind=SnapshotKind.CHECKPOINT,
        number=1,
        created_at_ms=0,
        batch_id=1,
        query_id="11111111-2222",
    )


def test_what_executors_copied_is_restored(
    files: LiveFiles, store: SnapshotStore, executors: ExecutorCopy, tmp_path: Path
) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        stored = store.write_checkpoint(header(files.live), staged.files, runner=executors)
        expected = {file.path: file.read() for file in staged.files}
    assert len(store.manifest(stored.location).objects) > 1
    assert store.verify(stored.location) == []
    found: dict[str, bytes] = {}

    def take(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        found[entry.path] = b"".join(chunks)

    store.extract(stored.location, take)
    assert found == expected

    def fill(filler: Filler) -> None:
        for path, data in found.items():
            filler(path, [data])

    assert materialize(LiveDirectory(str(tmp_path / "restored")), fill).batch_id == 1


def test_little_is_copied_by_the_driver(files: LiveFiles, store: SnapshotStore, executors: ExecutorCopy) -> None:
    few = ExecutorCopy(executors.context, above_bytes=10**9)
    with staged_cut(files.live, carry_in_flight=False) as staged:
        stored = store.write_checkpoint(header(files.live), staged.files, runner=few)
    assert len(store.manifest(stored.location).objects) == 1


def test_a_file_that_an_executor_misses_ends_the_snapshot_without_a_trace(
    files: LiveFiles, store: SnapshotStore, executors: ExecutorCopy, tmp_path: Path
) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        files.remove("state/0/7/2.delta")
        with pytest.raises(CutOvertakenError, match=r"state/0/7/2\.delta vanished"):
            store.write_checkpoint(header(files.live), staged.files, runner=executors)
    assert store.checkpoints() == []
    assert not list((tmp_path / "snapshots").rglob("*.pack"))


def test_a_snapshot_given_up_while_executors_copy_leaves_no_trace(
    files: LiveFiles, store: SnapshotStore, executors: ExecutorCopy, tmp_path: Path
) -> None:
    asked: list[bool] = []

    def abort_once_the_executors_work() -> bool:
        # The inlined files come first, and each of them is asked for.
        asked.append(executors.context.statusTracker().getActiveJobsIds() != [])
        return asked[-1]

    slow = tmp_path / "live-0/state/0/7/2.delta"
    slow.unlink()
    # A pipe that nobody writes to keeps one executor waiting.
    os.mkfifo(slow)
    with staged_cut(files.live, carry_in_flight=False) as staged:
        wanted = [file for file in staged.files if file.size or file.path != "state/0/7/2.delta"]
        pipe = next(file for file in staged.files if file.path == "state/0/7/2.delta")
        pipe.size = 30_000  # type: ignore[misc]
        wanted = [*wanted, pipe]
        with pytest.raises(SnapshotAbortedError, match="aborted before it was complete"):
            store.write_checkpoint(
                header(files.live), wanted, runner=executors, should_abort=abort_once_the_executors_work
            )
    assert asked[-1]
    assert store.checkpoints() == []
    assert not list((tmp_path / "snapshots").rglob("_metadata"))
