"""A query that nobody can reach is fenced off while it writes; one that goes on from it loses and doubles no row."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dagster_ckpt.sinks.batch_in_flight import settle_in_flight
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import fence
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from tests.support.small_spark import lay_file, small_spark

pytestmark = [pytest.mark.spark, pytest.mark.core]
LIMIT_S = 120
FILES = 12


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.shuffle.partitions": "1"}) as session:
        yield session


class Feed:
    """Two queries over the same files, into the same folder."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.files = 0
        (root / "in").mkdir()

    def more(self, files: int = 1) -> None:
        for _ in range(files):
            lay_file(self.root / "in", self.files, [{"v": self.files}])
            self.files += 1

    def start(self, live: LiveDirectory, *, stateful: bool) -> StreamingQuery:
        rows = self.spark.readStream.schema("v long").json(str(self.root / "in"))
        writer = (rows.dropDuplicates(["v"]) if stateful else rows).writeStream.format("parquet")
        writer = writer.option("path", str(self.root / "out")).option("checkpointLocation", live.spark_location)
        return writer.trigger(processingTime="100 milliseconds").start()

    def rows(self) -> list[int]:
        return sorted(row[0] for row in self.spark.read.schema("v long").parquet(str(self.root / "out")).collect())


@pytest.mark.thorough(but="0.23-*")
@pytest.mark.parametrize("stateful", [False, True], ids=["without state", "with state"])
@pytest.mark.parametrize("delay_s", [0.0, 0.11, 0.23, 0.37])
def test_whenever_it_is_fenced_no_row_is_lost_and_none_is_there_twice(
    spark: SparkSession, tmp_path: Path, delay_s: float, stateful: bool
) -> None:
    feed = Feed(spark, tmp_path)
    feed.more(2)
    old, fresh = (LiveDirectory(str(tmp_path / name)) for name in ("live-1", "live-2"))
    hung = feed.start(old, stateful=stateful)
    deadline = time.monotonic() + LIMIT_S
    while (old.positions().commit or 0) < 1:
        assert time.monotonic() < deadline
        feed.more()
        time.sleep(0.1)
    feed.more()
    time.sleep(delay_s)

    done = fence(old.folder, by="a test", wait_s=LIMIT_S)
    feed.more()
    clone(old, fresh, carry_state=True)
    settle_in_flight(fresh, [f"FileSink[file:{tmp_path / 'out'}]"], still_mine=nullcontext)
    # One JVM stops a query itself when another of its id starts; two do not.
    give_query_id(fresh, str(uuid.uuid4()))
    successor = feed.start(fresh, stateful=stateful)
    while hung.isActive:
        assert time.monotonic() < deadline, "the fence does not end the query"
        feed.more()
        time.sleep(0.1)
    feed.more(FILES)
    successor.processAllAvailable()
    successor.stop()

    assert done.in_flight is None
    assert old.positions().offset == done.batch_id - 1
    error = str(hung.exception())
    assert "concurrently" in error or "Concurrent" in error
    assert feed.rows() == list(range(feed.files))
