"""Going back to a batch that Spark still retains: the rows of the uninterrupted run, however it is cut again."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import (
    HEAP,
    ROCKSDB_CHANGELOG,
    ROCKSDB_JOIN_V3,
    ROCKSDB_V2,
    Workload,
    aggregation,
    join,
    run_to_the_end,
    stateless,
)

from dagster_ckpt.config.state_backend import CustomStateBackend, StateBackend
from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.sinks.file_sink import FileSink, delete_part_files, read_sink_log
from dagster_ckpt.sinks.file_sink_log import own_past
from dagster_ckpt.sinks.sink import RollBack
from dagster_ckpt.spark.checkpoint_dir.inspect import inspect_live_directory, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = pytest.mark.spark

HEAP_PROVIDER = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
RETAIN = "spark.sql.streaming.minBatchesToRetain"


def retaining(backend: StateBackend, batches: int) -> StateBackend:
    """The same backend in a query for which Spark retains so many batches."""
    own = {"spark.sql.streaming.stateStore.providerClass"}
    settings = {name: value for name, value in backend.spark_settings().items() if name not in own}
    provider = backend.spark_settings().get(*own, HEAP_PROVIDER)
    return CustomStateBackend(provider, {**settings, RETAIN: str(batches)})


def write_more_input(folder: Path) -> None:
    """One more file, newer than those there are."""
    path = folder / "999.json"
    path.write_text('{"k": 1, "v": 9100, "t": "2024-01-01T00:30:00Z"}')
    os.utime(path, (1_700_001_000, 1_700_001_000))


CASES = [
    # Compact entries of both logs are 3, 7, ...: 3 is one, 2 the last before it, 4 the first after it.
    pytest.param(stateless, HEAP, [7, 4, 3, 2], id="stateless"),
    pytest.param(aggregation, HEAP, [4, 0], id="aggregation-heap"),
    pytest.param(
        aggregation, ROCKSDB_V2, [7, 3], id="aggregation-rocksdb-format-v2", marks=needs(Feature.CHECKPOINT_FORMAT_2)
    ),
    pytest.param(join, ROCKSDB_JOIN_V3, [6, 3], id="join-rocksdb-state-v3", marks=needs(Feature.JOIN_STATE_3)),
]


@pytest.mark.thorough(but=("aggregation-rocksdb-format-v2",))
@pytest.mark.core
@pytest.mark.parametrize(("build", "backend", "batches"), CASES)
def test_a_query_rewound_to_a_batch_gives_the_rows_of_the_uninterrupted_run(
    spark: SparkSession,
    tmp_path: Path,
    build: Callable[[DataFrame, DataFrame], DataFrame],
    backend: StateBackend,
    batches: list[int],
) -> None:
    work = Workload(build, retaining(backend, 100), tmp_path)
    original = LiveDirectory(f"file://{tmp_path}/live-0")
    run_to_the_end(spark, work, original)
    expected = work.rows(spark)
    assert expected
    assert set(batches) <= set(retained_batches(original))
    before = {path: entry.version() for path, entry in original.folder.find()}

    for number, batch in enumerate(batches):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        planned = batch + 1 if batch < (original.positions().commit or 0) else None
        made = clone(original, target, at_batch=batch)
        FileSink.at(f"file:{work.output}").roll_back(RollBack(batch), nullcontext)
        state = inspect_live_directory(target)
        assert (made.batch_id, state.batch_id, state.in_flight) == (batch, batch, planned), state.reason
        # Cut otherwise than the first time: a sink that was not rolled back would lose rows here.
        run_to_the_end(spark, work, target, files_per_batch=1 + 2 * (number % 2))
        assert work.rows(spark) == expected, f"rewound to batch {batch}"
    # Late uploads of the first query's own stores may have appeared there; nothing else has changed.
    assert before.items() <= {path: entry.version() for path, entry in original.folder.find()}.items()


def test_without_the_roll_back_of_its_log_the_sink_loses_rows_and_with_it_leaves_files_that_nobody_sees(
    spark: SparkSession, tmp_path: Path
) -> None:
    work = Workload(stateless, retaining(HEAP, 100), tmp_path)
    live = LiveDirectory(f"file://{tmp_path}/live-0")
    run_to_the_end(spark, work, live)
    expected = work.rows(spark)
    # Room for batches cut otherwise: the sink passes over numbers it knows, whatever is in them.
    clone(live, LiveDirectory(f"file://{tmp_path}/careless"), at_batch=1)
    write_more_input(tmp_path / "left")
    run_to_the_end(spark, work, LiveDirectory(f"file://{tmp_path}/careless"), files_per_batch=3)
    careless = work.rows(spark)

    FileSink.at(f"file:{work.output}").roll_back(RollBack(1), nullcontext)
    clone(live, LiveDirectory(f"file://{tmp_path}/careful"), at_batch=1)
    run_to_the_end(spark, work, LiveDirectory(f"file://{tmp_path}/careful"), files_per_batch=3)
    careful = work.rows(spark)

    assert set(expected) < set(careful)
    assert len(careful) > len(careless), "the hazard that the roll-back is for"
    log = read_sink_log(str(work.output))
    orphans = [file for file in FileSink.at(str(work.output)).leftovers().files if file.name not in log.names]
    assert orphans
    delete_part_files(str(work.output), orphans)
    assert work.rows(spark) == careful
    assert {file.name for file in FileSink.at(str(work.output)).leftovers().files} <= log.names


@pytest.mark.thorough
def test_every_batch_that_spark_retains_can_be_gone_back_to(spark: SparkSession, tmp_path: Path) -> None:
    work = Workload(aggregation, retaining(ROCKSDB_CHANGELOG, 4), tmp_path)
    live = LiveDirectory(f"file://{tmp_path}/live")
    run_to_the_end(spark, work, live)
    expected = work.rows(spark)
    retained = retained_batches(live)
    assert retained[0] > 0
    assert len(retained) >= 4

    for batch in reversed(retained):
        target = LiveDirectory(f"file://{tmp_path}/live-{batch}")
        clone(live, target, at_batch=batch)
        FileSink.at(f"file:{work.output}").roll_back(RollBack(batch), nullcontext)
        run_to_the_end(spark, work, target, files_per_batch=2)
        assert work.rows(spark) == expected, f"rewound to batch {batch}"


@pytest.mark.thorough
def test_a_batch_whose_state_is_gone_is_refused_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    work = Workload(aggregation, retaining(HEAP, 100), tmp_path)
    live = LiveDirectory(f"file://{tmp_path}/live")
    run_to_the_end(spark, work, live)
    (tmp_path / "live/state/0/1/2.delta").unlink()

    with pytest.raises(IncompleteCutError, match=r"2\.delta is missing"):
        clone(live, LiveDirectory(f"file://{tmp_path}/rewound"), at_batch=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "live", "output", "right"]
    assert own_past(f"file:{work.output}", 2)
