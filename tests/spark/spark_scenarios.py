"""Real queries for the tests of this room: input, state format, and snapshots taken while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.errors import NothingCommittedError
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import logged_batch, roll_back
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Materialized, materialize
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut, until_not_overtaken
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from tests.support.small_spark import lay_file

SCHEMA = "k long, v long, t timestamp"
FILES = 8
SIDES = ("left", "right")

HEAP = HashMapStateBackend()
ROCKSDB = EmbeddedRocksDBStateBackend(False)
ROCKSDB_CHANGELOG = EmbeddedRocksDBStateBackend(True)
FORMAT_V2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
ROCKSDB_V2 = EmbeddedRocksDBStateBackend(True, settings=FORMAT_V2)
ROCKSDB_V2_NO_CHANGELOG = EmbeddedRocksDBStateBackend(False, settings=FORMAT_V2)
ROCKSDB_JOIN_V3 = EmbeddedRocksDBStateBackend(True, settings={"spark.sql.streaming.join.stateFormatVersion": "3"})


def write_input(folder: Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        rows = [{"k": k % 4, "v": number * 100 + k, "t": f"2024-01-01T00:{number:02}:{k * 4:02}Z"} for k in range(12)]
        lay_file(folder, number, rows)


@dataclass(frozen=True)
class Workload:
    """One query: from files to files, one input file a batch.

    In append mode the output is Spark's file sink, in the others (which it refuses) a file of our own for each batch.
    """

    build: Callable[[DataFrame, DataFrame], DataFrame]
    backend: StateBackend
    folder: Path
    mode: str = "append"
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def session(self, spark: SparkSession) -> SparkSession:
        session = spark.newSession()
        apply_state_backend(session, self.backend)
        for name, value in self.settings.items():
            session.conf.set(name, value)
        return session

    def writer(self, spark: SparkSession, *, files_per_batch: int = 1) -> DataStreamWriter:
        left, right = (self._stream(spark, side, files_per_batch) for side in SIDES)
        writer = self.build(left, right).writeStream.outputMode(self.mode)
        to_sink = (
            writer.format("json").option("path", str(self.output))
            if self.mode == "append"
            else writer.foreachBatch(write_batch_to(self.output))
        )
        return to_sink.option("checkpointLocation", "/must/not/be/used").queryName("must not be used")

    def rows(self, spark: SparkSession) -> list[str]:
        if self.mode == "append":
            return sorted(row.value for row in spark.read.text(str(self.output)).collect())
        # In the order of the batches, but without their numbers: whether one without data ran in between may differ.
        batches = sorted(self.output.iterdir(), key=lambda path: int(path.name))
        return [line for path in batches for line in path.read_text().splitlines()]

    def newest_batch(self) -> int:
        """The newest batch that the output shows rows of, or knows; -1 for none."""
        if self.mode == "append":
            logged = logged_batch(str(self.output))
            return -1 if logged is None else logged
        return max((int(path.name) for path in self.output.iterdir()), default=-1)

    def back_to(self, batch_id: int) -> None:
        """Undo the later batches of an output that is not Spark's file sink."""
        if self.mode != "append":
            for path in self.output.iterdir():
                if int(path.name) > batch_id:
                    path.unlink()

    def hold_back_input(self) -> None:
        """Write the input aside, for `feed` to give it to a running query."""
        for side in SIDES:
            write_input(self.folder / f"{side}-held-back")
            (self.folder / side).mkdir()

    def feed(self, number: int) -> None:
        """Let the query see one more file of each side."""
        for side in SIDES:
            name = f"{number:04}.json"
            (self.folder / f"{side}-held-back" / name).rename(self.folder / side / name)

    def _stream(self, spark: SparkSession, side: str, files_per_batch: int) -> DataFrame:
        source = self.folder / side
        if not source.exists():
            write_input(source)
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_batch)
        return stream.json(str(source)).withWatermark("t", "20 seconds")


