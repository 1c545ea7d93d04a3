"""A snapshot of a running query, resumed: its output must equal the uninterrupted run's, row for row.

Every operator runs with at least two providers, every provider with at least three operators, and state checkpoint
format v2 with each family of operators (x: covered here; -: Spark refuses the pair). Every suite runs each operator
with one of them at least, and each of them with two operators at least; `make test-state` runs the rest:

| operator                              | heap | RocksDB | + changelog | format v2 | format v2 + changelog |
|---------------------------------------|------|---------|-------------|-----------|-----------------------|
| aggregation, watermark, append        | x    | x       | x           | x         | x                     |
| aggregation, no watermark, update     | x    |         |             |           | x                     |
| aggregation, no watermark, complete   |      |         | x           | x         |                       |
| aggregation without a key, update     |      | x       |             |           | x                     |
| session windows                       | x    |         |             |           | x                     |
| dropDuplicates                        |      | x       |             | x         |                       |
| dropDuplicates with the event time    | x    |         | x           |           |                       |
| dropDuplicatesWithinWatermark         | x    |         |             |           | x                     |
| inner join, state v2 (four stores)    |      |         | x           | x         |                       |
| left outer join, state v2             | x    |         |             |           | x                     |
| left outer join, state v3             | -    | x       |             | x         |                       |
| full outer join, state v4             | -    |         | x           |           | x                     |
| applyInPandasWithState                | x    |         |             |           | x                     |
| transformWithState                    | -    |         | x           | x         |                       |
| transformWithStateInPandas            | -    | x       |             |           | x                     |
| limit                                 | x    |         |             |           | x                     |
| window aggregation over a join        |      | x       |             |           | x                     |
| window aggregation over deduplication | x    |         |             | x         |                       |
| stateless, union of two sources       | no state                                                       |

One of them runs once more on Hadoop's own local file system: see local_files.py.
Join state v1 is not in it: Spark 4.3 refuses to start such a query.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import spark_stateful_queries as queries
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from spark_scenarios import (
    HEAP,
    ROCKSDB,
    ROCKSDB_CHANGELOG,
    ROCKSDB_V2,
    ROCKSDB_V2_NO_CHANGELOG,
    TakenSnapshot,
    Workload,
    run_to_the_end,
    snapshots_of_a_running_query,
)

from dagster_ckpt import run_stream
from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.versions import Feature
from tests.support.local_files import HADOOPS_OWN
from tests.support.needs import needs
from tests.support.small_spark import lay_file, unload_stores

pytestmark = pytest.mark.spark

BACKENDS = {
    "heap": HEAP,
    "rocksdb": ROCKSDB,
    "changelog": ROCKSDB_CHANGELOG,
    "v2": ROCKSDB_V2_NO_CHANGELOG,
    "v2-changelog": ROCKSDB_V2,
}
NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"
JOIN = "spark.sql.streaming.join.stateFormatVersion"


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        build: The query.
        backends: Names of the backends it is tried with in every suite.
        mode: Output mode.
        settings: Further settings of the query.
        needed: Features of Spark that it needs; those of its backend are added.
        further: Names of those that only `make test-state` tries.
        in_core: Whether every version of Spark must pass it, with the last of `backends`.
        any_batching: Whether its rows do not depend on how the input is cut into batches. The last run then makes
            larger ones.
    """

    build: Callable[[DataFrame, DataFrame], DataFrame]
    backends: str
    mode: str = "append"
    settings: Mapping[str, str] = field(default_factory=dict)
    any_batching: bool = True
    needed: tuple[Feature, ...] = ()
    further: str = ""
    in_core: bool = False

    @property
    def labels(self) -> list[str]:
        return [f"state-v{value}" if name == JOIN else "hadoops-own-files" for name, value in self.settings.items()]

    @property
    def of_format_2(self) -> list[Feature]:
        in_one = [Feature.CHECKPOINT_FORMAT_2_OF_ONE_PARTITION] if self.build in queries.IN_ONE_PARTITION else []
        return [Feature.CHECKPOINT_FORMAT_2, *in_one]


CASES = [
    Case(queries.windowed_counts, "heap rocksdb changelog v2 v2-changelog", in_core=True),
    Case(queries.counts_for_ever, "heap", mode="update", any_batching=False, further="v2-changelog"),
    Case(queries.counts_for_ever, "changelog", mode="complete", any_batching=False, further="v2"),
    Case(queries.one_total, "rocksdb", mode="update", any_batching=False, in_core=True),
    Case(queries.one_total, "v2-changelog", mode="update", any_batching=False, in_core=True),
    Case(queries.sessions, "heap", further="v2-changelog", in_core=True),
    Case(queries.first_of_each, "rocksdb", further="v2"),
    Case(queries.first_of_each_event, "changelog", further="heap", in_core=True),
    Case(queries.first_within_watermark, "v2-changelog", any_batching=False, further="heap"),
    Case(queries.inner_join, "v2", settings={JOIN: "2"}, further="changelog"),
    Case(queries.left_outer_join, "v2-changelog", settings={JOIN: "2"}, further="heap", in_core=True),
    Case(queries.left_outer_join, "rocksdb", settings={JOIN: "3"}, needed=(Feature.JOIN_STATE_3,), further="v2"),
    Case(
        queries.full_outer_join,
        "changelog",
        settings={JOIN: "4"},
        needed=(Feature.JOIN_STATE_4,),
        further="v2-changelog",
    ),
    Case(queries.pandas_with_state, "heap", any_batching=False, further="v2-changelog", in_core=True),
    Case(queries.transform_rows, "changelog", any_batching=False, needed=(Feature.TRANSFORM_WITH_STATE,), further="v2"),
    Case(
        queries.transform_pandas,
        "rocksdb",
        any_batching=False,
        needed=(Feature.TRANSFORM_WITH_STATE_IN_PANDAS,),
        further="v2-changelog",
    ),
    Case(queries.first_rows, "heap", any_batching=False, further="v2-changelog", in_core=True),
    Case(queries.counts_over_a_join, "rocksdb", further="v2-changelog", in_core=True),
    Case(queries.counts_of_firsts, "v2", further="heap", in_core=True),
    Case(queries.stateless_union, "heap", in_core=True),
    Case(queries.windowed_counts, "changelog", settings=HADOOPS_OWN),
]

