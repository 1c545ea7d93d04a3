"""Snapshots of queries in each of Spark's ways to execute one, and of sources and logs of other kinds, resumed.

Real-time mode runs only on sources such as Kafka: `tests/kafka/test_real_time_mode.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spark_stateful_queries as queries
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import DataStreamWriter
from spark_scenarios import (
    HEAP,
    ROCKSDB_V2,
    SCHEMA,
    TakenSnapshot,
    Workload,
    run_to_the_end,
    snapshots_of_a_running_query,
    take_snapshot,
)

from dagster_ckpt.errors import NothingCommittedError
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = pytest.mark.spark
EVOLUTION = "spark.sql.streaming.queryEvolution"


def rate(spark: SparkSession) -> DataFrame:
    stream = spark.readStream.format("rate").options(rowsPerSecond=20, numPartitions=1)
    return stream.load()


def rate_of_micro_batches(spark: SparkSession) -> DataFrame:
    stream = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=5, numPartitions=1, startTimestamp=0)
    return stream.load()


class NamedSources(Workload):
    """With named sources, which need version 2 of the offset log."""

    def _stream(self, spark: SparkSession, side: str, files_per_batch: int) -> DataFrame:
        reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_batch).name(side)
        return reader.json(str(self.folder / side)).withWatermark("t", "20 seconds")


class NamedSink(Workload):
    """With a named sink, which makes version 3 of the commit log; PySpark has no name for it, the JVM has."""

    def writer(self, spark: SparkSession, *, files_per_batch: int = 1) -> DataStreamWriter:
        writer: Any = super().writer(spark, files_per_batch=files_per_batch)
        writer._jwrite = writer._jwrite.name("out")
        return writer


@pytest.mark.thorough(but="offset-log-v2")
@pytest.mark.parametrize(
    ("work", "formats"),
    [
        pytest.param(
            lambda folder: NamedSources(
                queries.inner_join,
                HEAP,
                folder,
                settings={
                    f"{EVOLUTION}.enableSourceEvolution": "true",
                    "spark.sql.streaming.offsetLog.formatVersion": "2",
                },
            ),
            {"offset_log": 2, "commit_log": 1, "state_checkpoint": 1},
            id="named-sources",
            marks=needs(Feature.NAMED_SOURCES),
        ),
        pytest.param(
            lambda folder: NamedSink(
                queries.windowed_counts, ROCKSDB_V2, folder, settings={f"{EVOLUTION}.enableSinkEvolution": "true"}
            ),
            {"offset_log": 1, "commit_log": 3, "state_checkpoint": 2},
            id="named-sink",
            marks=needs(Feature.NAMED_SINKS),
        ),
        pytest.param(
            lambda folder: Workload(
                queries.stateless_union, HEAP, folder, settings={"spark.sql.streaming.offsetLog.formatVersion": "2"}
            ),
            {"offset_log": 2, "commit_log": 1, "state_checkpoint": None},
            id="offset-log-v2",
            marks=needs(Feature.OFFSET_LOG_2),
        ),
    ],
)
def test_a_query_with_later_versions_of_its_logs_is_resumed_exactly(
    spark: SparkSession, tmp_path: Path, work: Callable[[Path], Workload], formats: dict[str, int | None]
) -> None:
    load = work(tmp_path)
    original = LiveDirectory(f"file://{tmp_path}/live-0")
    snapshots = snapshots_of_a_running_query(spark, load, original)
    expected = load.rows(spark)
    properties = cut(original, carry_in_flight=False).properties
    assert properties["formats"] == formats
    assert set(properties["source_offsets"]) <= {"0", "1", "left", "right"}
    assert list(properties["named_sinks"]) == (["out"] if formats["commit_log"] == 3 else [])
    original.delete()

    for number, snapshot in enumerate((snapshots[-1], snapshots[0])):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        snapshot.restore(target)
        run_to_the_end(spark, load, target)
        assert load.rows(spark) == expected


@pytest.mark.thorough(but="availableNow")
@pytest.mark.parametrize(
    "trigger",
    [{"once": True}, {"availableNow": True}, {"processingTime": "1 second"}],
    ids=lambda trigger: next(iter(trigger)),
)
def test_each_trigger_of_micro_batches_is_resumed_exactly(
    spark: SparkSession, tmp_path: Path, trigger: dict[str, Any]
) -> None:
    work = Workload(queries.inner_join, HEAP, tmp_path)
    live, restored = (LiveDirectory(f"file://{tmp_path}/live-{number}") for number in (0, 1))
    work.hold_back_input()

    def run(directory: LiveDirectory) -> None:
        session = work.session(spark)
        query = start_query(work.writer(session).trigger(**trigger), "triggered", directory)
        if "processingTime" in trigger:
            session.streams.get(query.query_id).processAllAvailable()
            query.stop()
        else:
            while not query.wait(0.5):
                pass
        assert query.exception() is None, query.exception()

    for number in range(3):
        work.feed(number)
    run(live)
    snapshot = take_snapshot(live, carry_in_flight=False, output=work.output)
    for number in range(3, 6):
        work.feed(number)
    run(live)
    expected = work.rows(spark)

    snapshot.restore(restored)
    run(restored)

    assert work.rows(spark) == expected
    assert cut(restored, carry_in_flight=False).properties["mode"] == "MICRO_BATCH"


def snapshots_while_running(
    query: SupervisedQuery, live: LiveDirectory, *, commits: int, output: Path | None = None
) -> list[TakenSnapshot]:
    """Snapshots from the first commit until there are so many."""
    snapshots: list[TakenSnapshot] = []
    while len({snapshot.batch_id for snapshot in snapshots}) < commits:
        assert not query.wait(0.01), query.exception()
        try:
            snapshots.append(take_snapshot(live, carry_in_flight=bool(len(snapshots) % 2), output=output))
        except NothingCommittedError:
            continue
    return snapshots


def wait_for_batch(query: SupervisedQuery, live: LiveDirectory, batch: int) -> None:
    while (live.positions().commit or 0) < batch:
        assert not query.wait(0.01), query.exception()


@pytest.mark.thorough(but="rate_of_micro_batches")
@pytest.mark.parametrize("source", [rate, rate_of_micro_batches])
def test_a_source_without_a_log_of_files_goes_on_from_its_offset(
    spark: SparkSession, tmp_path: Path, source: Callable[[SparkSession], DataFrame]
) -> None:
    output = tmp_path / "out"

    def start(live: LiveDirectory) -> SupervisedQuery:
        return start_query(source(spark).writeStream.format("json").option("path", str(output)), "rate", live)

    def rows() -> list[Row]:
        return spark.read.schema("timestamp timestamp, value long").json(str(output)).orderBy("value").collect()

    original = LiveDirectory(f"file://{tmp_path}/live-0")
    query = start(original)
    snapshots = snapshots_while_running(query, original, commits=4, output=output)
    query.stop()
    expected = rows()
    assert [row.value for row in expected] == list(range(len(expected)))

    for number, snapshot in enumerate((snapshots[-1], snapshots[len(snapshots) // 2], snapshots[0])):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        snapshot.restore(target)
        query = start(target)
        wait_for_batch(query, target, snapshot.batch_id + 3)
        query.stop()
        resumed = rows()
        shared = min(len(resumed), len(expected))
        assert [row.value for row in resumed] == list(range(len(resumed)))
        # The time of a row follows from the start of the source, which it notes once and which the snapshot carries.
        assert resumed[:shared] == expected[:shared]


def seen(path: Path) -> list[int]:
    """What a sink that remembers nothing was given, each once."""
    return sorted({int(line) for line in path.read_text().splitlines()})


def append_to(path: Path) -> Callable[[Row], None]:
    def append(row: Row) -> None:
        with path.open("a") as stream:
            stream.write(f"{row.value}\n")

    return append


@needs(Feature.ASYNC_FOREACH)
def test_asynchronous_progress_tracking_gives_every_row_again_after_its_newest_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    session = spark.newSession()
    # Kept so short as elsewhere here, Spark purges the offsets of a batch before it has committed the next but one.
    session.conf.set("spark.sql.streaming.minBatchesToRetain", "10")

    def start(live: LiveDirectory) -> SupervisedQuery:
        # Each query to a file of its own: a Python worker may outlive its query by some rows.
        writer = rate_of_micro_batches(session).writeStream.foreach(append_to(Path(f"{live.local_path}-seen")))
        tracking = {"asyncProgressTrackingEnabled": "true", "asyncProgressTrackingCheckpointIntervalMs": "500"}
        return start_query(writer.options(**tracking), "tracked", live)

    original = LiveDirectory(f"file://{tmp_path}/live-0")
    query = start(original)
    snapshots = snapshots_while_running(query, original, commits=4)
    assert query.facts().mode is ExecutionMode.ASYNC_PROGRESS
    query.stop()
    assert seen(Path(f"{original.local_path}-seen"))[:20] == list(range(20))

    for number, snapshot in enumerate((snapshots[-1], snapshots[len(snapshots) // 2], snapshots[0])):
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        snapshot.restore(target)
        committed = offsets_of(target)["offset"]
        query = start(target)
        wait_for_batch(query, target, snapshot.batch_id + 2)
        query.stop()
        again = seen(Path(f"{target.local_path}-seen"))
        assert again == list(range(committed, again[-1] + 1))


def test_continuous_processing_goes_on_after_the_epoch_of_the_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """No sink that can be asked works here: a Python one fails at its second epoch, memory refuses a restart."""

    def start(live: LiveDirectory) -> SupervisedQuery:
        return start_query(
            rate(spark).writeStream.format("noop").trigger(continuous="500 milliseconds"), "epochs", live
        )

    original = LiveDirectory(f"file://{tmp_path}/live-0")
    query = start(original)
    wait_for_value(query, original, 10)
    snapshots = snapshots_while_running(query, original, commits=4)
    assert query.facts().mode is ExecutionMode.CONTINUOUS
    query.stop()
    assert inspect_live_directory(original).status is LiveStatus.GOOD
    assert cut(original, carry_in_flight=False).properties["mode"] == "CONTINUOUS"

    for number, snapshot in enumerate((snapshots[-1], snapshots[len(snapshots) // 2], snapshots[0])):
        assert snapshot.in_flight is None
        target = LiveDirectory(f"file://{tmp_path}/live-{number + 1}")
        snapshot.restore(target)
        before = offsets_of(target)["0"]["value"]
        query = start(target)
        wait_for_batch(query, target, snapshot.batch_id + 1)
        after = parse_offset_entry(target.folder.read(f"offsets/{snapshot.batch_id + 1}"), f"{snapshot.batch_id + 1}")
        assert json.loads(after.sources["0"] or "")["0"]["value"] >= before > 10
        wait_for_value(query, target, before)
        query.stop()


def wait_for_value(query: SupervisedQuery, live: LiveDirectory, value: int) -> None:
    wait_for_batch(query, live, 1)
    while offsets_of(live)["0"]["value"] <= value:
        assert not query.wait(0.01), query.exception()


def offsets_of(live: LiveDirectory) -> Any:
    """The offset of the only source in the newest commit."""
    return cut(live, carry_in_flight=False).properties["source_offsets"]["0"]
