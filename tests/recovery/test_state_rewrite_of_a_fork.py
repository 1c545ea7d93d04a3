"""The first start of a fork, or one that finishes a restore, may rewrite the state, and be killed anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.catalog.pending_restore import Forked, ToBatch
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, OnStateChange
from dagster_ckpt.recovery import live_directories
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.live_directories import StateRewrite
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.checkpoint_dir.inspect import inspect_live_directory, live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state.rewriting import shape_in
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import check_places
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import keeping, set_stream
from tests.support.executioner import Executioner, Killed
from tests.support.lease_losers import copied_state
from tests.support.needs import needs
from tests.support.query_bench import make_stream
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import History
from tests.support.small_spark import lay_file, small_spark

SHAPE = StateShape(ROCKSDB, 12)


@pytest.fixture
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_directories, "rewrite_state", copied_state)


def finish(stream: StreamHandle, output: Path, *, rewrites: bool) -> PreparedStart:
    """A start that finishes what is pending."""
    check_places(stream, StartFrom(), predecessor_ended=True)
    plan = planned_start(stream, StartFrom())
    assert plan.kind is RecoveryKind.FINISH_RESTORE
    spark: Any = None
    with keeping(stream.catalog, stream.stream_id) as lease:
        rewrite = StateRewrite(spark, SHAPE) if rewrites else None
        return prepare(stream, plan, lease, NamedOutput("parquet", str(output)), rewrite=rewrite)


@pytest.mark.usefixtures("_without_spark")
def test_the_first_start_of_a_fork_rewrites_its_state_and_can_be_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, killed = 0, True
    history = History(tmp_path)
    of_original = {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()}
    while killed:
        name = f"scratch-{step}"
        stream = replace(history.shelf.stream, stream_id=name, name=name, asset_key=name)
        made = fork(history.shelf.stream, stream, StartFrom("batch-3"), origin="a test")
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                finish(stream, tmp_path / name, rewrites=True)
                killed = False
            except Killed:
                step += 1
        prepared = finish(stream, tmp_path / name, rewrites=killed)
        assert inspect_live_directory(prepared.live).batch_id == made.batch_id == 3
        assert live_query_id(prepared.live) == made.query_id
        # It counts as a fork that has not started until its query has.
        pending = stream.catalog.streams.get(name).pending_restore
        assert isinstance(pending, Forked)
        assert pending.of_stream_id == STREAM
        assert prepared.live.is_not_in_use()
        assert prepared.live.url != made.live_directory
    assert step > 8
    assert {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()} == of_original
    history.close()


@pytest.mark.usefixtures("_without_spark")
def test_a_restore_that_was_cut_off_is_finished_with_rewritten_state(tmp_path: Path) -> None:
    history = History(tmp_path)
    stream = history.shelf.stream
    history.start("batch-5")
    pending = ToBatch(batch_id=5, sinks=(history.file_sink,))
    history.commit(6, path := Path(history.live.url), history.sink)
    (path / "commits/6").unlink()
    (path / "offsets/6").unlink()
    set_stream(stream.catalog, STREAM, pending_restore=f'{{"batch_id":5,"sinks":["{history.file_sink}"]}}')
    assert stream.catalog.streams.get(STREAM).pending_restore == pending

    prepared = finish(stream, history.sink, rewrites=True)

    assert prepared.rewritten is not None
    assert prepared.live.url != str(path)
    assert (history.batch, history.sink_batch) == (5, 5)
    assert stream.catalog.streams.get(STREAM).pending_restore is None
    assert not prepared.live.is_not_in_use()
    history.close()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.mark.thorough
@pytest.mark.spark
@needs(Feature.STATE_REWRITER)
def test_a_fork_starts_with_another_backend_and_other_partitions(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    landing.mkdir()
    for number in range(3):
        lay_file(landing, number, [{"shop": (number + n) % 11} for n in range(22)])
    original = make_stream(tmp_path)
    shown: dict[int, int] = {}

    def describe() -> DataStreamWriter:
        stream = spark.readStream.schema("shop long").option("maxFilesPerTrigger", 1)
        counts = stream.json(str(landing)).groupBy("shop").agg(F.count("*").alias("n"))

        def keep(batch: Any, _batch_id: int) -> None:
            shown.update({row.shop: row.n for row in batch.collect()})

        return counts.writeStream.foreachBatch(keep).outputMode("update").trigger(availableNow=True)

    def run(stream: StreamHandle, **how: Any) -> LiveDirectory:
        to_start = QueryToStart(describe)
        outcome = execute_stream(
            stream,
            RunRequest(
                run_id="run",
                start_query=lambda live: start_query(to_start.take(), stream.name, live),
                describe=to_start.described,
                start_from=StartFrom("latest", **how),
            ),
        )
        assert outcome.end.kind is EndKind.ENDED_BY_ITSELF, outcome.end
        return LiveDirectory(stream.catalog.streams.get(stream.stream_id).live_directory or "")

    apply_state_backend(spark, EmbeddedRocksDBStateBackend(True))
    before = run(original)
    heap = HashMapStateBackend()
    forked = replace(
        original,
        stream_id="scratch",
        name="scratch",
        asset_key="scratch",
        backend=heap,
        on_backend_change=OnStateChange.CONVERT,
    )
    fork(original, forked, StartFrom(), origin="a test")
    lay_file(landing, 3, [{"shop": n % 11} for n in range(22)])
    shown.clear()

    apply_state_backend(spark, heap)
    live = run(forked, state_partitions=5)

    assert shape_in(live) == StateShape(HEAP, 5)
    assert shape_in(before) == StateShape(ROCKSDB, 2)
    assert shown == dict.fromkeys(range(11), 8)
    assert forked.catalog.streams.get("scratch").pending_restore is None
    assert not live.is_not_in_use()
    original.catalog.close()
