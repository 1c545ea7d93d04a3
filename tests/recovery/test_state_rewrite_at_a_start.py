"""A start that rewrites state: from a snapshot, from the live directory, with another backend, and if it is killed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, OnStateChange, StateBackend
from dagster_ckpt.errors import StateBackendChangeError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state.rewriting import shape_in
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.needs import needs, needs_rewriter
from tests.support.query_bench import make_stream
from tests.support.small_spark import lay_file, small_spark

pytestmark = [pytest.mark.spark, needs_rewriter()]

CHANGELOG = EmbeddedRocksDBStateBackend(True)


@dataclass
class Orders:
    """A stream that counts the rows of every shop, and writes what changed in each batch."""

    spark: SparkSession
    root: Path
    stream: StreamHandle
    files: int = 0

    def feed(self, files: int = 1) -> None:
        (self.root / "landing").mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            lay_file(self.root / "landing", number, [{"shop": (number * 7 + n) % 11} for n in range(20)])
        self.files += files

    def describe(self) -> DataStreamWriter:
        stream = self.spark.readStream.schema("shop long").option("maxFilesPerTrigger", 1)
        counts = stream.json(str(self.root / "landing")).groupBy("shop").agg(F.count("*").alias("n"))
        totals = self.root / "totals"

        def keep(batch: Any, _batch_id: int) -> None:
            totals.mkdir(exist_ok=True)
            for row in batch.collect():
                (totals / str(row.shop)).write_text(str(row.n))

        return counts.writeStream.foreachBatch(keep).outputMode("update").trigger(availableNow=True)

    def run(self, text: str = "latest", *, backend: StateBackend = CHANGELOG, **how: Any) -> None:
        apply_state_backend(self.spark, backend)
        to_start = QueryToStart(self.describe)
        outcome = execute_stream(
            self.stream,
            RunRequest(
                run_id="run",
                start_query=lambda live: start_query(to_start.take(), "orders", live),
                describe=to_start.described,
                start_from=StartFrom(text, **how),
            ),
        )
        assert outcome.end.kind is EndKind.ENDED_BY_ITSELF, outcome.end

    @property
    def live(self) -> LiveDirectory:
        return LiveDirectory(self.stream.catalog.streams.get("orders").live_directory or "")

    @property
    def shape(self) -> StateShape | None:
        return shape_in(self.live)

    def directories(self) -> set[str]:
        return {each.live.url.rpartition("/")[2] for each in self.stream.live_directories()}

    def totals_are_right(self) -> bool:
        shops = Counter((number * 7 + n) % 11 for number in range(self.files) for n in range(20))
        shown = {int(path.name): int(path.read_text()) for path in (self.root / "totals").iterdir()}
        return shown == dict(shops)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.fixture
def orders(spark: SparkSession, tmp_path: Path) -> Iterator[Orders]:
    orders = Orders(spark, tmp_path, make_stream(tmp_path))
    orders.feed(2)
    orders.run()
    yield orders
    orders.stream.catalog.close()


def test_a_start_from_a_savepoint_rescales_it(orders: Orders) -> None:
    verbs.trigger_savepoint(orders.stream, origin="a test", label="good")
    before = orders.live
    orders.feed()

    orders.run("good", state_partitions=5)

    assert orders.shape == StateShape(ROCKSDB, 5)
    assert re.fullmatch(r"live-2-\d+", orders.live.url.rpartition("/")[2])
    assert orders.live != before
    assert orders.totals_are_right()


@pytest.mark.thorough
def test_a_start_from_the_live_directory_rescales_it_and_later_starts_keep_the_number(orders: Orders) -> None:
    orders.feed()
    orders.run(state_partitions=1)
    assert orders.shape == StateShape(ROCKSDB, 1)

    orders.feed()
    orders.run()
    assert orders.shape == StateShape(ROCKSDB, 1)
    assert orders.totals_are_right()
    taken = verbs.trigger_savepoint(orders.stream, origin="a test")
    assert (taken.properties or {})["state_partitions"] == 1


@pytest.mark.thorough
def test_another_backend_is_refused_or_converted(orders: Orders) -> None:
    orders.feed()
    heap = HashMapStateBackend()
    orders.stream = replace(orders.stream, backend=heap)
    with pytest.raises(StateBackendChangeError, match="on_change: CONVERT"):
        orders.run(backend=heap)
    assert orders.shape == StateShape(ROCKSDB, 2)

    orders.stream = replace(orders.stream, on_backend_change=OnStateChange.CONVERT)
    orders.run(backend=heap, state_partitions=3)

    assert orders.shape == StateShape(HEAP, 3)
    assert orders.totals_are_right()


@pytest.mark.thorough
def test_a_preflight_tries_the_rewrite_on_a_copy(orders: Orders) -> None:
    before = orders.live, orders.directories()
    said: list[str] = []

    result = preflight(orders.stream, orders.describe, start_from=StartFrom(state_partitions=7), report=said.append)

    assert result.passed, result.reason
    assert any("2 partitions" in each and "7 partitions" in each for each in said)
    assert result.reason.endswith("after batch 1 the new code has the same state as the running code")
    assert (orders.live, orders.directories()) == before
    assert orders.shape == StateShape(ROCKSDB, 2)


@pytest.mark.thorough
def test_a_preflight_says_what_new_code_makes_of_the_state(orders: Orders) -> None:
    describe = orders.describe

    def counts_even_shops_twice() -> DataStreamWriter:
        stream = orders.spark.readStream.schema("shop long").option("maxFilesPerTrigger", 1)
        rows = stream.json(str(orders.root / "landing"))
        twice = rows.selectExpr("shop", "explode(sequence(0, if(shop % 2 = 0, 1, 0)))")
        counts = twice.groupBy("shop").agg(F.count("*").alias("n"))
        return counts.writeStream.format("noop").outputMode("update").trigger(availableNow=True)

    before = {path: version.version() for path, version in orders.live.folder.find()}
    for partitions in (None, 3):
        result = preflight(orders.stream, counts_even_shops_twice, start_from=StartFrom(state_partitions=partitions))
        # Even shops from 0 to 10, each of which the replayed batch has seen.
        assert result.reason.endswith("default of operator 0 (stateStoreSave): 6 rows changed")
    assert preflight(orders.stream, describe).reason.endswith("has the same state as the running code")
    assert {path: version.version() for path, version in orders.live.folder.find()} == before


class KilledError(Exception):
    """The process dies here."""


@needs(Feature.STATE_REWRITER)
def test_a_start_killed_after_any_file_of_the_rewrite_leaves_the_stream_as_it_was(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing cleans up after a kill: what is left of the new directory is there when the next start comes."""
    orders.feed()
    before, record = orders.live, orders.stream.catalog.streams.get("orders")
    kept_fields = ("live_directory", "live_generation", "timeline", "pending_restore", "origin")
    kept_values = [getattr(record, name) for name in kept_fields]
    content = {path: version.version() for path, version in before.folder.find()}
    written: list[str] = []
    dies_after = 0

    def killing(method: str) -> None:
        write = getattr(LocalFileIO, method)

        def writes(self: LocalFileIO, path: str, *arguments: Any, **keywords: Any) -> None:
            write(self, path, *arguments, **keywords)
            if re.search(r"/orders/live-([2-9]|\d\d)", str(self.root)):
                written.append(path)
                if len(written) > dies_after:
                    raise KilledError(path)

        monkeypatch.setattr(LocalFileIO, method, writes)

    kept = LiveDirectory.delete
    killing("place")
    killing("write")
    died: list[str] = []
    while True:
        written.clear()
        monkeypatch.setattr(LiveDirectory, "delete", lambda _self: None)
        try:
            orders.run(state_partitions=5)
        except KilledError as killed:
            died.append(str(killed))
        else:
            break
        finally:
            monkeypatch.setattr(LiveDirectory, "delete", kept)
        assert [getattr(orders.stream.catalog.streams.get("orders"), name) for name in kept_fields] == kept_values
        assert orders.live == before
        assert {path: version.version() for path, version in before.folder.find()} == content
        dies_after += 1

    assert {"not-in-use", "metadata", "commits/1", "offsets/1"} <= set(died)
    assert orders.shape == StateShape(ROCKSDB, 5)
    assert orders.totals_are_right()