PAIRS = [
    pytest.param(
        case,
        BACKENDS[backend],
        id="-".join([case.build.__name__, case.mode, *case.labels, backend]),
        marks=[
            needs(*case.needed, *(case.of_format_2 if backend.startswith("v2") else [])),
            *([pytest.mark.core] if case.in_core and backend == case.backends.split()[-1] else []),
            *([pytest.mark.state] if backend in case.further.split() else []),
        ],
    )
    for case in CASES
    for backend in (*case.backends.split(), *case.further.split())
]


@pytest.mark.thorough(but=("one_total-update-rocksdb", "sessions-append-heap"))
@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_a_query_resumed_from_any_snapshot_gives_the_rows_of_the_uninterrupted_run(
    spark: SparkSession, tmp_path: Path, case: Case, backend: StateBackend
) -> None:
    # Batches without data, which only move the watermark on, would come at other places of a resumed run.
    settings = case.settings if case.any_batching else {**case.settings, NO_DATA_BATCHES: "false"}
    work = Workload(case.build, backend, tmp_path, case.mode, settings)
    original = LiveDirectory(f"file://{tmp_path}/live-0")
    snapshots = snapshots_of_a_running_query(spark, work, original)
    expected = work.rows(spark)
    assert expected
    newest = work.newest_batch()
    # A task of the stopped query may still open a store there.
    unload_stores(spark)
    original.delete()

    for number, snapshot in enumerate(_last_middle_first(snapshots)):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        made = snapshot.restore(target)
        # As a start does: Spark 3.5 refuses a join's state if the first batch has rows of one side alone.
        widen_schemas(target.folder, snapshot.batch_id, nullcontext)
        work.back_to(snapshot.batch_id)
        assert made.batch_id == snapshot.batch_id
        # A sink that still knew later batches would pass over them, and their rows would be there from before.
        assert work.newest_batch() == min(newest, snapshot.batch_id)
        assert inspect_live_directory(target).in_flight == snapshot.in_flight
        run_to_the_end(spark, work, target, files_per_batch=3 if case.any_batching and number == 2 else 1)
        assert work.rows(spark) == expected, f"resumed after batch {snapshot.batch_id}, in flight {snapshot.in_flight}"
        # Late uploads of the first query's own stores may appear there; what a start writes may not.
        assert not [path for path, _ in original.folder.find() if "_metadata" in path or "_stateSchema" in path]

    for number, snapshot in enumerate(snapshots):
        target = LiveDirectory(f"file://{tmp_path}/whole-{number}")
        snapshot.restore(target)
        assert inspect_live_directory(target).status is LiveStatus.GOOD


@pytest.mark.core
def test_a_join_goes_on_if_one_side_has_no_rows_in_the_first_batch_of_a_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark 3.5 finds other columns nullable in such a batch, and refuses the state schemas that it stored itself."""
    places = {
        "catalog": f"sqlite:///{tmp_path}/catalog.db",
        "storage": f"file://{tmp_path}/snapshots",
        "live_root": f"{tmp_path}/live",
    }

    def pairs(session: SparkSession) -> DataStreamWriter:
        ordered, paid = (
            session.readStream.schema("id long").json(f"{tmp_path}/{side}") for side in ("ordered", "paid")
        )
        pairs = ordered.join(paid, "id").writeStream.format("parquet")
        return pairs.option("path", f"{tmp_path}/pairs").trigger(availableNow=True)

    for side in ("ordered", "paid"):
        (tmp_path / side).mkdir()
        lay_file(tmp_path / side, 0, [{"id": 0}])
    run_stream("pairs", pairs, **places, spark=spark)
    # Each start has one batch, with rows of one side.
    for side in ("ordered", "paid"):
        lay_file(tmp_path / side, 1, [{"id": 1}])
        run_stream("pairs", pairs, **places, spark=spark)

    assert sorted(row.id for row in spark.read.parquet(f"{tmp_path}/pairs").collect()) == [0, 1]


def _last_middle_first(snapshots: list[TakenSnapshot]) -> list[TakenSnapshot]:
    """Of either kind, and not in the order of time, so that every rewind leads back from the end of the input."""
    aligned = [snapshot for snapshot in snapshots if snapshot.in_flight is None]
    carrying = [snapshot for snapshot in snapshots if snapshot.in_flight is not None]
    assert len({snapshot.batch_id for snapshot in snapshots}) >= 4
    assert aligned
    assert carrying
    return [aligned[-1], carrying[len(carrying) // 2], aligned[0]]
