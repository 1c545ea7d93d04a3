"""A batch of a stream that is run again: what it read, kept, gave, and what its sink has of it."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.cli.main import commands
from dagster_ckpt.client.debugging import BatchDebug
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import InputGoneError, LiveDirectoryError, OptionError, RestoreError, StreamFailedError
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.state.rewriter import Rewriter
from tests.support.small_spark import lay_file, lose, small_spark
from tests.support.small_stream import ROWS, STREAM, SmallStream, dedup

pytestmark = pytest.mark.spark
HAS_READER = installed_release().has(Feature.STATE_READER)
# By another Spark, if there is one.
READS_STATE = HAS_READER or Rewriter.find() is not None


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


def even(rows: DataFrame) -> DataFrame:
    return rows.where("a % 2 = 0")


def windows(rows: DataFrame) -> DataFrame:
    times = rows.withColumn("at", F.timestamp_seconds("a")).withWatermark("at", "0 seconds")
    return times.groupBy(F.window("at", "4 seconds")).agg(F.count("*").alias("rows"), F.sum("a").alias("sum"))


def joined(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    [folder] = {Path(each).parent for each in rows_folder}
    other = spark.readStream.schema("a long").option("maxFilesPerTrigger", 1).json(str(folder / "other"))
    return rows.join(other.withColumnRenamed("a", "b"), F.expr("a = b + 5"))


rows_folder: list[str] = []
QUERIES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "stateless": even,
    "dedup": dedup,
    "aggregation": windows,
    "join": joined,
}


def made(spark: SparkSession, root: Path, query: str, **options: Any) -> SmallStream:
    rows_folder[:] = [str(root / "in")]
    stream = SmallStream(spark, root, QUERIES[query], **options)
    stream.feed(0, folder="other")
    return stream


def run_on(stream: SmallStream, files: int, query: str) -> None:
    stream.feed(files)
    if query == "join":
        stream.files -= files
        stream.feed(files, folder="other")
    stream.run()


@contextmanager
def untouched(stream: SmallStream) -> Iterator[None]:
    """Check that nothing of a stream changes: its files, and what the catalog records."""

    def digest() -> dict[str, object]:
        with sqlite3.connect(stream.root / "catalog.db") as catalog:
            tables = [name for (name,) in catalog.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows = {name: sorted(map(repr, catalog.execute(f'SELECT * FROM "{name}"'))) for name in tables}
        files = {
            path: data
            for path, data in stream.files_of("live", "out", "snapshots", "in").items()
            if SCRATCH_FOLDER not in path
        }
        return {**files, **rows}

    before = digest()
    yield
    after = digest()
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == set()
    assert not list((stream.root / "live" / SCRATCH_FOLDER / STREAM).glob("*"))


@contextmanager
def debugged(stream: SmallStream, batch: int, writer: Any = None) -> Iterator[BatchDebug]:
    with untouched(stream), stream.client() as client:
        query = writer or stream.writer()
        with client.debug_batch(STREAM, batch, query, spark=stream.spark) as debug:
            yield debug


def counted(rows: DataFrame) -> Counter[str]:
    return Counter(json.dumps(row.asDict(recursive=True), default=str, sort_keys=True) for row in rows.collect())


State = dict[tuple[int, str], Counter[str]]


def state_of(stream: SmallStream, batch: int, copy: Path) -> State:
    """The state of the stream itself after a batch, by Spark's reader."""
    live = LiveDirectory(str(copy))
    clone(LiveDirectory(str(stream.live)), live, at_batch=batch)
    reader = StateReader(stream.spark, live, batch)
    return {(name.operator_id, name.state): counted(reader.frame(name).content) for name in reader.states}


def state_in(debug: BatchDebug, part: str) -> State:
    frames = debug.state_frames.get(part, {})
    return {(each.operator_id, each.state): counted(rows.drop("partition")) for each, rows in frames.items()}


