from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_scenarios import HEAP, ROCKSDB_CHANGELOG, Workload, run_to_the_end, stateless
from spark_stateful_queries import counts_over_a_join, transform_rows

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.state_rows import count_state_rows
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = [pytest.mark.spark, pytest.mark.core]
KEYS = 4


def newest(live: LiveDirectory) -> int:
    commit = live.positions().commit
    assert commit is not None
    return commit


@needs(Feature.TRANSFORM_WITH_STATE)
def test_every_variable_of_a_state_of_ones_own_is_read(spark: SparkSession, tmp_path: Path) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(transform_rows, ROCKSDB_CHANGELOG, tmp_path), live, files_per_batch=4)

    rows = {item.state: item.rows for item in count_state_rows(spark, live, newest(live))}

    assert set(rows) == {"count", "recent", "by_rest", "timers"}
    assert rows["count"] == KEYS
    # Each key has three values in a file, and a file adds a multiple of five.
    assert rows["by_rest"] == 3 * KEYS


@needs(Feature.STATE_READER)
def test_each_operator_of_a_chain_is_read(spark: SparkSession, tmp_path: Path) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(counts_over_a_join, HEAP, tmp_path), live, files_per_batch=4)

    read = [(item.operator, item.state) for item in count_state_rows(spark, live, newest(live))]

    assert read == [("stateStoreSave", "default"), ("symmetricHashJoin", "left"), ("symmetricHashJoin", "right")]


def test_a_query_without_state_has_none_to_read(spark: SparkSession, tmp_path: Path) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(stateless, HEAP, tmp_path), live, files_per_batch=8)

    assert count_state_rows(spark, live, newest(live)) == []


@needs(Feature.STATE_READER)
def test_state_that_cannot_be_loaded_is_an_error_that_names_it(spark: SparkSession, tmp_path: Path) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(counts_over_a_join, HEAP, tmp_path), live, files_per_batch=4)
    for path in (tmp_path / "live/state/0/0").glob("*.[ds]*"):
        path.unlink()

    with pytest.raises(LiveDirectoryError, match=r"default of operator 0 \(stateStoreSave\)"):
        count_state_rows(spark, live, newest(live))
