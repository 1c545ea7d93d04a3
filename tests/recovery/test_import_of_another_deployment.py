"""Real queries: staging goes on from production's savepoint with a sink of its own, and production is as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter
from test_import import tree

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import SharedSinkError
from dagster_ckpt.recovery.fork import import_snapshot
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from tests.support import verbs
from tests.support.small_spark import lay_file, small_spark
from tests.support.streams import stream_at

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.streaming.fileSink.log.compactInterval": "4"}) as session:
        apply_state_backend(session, EmbeddedRocksDBStateBackend())
        yield session


@dataclass
class Deployment:
    """A catalog, a storage and an output, and the one stream in it; the input lies beside all deployments."""

    spark: SparkSession
    root: Path

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.stream = stream_at(self.root, name=self.root.name)
        self.output = self.root / "output"

    def writer(self, output: Path) -> DataStreamWriter:
        stream = self.spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1)
        rows = stream.json(str(self.root.parent / "landing")).withWatermark("at", "10 minutes")
        counts = rows.groupBy(F.window("at", "30 minutes"), "shop").count().select("window.start", "shop", "count")
        return counts.writeStream.format("parquet").option("path", str(output)).trigger(availableNow=True)

    def run(self, output: Path | None = None) -> Outcome:
        """Run the stream as a streaming asset would, to the end of its input."""
        query = QueryToStart(lambda: self.writer(output or self.output))

        def start(live: LiveDirectory) -> SupervisedQuery:
            return start_query(query.take(), self.stream.name, live)

        return execute_stream(self.stream, RunRequest(run_id="run", start_query=start, describe=query.described))

    def rows(self, output: Path | None = None) -> Counter[tuple[Any, ...]]:
        reader = self.spark.read.schema("start timestamp, shop long, count long")
        return Counter(tuple(row) for row in reader.parquet(str(output or self.output)).collect())


def feed(root: Path, first: int, files: int) -> None:
    """Lay files; each is one batch, and no row is late."""
    (root / "landing").mkdir(exist_ok=True)
    for number in range(first, first + files):
        rows = [{"at": f"2024-01-01T{number:02}:{n:02}:00Z", "shop": n % 3} for n in range(6)]
        lay_file(root / "landing", number, rows)


@pytest.mark.thorough(but="with rows")
@pytest.mark.parametrize("with_rows", [False, True], ids=["apart", "with rows"])
def test_staging_goes_on_exactly_from_productions_savepoint_and_production_is_byte_for_byte_as_it_was(
    spark: SparkSession, tmp_path: Path, with_rows: bool
) -> None:
    production, staging, uninterrupted = (
        Deployment(spark, tmp_path / name) for name in ("production", "staging", "all")
    )
    feed(tmp_path, 0, 5)
    assert production.run().end.kind is EndKind.ENDED_BY_ITSELF
    savepoint = verbs.trigger_savepoint(production.stream, origin="a test", label="for staging")
    production.stream.catalog.close()
    at_savepoint, before = production.rows(), tree(production.root)

    outputs = {str(production.output): str(staging.output)}
    made = import_snapshot(
        staging.stream, str(savepoint.location), outputs=outputs, origin="a test", with_rows=with_rows
    )
    feed(tmp_path, 5, 3)
    with pytest.raises(SharedSinkError, match="the stream that the state comes from"):
        staging.run(production.output)
    with pytest.raises(SharedSinkError, match="no sink of the imported snapshot is mapped to it"):
        staging.run(staging.root / "elsewhere")
    first = staging.run()

    assert first.end.kind is EndKind.ENDED_BY_ITSELF, first.end.reason
    assert uninterrupted.run().end.kind is EndKind.ENDED_BY_ITSELF
    own = staging.rows() if with_rows else staging.rows() + at_savepoint
    assert at_savepoint
    assert own == uninterrupted.rows()
    assert LiveDirectory(made.live_directory).positions().commit == (made.batch_id or 0) + 4
    # From now on it is a stream like any other, with snapshots of its own.
    mine = verbs.trigger_savepoint(staging.stream, origin="a test", label="own")
    header = staging.stream.store.manifest(str(mine.location)).header
    assert header.query_id == made.query_id
    assert header.properties["deployment_id"] == staging.stream.catalog.deployment_id
    feed(tmp_path, 8, 1)
    assert staging.run().end.kind is EndKind.ENDED_BY_ITSELF
    assert tree(production.root) == before
    for deployment in (staging, uninterrupted):
        deployment.stream.catalog.close()