BACKENDS = {"heap": None, "rocksdb": EmbeddedRocksDBStateBackend()}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query", QUERIES)
def test_a_batch_is_the_same_from_the_live_directory_and_from_a_snapshot(
    spark: SparkSession, tmp_path: Path, query: str, backend: str
) -> None:
    stream = made(spark, tmp_path, query, backend=BACKENDS[backend])
    run_on(stream, 2, query)
    stream.savepoint()
    run_on(stream, 3, query)
    commits = sorted(int(path.name) for path in (stream.live / "commits").iterdir() if path.name.isdecimal())
    # The newest batch that read something.
    batch = max(each for each in commits if each < commits[-1] or query in ("stateless", "dedup"))
    if query == "join":
        batch = commits[-1]
    truth = {}
    if HAS_READER and query != "stateless":
        truth = {each: state_of(stream, each, tmp_path / f"copy-{each}") for each in (batch - 1, batch)}

    def check(debug: BatchDebug) -> Any:
        assert debug.error is None
        assert debug.without_state is None or not READS_STATE
        if truth:
            assert state_in(debug, "state_before") == truth[batch - 1]
            assert state_in(debug, "state_after") == truth[batch]
            assert any(truth[batch].values())
        elif READS_STATE and query == "dedup":
            before, after = (debug.state_before(), debug.state_after())
            assert sorted(row.key.a for row in before.collect()) == list(range(5 * batch + 5))
            assert sorted(row.key.a for row in after.collect()) == list(range(5 * batch + 10))
        assert debug.sink.rows is not None, debug.sink.says
        assert counted(debug.sink.rows) == counted(debug.output)
        assert debug.difference.count() == 0
        return {source: counted(rows) for source, rows in debug.inputs.items()}, counted(debug.output)

    with debugged(stream, batch) as debug:
        assert debug.replayed_from == f"the live directory at batch {batch - 1}"
        near = check(debug)
    lose(stream.live)
    with debugged(stream, batch) as debug:
        assert debug.replayed_from.startswith("savepoint sp at batch")
        assert check(debug) == near
    if query in ("stateless", "dedup"):
        assert near[0] == {"0": Counter(json.dumps({"a": 20 + row}) for row in range(ROWS))}


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> SmallStream:
    """Each id once; three batches, a savepoint, and two more."""
    stream = made(spark, tmp_path, "dedup")
    run_on(stream, 3, "dedup")
    stream.savepoint()
    run_on(stream, 2, "dedup")
    return stream


def ids(rows: DataFrame) -> list[int]:
    return sorted(row.a for row in rows.collect())


@pytest.mark.thorough
def test_the_first_batch_begins_with_nothing(stream: SmallStream) -> None:
    lose(stream.live)
    with debugged(stream, 0) as debug:
        assert debug.replayed_from == "the beginning of the stream"
        assert ids(debug.input) == ids(debug.output) == list(range(10))
        assert debug.difference.count() == 0
        if READS_STATE:
            assert debug.state_changes[0].counts["ADDED"] == 10
            with pytest.raises(OptionError, match="it is the first batch"):
                debug.state_before()


def test_other_code_is_tried_on_the_batch(stream: SmallStream) -> None:
    def other(spark: SparkSession) -> DataStreamWriter:
        return stream.write(dedup(stream.read(spark)).where("a <> 22").union(stream.read(spark).where("a = -1")))

    with debugged(stream, 3, lambda spark: stream.write(dedup(stream.read(spark)).where("a <> 22"))) as debug:
        assert ids(debug.input) == list(range(15, 25))
        assert ids(debug.output) == [20, 21, 23, 24]
        [row] = debug.difference.collect()
        assert (row.a, row.replayed, row.in_sink) == (22, 0, 1)
    with stream.client() as client, pytest.raises(LiveDirectoryError, match="has a source 1"):
        client.debug_batch(STREAM, 3, other, spark=stream.spark)


def test_a_batch_that_fails_shows_what_it_failed_at(stream: SmallStream) -> None:
    def fails(spark: SparkSession) -> DataStreamWriter:
        checked = F.when(F.col("a") == 32, F.raise_error(F.lit("no such id"))).otherwise(F.col("a"))
        return stream.write(dedup(stream.read(spark)).select(checked.cast("long").alias("a")))

    stream.feed(1)
    with pytest.raises(StreamFailedError):
        stream.run(fails)
    with debugged(stream, 5, fails) as debug:
        assert "no such id" in (debug.error or "")
        assert ids(debug.input) == list(range(25, 35))
        assert debug.sink.rows is None
        with pytest.raises(OptionError, match="Batch 5 has no output: it failed"):
            _ = debug.output
        if READS_STATE:
            assert debug.state_before().count() == 30
    with debugged(stream, 5) as debug:
        assert ids(debug.output) == list(range(30, 35))
        assert "does not have the batch: its log ends at 4" in debug.sink.says


