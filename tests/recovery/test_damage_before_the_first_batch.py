"""State damaged while the process was down never replaces the last good checkpoint, and the stream comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.catalog.records import EventType, StartCause
from dagster_ckpt.config.rocksdb_state_backends import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.policies.restart_strategies import RestartStrategies
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle
from tests.support.query_bench import Bench, make_stream
from tests.support.small_spark import small_spark

pytestmark = pytest.mark.spark

BACKENDS: dict[str, StateBackend] = {"heap": HashMapStateBackend(), "rocksdb": EmbeddedRocksDBStateBackend(True)}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x55]) + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({}) as session:
        yield session


def stream_of(root: Path, *, interval: int) -> StreamHandle:
    stream = make_stream(root, num_retained=1, interval=interval, tolerable_failures=1_000)
    return replace(stream, restart=RestartStrategies.fixed_delay_restart(5, 1))


def reopen(bench: Bench, *, interval: int) -> None:
    bench.stream.catalog.close()
    bench.stream = stream_of(bench.root, interval=interval)
    # Another process has nothing in memory.
    bench.spark.sparkContext._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()


@pytest.mark.parametrize(
    ("backend", "damage"),
    [("heap", "flipped"), ("heap", "cut"), ("heap", "zeroed"), ("rocksdb", "flipped"), ("rocksdb", "zeroed")],
)
def test_damaged_state_that_no_query_has_loaded_costs_no_checkpoint(
    spark: SparkSession, tmp_path: Path, backend: str, damage: str
) -> None:
    apply_state_backend(spark, BACKENDS[backend])
    bench = Bench(spark, tmp_path, stream_of(tmp_path, interval=200))
    bench.feed(2)
    bench.run(lambda: bench.committed() >= 1 and any((each.batch_id or 0) >= 1 for each in bench.snapshots()))
    [good] = bench.snapshots()[:1]
    reopen(bench, interval=3_600_000)
    bench.feed(2)
    bench.run(lambda: bench.committed() >= (good.batch_id or 0) + 2)
    live = Path(bench.stream.catalog.streams.get("orders").live_directory or "")
    newest = bench.committed() + 1
    damaged = [path for suffix in ("delta", "changelog") for path in live.glob(f"state/*/*/{newest}.{suffix}")]
    assert damaged
    for path in damaged:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))

    # A start in place without input: Spark loads no state, but checkpoints are due.
    reopen(bench, interval=200)
    failures = len(events(bench, EventType.CHECKPOINT_FAILED))
    bench.run(lambda: len(events(bench, EventType.CHECKPOINT_FAILED)) >= failures + 2)

    assert good.snapshot_id in {each.snapshot_id for each in bench.snapshots()}
    assert all(each.batch_id == good.batch_id for each in bench.snapshots())
    reopen(bench, interval=200)
    bench.feed(2)
    bench.run_to_the_end(cause=StartCause.RESTART_NEW_RUN)
    bench.assert_exact()


def events(bench: Bench, what: EventType) -> list[object]:
    return [event for event in bench.stream.catalog.events.after(0) if event.type is what]