def write_batch_to(output: Path) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        output.mkdir(exist_ok=True)
        (output / str(batch_id)).write_text("\n".join(sorted(map(str, batch.collect()))))

    return write


def aggregation(left: DataFrame, right: DataFrame) -> DataFrame:
    windows = left.groupBy(F.window("t", "30 seconds"), "k")
    return windows.agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def join(left: DataFrame, right: DataFrame) -> DataFrame:
    within = F.expr("l.k = r.k AND l.t BETWEEN r.t AND r.t + INTERVAL 20 SECONDS")
    return left.alias("l").join(right.alias("r"), within).select("l.k", "l.v", F.col("r.v").alias("w"))


def stateless(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.where("v % 3 != 0").select("k", "v")


@dataclass(frozen=True)
class TakenSnapshot:
    """What a snapshot of a cut would hold, in memory."""

    batch_id: int
    in_flight: int | None
    files: Mapping[str, bytes]
    sinks: list[dict[str, object]] = field(default_factory=list)

    def fill(self, write: Callable[[str, Iterable[bytes]], None]) -> None:
        for path, data in self.files.items():
            write(path, [data])

    def restore(self, target: LiveDirectory) -> Materialized:
        made = materialize(target, self.fill)
        for index, sink in enumerate(self.sinks):
            roll_back(str(sink["path"]), self.batch_id, made.sinks.get(index, ()), still_mine=nullcontext)
        return made


def take_snapshot(live: LiveDirectory, *, carry_in_flight: bool, output: Path | None = None) -> TakenSnapshot:
    return until_not_overtaken(lambda: _take(live, carry_in_flight=carry_in_flight, output=output))


def _take(live: LiveDirectory, *, carry_in_flight: bool, output: Path | None) -> TakenSnapshot:
    sinks = [FileSink.at(f"file:{output}")] if output else []
    with staged_cut(live, carry_in_flight=carry_in_flight, sinks=sinks) as staged:
        files = {}
        for file in staged.stage(staged.files):
            files[file.path] = file.read()
            assert len(files[file.path]) == file.size
        return TakenSnapshot(staged.cut.batch_id, staged.cut.in_flight, files, staged.cut.properties["sinks"])


def snapshots_of_a_running_query(spark: SparkSession, work: Workload, live: LiveDirectory) -> list[TakenSnapshot]:
    """Feed a query one file after the other, and take one snapshot after the other while it works on each.

    None is taken of the last file: a query that Spark starts again gives the rows that only wait for the watermark with
    its next data, not before.
    """
    snapshots: dict[tuple[int, int | None], TakenSnapshot] = {}
    output = work.output if work.mode == "append" else None
    work.hold_back_input()
    session = work.session(spark)
    query = start_query(work.writer(session), "uninterrupted", live)
    try:
        for number in range(FILES - 1):
            before = live.positions().commit
            work.feed(number)
            seen = None
            while not query.wait(0.001) and (now := live.positions()).commit == before:
                if now == seen:
                    continue
                seen = now
                with suppress(NothingCommittedError):
                    snapshot = take_snapshot(live, carry_in_flight=True, output=output)
                    snapshots.setdefault((snapshot.batch_id, snapshot.in_flight), snapshot)
            assert query.exception() is None, query.exception()
            snapshot = take_snapshot(live, carry_in_flight=False, output=output)
            snapshots.setdefault((snapshot.batch_id, None), snapshot)
        work.feed(FILES - 1)
        session.streams.get(query.query_id).processAllAvailable()
    finally:
        query.stop()
    assert query.exception() is None, query.exception()
    return [snapshots[key] for key in sorted(snapshots, key=lambda key: (key[0], key[1] or 0))]


def run_to_the_end(spark: SparkSession, work: Workload, live: LiveDirectory, *, files_per_batch: int = 1) -> None:
    writer = work.writer(work.session(spark), files_per_batch=files_per_batch).trigger(availableNow=True)
    query = start_query(writer, "resumed", live)
    while not query.wait(0.5):
        pass
    assert query.exception() is None, query.exception()