@pytest.mark.thorough
def test_input_that_is_gone_is_named(stream: SmallStream) -> None:
    gone = stream.root / "in/0003.json"
    kept = gone.read_bytes()
    gone.unlink()
    with untouched(stream), stream.client() as client:
        for batch in (3, 4):
            if batch == 4:
                lose_live = stream.live
                lose_live.rename(stream.root / "moved")
            with pytest.raises(InputGoneError, match=r"1 of \d files no longer exist: .*/in/0003\.json"):
                client.debug_batch(STREAM, batch, stream.writer(), spark=stream.spark)
            if batch == 4:
                (stream.root / "moved").rename(lose_live)
    lay_file(stream.root / "in", 3, [{"a": 99}])
    with debugged(stream, 3) as debug:
        assert "the batch read 10 rows when it ran first, and 1 now" in debug.notes
    gone.write_bytes(kept)
    with debugged(stream, 3) as debug:
        assert any("another modification time" in note for note in debug.notes)
        assert debug.difference.count() == 0


def test_a_batch_that_cannot_be_replayed_is_refused(stream: SmallStream) -> None:
    with stream.client() as client:
        for batch, message in ((9, "has not planned batch 9 yet: the newest is 4"), (-1, "numbered from 0")):
            with pytest.raises(OptionError, match=message):
                client.debug_batch(STREAM, batch, stream.writer(), spark=stream.spark)
        with pytest.raises(OptionError, match="query returned list"):
            client.debug_batch(STREAM, 3, lambda _spark: [], spark=stream.spark)  # type: ignore[arg-type,return-value]
    live = stream.live
    lose(live)
    with sqlite3.connect(stream.root / "catalog.db") as catalog:
        catalog.execute("DELETE FROM planned_batches WHERE batch_id IN (1, 3)")
    with stream.client() as client:
        for batch in (1, 4):
            with pytest.raises(RestoreError, match=r"the live directory is gone.*begins at the oldest checkpoint"):
                client.debug_batch(STREAM, batch, stream.writer(), spark=stream.spark)


@pytest.mark.thorough
def test_the_function_of_foreach_batch_is_not_called(stream: SmallStream) -> None:
    called: list[int] = []

    def writer(spark: SparkSession) -> DataStreamWriter:
        rows = dedup(stream.read(spark))
        return rows.writeStream.foreachBatch(lambda batch, number: called.extend([number] * batch.count()))

    stream.feed(1)
    stream.run(writer)
    assert called == [5] * 5
    with debugged(stream, 5, writer) as debug:
        assert ids(debug.output) == list(range(30, 35))
        assert debug.notes == ["the function of foreachBatch is not called: the output is the rows that it is given"]
        assert debug.sink.says == "the sink does not record which rows a batch wrote"
        with pytest.raises(OptionError, match="cannot be compared: the sink does not record"):
            _ = debug.difference
    assert called == [5] * 5


@pytest.mark.thorough
def test_a_batch_is_found_in_a_compacted_log(spark: SparkSession, tmp_path: Path) -> None:
    stream = made(spark, tmp_path, "stateless")

    def writer(spark: SparkSession) -> DataStreamWriter:
        rows = stream.read(spark).withColumn("at", F.expr("timestamp_micros(a)")).withColumn("part", F.expr("a % 2"))
        folder = str(tmp_path / "out")
        return rows.writeStream.format("json").option("path", folder).partitionBy("part")

    stream.feed(5)
    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", "3")
    try:
        stream.run(writer)
    finally:
        spark.conf.unset("spark.sql.streaming.fileSink.log.compactInterval")
    log = tmp_path / "out/_spark_metadata"
    assert (log / "2.compact").exists()
    for batch in (2, 3):
        with debugged(stream, batch, writer) as debug:
            assert debug.difference.count() == 0
            assert debug.sink.rows is not None
            assert ids(debug.sink.rows) == list(range(5 * batch, 5 * batch + 10))
    (log / "1").unlink()
    with debugged(stream, 1, writer) as debug:
        assert "no longer lists the files of the batch apart" in debug.sink.says
    with debugged(stream, 2, writer) as debug:
        assert debug.sink.rows is None


