"""Real queries: a fork runs beside its original in one session, and both give the rows they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import SharedSinkError
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.small_spark import lay_file, small_spark
from tests.support.streams import stream_at

pytestmark = pytest.mark.spark
ORIGIN = "a test"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.streaming.fileSink.log.compactInterval": "4"}) as session:
        apply_state_backend(session, EmbeddedRocksDBStateBackend())
        yield session


@dataclass
class Original:
    """A counting query that runs, and the catalog's record of it."""

    spark: SparkSession
    root: Path
    stream: StreamHandle
    files: int = 0

    def feed(self, files: int) -> None:
        """Lay files; each is one batch, and no row is late."""
        landing = self.root / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number:02}:{n:02}:00Z", "shop": n % 3} for n in range(6)]
            lay_file(landing, number, rows)
        self.files += files

    def writer(self, output: str, *, files_per_batch: int = 1) -> DataStreamWriter:
        stream = self.spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", files_per_batch)
        rows = stream.json(str(self.root / "landing")).withWatermark("at", "10 minutes")
        counts: DataFrame = rows.groupBy(F.window("at", "30 minutes"), "shop").count()
        selected = counts.select("window.start", "shop", "count")
        return selected.writeStream.format("parquet").option("path", str(self.root / output))

    def start(self) -> SupervisedQuery:
        live = self.stream.live_directory(1, 0)
        query = start_query(self.writer("output"), "original", live)
        record = self.stream.register()
        if record.live_directory is None:
            as_writer(self.stream.catalog, self.stream.stream_id).streams.switch_live_directory(live.url)
            holder = this_holder("first", "run", None)
            as_writer(self.stream.catalog, self.stream.stream_id).executions.start(
                "first", run_id="run", cause=StartCause.MANUAL, holder=holder
            )
            as_writer(self.stream.catalog).executions.running("first", live_directory=live.url, recovery={})
        return query

    def catch_up(self, query: SupervisedQuery) -> None:
        query._query.processAllAvailable()
        progress = query.progress()
        assert progress is not None
        as_writer(self.stream.catalog).executions.heartbeat(
            "first", {"batch_id": progress.batch_id, "sinks": list(progress.sinks)}
        )

    def run_fork(self, stream: StreamHandle, output: str) -> Outcome:
        """Run the fork as a streaming asset would, to the end of its input, cutting batches in another way."""

        def describe() -> DataStreamWriter:
            return self.writer(output, files_per_batch=2).trigger(availableNow=True)

        def start(live: LiveDirectory) -> SupervisedQuery:
            return start_query(describe(), stream.name, live)

        return execute_stream(stream, RunRequest(run_id="fork", start_query=start, describe=describe))

    def rows(self, output: str) -> Counter[tuple[Any, ...]]:
        # A folder may hold no file yet to take the schema from.
        reader = self.spark.read.schema("start timestamp, shop long, count long")
        return Counter(tuple(row) for row in reader.parquet(str(self.root / output)).collect())

    def uninterrupted(self) -> Counter[tuple[Any, ...]]:
        """What a query that nothing ever happened to writes."""
        writer = self.writer("uninterrupted").trigger(availableNow=True)
        query = start_query(writer, "uninterrupted", LiveDirectory(str(self.root / "uninterrupted-live")))
        while not query.wait(0.5):
            pass
        assert query.exception() is None
        return self.rows("uninterrupted")


@pytest.fixture
def original(spark: SparkSession, tmp_path: Path) -> Original:
    return Original(spark, tmp_path, stream_at(tmp_path))


@pytest.mark.thorough(but="savepoint")
@pytest.mark.core(thorough=True)
@pytest.mark.parametrize("of", ["latest", "batch-2", "savepoint"])
def test_a_fork_and_its_original_run_in_one_session_and_both_are_exact(original: Original, of: str) -> None:
    scratch = replace(original.stream, stream_id="scratch", name="scratch", asset_key="scratch")
    original.feed(5)
    query = original.start()
    try:
        original.catch_up(query)
        start_from = StartFrom(of)
        if of == "savepoint":
            start_from = StartFrom(verbs.trigger_savepoint(original.stream, origin=ORIGIN).snapshot_id)
        # One fork takes the output along, and one does not.
        made = fork(
            original.stream,
            scratch,
            start_from,
            origin="a test",
            outputs={str(original.root / "output"): str(original.root / "forked")},
        )
        upto = original.rows("forked")
        original.feed(3)

        outcome = original.run_fork(scratch, "forked")

        assert outcome.end.kind is EndKind.ENDED_BY_ITSELF, outcome.end.reason
        assert query._query.isActive, "a fork with the original's query id would have stopped it"
        original.catch_up(query)
        expected = original.uninterrupted()
        assert original.rows("output") == expected
        assert original.rows("forked") == expected
        assert upto <= expected

        again = replace(scratch, stream_id="scratch-2", name="scratch-2", asset_key="scratch-2")
        same = start_from if of == "savepoint" else StartFrom(f"batch-{made.batch_id}")
        fork(original.stream, again, same, origin="a test")
        assert original.run_fork(again, "apart").end.kind is EndKind.ENDED_BY_ITSELF
        # A new folder holds exactly what came after the fork.
        assert original.rows("apart") + upto == expected
        assert query._query.isActive
    finally:
        query.stop()


def test_a_fork_that_would_write_to_the_originals_folder_is_refused_before_any_batch_runs(original: Original) -> None:
    scratch = replace(original.stream, stream_id="scratch", name="scratch", asset_key="scratch")
    original.feed(3)
    query = original.start()
    try:
        original.catch_up(query)
        made = fork(original.stream, scratch, StartFrom(), origin="a test")
        before = original.rows("output")

        with pytest.raises(SharedSinkError, match="output of the stream that the state comes from"):
            original.run_fork(scratch, "output")

        assert LiveDirectory(made.live_directory).positions().commit == made.batch_id
        assert original.rows("output") == before
        execution = scratch.catalog.executions.latest("scratch")
        assert execution is not None
        assert execution.settled, "nobody starts it again by itself"
        # Corrected, it starts.
        original.feed(1)
        assert original.run_fork(scratch, "corrected").end.kind is EndKind.ENDED_BY_ITSELF
    finally:
        query.stop()
