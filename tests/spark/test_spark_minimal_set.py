"""The files of a cut are those that are needed: without any one of them the check refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import (
    HEAP,
    ROCKSDB,
    ROCKSDB_CHANGELOG,
    ROCKSDB_JOIN_V3,
    ROCKSDB_V2,
    Workload,
    aggregation,
    join,
    run_to_the_end,
    take_snapshot,
)

from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import materialize
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = [pytest.mark.spark, pytest.mark.core]


@pytest.mark.thorough(but=("heap", "rocksdb-format-v2"))
@pytest.mark.parametrize(
    ("build", "backend"),
    [
        pytest.param(aggregation, HEAP, id="heap"),
        pytest.param(aggregation, ROCKSDB, id="rocksdb"),
        pytest.param(aggregation, ROCKSDB_CHANGELOG, id="rocksdb-changelog"),
        pytest.param(aggregation, ROCKSDB_V2, id="rocksdb-format-v2", marks=needs(Feature.CHECKPOINT_FORMAT_2)),
        pytest.param(join, HEAP, id="join-heap"),
        pytest.param(join, ROCKSDB_JOIN_V3, id="join-rocksdb-state-v3", marks=needs(Feature.JOIN_STATE_3)),
    ],
)
def test_without_any_one_file_of_a_cut_the_directory_is_broken(
    spark: SparkSession,
    tmp_path: Path,
    build: Callable[[DataFrame, DataFrame], DataFrame],
    backend: StateBackend,
) -> None:
    work = Workload(build, backend, tmp_path)
    original = LiveDirectory(f"{tmp_path}/live-0")
    run_to_the_end(spark, work, original, files_per_batch=2)
    snapshot = take_snapshot(original, carry_in_flight=False)
    restored = LiveDirectory(f"{tmp_path}/live-1")
    materialize(restored, snapshot.fill)
    assert {path for path, _ in restored.folder.find()} == set(snapshot.files)

    # Spark does without its own checksums, with a warning.
    needed = [path for path in snapshot.files if not path.endswith(".crc")]
    assert len(needed) > 8
    for path in needed:
        data = restored.folder.read(path)
        restored.folder.delete(path)
        assert inspect_live_directory(restored).status is not LiveStatus.GOOD, f"{path} is not needed"
        restored.folder.write(path, [data])
    assert inspect_live_directory(restored).status is LiveStatus.GOOD
