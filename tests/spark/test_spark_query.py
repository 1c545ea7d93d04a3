"""Supervising a real query."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import FILES, HEAP, Workload, aggregation, take_snapshot

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import OptionError, QueryStopError
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import materialize
from dagster_ckpt.spark.query.query import SupervisedQuery, jvm_pid, start_query
from dagster_ckpt.spark.query.session import apply_state_backend

pytestmark = [pytest.mark.spark, pytest.mark.core]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("query")


@pytest.fixture(scope="module")
def live(folder: Path) -> LiveDirectory:
    return LiveDirectory(f"{folder}/live-0")


@pytest.fixture(scope="module")
def query(spark: SparkSession, folder: Path, live: LiveDirectory) -> Iterator[SupervisedQuery]:
    """A query over all its input, idle now."""
    started = start_query(Workload(aggregation, HEAP, folder).writer(spark), "orders", live)
    spark.streams.get(started.query_id).processAllAvailable()
    yield started
    started.stop()


def test_name_and_live_directory_replace_what_the_writer_had(
    spark: SparkSession, query: SupervisedQuery, live: LiveDirectory
) -> None:
    assert spark.streams.get(query.query_id).name == "orders"
    assert inspect_live_directory(live).status is LiveStatus.GOOD


def test_every_batch_is_reported_once(query: SupervisedQuery, live: LiveDirectory, folder: Path) -> None:
    reports = query.recent_progress()

    assert [report.batch_id for report in reports] == list(range(len(reports)))
    assert reports[-1].batch_id == live.positions().commit
    assert sum(report.input_rows for report in reports) == FILES * 12
    # Spark 3.5 names it as the user did.
    assert [sink_of(sink).place for sink in reports[-1].sinks] in ([f"file:{folder}/output"], [f"{folder}/output"])
    assert reports[-1].watermark is not None
    assert query.recent_progress() == []
    assert query.progress() == reports[-1]


def test_a_query_with_nothing_to_do_is_idle_and_has_not_ended(query: SupervisedQuery) -> None:
    while not query.is_idle():
        assert not query.wait(0.1)
    assert not query.wait(0)
    assert query.exception() is None


def test_the_jvm_of_a_classic_session_is_a_process_of_this_machine(spark: SparkSession) -> None:
    pid = jvm_pid(spark)

    assert pid is not None
    assert psutil.Process(pid).name() == "java"


def test_a_server_of_spark_connect_is_not_our_jvm() -> None:
    assert jvm_pid(Mock(name="a Connect session")) is None


def test_a_failed_query_tells_every_cause(spark: SparkSession, tmp_path: Path) -> None:
    def fail(left: DataFrame, right: DataFrame) -> DataFrame:
        return left.selectExpr("raise_error('the input is bad') AS x")

    started = start_query(Workload(fail, HEAP, tmp_path).writer(spark), "failing", LiveDirectory(f"{tmp_path}/live"))
    while not started.wait(0.5):
        pass

    assert "the input is bad" in (started.exception() or "")
    started.stop()


def test_a_stop_that_fails_is_an_error_only_while_the_query_runs() -> None:
    stuck = Mock(isActive=True, stop=Mock(side_effect=RuntimeError("timed out")))
    stuck.name = "orders"
    with pytest.raises(QueryStopError, match="'orders' does not stop: timed out"):
        SupervisedQuery(stuck).stop()

    class BridgeIsBroken:
        """A JVM that may live, and does not answer any more."""

        name = "orders"

        def stop(self) -> None:
            raise RuntimeError("the answer was lost")

        @property
        def isActive(self) -> bool:  # noqa: N802 - Spark's
            raise ConnectionError("nothing can be asked any more")

    with pytest.raises(QueryStopError, match="the answer was lost"):
        SupervisedQuery(BridgeIsBroken()).stop()  # type: ignore[arg-type]

    ended = Mock(isActive=False, stop=Mock(side_effect=RuntimeError("the query's own error")))
    SupervisedQuery(ended).stop()
    ended.stop.assert_called_once()


def test_a_state_backend_is_applied_to_the_session(spark: SparkSession) -> None:
    session = spark.newSession()
    backend = EmbeddedRocksDBStateBackend(
        True,
        settings={
            "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
            "spark.sql.streaming.stateStore.rocksdb.blockSizeKB": 8,
        },
    )

    changed = apply_state_backend(session, backend)

    assert changed == backend.spark_settings()
    assert {name: session.conf.get(name) for name in changed} == changed
    assert apply_state_backend(session, backend) == {}


def test_a_setting_of_the_application_is_refused_with_what_to_do(spark: SparkSession) -> None:
    backend = EmbeddedRocksDBStateBackend(True)
    backend.set_db_storage_paths("/elsewhere")

    with pytest.raises(OptionError, match=r"spark\.local\.dir.*when the application starts"):
        apply_state_backend(spark.newSession(), backend)


def global_count(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.groupBy().count()


def test_state_without_a_key_is_cut_although_the_session_has_more_partitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    work = Workload(global_count, HEAP, tmp_path)
    live = LiveDirectory(f"{tmp_path}/live")
    writer = work.writer(spark).outputMode("update").format("noop").trigger(availableNow=True)
    started = start_query(writer, "counting", live)
    while not started.wait(0.5):
        pass

    snapshot = take_snapshot(live, carry_in_flight=False)

    assert not [path for path in snapshot.files if path.startswith("state/0/1/")]
    assert materialize(LiveDirectory(f"{tmp_path}/restored"), snapshot.fill).batch_id == snapshot.batch_id
