"""An image of a running query, resumed: its output must equal the uninterrupted run's, row for row."""

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
    ROCKSDB_V2_NO_CHANGELOG,
    TakenImage,
    Workload,
    aggregation,
    images_of_a_running_query,
    join,
    run_to_the_end,
    stateless,
)

from dagster_ckpt.options.state_backend import StateBackend
from dagster_ckpt.spark import LiveDirectory, LiveStatus, inspect_live_directory

pytestmark = pytest.mark.spark

WORKLOADS = [
    pytest.param(stateless, HEAP, id="stateless"),
    pytest.param(aggregation, HEAP, id="aggregation-heap"),
    pytest.param(aggregation, ROCKSDB, id="aggregation-rocksdb"),
    pytest.param(aggregation, ROCKSDB_CHANGELOG, id="aggregation-rocksdb-changelog"),
    pytest.param(aggregation, ROCKSDB_V2, id="aggregation-rocksdb-format-v2"),
    pytest.param(aggregation, ROCKSDB_V2_NO_CHANGELOG, id="aggregation-rocksdb-format-v2-no-changelog"),
    pytest.param(join, HEAP, id="join-heap"),
    pytest.param(join, ROCKSDB_CHANGELOG, id="join-rocksdb-changelog"),
    pytest.param(join, ROCKSDB_JOIN_V3, id="join-rocksdb-state-v3"),
]


@pytest.mark.parametrize(("build", "backend"), WORKLOADS)
def test_a_query_resumed_from_any_image_gives_the_rows_of_the_uninterrupted_run(
    spark: SparkSession,
    tmp_path: Path,
    build: Callable[[DataFrame, DataFrame], DataFrame],
    backend: StateBackend,
) -> None:
    work = Workload(build, backend, tmp_path)
    original = LiveDirectory(f"file://{tmp_path}/live-0")
    images = images_of_a_running_query(spark, work, original)
    expected = work.rows(spark)
    assert expected
    original.delete()

    resumed = _late_and_early(images)
    for number, image in enumerate(resumed):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        made = image.restore(target)
        assert made.batch_id == image.batch_id
        assert inspect_live_directory(target).in_flight == image.in_flight
        # A second batching after the rewind: a sink that was not rolled back would lose rows here.
        run_to_the_end(spark, work, target, files_per_batch=1 + 2 * (number % 2))
        assert work.rows(spark) == expected, f"resumed after batch {image.batch_id}, in flight {image.in_flight}"
        # Late uploads of the first query's own stores may appear there; what a start writes may not.
        assert not [path for path, _ in original.folder.files() if "_metadata" in path or "_stateSchema" in path]

    for number, image in enumerate(images):
        target = LiveDirectory(f"file://{tmp_path}/whole-{number}")
        image.restore(target)
        assert inspect_live_directory(target).status is LiveStatus.GOOD


def _late_and_early(images: list[TakenImage]) -> list[TakenImage]:
    """Images of either kind, not in the order of time, so that rewinds go back and forth."""
    aligned = [image for image in images if image.in_flight is None]
    carrying = [image for image in images if image.in_flight is not None]
    assert len({image.batch_id for image in images}) >= 4
    assert aligned
    assert carrying
    return [aligned[-1], carrying[len(carrying) // 2], aligned[len(aligned) // 3], carrying[-1]]