PROGRAM = """
import dagster as dg
from dagster_ckpt import (
    CheckpointCatalogResource, CheckpointStorageResource, SparkSessionResource, StateBackendResource, streaming_asset
)

def query(spark):
    rows = spark.readStream.schema("a long").option("maxFilesPerTrigger", 1).json("{root}/in").dropDuplicates(["a"])
    return rows.writeStream.format("parquet").option("path", "{root}/out")

@streaming_asset(name="small")
def small(context, pyspark: SparkSessionResource):
    return query(pyspark.spark_session)

defs = dg.Definitions(
    assets=[small.asset],
    resources={{
        "pyspark": SparkSessionResource(),
        "checkpoint_catalog": CheckpointCatalogResource(url="sqlite:///{root}/catalog.db"),
        "checkpoint_storage": CheckpointStorageResource(path="file://{root}/snapshots"),
        "state_backend": StateBackendResource(live_directory="{root}/live"),
    }},
)
"""


@pytest.mark.thorough
def test_the_command_prints_tables_and_writes_files(stream: SmallStream, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"streams_of_{stream.root.name.replace('-', '_')}"
    (stream.root / f"{module}.py").write_text(PROGRAM.format(root=stream.root))
    monkeypatch.chdir(stream.root)
    monkeypatch.syspath_prepend(str(stream.root))
    catalog = ["--catalog", f"sqlite:///{stream.root}/catalog.db"]

    def run(*words: str, before: list[str] = catalog) -> str:
        done = CliRunner().invoke(commands(), [*before, "debug", STREAM, "--batch", "3", *words])
        assert done.exit_code == 0, done.output + str(done.exception)
        return done.stdout

    shown = run("--query", f"{module}:query", "--output", str(stream.root / "frames"))
    assert "Batch 3, from the live directory at batch 2" in shown
    assert "Input of source 0: 10 rows" in shown
    assert "Output: 5 rows" in shown
    assert "The sink has exactly the output: " in shown
    read = stream.spark.read
    assert read.parquet(str(stream.root / "frames/input/source=0")).count() == 10
    assert read.parquet(str(stream.root / "frames/sink")).count() == 5
    if READS_STATE:
        assert "5 added, 0 removed, 0 changed" in shown
        assert read.parquet(str(stream.root / "frames/state_before/operator=0/state=default")).count() == 20
    told = json.loads(run("--json", "--limit", "1", before=["-m", module]))
    assert (told["output"]["rows"], told["difference"]["rows"], len(told["inputs"]["0"]["first"])) == (5, 0, 1)
    again = CliRunner().invoke(
        commands(), [*catalog, "debug", STREAM, "--batch", "3", "--query", f"{module}:small", "--output", "frames"]
    )
    assert again.exit_code == 1, again.output
    for words, message in (((), "--query MODULE:NAME"), (("--query", f"{module}:none"), "has no none")):
        wrong = CliRunner().invoke(commands(), [*catalog, "debug", STREAM, "--batch", "3", *words])
        assert (wrong.exit_code, message in wrong.output) == (2, True), wrong.output


GUIDE = Path(__file__).parents[2] / "docs/guides/debug-a-batch.md"


def test_the_examples_of_the_guide_run(
    stream: SmallStream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GUIDE.read_text("utf-8")
    module = f"streams_of_the_guide_in_{stream.root.name.replace('-', '_')}"
    for name, value in {
        "sqlite:////var/lib/streams/catalog.db": f"sqlite:///{stream.root}/catalog.db",
        '"orders"': f'"{STREAM}"',
        "debug orders": f"debug {STREAM}",
        "streams": module,
        "/data/landing": f"{stream.root}/in",
        "/data/orders": f"{stream.root}/out",
        "user_id long, amount long": "a long",
        "user_id": "a",
        "812": "3",
        "spark.readStream": "spark.readStream.option('maxFilesPerTrigger', 1)",
    }.items():
        text = text.replace(name, value)
    monkeypatch.chdir(stream.root)
    monkeypatch.syspath_prepend(str(stream.root))
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{stream.root}/catalog.db")
    program, *examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (stream.root / f"{module}.py").write_text(program)
    names: dict[str, Any] = {"spark": stream.spark}
    for example in examples if READS_STATE else examples[:1]:
        exec(compile(example, GUIDE.name, "exec"), names)
    names["debug"].close()
    names["client"].close()
    if READS_STATE:
        assert "the live directory at batch 2 [] None" in capsys.readouterr().out
    lines = re.findall(r"^\$ dagster-ckpt (.*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        done = CliRunner().invoke(commands(), shlex.split(line))
        assert done.exit_code == 0, done.output + str(done.exception)
    written = {path.name for path in (stream.root / "batch-3").iterdir()}
    states = {"state_before", "state_after", "state_changes"} if READS_STATE else set()
    assert written == {"input", "output", "sink", "difference", *states}
